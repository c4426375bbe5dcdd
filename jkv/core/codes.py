"""Codecs over rows and kv heads: a codec is written for one of each, and its arrays, if any, are of heads.

What goes in and comes out is [B,H,...]; arrays of the codec are [1,H,...], or [1,1,...] where all heads share them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jkv.protocols import Code, Codec, KernelCodes


def encode(codec: Codec, x: Array) -> Code:
    """The code of x f[B,H,n,D]."""
    return _mapped(lambda codec, x: codec.encode(x), codec, x)


def decode(codec: Codec, code: Code) -> Array:
    """f32[B,H,n,D]."""
    return _mapped(lambda codec, code: codec.decode(code), codec, code)


def bits(codec: Codec, dim: int) -> float:
    """Bits of a number that it keeps of `dim` channels, metadata included; plain floats are taken to be bfloat16."""
    x = jax.ShapeDtypeStruct((codec.grain, dim), jnp.bfloat16)
    code = jax.eval_shape(codec.encode, x)
    return round(8 * sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(code)) / x.size, 4)


def logits(codec: Codec, q: Array, code: Code) -> Array:
    """f32[B,H,N,n] of q f32[B,H,N,D], unscaled."""
    return _mapped(lambda codec, q, code: codec.logits(q, code), codec, q, code)


def mix(codec: Codec, w: Array, code: Code) -> Array:
    """w f32[B,H,N,n] -> f32[B,H,N,D]."""
    return _mapped(lambda codec, w, code: codec.mix(w, code), codec, w, code)


def kernel_codes(codec: Codec, code: Code) -> KernelCodes | None:
    """The same codes as kernels read them, or None."""
    return _mapped(lambda codec, code: codec.kernel_codes(code), codec, code)


def _mapped(run: Callable[..., Any], codec: Codec, *arrays: Any) -> Any:
    """run(codec, *arrays) of every row and head."""
    heads = jax.tree.leaves(arrays)[0].shape[1]
    own = jax.tree.map(lambda x: jnp.broadcast_to(x[0], (heads, *x.shape[2:])), codec)
    return jax.vmap(jax.vmap(run), in_axes=(None, *[0] * len(arrays)))(own, *arrays)
