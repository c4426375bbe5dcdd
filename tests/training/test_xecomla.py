"""jkv train xecomla: latents of full rank lose nothing, those of less are the best, and what is trained is loaded."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jkv
from jkv import models
from jkv.cache.cache import tree_bytes
from jkv.io import load as loading
from jkv.methods import parse
from jkv.prompts.allocation import CacheShape
from jkv.training.distillation import kl
from jkv.training.recipes import xecomla
from support.commands import PARAMS, call, refused

HF = dict(models.TINY, vocab_size=256)  # 4 query heads, 2 kv heads of 8 channels
ROPE_DIM, FULL = 4, 2 * (8 - 4) + 2 * 8
IDS = np.random.default_rng(3).integers(0, 256, (2, 24))
ARGUMENTS = (
    "--rank 16 --rope-dim 4 --corpus pydoc --texts 4 --length 48 --batch 2 --rate 3e-3 --every 4 --top 0".split()
)
forward = jax.jit(models.forward)


def said(params, ids=IDS):
    return np.asarray(forward(params, jnp.asarray(ids), jnp.broadcast_to(jnp.arange(ids.shape[1])[None], ids.shape)))


def made(rank=FULL, turned=ROPE_DIM, queries=None, params=PARAMS):
    return xecomla.converted(params, xecomla.config_of(HF, rank, turned, queries))


def lossless():
    """The tiny model as nothing of it is lost: its slow pairs do not turn, and both heads' fast ones are the same."""
    turned, layers = np.array([0, 1, 4, 5]), []
    for w in PARAMS.layers:
        qkv = np.array(w["qkv"])
        qkv[1, -2, turned] = qkv[0, -2, turned]
        layers.append({**w, "qkv": jnp.asarray(qkv)})
    ropes = tuple(replace(r, inv_freq=(*r.inv_freq[:2], 0.0, 0.0)) for r in PARAMS.config.ropes)
    return replace(PARAMS, layers=tuple(layers), config=replace(PARAMS.config, ropes=ropes))


@pytest.mark.parametrize("queries", [None, 32])
def test_full_rank_latents_equal_lossless_model(queries):
    """Beside the model itself; and its own key heads, or its turns, would be lost."""
    old = lossless()
    new = made(queries=queries, params=old)
    np.testing.assert_allclose(said(new), said(old), atol=2e-5)
    assert np.abs(said(made(queries=queries)) - said(PARAMS)).max() > 0.1
    assert np.abs(said(made(FULL - 4, queries=queries, params=old)) - said(old)).max() > 0.01


def test_single_token_output_is_independent_of_keys():
    np.testing.assert_allclose(said(made(), IDS[:, :1]), said(PARAMS, IDS[:, :1]), atol=2e-5)


def test_latent_decode_equals_model_decode():
    """Decoded with matrices multiplied into queries and outputs, which the model's own heads do without."""
    old = lossless()
    tokens = [
        jkv.generate(p, "full", [IDS[0, :12].tolist()], max_new_tokens=12).tokens[0] for p in (old, made(params=old))
    ]
    assert tokens[0] == tokens[1]


def test_layer_equals_expanded_head_attention():
    """In float64, head by head, from the rank and the channels that are asked for."""
    p = made(13)
    w, c = p.layers[1], p.config
    m, rope, t = c.latent, c.ropes[1], IDS.shape[1]
    assert (m.rank, m.turned, m.plain, m.values, c.head_dim, c.cached) == (13, 4, 4, 8, 17, 17)
    x = np.random.default_rng(0).normal(size=(t, c.width))
    h = x / np.sqrt((x**2).mean(-1, keepdims=True) + c.eps) * np.float64(w["norm1"])
    angle = np.arange(t)[:, None] * np.array(rope.inv_freq)

    def turn(y):
        a, b = y[..., :2], y[..., 2:]
        return np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], -1)

    both, heads = h @ np.float64(w["kv"]).T, []
    latent, shared = both[:, :13], turn(both[:, 13:])
    for g, q in enumerate((h @ np.float64(w["q"]).T).reshape(t, 4, 8).swapaxes(0, 1)):
        keys = np.concatenate([latent @ np.float64(w["key"][g]).T, shared], 1)
        logits = np.concatenate([q[:, :4], turn(q[:, 4:])], 1) @ keys.T * 8**-0.5
        weights = np.where(np.tril(np.ones((t, t))) > 0, np.exp(logits), 0)
        heads.append(weights / weights.sum(-1, keepdims=True) @ latent @ np.float64(w["value"][g]).T)
    want = x + np.concatenate(heads, 1) @ np.float64(w["o"]).T
    found, still = [], replace(p, layers=({**w, "down": 0 * w["down"]},) * 2)
    pos = jnp.arange(t)[None]
    y, _ = models.family(c).layer(still, 1, jnp.asarray(x[None], jnp.float32), pos, models.plain(c, pos))
    found.append(y[0])
    np.testing.assert_allclose(found[0], want, atol=2e-5)


def test_factors_are_optimal_low_rank():
    """By the eigenvalues that are left (Eckart and Young), and beside alternating least squares from many starts."""
    rng = np.random.default_rng(1)
    w = rng.normal(size=(9, 7)) @ rng.normal(size=(7, 12))
    for rank in (1, 4, 7):
        up, down = xecomla.factors(w, rank)
        assert up.shape == (9, rank) and down.shape == (rank, 12)
        error = ((w - up @ down) ** 2).sum()
        np.testing.assert_allclose(error, np.linalg.eigvalsh(w @ w.T)[: 9 - rank].sum(), atol=1e-9)
        for _ in range(5):
            b = rng.normal(size=(rank, 12))
            for _ in range(200):
                a = w @ np.linalg.pinv(b)
                b = np.linalg.pinv(a) @ w
            assert error <= ((w - a @ b) ** 2).sum() + 1e-9


def test_keys_and_values_share_optimal_latent():
    """Rows of both heads' plain channels and values together, not of each; the rotated key is the heads' mean."""
    w, qkv = made(6).layers[0], np.float64(PARAMS.layers[0]["qkv"])
    plain, turned = [2, 3, 6, 7], [0, 1, 4, 5]
    stacked = np.concatenate([np.concatenate([qkv[h, 2, plain], qkv[h, 3]]) for h in (0, 1)])
    got = np.concatenate([np.concatenate([w["key"][2 * h], w["value"][2 * h]]) for h in (0, 1)]) @ w["kv"][:6]
    best = np.linalg.eigvalsh(stacked @ stacked.T)[:-6].sum()
    np.testing.assert_allclose(((stacked - got) ** 2).sum(), best, rtol=1e-5)
    np.testing.assert_array_equal(w["key"][::2], w["key"][1::2])
    np.testing.assert_allclose(w["kv"][6:], qkv[:, 2, turned].mean(0), atol=1e-6)


@pytest.mark.parametrize("rank", [6, 13])
def test_token_bytes_are_latent_plus_rotated_key(rank):
    """In a tier; the window of exact tokens has the latent twice, as a key and as a value."""
    cache = CacheShape(parse("full"), made(rank).config, 2, 100, 28, jnp.float32).empty()
    for layer in cache.layers:
        for part, each in ((layer.tiers[0], rank + ROPE_DIM), (layer.recent, 2 * rank + ROPE_DIM)):
            assert tree_bytes((part.k, part.v)) == 2 * part.pos.shape[-1] * 4 * each


@pytest.fixture(autouse=True, scope="module")
def tiny():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "load", lambda what, dtype="float32", *_: PARAMS)
        patch.setattr(loading, "read", lambda what: SimpleNamespace(config=HF))
        yield patch


def train(out, *more):
    return call("train", "xecomla", "--out", out, *ARGUMENTS, *more)


def loaded(folder):
    from jkv.io.safetensors import read_folder

    source = read_folder(folder)
    return replace(models.build(source.config, source.tensors, jnp.float32), tokenizer=source.tokenizer)


@pytest.mark.slow
def test_training_lowers_loss_and_resumes_exactly(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    result = train(one, "--steps", 12, "--check", 1)
    assert result.exit_code == 0, result.output
    assert "20 numbers a token and layer, 32 before" in result.stdout and result.stdout.count("full: perplexity") == 2
    rows = [json.loads(line)["loss"] for line in (one / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 12 and np.mean(rows[-2:]) < 0.7 * np.mean(rows[:2])

    tell = kl.Distilling._tell

    def killed(self, *told):
        tell(self, *told)
        if self.state.number == 5:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kl.Distilling, "_tell", killed)
        assert train(two, "--steps", 12, "--check", 0).exit_code != 0
    assert not (two / "config.json").exists()
    refused(train(two, "--steps", 12, "--check", 0, "--resume", "--rank", 15), "another training", "rank 16 (now 15)")
    refused(train(two, "--steps", 12, "--check", 0), "go on with it by --resume")
    assert train(two, "--steps", 12, "--check", 0, "--resume").exit_code == 0
    ours, theirs = map(loaded, (one, two))
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)
    assert ours.config.family == "mla" and ours.config.latent.rank == 16
    text = "the quick brown fox"
    assert ours.tokenizer.encode(text) == PARAMS.tokenizer.encode(text)
    assert ours.tokenizer.template == PARAMS.tokenizer.template
    assert len(jkv.generate(ours, "int8", text, max_new_tokens=3).tokens) == 3


def test_zero_steps_equal_conversion(tmp_path):
    assert train(tmp_path / "none", "--steps", 0, "--check", 0).exit_code == 0
    jax.tree.map(np.testing.assert_array_equal, loaded(tmp_path / "none").layers, made(16).layers)


NO = [
    (["--rank", 25], "rank=25: keys and values of this model are of rank 24, with rope_dim=4"),
    (["--rope-dim", 3], "rope_dim=3: an even number of the 8 channels"),
    (["--rope-dim", 8], "rope_dim=8: an even number of the 8 channels of a head, and not all"),
    (["--query-rank", 40], "query_rank=40: queries of this model are of rank 32"),
]


@pytest.mark.parametrize(("more", "says"), NO)
def test_invalid_ranks_are_refused_before_writing(more, says, tmp_path):
    refused(train(tmp_path / "no", *more), says)
    assert not (tmp_path / "no").exists()


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
MODELS = [
    (dict(model_type="qwen2"), "qwen2 models cannot be converted; give one of llama, "),
    (dict(rope_scaling=YARN), "rotations of this llama model are not, unscaled, those of 4 channels"),
    (dict(model_type="phi3", partial_rotary_factor=0.5), "config field 'partial_rotary_factor' = 0.5"),
    (dict(model_type="mistral", sliding_window=8), "config field 'sliding_window' = 8"),
]


@pytest.mark.parametrize(("change", "says"), MODELS)
def test_unconvertible_models_are_refused(change, says):
    with pytest.raises(ValueError, match=says):
        xecomla.config_of(HF | change, 16, 4, None)


def test_quantized_weights_are_refused():
    with pytest.raises(ValueError, match="weights are int8; load the model without weights="):
        made(params=models.random(HF, form="int8"))


def test_llama3_rope_scaling_is_preserved():
    """Frequencies that are stretched by their length stay those of the model."""
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    hf = HF | dict(rope_scaling=scaling | dict(original_max_position_embeddings=64), rope_theta=5e5)
    old, new = models.read_config(hf), models.read_config(xecomla.config_of(hf, 16, 4, None))
    np.testing.assert_allclose(new.ropes[0].inv_freq, old.ropes[0].inv_freq[:2], rtol=1e-12)
    assert new.context == old.context and new.scale == old.scale
