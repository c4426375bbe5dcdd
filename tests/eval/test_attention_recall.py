"""The share of the full model's attention that a cache reads, against plain numpy."""

import jax.numpy as jnp
import numpy as np
import pytest

from jkv import methods
from jkv.core import decode_loop
from jkv.eval import attention_recall
from jkv.prompts.allocation import CacheShape
from support import rig
from support.rig import LENGTHS, MODEL, PARAMS, PROMPT, G, H

N, PREFIX, PAGE, RECENT = 3, LENGTHS[1] - 3, 8, 16
IDS = np.stack([PROMPT[0, -LENGTHS[1] :], PROMPT[1, -LENGTHS[1] :]])


@pytest.mark.slow
def test_quest_recall_matches_page_bounds():
    config = methods.parse(f"quest(pages=3, page={PAGE}, dense_layers=0)")
    cache = CacheShape(config, MODEL, 2, LENGTHS[1], N, jnp.float32).empty()
    cache, _ = decode_loop.prefill(PARAMS, cache, jnp.asarray(IDS[:, :PREFIX]), fresh=True)
    shares, count = attention_recall.recovered(PARAMS, cache, IDS)
    assert shares.shape == (MODEL.layers, N, 2, H)
    q, k, _, p = (np.asarray(x, np.float64) for x in rig.dense_prompt(jnp.asarray(IDS))[1][0])
    units = (PREFIX - RECENT) // PAGE
    pages = k[:, :, : units * PAGE].reshape(2, H, units, PAGE, -1)
    sizes = []
    for step in range(N):
        now = PREFIX + step
        for row in range(2):
            for head in range(H):
                ask = q[row, head, :, now]  # G,D
                bounds = np.maximum(ask[:, None] * pages[row, head].min(1), ask[:, None] * pages[row, head].max(1))
                best = np.argsort(-bounds.sum(-1).max(0), kind="stable")[:3]
                read = np.zeros(LENGTHS[1], bool)
                read[units * PAGE : now + 1] = True
                for page in best:
                    read[page * PAGE : (page + 1) * PAGE] = True
                want = p[row, head, :, now].mean(0) @ read
                np.testing.assert_allclose(shares[0, step, row, head], want, atol=1e-5)
                sizes.append(read.sum())
    assert units > 3 and p.shape[2] == G and np.isclose(count, np.mean(sizes)) and shares[0].max() < 1
