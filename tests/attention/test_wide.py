"""Models whose values have another width than their keys: llama with its values lifted, and latents, of both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jkv import models
from jkv.attention.dense import attend_window, prompt_kernel
from jkv.attention.mask import causal
from jkv.attention.tier_attention import kernel_of
from jkv.cache.cache import MERGED, Cache, tree_bytes
from jkv.cache.codec_map import decode
from jkv.core import decode_loop
from jkv.core.deferred_prefill import compress
from jkv.core.layer_step import none
from jkv.methods import parse
from jkv.methods.config import CacheConfig, TierSpec, resolve
from jkv.methods.merging.lococo import Mixtures
from jkv.methods.quantization.per_channel_scale import Separable
from jkv.models import ModelConfig, Params, llama
from jkv.nn.mixtures import Blend
from jkv.prompts.allocation import CacheShape
from support import rig
from support.rig import CASES, FORCED, PARAMS, PROMPT, Case, D, G
from support.tiny import LATENT

decoded = jax.jit(decode)
LIFTS = {
    n: np.linalg.qr(np.random.default_rng(n).normal(size=(max(n, D),) * 2))[0].astype("f")[:n, :D] for n in (8, 32)
}


class Wide(ModelConfig):
    """llama, of which a value is its own times a matrix f[Dv,D], and so is what attention gives back, transposed."""

    @property
    def value_dim(self) -> int:
        return int(self.family.removeprefix("wide"))


def layer(params: Params, i: int, x: jax.Array, pos: jax.Array, attend: Any) -> tuple[jax.Array, Any]:
    lift = jnp.asarray(LIFTS[params.config.value_dim])

    def lifted(i: int, p: models.Projected) -> tuple[jax.Array, Any]:
        o, aux = attend(i, replace(p, v=jnp.einsum("bhtd,vd->bhtv", p.v, lift)))
        return jnp.einsum("bhgtv,vd->bhgtd", o, lift), aux

    return llama.block(params, i, x, llama.project(params, i, x, pos), lifted)


for n in LIFTS:
    models.FAMILIES[f"wide{n}"] = SimpleNamespace(embed=llama.embed, head=llama.head, layer=layer)


def wide(n: int, layers: int = PARAMS.config.layers) -> Params:
    one = PARAMS.config
    fields = vars(one) | dict(family=f"wide{n}", layers=layers, ropes=one.ropes[:layers], windows=one.windows[:layers])
    return replace(PARAMS, layers=PARAMS.layers[:layers], config=Wide(**fields))


MODELS = {"wide8": partial(wide, 8), "wide32": partial(wide, 32), "latent": lambda _: LATENT}

SEPARABLE = CacheConfig(tiers=(TierSpec(k=Separable(bits=8, group=4), v=Separable(bits=4, group=4), rope="read"),))
READ = {
    text: parse(text)
    for text in (
        "full",
        "int8",
        "int4(group=8)",
        "mustafar",
        "kivi(recent=0, group=16)",
        "zipcache(block=20)",
        "lacache(budget=48) | int8",
        "snapkv(budget=48, window=8)",
        "adakv(budget=48, window=8) | int4(group=8)",
        "kvmerger(budget=48)",
        "quest(pages=1000, page=8, dense_layers=0) | int4(group=8)",
    )
} | {"separable": SEPARABLE}


def held(cache: Cache, i: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Of a layer, decoded: keys rotated to where they act, values, their positions, and how many each stands for."""
    layer, rope, heads = cache.layers[i], cache.model.ropes[i], cache.model.heads
    keys, values, places, counts = [layer.recent.k], [layer.recent.v], [layer.recent.pos[:, None]], []
    for tier, config in zip(layer.tiers, cache.plan[i].tiers, strict=True):
        k = decoded(config.k, tier.k)
        keys.append(rope.rotate(k, tier.pos if tier.at is None else tier.at) if config.rope != "write" else k)
        values.append(decoded(config.v, config.values(tier)))
        places.append(tier.seen_by(heads))
    shape = lambda x, *rest: np.broadcast_to(x, (x.shape[0], heads, x.shape[2], *rest))  # noqa: E731
    k, v = (np.concatenate([shape(x, x.shape[3]) for x in parts], 2) for parts in (keys, values))
    for tier in (SimpleNamespace(columns={}, pos=places[0]), *layer.tiers):
        merged = tier.columns.get(MERGED)
        counts.append(np.zeros((2, heads, tier.pos.shape[2])) if merged is None else np.asarray(merged))
    return k, v, np.concatenate([shape(x) for x in places], 2), 1 + np.concatenate(counts, 2)


def said(params: Params, cache: Cache, token: np.ndarray) -> np.ndarray:
    """The logits after one token of each row, with attention in float64 over what the cache holds."""
    model, pos = params.config, jnp.asarray(cache.seen)[:, None]
    net = models.family(model)
    x = net.embed(params, jnp.asarray(token)[:, None])

    def attend(i: int, p: models.Projected, a: int) -> tuple[jax.Array, None]:
        rope = model.ropes[a]
        q, new = np.float64(rope.rotate(p.q, pos[:, None, None])), np.asarray(rope.rotate(p.k, pos[:, None]))
        k, v, places, counts = held(cache, a)
        k, v = np.concatenate([k, new], 2), np.concatenate([v, p.v], 2)
        logits = np.einsum("bhgtd,bhsd->bhgts", q, np.float64(k)) * model.scale
        counts = np.concatenate([np.where(places < 0, 0, counts), np.ones((*counts.shape[:2], 1))], 2)
        w = counts[:, :, None, None] * np.exp(logits - logits.max(-1, keepdims=True))
        v = np.where(counts[..., None] > 0, v, 0)
        return jnp.asarray(np.einsum("bhgts,bhsd->bhgtd", w / w.sum(-1, keepdims=True), v), jnp.float32), None

    for a in range(model.layers):
        x, _ = models.layer(params.block(a), 0, x, pos, partial(attend, a=a), none)
    return np.asarray(net.head(params, x))[:, 0]


@pytest.mark.slow
@pytest.mark.parametrize("made", MODELS.values(), ids=list(MODELS))
@pytest.mark.parametrize("config", READ.values(), ids=list(READ))
def test_step_equals_float64_attention_over_cache(config: CacheConfig, made: Callable[[int], Params]):
    params = made(2 if "lacache" in config.name else 1)  # whose layers differ
    model = params.config
    cache = replace(CacheShape(config, params.config, 2, 142, 52, jnp.float32).empty(), name="")
    cache, _ = decode_loop.prefill(params, cache, jnp.asarray(PROMPT), fresh=True)
    for token in FORCED[:, :20].T:
        cache, got = decode_loop.step(params, cache, jnp.asarray(token))
    while cache.fill >= cache.recent_size:
        cache, got = decode_loop.step(params, cache, jnp.asarray(FORCED[:, 20]))
    recent = cache.layers[0].recent
    assert (recent.k.shape[3], recent.v.shape[3]) == (model.head_dim, model.value_dim)
    token = FORCED[:, 21]
    np.testing.assert_allclose(
        decode_loop.step(params, cache, jnp.asarray(token))[1], said(params, cache, token), atol=2e-4
    )


@pytest.mark.slow
def test_orthonormal_value_lift_keeps_logits():
    """Columns of the lift to 32 channels are orthonormal."""
    for text in ("full", "snapkv(budget=48, window=8)", f"razorattention(local=48, share=0.0, heads={rig.KEEPERS!r})"):
        config, out = parse(text), []
        for params in (PARAMS, wide(32)):
            cache = replace(CacheShape(config, params.config, 2, 142, 52, jnp.float32).empty(), name="")
            cache, logits = decode_loop.prefill(params, cache, jnp.asarray(PROMPT), fresh=True)
            for token in FORCED[:, :20].T:
                cache, logits = decode_loop.step(params, cache, jnp.asarray(token))
            out.append(logits)
        np.testing.assert_allclose(*out, atol=1e-4)


def test_full_latent_cache_matches_model_logits():
    cache = replace(CacheShape(parse("full"), LATENT.config, 2, 142, 52, jnp.float32).empty(), name="")
    cache, logits = decode_loop.prefill(LATENT, cache, jnp.asarray(PROMPT), fresh=True)
    out = [logits]
    for token in FORCED[:, :20].T:
        cache, logits = decode_loop.step(LATENT, cache, jnp.asarray(token))
        out.append(logits)
    ids = np.concatenate([PROMPT, FORCED[:, :20]], 1)
    pos = np.where(ids < 0, -1, np.cumsum(ids >= 0, 1) - 1)
    want = jax.jit(models.forward)(LATENT, jnp.maximum(ids, 0), pos)[:, PROMPT.shape[1] - 1 :]
    np.testing.assert_allclose(np.stack(out, 1), want, atol=1e-4)


def taken(params: Params, config: CacheConfig):
    """Traced, not run: all shapes of a prompt, of a flush and of a step fit together."""
    cache = CacheShape(config, params.config, 2, 142, 52, jnp.float32).empty()
    ids = jax.ShapeDtypeStruct(PROMPT.shape, jnp.int32)
    together = any(plan.together > 1 for plan in cache.plan)  # which a deferred prompt alone can be
    into = CacheShape(config.uncompressed(90), params.config, 2, 90, 0, jnp.float32).empty() if together else cache
    read, _ = jax.eval_shape(partial(decode_loop.prefill, fresh=True), params, into, ids)
    cache = jax.eval_shape(compress, cache, read) if together else read
    after, logits = jax.eval_shape(decode_loop.step, params, cache, jax.ShapeDtypeStruct((2,), jnp.int32))
    assert jax.tree.map(jnp.shape, after) == jax.tree.map(jnp.shape, cache) and logits.shape == (2, params.config.vocab)


EVERY = [case for cases in CASES.values() for case in cases]


# Codecs of moments are as wide as the model that these are of.
@pytest.mark.parametrize("case", [c for c in EVERY if not jax.tree.leaves((c.config.codec, c.config.tiers))], ids=str)
def test_methods_without_codec_arrays_accept_wide_values(case: Case):
    params, config = wide(32), parse(case.tight)
    if isinstance(config.merge, Mixtures):  # its weights are as wide as keys and values are
        config = replace(config, merge=replace(config.merge, gate=Blend.start(params.config, 12, 5, jax.random.key(0))))
    taken(params, config)


@pytest.mark.parametrize("case", [c for c in EVERY if not jax.tree.leaves(c.config)], ids=str)
def test_untrained_methods_accept_latents(case: Case):
    """But for what is made of a layer's output matrix, which is that of values, and says so."""
    if "criticalkv" in case.text:
        with pytest.raises(ValueError, match="values of this .* model are latents"):
            taken(LATENT, case.config)
    else:
        taken(LATENT, case.config)


@pytest.mark.parametrize(("text", "each"), [("full", 4 * 32), ("streaming(budget=48)", 4 * 32), ("int8", 32 + 4)])
def test_latent_is_stored_once(text: str, each: int):
    cache = CacheShape(parse(text), LATENT.config, 2, 142, 52, jnp.float32).empty()
    for layer in cache.layers:
        slots = 2 * layer.tiers[0].pos.shape[2]
        assert tree_bytes((layer.tiers[0].k, layer.tiers[0].v)) == slots * each


def test_latent_values_with_different_codec_are_stored():
    """So have those that a merge changes, by other weights than it changes keys."""
    for text in ("kivi(group=16)", "kvmerger(budget=48)"):
        cache = CacheShape(parse(text), LATENT.config, 2, 142, 52, jnp.float32).empty()
        assert jax.tree.leaves(cache.layers[0].tiers[0].v)


@pytest.mark.parametrize("window", [None, 40])
def test_tiled_prefill_of_wide_values_matches_reference(window: int | None):
    rng, t = np.random.default_rng(0), 700
    q, k = rng.normal(size=(1, 1, 2, t, 8)), rng.normal(size=(1, 1, t, 8))
    v, pos = rng.normal(size=(1, 1, t, 20)), np.arange(t)[None]
    floats, at = (jnp.asarray(x, jnp.float32) for x in (q, k, v)), jnp.asarray(pos)
    got = attend_window(*floats, causal(at, window), at, 0.3).finish()
    see = np.tril(np.ones((t, t), bool)) & (np.arange(t)[:, None] - np.arange(t) < (window or t))
    w = np.where(see, np.exp(np.einsum("bhgtd,bhsd->bhgts", q, k) * 0.3), 0)
    np.testing.assert_allclose(got, np.einsum("bhgts,bhsd->bhgtd", w / w.sum(-1, keepdims=True), v), atol=1e-5)


def test_kernels_refuse_wide_values():
    with pytest.raises(ValueError, match="the tpu kernel of prefill_attention does not take values of 32 channels"):
        prompt_kernel("tpu", jnp.bfloat16, 64, 32, 1)
    (plan, *_), (layers, _) = CacheShape(parse("int8"), wide(32).config, 2, 142, 52, jnp.float32).layout()
    config = replace(plan.tiers[0], kernels="tpu")
    with pytest.raises(ValueError, match="decode_attention does not take values of 32 channels beside keys of 16"):
        kernel_of(layers[0].tiers[0], config, D, G)
    assert resolve(parse("int8"), wide(32).config, 142, 52)[0] == plan
