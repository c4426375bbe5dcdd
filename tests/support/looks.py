"""What selectors are told of one row, without a cache around it."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array

from jkv.protocols import Entered, Look, Queries


def entered(k: Any, pos: Any = None, queries: Queries | None = None, memo: Any = None, **columns: Any) -> Entered:
    """Units of keys [B,H,n,u,D], one after the other if nothing else is said."""
    k = jnp.asarray(k, jnp.float32)
    n, u = k.shape[2:4]
    pos = jnp.broadcast_to(jnp.arange(n * u).reshape(n, u), k.shape[:4]) if pos is None else pos
    return Entered(k=k, pos=jnp.asarray(pos, jnp.int32), columns=columns, queries=queries, memo=memo)


def looked(
    q: Any,
    summary: Any,
    pos: Any,
    keys: Any = None,
    memo: Any = None,
    given: Array | None = None,
    alive: Any = None,
) -> Look:
    """A look at units whose newest tokens are at pos [B,H,n], of keys [B,H,n,u,D] that queries [B,H,G,D] meet.

    alive bool[B]: rows that have not ended, or None: all.
    """
    q = jnp.asarray(q, jnp.float32)

    def logits(apart: int | None = None) -> Array:
        flat = jnp.asarray(keys, jnp.float32).reshape(*q.shape[:2], -1, q.shape[-1])
        return jnp.einsum("bhgd,bhsd->bhgs", q, flat)

    pos = jnp.asarray(pos, jnp.int32)
    oldest = pos if keys is None else pos - (jnp.shape(keys)[3] - 1)
    alive = jnp.ones(q.shape[0], bool) if alive is None else jnp.asarray(alive)
    of = dict(pos=pos, oldest=oldest, summary=summary, memo=memo, given=given, alive=alive)
    return Look(q=q, columns={}, **of, logits=logits)
