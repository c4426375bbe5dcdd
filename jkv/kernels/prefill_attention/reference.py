"""Reference implementation: all logits at once, one einsum."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from jkv.arrays.online_softmax import Partial, softmax_parts


def attention(
    q: Array, k: Array, v: Array, pos: Array, first: Array, last: Array, scale: float, until: Array | None = None
) -> Partial:
    """Compute attention, as the package describes, in q's dtype (float64 if jax enables it)."""
    at = pos[:, None, None]
    see = (at >= 0) & (at >= first[:, None, :, None]) & (at <= last[:, None, :, None])
    if until is not None:
        see = see & (until[:, :, None] >= last[:, None, :, None])
    k, v = (x.astype(q.dtype) for x in (k, v))
    p, m, l = softmax_parts(jnp.einsum("bhgtd,bhsd->bhgts", q, k) * scale, see[:, :, None])  # noqa: E741
    v = jnp.where((pos >= 0)[:, None, :, None], v, 0)
    return Partial(acc=jnp.einsum("bhgts,bhsd->bhgtd", p, v), m=m, l=l)
