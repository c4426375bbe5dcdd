"""Whatever codes of the catalogue a kernel does not refuse it reads right: every pair of codecs, on every platform."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from math import lcm
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu_interpreter import parameters
from jax.experimental.pallas import tpu as pltpu

from jkv import methods, models
from jkv.cache import codec_map
from jkv.kernels import cpu_library, implementation
from jkv.kernels.decode_attention import reference, selftest, tpu_operands
from jkv.methods import METHODS
from jkv.methods.compatibility import check as check_config
from jkv.protocols import Codec, KernelCodes
from support import rig

pytestmark = pytest.mark.hardware

B, H, G, C, D = 1, 2, 2, 1024, 128
MODEL = models.read_config(models.TINY | dict(hidden_size=H * G * D, num_attention_heads=H * G, num_key_value_heads=H))


def texts() -> list[str]:
    """Methods with each number of bits that they take."""
    found = []
    for method in METHODS.values():
        for bits in (1, 2, 3, 4, 8) if "bits" in method.arguments and method.name not in rig.AROUND else ():
            with suppress(ValueError):
                check_config(methods.parse(text := f"{method.name}(bits={bits})"), MODEL)
                found.append(text)
    return found


def pairs() -> dict[str, tuple[Codec, Codec]]:
    """Keys and values of every tier of every method; of what is made of a model's statistics the other side alone."""
    found = {}
    for config in (*rig.compositions(), *map(methods.parse, texts())):
        for tier in config.tiers:
            own = [codec.for_layer(MODEL, 0) for codec in config.codecs(tier)]
            k, *v = [x for x in own if not x.by_head and x.layers == 1] or [None]
            if k is not None:
                found[str((k, *v))] = (k, *v) if v else (k, k)
    return found


def encoded(codec: Codec, x: jax.Array) -> tuple[Codec, jax.Array, KernelCodes | None]:
    """The codec with what it learns of a prompt x f[B,H,C,D], what its code decodes to, and the code."""
    own = codec_map.fit(codec, x, jnp.ones(x.shape[:3], bool)) or codec
    code = codec_map.encode(own, x)
    return own, codec_map.decode(own, code), codec_map.kernel_codes(own, code)


def asked(q: jax.Array, codec: Codec) -> jax.Array:
    """What its keys are asked for queries f[B,H,G,1,D]."""
    return codec_map.query(codec, q[:, :, :, 0])[0][:, :, :, None]


def side(x: KernelCodes) -> selftest.Side:
    if x.step is None:
        return selftest.Side(bits=0, floats=str(x.codes.dtype), kept=0 if x.kept is None else x.codes.shape[3])
    return selftest.Side(bits=x.bits, groups=x.step.shape[3], grain=x.codes.shape[2] // x.step.shape[2])


@pytest.mark.parametrize("platform", ["gpu", "tpu", "cpu"])
def test_supported_codec_pairs_equal_float64(platform: str, monkeypatch):
    """Beside float64 over what kernels are given, and that beside what decodes."""
    if platform == "cpu" and (why := cpu_library.missing("decode_attention")) is not None:
        pytest.skip(why)
    interpreters = {"gpu": parameters, "tpu": pltpu.InterpretParams}
    how = {"interpret": interpreters[platform]()} if platform in interpreters else {}
    kernel = implementation("decode_attention", platform)
    monkeypatch.setattr(tpu_operands, "_bits", lambda x: x)  # as in test_tpu.py
    rng = np.random.default_rng(0)
    sizes, middles = rng.gamma(1, 1, (2, 1, H, 1, D)), rng.standard_normal((2, 1, H, 1, D))
    x = jnp.asarray(rng.standard_normal((2, B, H, C, D)) * sizes + middles, jnp.bfloat16)
    q = jnp.asarray(rng.standard_normal((B, H, G, 1, D)), jnp.bfloat16)
    pos = jnp.asarray(np.where(np.arange(C) < 900, rng.permutation(C), -1)[None, None], jnp.int32)
    places = dict(pos=pos, first=jnp.zeros((B, 1), jnp.int32), last=jnp.full((B, 1), C, jnp.int32), scale=D**-0.5)
    kinds, wrong = set[tuple[int, bool, bool]](), dict[str, str]()
    for name, pair in pairs().items():
        whole = jax.ShapeDtypeStruct((B, H, lcm(C, *(codec.grain for codec in pair)), D), x.dtype)
        (asking, _, k), (_, _, v) = (jax.eval_shape(partial(encoded, codec), whole) for codec in pair)
        if k is None or v is None or jax.eval_shape(asked, q, asking).shape != q.shape:  # fewer channels: `uneven`
            continue
        if kernel.supports(k, v, D, G) is not None:
            continue
        assert whole.shape == x.shape[1:], "slots in whole units of such a codec"
        kinds |= {(x.bits, x.table is not None, x.step is not None and x.step.dtype == jnp.uint8) for x in (k, v)}
        (key_codec, keys, k), (value_codec, values, v) = (
            jax.jit(partial(encoded, codec))(y) for codec, y in zip(pair, x, strict=True)
        )
        asks = jax.jit(asked)(q, key_codec)
        part = jax.jit(lambda q, k, v: kernel.attention(q, k, v, **places, **how))(asks, k, v)
        given = jax.tree.map(np.asarray, dict(q=asks, k=k, v=v, **places))
        good, text = selftest.verdict(selftest.Case(k=side(k), v=side(v), dim=D, group=G), given, part, platform)

        def read(q: jax.Array, k: KernelCodes = k, v: KernelCodes = v) -> Any:
            return reference.attention(q, k, v, **places)

        @jax.jit
        def both(q: jax.Array, codecs: Any, keys: jax.Array, values: jax.Array, read: Any = read) -> Any:
            plain = [KernelCodes(codes=x) for x in (keys, values)]
            found = codec_map.between_ends(read, q, *codecs, D**-0.5).finish()
            return jnp.abs(found - reference.attention(q, *plain, **places).finish()).max() / jnp.abs(values).max()

        if not good or not (off := both(q.astype(jnp.float32), (key_codec, value_codec), keys, values)) <= 1e-4:
            wrong[name] = text if not good else f"codes decode to something else: {off:.1e}"
    tables, exponents = {(bits, True, False) for bits in (2, 3, 4)}, {(4, False, True)}
    assert kinds >= {(bits, False, False) for bits in (0, 2, 3, 4, 8)} | tables | exponents
    assert not wrong, wrong
