"""Codecs over rows and kv heads: a codec is written for one of each, and its arrays, if any, are of heads.

What goes in and comes out is [B,H,...]; arrays of the codec are [1,H,...], or [1,1,...] where all heads share them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import Array

from jkv.arrays.partial import Partial
from jkv.protocols import Code, Codec, KernelCodes

if TYPE_CHECKING:
    from jkv.models.scale import Scale


def encode(codec: Codec, x: Array) -> Code:
    """The code of x f[B,H,n,D]."""
    return _mapped(lambda codec, x: codec.encode(x), codec, x)


def decode(codec: Codec, code: Code) -> Array:
    """f32[B,H,n,D]."""
    return _mapped(lambda codec, code: codec.decode(code), codec, code)


def width(codec: Codec, code: Code) -> int:
    """Channels of what decodes."""
    return jax.eval_shape(decode, codec, code).shape[-1]


def inner_width(codec: Codec, code: Code) -> int:
    """Channels of what is contracted."""
    b, h, n = jax.eval_shape(decode, codec, code).shape[:3]
    return jax.eval_shape(mix, codec, jax.ShapeDtypeStruct((b, h, 1, n), jnp.float32), code).shape[-1]


def query(codec: Codec, q: Array) -> tuple[Array, Array | None]:
    """What codes of keys are asked, f[B,H,N,W] of q f[B,H,N,D], and what their logits have beside, f32[B,H,N]."""
    return _mapped(lambda codec, q: (codec.query(q), codec.shift(q)), codec, q)


def shifts(codec: Codec, heads: int, dim: int) -> bool:
    """Whether logits have something beside those of codes; its arrays are [L,H,...]."""
    one = jax.tree.map(lambda x: x[:1], codec)
    return jax.eval_shape(query, one, jax.ShapeDtypeStruct((1, heads, 1, dim), jnp.float32))[1] is not None


def output(codec: Codec, acc: Array, l: Array) -> Array:  # noqa: E741
    """f32[B,H,N,D] of sums f32[B,H,N,W] of coded values, whose weights sum to l f32[B,H,N]."""
    return _mapped(lambda codec, acc, total: codec.output(acc, total), codec, acc, l)


def logits(codec: Codec, q: Array, code: Code) -> Array:
    """f32[B,H,N,n] of q f32[B,H,N,W] as `query` makes it, unscaled."""
    return _mapped(lambda codec, q, code: codec.logits(q, code), codec, q, code)


def mix(codec: Codec, w: Array, code: Code) -> Array:
    """w f32[B,H,N,n] -> f32[B,H,N,W], of which `output` makes values."""
    return _mapped(lambda codec, w, code: codec.mix(w, code), codec, w, code)


def dots(codec: Codec, q: Array, code: Code) -> Array:
    """f32[B,H,N,n]: inner products of q f32[B,H,N,D] with what decodes."""
    asks, more = query(codec, q)
    found = logits(codec, asks, code)
    return found if more is None else found + more[..., None]


def between_ends(
    read: Callable[[Array], Partial], q: Array, keys: Codec | None, values: Codec, scale: Scale
) -> Partial:
    """Attention of q f[B,H,G,T,D] by read(q'), a Partial of codes; keys None: read asks decoded keys itself."""
    b, h, g, t, _ = q.shape
    asks, more = (q.reshape(b, h, g * t, -1), None) if keys is None else query(keys, q.reshape(b, h, g * t, -1))
    part = read(asks.reshape(b, h, g, t, -1))
    acc = output(values, part.acc.reshape(b, h, g * t, -1), part.l.reshape(b, h, g * t)).reshape(b, h, g, t, -1)
    m = part.m if more is None else part.m + more.reshape(b, h, g, t) * scale
    return replace(part, acc=acc, m=m)


def kernel_codes(codec: Codec, code: Code) -> KernelCodes | None:
    """The same codes as kernels read them, or None."""
    return _mapped(lambda codec, code: codec.kernel_codes(code), codec, code)


def _mapped(run: Callable[..., Any], codec: Codec, *arrays: Any) -> Any:
    """run(codec, *arrays) of every row and head."""
    heads = jax.tree.leaves(arrays)[0].shape[1]
    own = jax.tree.map(lambda x: jnp.broadcast_to(x[0], (heads, *x.shape[2:])), codec)
    return jax.vmap(jax.vmap(run), in_axes=(None, *[0] * len(arrays)))(own, *arrays)
