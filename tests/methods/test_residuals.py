"""What the evicted leave beside the tiers: any state of leaves [B,H,...] that a flush adds to and a step reads."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jkv import models
from jkv.arrays.online_softmax import Partial, merge
from jkv.arrays.pytree import part, value
from jkv.cache.padding import positions
from jkv.core import decode_loop
from jkv.generation.cache_file import load_cache, save_cache
from jkv.methods import parse
from jkv.methods.compatibility import check
from jkv.methods.config import CacheConfig
from jkv.prompts.allocation import CacheShape
from jkv.protocols import Merge
from support import rig
from support.rig import FORCED, MODEL, PARAMS, PROMPT, D, G, H


@value
class Sums:
    """Linear attention: s f32[B,H,D+1,D] and z f32[B,H,D+1], sums of phi(k) v and of phi(k)."""

    s: jax.Array
    z: jax.Array


@part
class Linear(Merge):
    """phi(q) . phi(k) = 1 + q . k scale, exp to the first order."""

    changes = "none"

    def empty(self, rows, model):
        return Sums(s=jnp.zeros((rows, model.heads, D + 1, D)), z=jnp.zeros((rows, model.heads, D + 1)))

    def absorb(self, state, ev, lost):
        gone = (lost.index < ev.pos.shape[2])[..., None]
        k, v = (jnp.where(gone, x, 0) for x in (lost.k, lost.v))
        k = jnp.concatenate([gone.astype(jnp.float32), k], -1)
        return Sums(s=state.s + jnp.einsum("bhnf,bhnd->bhfd", k, v), z=state.z + k.sum(2))

    def attend(self, state, q, found, scale):
        q = jnp.concatenate([jnp.ones((*q.shape[:-1], 1)), q * scale], -1)
        acc, l = jnp.einsum("bhgtf,bhfd->bhgtd", q, state.s), jnp.einsum("bhgtf,bhf->bhgt", q, state.z)  # noqa: E741
        return merge(found, Partial(acc=acc, m=jnp.where(l > 0, 0, -jnp.inf), l=l))


CONFIG = replace(parse("knorm(budget=48)"), merge=Linear(), name="")


def begun(config: CacheConfig, params=PARAMS):
    state = CacheShape(config, MODEL, 2, rig.LONGEST, rig.STEPS, jnp.float32).empty()
    return decode_loop.prefill(params, state, jnp.asarray(PROMPT), fresh=True)


@pytest.mark.slow
def test_linear_attention_residual_is_exact_for_zero_keys():
    """Keys that are all 0: then phi(q) . phi(k) = 1 = exp(q . k), and the logits are those of the full model."""
    blind = replace(PARAMS, layers=tuple({**x, "qkv": x["qkv"].at[:, G].set(0)} for x in PARAMS.layers))
    cache, logits = begun(CONFIG, blind)
    got = [logits]
    for token in FORCED.T:
        cache, logits = decode_loop.step(blind, cache, jnp.asarray(token))
        got.append(logits)
    ids = np.concatenate([PROMPT, FORCED], 1)
    expected = models.forward(blind, jnp.asarray(ids), positions(jnp.asarray(ids), jnp.zeros(2, jnp.int32)))
    expected = np.asarray(expected).transpose(1, 0, 2)[PROMPT.shape[1] - 1 :]
    np.testing.assert_allclose(np.stack(got), expected, atol=2e-4, rtol=0)
    assert all((layer.residual.z[:, :, 0] > 50).all() for layer in cache.layers)


def test_residual_state_is_counted_forked_and_saved(tmp_path):
    plain = replace(CONFIG, merge=None)
    cache, _ = begun(CONFIG)
    assert cache.nbytes - begun(plain)[0].nbytes == len(cache.layers) * 2 * H * (D + 1) * (D + 1) * 4
    for layer, copy, back in zip(cache.layers, cache.fork(2).layers, cache.rollback(0).layers, strict=True):
        assert layer.residual.s.any()
        np.testing.assert_array_equal(copy.residual.s, np.repeat(layer.residual.s, 2, 0))
        np.testing.assert_array_equal(back.residual.s, layer.residual.s)
    save_cache(cache, tmp_path / "cache", PARAMS)
    loaded = load_cache(tmp_path / "cache", PARAMS, CONFIG)
    jax.tree.map(np.testing.assert_array_equal, loaded.layers, cache.layers)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(tiers=parse("streaming(budget=48)").tiers), "positions within the cache"),
        (dict(score=parse(f"dms(keep=1.0, gate={rig.SWITCH!r})").score), "before their slots are needed"),
    ],
)
def test_residual_with_unobserved_eviction_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        check(replace(CONFIG, **change), MODEL)
