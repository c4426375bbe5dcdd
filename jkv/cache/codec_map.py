"""Codecs mapped over rows and kv heads; a codec itself sees one of each.

Inputs and outputs are [B,H,...]. A codec's arrays are [1,H,...], or [1,1,...] if all heads share them, or [B,H,...] if
each row has its own (`Tier.taught`).

A codec of g heads (`Codec.heads`) sees them as one head of g D channels; its code and its arrays have H / g heads. A
query is zero outside its own head's channels, and each head takes its own channels of a sum of values. So callers pass
[B,H,...,W] with every codec.
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
    """Encode x f[B,H,n,D]."""
    return _mapped(lambda codec, x: codec.encode(x), codec, side_by_side(x, codec.heads))


def decode(codec: Codec, code: Code, heads: int = 0) -> Array:
    """Decode to f32[B,H,n,D].

    Args:
        codec: the codec.
        code: code with H / g heads, or with H heads if every head has its own copy of a code of g heads.
        heads: H, if the code may have copies; 0 if it has none.
    """
    x = _mapped(lambda codec, code: codec.decode(code), codec, code)
    return _own(x, codec.heads) if x.shape[1] == heads else _apart(x, codec.heads)


def fit(codec: Codec, x: Array, live: Array, queries: Queries | None = None) -> Codec | None:
    """Fit the codec on a prompt. Returns it with arrays [B,H,...], or None if it is not `taught`.

    Args:
        codec: the codec.
        x: f[B,H,n,D], keys or values of the prompt.
        live: bool[B,Hs,n], which of them are tokens.
        queries: the newest queries, or None.
    """
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
    """Fit a codec on several layers. Returns the codec that encodes them all and the one that layer i reads with.

    Args:
        codec: the codec.
        layers: number of layers.
        i: which of the layers reads.
        x: f[B,layers*H,n,D], keys or values of all the layers.
        live: bool[B,Hs,n], which of them are tokens.
        queries: the newest queries, or None.
    """
    found = fit(codec.of_layers(layers), x, live, queries)
    return found, found and found.in_layer(i, layers)


def side_by_side(x: Array, g: int) -> Array:
    """Concatenate the channels of every g heads: [B,H,n,D] -> [B,H/g,n,gD].

    >>> side_by_side(jnp.arange(4).reshape(1, 2, 2, 1), 2).tolist()
    [[[[0, 2], [1, 3]]]]
    """
    b, h, n, d = x.shape
    return x if g == 1 else x.reshape(b, h // g, g, n, d).swapaxes(2, 3).reshape(b, h // g, n, g * d)


def _apart(x: Array, g: int) -> Array:
    """Invert `side_by_side`."""
    b, h, n, d = x.shape
    return x if g == 1 else x.reshape(b, h, n, g, d // g).swapaxes(2, 3).reshape(b, h * g, n, d // g)


def _own(x: Array, g: int) -> Array:
    """Take each head's own channels of the g D channels of its group: [B,H,n,gD] -> [B,H,n,D]."""
    b, h, n, d = x.shape
    if g == 1:
        return x
    each = jnp.diagonal(x.reshape(b, h // g, g, n, g, d // g), axis1=2, axis2=4)  # [B,H/g,n,D,g]
    return jnp.moveaxis(each, -1, 2).reshape(b, h, n, d // g)


def _among(x: Array, g: int) -> Array:
    """Put each head's channels into the g D channels of its group, 0 elsewhere: [B,H,n,D] -> [B,H,n,gD]."""
    b, h, n, d = x.shape
    if g == 1:
        return x
    own = jnp.eye(g, dtype=bool)[None, None, :, None, :, None]
    return jnp.where(own, x.reshape(b, h // g, g, n, 1, d), 0).reshape(b, h, n, g * d)


def width(codec: Codec, code: Code) -> int:
    """Return the number of decoded channels."""
    return jax.eval_shape(decode, codec, code).shape[-1]


def inner_width(codec: Codec, code: Code) -> int:
    """Return the number of channels that `mix` returns."""
    b, h, n = jax.eval_shape(decode, codec, code).shape[:3]
    return jax.eval_shape(mix, codec, jax.ShapeDtypeStruct((b, h, 1, n), jnp.float32), code).shape[-1]


def query(codec: Codec, q: Array) -> tuple[Array, Array | None]:
    """Apply `Codec.query` and `Codec.shift` to q f[B,H,N,D]: f[B,H,N,W] and f32[B,H,N], or None for no shift."""
    return _mapped(lambda codec, q: (codec.query(q), codec.shift(q)), codec, _among(q, codec.heads))


def shifts(codec: Codec, heads: int, dim: int) -> bool:
    """Return whether the codec shifts logits (`Codec.shift`); its arrays are [L,H,...]."""
    one = jax.tree.map(lambda x: x[:1], codec)
    x, live = (jax.ShapeDtypeStruct((1, heads, codec.grain, *d), t) for d, t in (((dim,), jnp.float32), ((), bool)))
    own = jax.eval_shape(fit, one, x, live) or one
    return jax.eval_shape(query, own, x)[1] is not None


def output(codec: Codec, acc: Array, l: Array) -> Array:  # noqa: E741
    """Apply `Codec.output`: f32[B,H,N,D] of coded sums f32[B,H,N,W] with total weights l f32[B,H,N]."""
    return _own(_mapped(lambda codec, acc, total: codec.output(acc, total), codec, acc, l), codec.heads)


def logits(codec: Codec, q: Array, code: Code) -> Array:
    """Return unscaled logits f32[B,H,N,n] of q f32[B,H,N,W], as `query` returns it."""
    found = _mapped(lambda codec, q, code: codec.logits(q, code), codec, _as_coded(q, code), code)
    return found.reshape(*q.shape[:3], -1)


def mix(codec: Codec, w: Array, code: Code) -> Array:
    """Sum the coded values with weights w f32[B,H,N,n]: f32[B,H,N,W], the input of `output`."""
    found = _mapped(lambda codec, w, code: codec.mix(w, code), codec, _as_coded(w, code), code)
    return found.reshape(*w.shape[:3], -1)


def _as_coded(x: Array, code: Code) -> Array:
    """Stack what belongs to the heads of one code: [B,H,N,...] -> [B,H/g,gN,...]."""
    heads = jax.tree.leaves(code)[0].shape[1]
    return x.reshape(x.shape[0], heads, -1, *x.shape[3:])


def dots(codec: Codec, q: Array, code: Code) -> Array:
    """Return inner products f32[B,H,N,n] of q f32[B,H,N,D] with the decoded code."""
    asks, more = query(codec, q)
    found = logits(codec, asks, code)
    return found if more is None else found + more[..., None]


def between_ends(
    read: Callable[[Array], Partial], q: Array, keys: Codec | None, values: Codec, scale: Scale
) -> Partial:
    """Attend with q f[B,H,G,T,D] in the channels of the codes, and map the result back.

    Args:
        read: read(q') returns the Partial of attention over codes.
        q: the queries.
        keys: codec of the keys, or None if `read` decodes the keys itself.
        values: codec of the values.
        scale: multiplies q . k.
    """
    b, h, g, t, _ = q.shape
    asks, more = (q.reshape(b, h, g * t, -1), None) if keys is None else query(keys, q.reshape(b, h, g * t, -1))
    part = read(asks.reshape(b, h, g, t, -1))
    acc = output(values, part.acc.reshape(b, h, g * t, -1), part.l.reshape(b, h, g * t)).reshape(b, h, g, t, -1)
    m = part.m if more is None else part.m + more.reshape(b, h, g, t) * scale
    return replace(part, acc=acc, m=m)


def kernel_codes(codec: Codec, code: Code) -> KernelCodes | None:
    """Return the code as kernels read it, or None if they cannot, as with codes of several heads."""
    return None if codec.heads > 1 else _mapped(lambda codec, code: codec.kernel_codes(code), codec, code)


def _mapped(run: Callable[..., Any], codec: Codec, *arrays: Any) -> Any:
    """Map run(codec, *arrays) over rows and heads, or groups of heads that are coded together."""
    heads = jax.tree.leaves(arrays)[0].shape[1]
    own = jax.tree.map(lambda x: jnp.repeat(x, heads // x.shape[1], axis=1), codec)
    shared = jax.tree.map(lambda x: None if x.shape[0] == 1 else 0, own)
    own = jax.tree.map(lambda x: x[0] if x.shape[0] == 1 else x, own)
    return jax.vmap(jax.vmap(run), in_axes=(shared, *[0] * len(arrays)))(own, *arrays)
