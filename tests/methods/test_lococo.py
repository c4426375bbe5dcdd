"""Trained mixtures of what a cache loses (LoCoCo), against plain numpy over prompts in pieces and several flushes."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

import jkv
from jkv import methods
from jkv.cache.codec_map import decode
from jkv.core import decode_loop
from jkv.io import trained_weights
from jkv.methods.merging.lococo import Mixtures
from jkv.nn.mixtures import Blend
from jkv.nn.network import restore
from support import rig
from support.mixtures import BUDGET, IDS, PIECE, by_hand, first_layer
from support.rig import PARAMS, D, H
from support.tiny import FOLDER, MIXTURES

TEXT = f"lococo(budget={BUDGET}, gate={MIXTURES!r}, chunk={PIECE})"


def stored(cache, head: int) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    layer = cache.layers[0]
    tier, recent = layer.tiers[0], layer.recent
    config = cache.plan[0].tiers[0]
    k, v = (np.asarray(decode(c, x))[0, head] for c, x in ((config.k, tier.k), (config.v, tier.v)))
    out = {int(t): (k[i], v[i]) for i, t in enumerate(np.asarray(tier.seen_by(H))[0, head]) if t >= 0}
    for i, t in enumerate(np.asarray(recent.pos)[0]):
        if t >= 0:
            out[int(t)] = (np.asarray(recent.k)[0, head, i], np.asarray(recent.v)[0, head, i])
    return out


def read(text: str, pieces: list[int], steps: int = 0):
    cache, start = rig.empty(text, rows=1, longest=150, new=16), 0
    for end in pieces:
        cache, _ = decode_loop.prefill(PARAMS, cache, jnp.asarray(IDS[:, start:end]))
        start = end
    for t in range(start, start + steps):
        cache, _ = decode_loop.step(PARAMS, cache, jnp.asarray(IDS[:, t]))
    return cache


@pytest.mark.slow
@pytest.mark.parametrize("local", [0, 6])
def test_chunked_mixtures_equal_reference(local: int):
    pieces = [40, 80, 110]
    cache = read(TEXT.replace("chunk", f"local={local}, chunk"), pieces)
    for head in range(H):
        want, got = by_hand(pieces, head, 0.5, local), stored(cache, head)
        assert want.keys() == got.keys() and len(got) == BUDGET
        for t, (k, v) in want.items():
            np.testing.assert_allclose(got[t][0], k, atol=2e-4)
            np.testing.assert_allclose(got[t][1], v, atol=2e-4)


def test_decode_block_is_mixed_like_chunk():
    cache = read(TEXT, [40, 80], steps=17)  # the flush comes before the seventeenth
    for head in range(H):
        want, got = by_hand([40, 80, 96], head, 0.5), stored(cache, head)
        got.pop(96)
        assert want.keys() == got.keys()
        for t, (k, _) in want.items():
            np.testing.assert_allclose(got[t][0], k, atol=2e-4)


def test_zero_share_leaves_heavy_hitters_unchanged():
    config = methods.parse(TEXT)
    assert isinstance(config.merge, Mixtures) and config.merge.gate is not None
    blend = config.merge.gate.update(jnp.zeros_like, "share")
    config = replace(config, merge=replace(config.merge, gate=blend))
    cache = jkv.prefill(PARAMS, config, IDS[:, :40], reserve=4)[0]
    _, k, v = first_layer(IDS)
    for head in range(H):
        for t, (own_k, own_v) in stored(cache, head).items():
            np.testing.assert_allclose(own_k, k[head, t], atol=1e-5)
            np.testing.assert_allclose(own_v, v[head, t], atol=1e-5)
    assert by_hand([40], 0, 0.0).keys() == stored(cache, 0).keys()


def test_mixture_weights_sum_to_one_and_are_shift_equivariant():
    rng = np.random.default_rng(1)
    arrays, _ = trained_weights.read(MIXTURES, "lococo")
    blend = restore(Blend, arrays).part(0)
    k, v = (jnp.asarray(rng.normal(size=(1, 40, D)), jnp.float32) for _ in range(2))
    there, own = jnp.arange(40)[None] < 36, jnp.arange(12)[None]
    w = blend(k, v, there, own)
    np.testing.assert_allclose(w.sum(-1), 1, atol=1e-5)
    assert float(w.min()) >= 0 and not np.asarray(w[..., 36:]).any()
    alone = blend.update(jnp.ones_like, "share")
    raw, moved = (
        np.log(np.asarray(alone(*x, jnp.ones((1, 40), bool), own))[0, :, 3 + i : 30 + i] + 1e-30)
        for i, x in enumerate([(k, v), (jnp.roll(k, 1, 1), jnp.roll(v, 1, 1))])
    )
    off = raw - moved  # a constant: the softmax's, which the ends change
    assert np.abs(off - off.mean(1, keepdims=True)).max() < 1e-3 and raw.std() > 0.1


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("lococo(budget=12, gate={g!r})", "exceed its newest tokens and its mixtures of 12"),
        ("lococo(budget=32, gate={g!r}) | int8", "Affine, which codes a token once"),
        ("lococo(budget=32, gate={g!r}) | quest", "the selection of pages"),
        ("lococo(budget=32)", "run `jkv train lococo"),
    ],
)
def test_invalid_compositions_are_refused(text: str, why: str):
    with pytest.raises(ValueError, match=why):
        jkv.generate(PARAMS, text.format(g=MIXTURES), IDS[:, :20], max_new_tokens=2)


def test_folder_with_invalid_arrays_is_refused():
    arrays, card = trained_weights.read(MIXTURES, "lococo")
    for name, array, why in (
        ("fewer", {"conv.bias": arrays["conv.bias"][:, :4]}, "not those of lococo"),
        ("even", {"conv.kernel": arrays["conv.kernel"][:, :4]}, "no entry in the middle"),
    ):
        trained_weights.write(f"{FOLDER.name}/{name}", arrays | array, card)
        with pytest.raises(ValueError, match=why):
            methods.parse(f"lococo(budget=32, gate='{FOLDER.name}/{name}')")
