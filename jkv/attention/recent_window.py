"""Recent-window attention, and the write of a step's token into the window."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jkv import kernels
from jkv.arrays.online_softmax import Partial
from jkv.attention.dense import attend, exact_kernel
from jkv.attention.mask import Mask
from jkv.models.softcap import Scale
from jkv.protocols import Window


def window_kernel(kind: str, dtype: Any, dim: int, width: int, groups: int) -> kernels.Choice:
    """Return the implementation of window attention.

    Only GPUs have a kernel; elsewhere XLA fuses the operations around it.

    Args:
        kind: allowed kernels.
        dtype: dtype of the keys.
        dim: channels of a key.
        width: channels of a value.
        groups: query heads per kv head.
    """
    if kernels.wanted(kind) != "gpu":
        return kernels.Choice("xla")
    return exact_kernel("window_attention", kind, dtype, dim, width, groups)


def _name(q: Array, window: Window, kind: str) -> str:
    return window_kernel(kind, window.k.dtype, q.shape[4], window.v.shape[3], q.shape[2]).name


def attend_recent(q: Array, window: Window, mask: Mask, scale: Scale, kind: str) -> Partial:
    """Attend with queries [B,H,G,T,D] to the recent window; kind: allowed kernels."""
    if (name := _name(q, window, kind)) == "xla":
        return attend(q, window.k, window.v, mask.over(window.pos[:, None]), scale)
    attention = kernels.implementation("window_attention", name).attention

    def run(*arrays: Array) -> Partial:
        return attention(*arrays, scale)

    return kernels.over_mesh(run, q, window.k, window.v, window.pos, mask.first, mask.last)


def entered(
    q: Array, window: Window, new: Window, at: Array, put: Array, mask: Mask, scale: Scale, kind: str
) -> tuple[Partial, Window]:
    """Write a step's token into the recent window and attend to it.

    Args:
        q: [B,H,G,T,D] queries.
        window: the window before; its `pos` lacks this block's tokens.
        new: the token, as a window of one entry.
        at: i32[], entry to write.
        put: i32[B,R] positions of this block's tokens, this one's included; -1 elsewhere.
        mask: visible positions.
        scale: multiplies q . k.
        kind: allowed kernels.

    Returns:
        The attention, and the window after the write, without its position.
    """
    after = jax.tree.map(
        lambda a, b: a if a.ndim == 2 else jax.lax.dynamic_update_slice_in_dim(a, b, at, 2), window, new
    )
    if (name := _name(q, window, kind)) == "xla":
        see = mask.over(jnp.maximum(window.pos, put)[:, None])
        return attend(q, after.k, after.v, see, scale), after
    implementation = kernels.implementation("window_attention", name).entered

    def run(q: Array, k: Array, v: Array, new_k: Array, new_v: Array, at: Array, *places: Array) -> Any:
        return implementation(q, k, v, new_k, new_v, at[0, 0], *places, scale)

    places = window.pos, put, mask.first, mask.last
    part, k, v = kernels.over_mesh(run, q, window.k, window.v, new.k, new.v, at[None, None], *places)
    return part, replace(after, k=k, v=v)
