"""KVgrad's score against a model in float64 and differences of what it says, transformers and kvpress; refusals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jkv
from benchmarks.presses import Wordless
from golden import make as golden
from jkv import models
from jkv.cache.cache import Cache
from jkv.cache.padding import pad
from jkv.core import compilation, decode_loop, deferred_prefill, layer_step
from jkv.core.gradients import slopes
from jkv.io.model_source import Source
from jkv.methods import METHODS, parse
from jkv.methods.compatibility import check
from jkv.methods.config import CacheConfig
from jkv.methods.prefill.probes import Graded
from jkv.models.weights.linear import Coded, decoded, forms
from jkv.prompts.allocation import CacheShape
from jkv.prompts.greedy import greedy
from support import rig
from support.rig import MODEL, PARAMS, H, L
from support.tiny import HYBRID, LATENT, SUNK

LENGTHS, PIECE, SINKS, STEP = (20, 26), 12, 3, 1e-4
ROWS = [[t for t in row.tolist() if t >= 0][:n] for row, n in zip(rig.PROMPT, LENGTHS, strict=True)]
WEIGHTS = [{name: np.asarray(w, float) for name, w in one.items()} for one in PARAMS.layers]
NONE = np.zeros((H, 0, MODEL.head_dim))


def rms(w: np.ndarray, x: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + MODEL.eps) * w


def turned(x: np.ndarray, pos: np.ndarray) -> np.ndarray:
    angle = pos[:, None] * np.array(MODEL.ropes[0].inv_freq)
    a, b = np.split(x, 2, -1)
    return np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], -1)


class Layer:
    """A layer in float64 of tokens x [...,T,E] behind tokens with these keys and values [H,S,D]."""

    def __init__(self, w: dict[str, np.ndarray], k: np.ndarray = NONE, v: np.ndarray = NONE):
        self.w, self.first, self.k, self.v = w, k.shape[1], k, v

    def project(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        y = np.einsum("hgde,...te->...hgtd", self.w["qkv"], rms(self.w["norm1"], x))
        at = self.first + np.arange(x.shape[-2])
        g = MODEL.groups
        return turned(y[..., :g, :, :], at), turned(y[..., g, :, :], at), y[..., g + 1, :, :]

    def logits(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Of queries [...,H,G,T,S+T], -inf unseen; and all values."""
        q, k, v = self.project(x)
        past = (np.broadcast_to(x, (*k.shape[:-2], *x.shape[-2:])) for x in (self.k, self.v))
        past = (np.broadcast_to(x, (*k.shape[:-2], *x.shape[-2:])) for x in (self.k, self.v))
        k, v = (np.concatenate(both, -2) for both in zip(past, (k, v), strict=True))
        out = np.einsum("...hgtd,...hsd->...hgts", q, k) * float(MODEL.scale)
        n, t = self.k.shape[1], x.shape[-2]
        return np.where(np.arange(n + t) <= n + np.arange(t)[:, None], out, -np.inf), v

    def attended(self, x: np.ndarray) -> np.ndarray:
        """The residual behind attention."""
        logits, v = self.logits(x)
        o = np.einsum("...hgts,...hsd->...thgd", softmax(logits), v)
        return x + o.reshape(*x.shape[:-1], -1) @ self.w["o"].T

    def rest(self, a: np.ndarray) -> np.ndarray:
        """What is behind the layer, of the residual behind its attention."""
        both = np.einsum("hpfe,...te->...thpf", self.w["gate_up"], rms(self.w["norm2"], a))
        y = both[..., 0, :] / (1 + np.exp(-both[..., 0, :])) * both[..., 1, :]
        return a + y.reshape(*a.shape[:-1], -1) @ self.w["down"].T


def softmax(x: np.ndarray) -> np.ndarray:
    x = np.exp(x - x.max(-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)


def steepest(layers: list[Layer], i: int, a: np.ndarray) -> np.ndarray:
    """f[P]: the size of the gradient of the squares of the last states at the residual a [P,E] of each token."""

    def said(a: np.ndarray) -> np.ndarray:
        x = layers[i].rest(a)
        for layer in layers[i + 1 :]:
            x = layer.rest(layer.attended(x))
        return (x * x).sum((-1, -2))

    p, e = a.shape
    out = np.zeros((p, e))
    for t in range(p):
        moves = np.zeros((e, p, e))
        moves[:, t] = STEP * np.eye(e)
        out[t] = (said(a + moves) - said(a - moves)) / (2 * STEP)
    return np.linalg.norm(out, axis=-1)


def wanted(prompt: list[int], ids: list[int], first: int, end: int) -> list[np.ndarray]:
    """f[H,end-first] of each layer: what attention of a probe to those tokens of a prompt is worth, at most."""
    n, embed = len(prompt), np.asarray(PARAMS.embed, float)
    x, y, layers, states = embed[prompt], embed[ids], [], []
    for w in WEIGHTS:
        whole = Layer(w)
        _, k, v = whole.project(x)
        layers.append(Layer(w, k, v))
        states.append(y)
        x, y = whole.rest(whole.attended(x)), layers[-1].rest(layers[-1].attended(y))
    pos = np.arange(n + len(ids))
    among, out = (pos < SINKS) | ((pos >= first) & (pos < end)) | (pos >= n), []
    for i, (layer, y) in enumerate(zip(layers, states, strict=True)):
        logits, v = layer.logits(y)
        paid = softmax(np.where(among, logits, -np.inf))
        columns = layer.w["o"].reshape(MODEL.width, H, MODEL.groups, -1)
        moved = np.linalg.norm(np.einsum("ehgd,hsd->hgse", columns, v), axis=-1)
        worth = paid * moved[:, :, None] * steepest(layers, i, layer.attended(y))[:, None]
        out.append(worth.max((1, 2))[:, first:end])
    return out


@pytest.mark.slow
def test_score_equals_float64_gradient_times_attention():
    config, probe = parse(f"kvgrad(budget=16, piece={PIECE}, sinks={SINKS})"), Graded(piece=PIECE, sinks=SINKS)
    assert config.prefill.probe == probe
    cache = CacheShape(config.uncompressed(32), MODEL, 2, 32, 0, jnp.float32).empty()
    cache, _ = decode_loop.prefill(PARAMS, cache, pad(ROWS, 32), fresh=True)
    parts = probe.texts(PARAMS, ROWS, greedy)
    assert [x.span for x in parts] == [[(0, 12), (0, 12)], [(12, 20), (12, 24)], [(24, 24), (24, 26)]]
    for part in parts[:2]:
        ids, span = pad(part.ids, 32), jnp.asarray(part.span)
        cache = deferred_prefill.probe(PARAMS, cache, ids, span, probe)
    for row, prompt in enumerate(ROWS):
        for part in parts[:2]:
            want = wanted(prompt, part.ids[row], *part.span[row])
            for layer in range(L):
                held = cache.layers[layer].recent
                at = np.isin(held.pos[row], np.arange(*part.span[row]))
                np.testing.assert_allclose(held.columns["probed"][row][:, at], want[layer], rtol=1e-3)


def test_defaults_equal_authors():
    config = parse("kvgrad(keep=0.3)")
    assert config.prefill.probe == Graded(piece=256, sinks=4) and config.score == parse("kvzip(keep=0.3)").score
    for wrong in (dict(piece=0), dict(step=0)):
        with pytest.raises(ValueError, match="kvgrad: .*1 or more"):
            METHODS["kvgrad"](budget=40, **wrong)


@pytest.mark.parametrize(
    "params, why", [(LATENT, "values that are latents"), (HYBRID, "blocks that recur"), (SUNK, "experts")]
)
def test_models_without_backward_pass_are_refused(params, why):
    check(parse("kvzip(budget=24)"), params.config)
    with pytest.raises(ValueError, match=f"goes back through the model .* does not go with {why}"):
        check(parse("kvgrad(budget=24)"), params.config)


@pytest.mark.slow
def test_prompt_within_budget_is_kept_whole():
    texts = "full", "kvgrad(budget=64)"
    full, kept = (jkv.generate(PARAMS, text, ROWS, max_new_tokens=8, stop_ids=()) for text in texts)
    assert kept.tokens == full.tokens


PROMPT, PROBE = 21, 15  # tokens


def found(params: models.Params, ids: np.ndarray) -> list[np.ndarray]:
    """Slopes f[1,PROBE] of each layer, of the last of ids behind the others."""
    cache = dense(params, parse("kvgrad(budget=8)"), ids[:PROMPT].tolist())
    new = jnp.asarray(ids[None, PROMPT:], jnp.int32)
    x, pos, _, _ = layer_step.embedded(params.ends, new, cache.counts, cache.fill, None, stay=None, later=False)
    return [np.asarray(x) for x in slopes(params, cache, x, pos, compilation.call)]


@pytest.mark.slow
@pytest.mark.parametrize("form", ["int8", "int4"])
def test_quantized_model_has_gradients_of_decoded_weights(form):
    sizes = dict(models.TINY, hidden_size=64, num_hidden_layers=1)
    params, ids = models.random(sizes, 0, form=form), np.random.default_rng(5).integers(0, 100, PROMPT + PROBE)
    assert forms(params.layers) == form
    floats = jax.tree.map(decoded, params, is_leaf=lambda x: isinstance(x, Coded))
    np.testing.assert_allclose(found(params, ids), found(floats, ids), rtol=1e-4)


def families(name: str) -> tuple[models.Params, Any, np.ndarray]:
    """A tiny model of a family, the same in transformers, and token ids."""
    from benchmarks.engines import Transformers

    tensors = {key: (lambda a=a: a) for key, a in golden.weights(golden.CASES[name], 0).items()}
    params = models.build(golden.CASES[name], tensors, jnp.float32)
    ids = np.random.default_rng(5).integers(0, params.config.vocab, PROMPT + PROBE)
    return params, Transformers(Source(golden.CASES[name], tensors), 1).model, ids


def dense(params: models.Params, config: CacheConfig, ids: list[int]) -> Cache:
    """All of a prompt in the recent windows."""
    dtype = params.embed.dtype
    cache = CacheShape(config.uncompressed(len(ids)), params.config, 1, len(ids), 0, dtype).empty()
    return decode_loop.prefill(params, cache, jnp.asarray([ids], jnp.int32), fresh=True)[0]


@pytest.mark.slow
def test_float16_model_handles_gradients_beyond_float16():
    params, ids = models.random(models.TINY, 0), np.random.default_rng(5).integers(0, 100, PROMPT + PROBE)
    large = replace(params, layers=tuple(w | {"down": 1000 * w["down"]} for w in params.layers))
    half = jax.tree.map(lambda x: x.astype(jnp.float16), large)
    want = found(jax.tree.map(lambda x: x.astype(jnp.float32), half), ids)
    assert max(x.max() for x in want) > 1e8  # float16 ends at 65,504
    np.testing.assert_allclose(found(half, ids), want, rtol=0.02)


@pytest.mark.peers
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "gemma2", "olmo2", "granite"])
def test_gradients_equal_torch(name):
    torch = pytest.importorskip("torch")
    params, model, ids = families(name)
    model.set_attn_implementation("eager")  # whatever version it is: others may leave out caps of logits
    added, states = [], []

    def keep(module: Any, args: Any, out: Any) -> None:
        out[0].retain_grad()
        added.append(out[0])

    for block in model.model.layers:
        block.self_attn.register_forward_hook(keep)
    model.model.layers[-1].register_forward_hook(lambda module, args, out: states.append(out))
    model(torch.tensor(ids[None]))
    said = states[0] if torch.is_tensor(states[0]) else states[0][0]
    (said[:, PROMPT:] ** 2).sum().backward()
    for own, theirs in zip(found(params, ids), added, strict=True):
        np.testing.assert_allclose(own, theirs.grad[:, PROMPT:].norm(dim=-1), rtol=1e-3)


@pytest.mark.peers
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_scores_equal_kvpress(name, monkeypatch):
    torch, transformers, kvpress = map(pytest.importorskip, ("torch", "transformers", "kvpress"))
    params, model, ids = families(name)
    said = []

    class Told(kvpress.KVgradPress):
        def compress_post(self, model: Any) -> None:
            said.append(self.score_val.numpy().copy())

    monkeypatch.setattr(kvpress.presses.kvzip_press, "AutoTokenizer", Wordless)  # no request in words, on either side
    with Told(compression_ratio=0.5, n_sink=SINKS, chunk_size=PIECE)(model):
        model(torch.tensor(ids[None]), past_key_values=transformers.DynamicCache(config=model.config))
    probe = Graded(piece=PIECE, sinks=SINKS)
    cache = dense(params, parse("kvgrad(budget=8)"), ids.tolist())
    for part in probe.texts(params, [ids.tolist()], greedy):
        cache = deferred_prefill.probe(params, cache, jnp.asarray(part.ids, jnp.int32), jnp.asarray(part.span), probe)
    for layer, theirs in zip(cache.layers, said[0], strict=True):
        got = np.asarray(layer.recent.columns["probed"])[:, :, np.asarray(layer.recent.pos[0]) >= 0]
        np.testing.assert_allclose(got, theirs, rtol=1e-3)
