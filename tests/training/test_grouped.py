"""A training's attention within groups, against the float64 model that is told which tokens to see, one by one."""

import jax
import numpy as np
import pytest
from test_losses import BATCH, MODEL, PARAMS, f64, run

from jkv import models
from jkv.training.grouped import grouped
from jkv.training.student import hidden


def seen(pos: np.ndarray, head: int) -> np.ndarray:
    """bool[T,T] of groups of 16, the second head's half a group later; the first two tokens are for all."""
    out, shift = np.zeros((len(pos),) * 2, bool), 8 * head
    for i, a in enumerate(pos):
        for j, b in enumerate(pos):
            out[i, j] = 0 <= b < 2 or (a + shift) // 16 == (b + shift) // 16
    return out


def test_heads_see_their_own_groups_and_the_sinks():
    told = grouped(BATCH, MODEL.heads, 16, shifted=0.5, sinks=2)
    got = jax.jit(lambda: models.family(MODEL).head(PARAMS, hidden(PARAMS, BATCH, told)[0]))()
    for row in range(2):
        ids, pos = (np.asarray(x)[row] for x in (BATCH.ids, BATCH.pos))
        added = np.where(np.stack([seen(pos, head) for head in range(MODEL.heads)]), 0, -1e30)
        want, _ = run(f64(PARAMS), None, ids, pos, bias=lambda i, y, age, added=added: added)
        np.testing.assert_allclose(np.asarray(got)[row][pos >= 0], want[pos >= 0], atol=1e-4)


def test_one_group_is_plain_attention():
    added, _ = grouped(BATCH, MODEL.heads, 150, shifted=0.0, sinks=0)(0, None, None)  # type: ignore[arg-type]
    live = np.asarray(BATCH.pos) >= 0
    assert (np.asarray(added)[np.broadcast_to((live[:, None] & live[:, :, None])[:, None], added.shape)] == 0).all()


def test_what_is_no_group_is_refused():
    with pytest.raises(ValueError, match="group=0"):
        grouped(BATCH, MODEL.heads, 0)
