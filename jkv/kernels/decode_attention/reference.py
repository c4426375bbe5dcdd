"""Reference implementation: dequantize everything, one einsum."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jkv.arrays.bitpacking import powers, select, spread, unpack
from jkv.arrays.online_softmax import Partial, softmax_parts
from jkv.protocols import KernelCodes


def dense(x: KernelCodes, dtype: Any = jnp.float32) -> Array:
    """Dequantize to f[B,H,C,D] in `dtype`: codes times steps plus lows, or the kept channels with zeros elsewhere."""
    if x.kept is not None:
        return jax.vmap(jax.vmap(spread))(x.codes.astype(dtype), x.kept)
    if x.step is None:
        return x.codes.astype(dtype)
    codes = unpack(x.codes, x.bits)
    codes = (codes if x.table is None else jax.vmap(jax.vmap(select))(codes, x.table)).astype(dtype)
    exponents = x.step.dtype == jnp.uint8

    def wide(y: Array) -> Array:
        return jnp.repeat(jnp.repeat(y, codes.shape[2] // y.shape[2], 2), codes.shape[3] // y.shape[3], 3).astype(dtype)

    codes = (codes - 2 ** (x.bits - 1)) * wide(powers(x.step)) if exponents else codes * wide(x.step)
    return codes if x.low is None else codes + wide(x.low)


def attention(q: Array, k: KernelCodes, v: KernelCodes, pos: Array, first: Array, last: Array, scale: float) -> Partial:
    """Compute attention, as the package describes, in q's dtype (float64 if jax enables it)."""
    see = (
        (pos[:, :, None] >= 0)
        & (pos[:, :, None] >= first[:, None, :, None])
        & (pos[:, :, None] <= last[:, None, :, None])
    )
    keys, values = (dense(x, q.dtype) for x in (k, v))
    p, m, l = softmax_parts(jnp.einsum("bhgtd,bhsd->bhgts", q, keys) * scale, see[:, :, None])  # noqa: E741
    values = jnp.where((pos >= 0)[..., None], values, 0)
    return Partial(acc=jnp.einsum("bhgts,bhsd->bhgtd", p, values), m=m, l=l)
