"""Codecs over rows and kv heads: a codec is written for one of each, and its arrays, if any, are of heads.

What goes in and comes out is [B,H,...]; arrays of the codec are [1,H,...], or [1,1,...] where all heads share them, or
[B,H,...] where each row has its own (`Tier.taught`).

A codec of g heads at a time (`Codec.heads`) sees their channels side by side, as one head of g D channels: its code and
its arrays have H / g heads. A query asks in the channels of its own head and 0 in the others, and of a sum of values
its head takes its own channels; so what passes between the two ends is [B,H,...,W] of every codec.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import Array

from jkv.arrays.online_softmax import Partial
from jkv.protocols import Code, Codec, KernelCodes, Queries

if TYPE_CHECKING:
    from jkv.models.softcap import Scale


def encode(codec: Codec, x: Array) -> Code:
    """The code of x f[B,H,n,D]."""
    return _mapped(lambda codec, x: codec.encode(x), codec, side_by_side(x, codec.heads))


def decode(codec: Codec, code: Code, heads: int = 0) -> Array:
    """f32[B,H,n,D]; heads: H, where each head may have its own copy of a code of several."""
    x = _mapped(lambda codec, code: codec.decode(code), codec, code)
    return _own(x, codec.heads) if x.shape[1] == heads else _apart(x, codec.heads)


def fit(codec: Codec, x: Array, live: Array, queries: Queries | None = None) -> Codec | None:
    """The codec with arrays [B,H,...], made of x f[B,H,n,D] where live bool[B,Hs,n]; None: it learns nothing."""
    if not codec.taught:
        return None
    x = side_by_side(x, codec.heads)
    live = jnp.broadcast_to(live if live.shape[1] == x.shape[1] else live[:, :1], x.shape[:3])
    q = jnp.zeros((*x.shape[:2], 1, x.shape[3]))  # where shapes alone are asked for
    if queries is not None and codec.needs.queries:
        last = queries.newest(codec.needs.queries)
        q = jnp.where((last.pos >= 0)[:, None, None, :, None], last.q, 0).reshape(*x.shape[:2], -1, x.shape[3])
    return _mapped(lambda codec, x, live, q: codec.fit(x, live, q), codec, x, live, q)


def taught(
    codec: Codec, layers: int, i: int, x: Array, live: Array, queries: Queries | None = None
) -> tuple[Codec | None, Codec | None]:
    """`fit` of the heads of some layers, x f[B,layers*H,n,D]: what encodes them, and what the i-th layer reads."""
    found = fit(codec.of_layers(layers), x, live, queries)
    return found, found and found.in_layer(i, layers)


def side_by_side(x: Array, g: int) -> Array:
    """[B,H,n,D] -> [B,H/g,n,gD]: the channels of g heads at a time.

    >>> side_by_side(jnp.arange(4).reshape(1, 2, 2, 1), 2).tolist()
    [[[[0, 2], [1, 3]]]]
    """
    b, h, n, d = x.shape
    return x if g == 1 else x.reshape(b, h // g, g, n, d).swapaxes(2, 3).reshape(b, h // g, n, g * d)


def _apart(x: Array, g: int) -> Array:
    """The inverse."""
    b, h, n, d = x.shape
    return x if g == 1 else x.reshape(b, h, n, g, d // g).swapaxes(2, 3).reshape(b, h * g, n, d // g)


def _own(x: Array, g: int) -> Array:
    """[B,H,n,gD] -> [B,H,n,D]: of the channels of g heads each head's own."""
    b, h, n, d = x.shape
    if g == 1:
        return x
    each = jnp.diagonal(x.reshape(b, h // g, g, n, g, d // g), axis1=2, axis2=4)  # [B,H/g,n,D,g]
    return jnp.moveaxis(each, -1, 2).reshape(b, h, n, d // g)


def _among(x: Array, g: int) -> Array:
    """[B,H,n,D] -> [B,H,n,gD]: each head's own among the channels of g heads, 0 elsewhere."""
    b, h, n, d = x.shape
    if g == 1:
        return x
    own = jnp.eye(g, dtype=bool)[None, None, :, None, :, None]
    return jnp.where(own, x.reshape(b, h // g, g, n, 1, d), 0).reshape(b, h, n, g * d)


def width(codec: Codec, code: Code) -> int:
    """Channels of what decodes."""
    return jax.eval_shape(decode, codec, code).shape[-1]


def inner_width(codec: Codec, code: Code) -> int:
    """Channels of what is contracted."""
    b, h, n = jax.eval_shape(decode, codec, code).shape[:3]
    return jax.eval_shape(mix, codec, jax.ShapeDtypeStruct((b, h, 1, n), jnp.float32), code).shape[-1]


def query(codec: Codec, q: Array) -> tuple[Array, Array | None]:
    """What codes of keys are asked, f[B,H,N,W] of q f[B,H,N,D], and what their logits have beside, f32[B,H,N]."""
    return _mapped(lambda codec, q: (codec.query(q), codec.shift(q)), codec, _among(q, codec.heads))


def shifts(codec: Codec, heads: int, dim: int) -> bool:
    """Whether logits have something beside those of codes; its arrays are [L,H,...]."""
    one = jax.tree.map(lambda x: x[:1], codec)
    x, live = (jax.ShapeDtypeStruct((1, heads, codec.grain, *d), t) for d, t in (((dim,), jnp.float32), ((), bool)))
    own = jax.eval_shape(fit, one, x, live) or one
    return jax.eval_shape(query, own, x)[1] is not None


def output(codec: Codec, acc: Array, l: Array) -> Array:  # noqa: E741
    """f32[B,H,N,D] of sums f32[B,H,N,W] of coded values, whose weights sum to l f32[B,H,N]."""
    return _own(_mapped(lambda codec, acc, total: codec.output(acc, total), codec, acc, l), codec.heads)


def logits(codec: Codec, q: Array, code: Code) -> Array:
    """f32[B,H,N,n] of q f32[B,H,N,W] as `query` makes it, unscaled."""
    found = _mapped(lambda codec, q, code: codec.logits(q, code), codec, _as_coded(q, code), code)
    return found.reshape(*q.shape[:3], -1)


def mix(codec: Codec, w: Array, code: Code) -> Array:
    """w f32[B,H,N,n] -> f32[B,H,N,W], of which `output` makes values."""
    found = _mapped(lambda codec, w, code: codec.mix(w, code), codec, _as_coded(w, code), code)
    return found.reshape(*w.shape[:3], -1)


def _as_coded(x: Array, code: Code) -> Array:
    """[B,H,N,...] -> [B,H/g,gN,...]: what the heads of one code have, together."""
    heads = jax.tree.leaves(code)[0].shape[1]
    return x.reshape(x.shape[0], heads, -1, *x.shape[3:])


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
    """The same codes as kernels read them, or None: kernels read a code a head."""
    return None if codec.heads > 1 else _mapped(lambda codec, code: codec.kernel_codes(code), codec, code)


def _mapped(run: Callable[..., Any], codec: Codec, *arrays: Any) -> Any:
    """run(codec, *arrays) of every row and head, or code of several heads."""
    heads = jax.tree.leaves(arrays)[0].shape[1]
    own = jax.tree.map(lambda x: jnp.repeat(x, heads // x.shape[1], axis=1), codec)
    shared = jax.tree.map(lambda x: None if x.shape[0] == 1 else 0, own)
    own = jax.tree.map(lambda x: x[0] if x.shape[0] == 1 else x, own)
    return jax.vmap(jax.vmap(run), in_axes=(shared, *[0] * len(arrays)))(own, *arrays)
