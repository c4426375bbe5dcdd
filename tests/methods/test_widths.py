"""Heads of every width: a method's defaults fit them, or one sentence says why they can't."""

import jax
import jax.numpy as jnp
import pytest

from jkv import methods, models
from jkv.methods import compatibility
from jkv.methods.quantization.groups import Widest, shared
from jkv.methods.quantization.integer import Affine

WIDTHS = (64, 80, 96, 100, 112, 128)
CODED = [name for name, method in methods.METHODS.items() if {"codec", "tiers"} & {*method.axes}]
ALWAYS = {"int8", "int4", "kivi", "mikv", "ksort", "minicache", "planned"}


def check(text, dim):
    """The config of a text, for a model with heads of this width."""
    sizes = dict(head_dim=dim, max_position_embeddings=8192)
    config, model = methods.parse(text), models.read_config(models.TINY | sizes)
    compatibility.check(config, model)
    return [codec.for_layer(model, 0) for codec in config.all_codecs]


@pytest.mark.parametrize("name", CODED)
def test_defaults_fit_every_head_dim_or_are_refused(name):
    text = f"{name}(budget=256)" if methods.METHODS[name].sized else name
    for dim in WIDTHS:
        try:
            codecs = check(text, dim)
        except ValueError as error:
            said = str(error)
            assert name not in ALWAYS and dim not in (64, 128) and "\n" not in said, said
            assert str(dim) in said or str(2 * dim) in said, said  # or that of two heads
            continue
        for codec in codecs:
            x = jax.ShapeDtypeStruct((2 * codec.grain, dim * max(codec.heads, 1)), jnp.float32)
            try:
                assert jax.eval_shape(lambda x, codec=codec: codec.decode(codec.encode(x)), x).shape == x.shape
            except ValueError as error:
                assert "FOLDER" in str(error), error  # its arrays are made of a model


@pytest.mark.parametrize("dim", WIDTHS)
def test_default_group_is_widest_divisor_and_explicit_one_is_kept(dim):
    assert shared(Widest(32), dim) == max(g for g in range(1, 33) if dim % g == 0)
    step = jax.eval_shape(Affine(bits=4, group=Widest(32)).encode, jax.ShapeDtypeStruct((3, dim), jnp.float32)).slots[1]
    assert step.shape == (3, dim // shared(Widest(32), dim))
    for text in ("int4(group=32)", "kivi(group=32)", "gear(bits=4, group=64)", "mikv(group=32)"):
        if dim % (64 if "64" in text else 32):
            with pytest.raises(ValueError, match=f"does not divide head_dim={dim}; take a divisor, or 0"):
                check(text, dim)
        else:
            check(text, dim)


def test_default_group_prints_as_number():
    assert methods.METHODS["int4"].arguments["group"] == 32 and f"{Widest(32)!r} {Widest(32)}" == "32 32"
