"""Attention within groups of neighbours, for a training on texts that are longer than a model has seen."""

from __future__ import annotations

import jax.numpy as jnp

from jkv.training.losses import Batch
from jkv.training.student import Bias


def grouped(batch: Batch, heads: int, group: int, shifted: float = 0.5, sinks: int = 4) -> Bias:
    """The bias by which token i sees j if both are of one group of `group` tokens, or j of a text's first `sinks`.

    floor((i + o) / group) = floor((j + o) / group), o = group / 2 for the last `shifted` share of kv heads, else 0: the
    first and last halves of their groups stand alone. What is trained so is read without it. Source: SinkLoRA
    (2406.05678), a reconstruction: the mask alone, and no time is saved.
    """
    if group < 1 or not 0 <= shifted <= 1 or sinks < 0:
        raise ValueError(f"grouped: group={group}, shifted={shifted}, sinks={sinks}: 1 or more, 0 to 1, 0 or more")
    late = jnp.arange(heads) >= heads - round(shifted * heads)
    at = (batch.pos[:, None] + jnp.where(late, group // 2, 0)[None, :, None]) // group
    sees = (at[..., :, None] == at[..., None, :]) | ((batch.pos >= 0) & (batch.pos < sinks))[:, None, None]
    added = jnp.where(sees, 0.0, -1e30)
    return lambda layer, projected, age: (added, None)
