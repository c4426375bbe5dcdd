"""The contest that `utility` is trained in: who wins there is who wins in a cache."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jkv
from jkv.io import load as loading
from jkv.io import trained_weights
from jkv.io.safetensors import read_json
from jkv.methods.eviction.utility import Utility
from jkv.nn.gates import RetentionGate
from jkv.protocols import Born
from jkv.training.distillation import suffix
from jkv.training.recipes import utility
from support import commands
from support.commands import call
from support.scenes import evidence
from support.tiny import PARAMS, WORTH, published_zap

RNG = np.random.default_rng(12)
C, SIZES, T = PARAMS.config, (40, 33), 40


def test_training_scores_match_cache_ranks():
    x = jnp.asarray(RNG.normal(0, 1, (2, C.layers, T, C.width)), jnp.float32)
    live = jnp.asarray(np.arange(T) < np.array(SIZES)[:, None])
    score = trained_weights.trained(WORTH, Utility())
    own = utility.Recipe().worth(score, suffix.Prefix(x=x, k=jnp.zeros(()), v=jnp.zeros(())), live)
    for layer in range(C.layers):
        one = jax.tree.map(lambda a: a[layer], score)  # noqa: B023
        for row, size in enumerate(SIZES):
            k, pos = jnp.zeros((1, C.heads, size, 4)), jnp.arange(size, dtype=jnp.int32)[None]
            columns = one.birth(Born(x=x[row : row + 1, layer, :size], k=k, v=k, pos=pos, ids=pos, out=jnp.eye(4)))
            want = one.rank(dataclasses.replace(evidence(np.eye(size)), columns=columns))[0]
            np.testing.assert_allclose(own[layer, row, :, :size], want, rtol=1e-4, atol=1e-4)


def test_input_projections_are_frozen():
    held = suffix.Prefix(x=jnp.asarray(RNG.normal(0, 1, (1, C.layers, 9, C.width)), jnp.float32), k=0, v=0)
    score = trained_weights.trained(WORTH, Utility())
    slope = jax.grad(lambda s: utility.Recipe().worth(s, held, jnp.ones((1, 9), bool)).sum())(score).gate
    for name, x in slope.arrays.items():
        assert np.isfinite(x).all() and np.asarray(x).any() == ("hidden" not in name)


@pytest.fixture
def given(monkeypatch, tmp_path):
    """A model with a tokenizer, and the options for gates of it."""
    made = commands.PARAMS
    monkeypatch.setattr(loading, "load", lambda what, dtype="float32", *_: made)
    monkeypatch.setattr(loading, "read", lambda what: SimpleNamespace(config=dict(jkv.models.TINY, vocab_size=256)))
    zap = published_zap(str(tmp_path / "zap"), 8, made.config.width, made.config.heads, made.config.layers)
    fading, card = RetentionGate.start(made.config, 8, jax.random.key(0), offset=4.0), {"method": "trimkv"}
    trained_weights.write(tmp_path / "fading", fading.arrays, card | {"model": trained_weights.identities(made)})
    return {"--foreseen": zap, "--fading": str(tmp_path / "fading")}


def test_zero_steps_keep_initial_weights(tmp_path, given):
    short = "--steps 0 --answer 20 --texts 2 --length 60 --corpus pydoc --budget 24 --window 4 --check 0".split()
    result = call("train", "utility", "--out", tmp_path / "a", *(x for pair in given.items() for x in pair), *short)
    assert result.exit_code == 0, result.output
    arrays, fading = (
        trained_weights.read(x, y)[0] for x, y in ((tmp_path / "a", "utility"), (given["--fading"], "trimkv"))
    )
    assert all((arrays[f"fading.{name}"] == x).all() for name, x in fading.items()) and not arrays["level"].any()
    short[1] = "2"
    result = call("train", "utility", "--out", tmp_path / "b", "--start", tmp_path / "a", *short)
    assert result.exit_code == 0, result.output
    after, losses = (
        trained_weights.read(tmp_path / "b", "utility")[0],
        read_json(tmp_path / "b" / "card.json")["losses"],
    )
    assert (
        np.isfinite(losses["loss"])
        and all((after[n] == x).all() for n, x in arrays.items() if "hidden" in n)
        and after["level"].any()
    )


def test_missing_or_mismatched_weights_are_refused(tmp_path, given):
    c = commands.PARAMS.config
    deep = published_zap(str(tmp_path / "deep"), 8, c.width, c.heads, c.layers + 1)
    line = published_zap(str(tmp_path / "line"), None, c.width, c.heads, c.layers)
    for options, message in (
        (("--foreseen", deep), f"the weights are of [{c.layers + 1}, {c.width}, {c.heads}]"),
        (("--foreseen", line), "surrogates of one layer"),
        ((), "give --foreseen FOLDER of `jkv train kvzap`"),
        (("--start", WORTH, "--fading", given["--fading"]), "leave out --foreseen and --fading"),
    ):
        result = call("train", "utility", "--out", tmp_path, "--texts", 2, "--length", 400, *options)
        assert result.exit_code == 1 and message in result.stderr
