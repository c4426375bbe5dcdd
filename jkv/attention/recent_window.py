"""A layer's recent window of exact tokens: a few queries read all of it, and the token of a step comes into it."""

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
    """Which implementation attends a window, for keys of that dtype, of `dim` channels and `groups` queries each, and
    values of `width` channels. Only GPUs have one: elsewhere XLA fuses what is around it."""
    if kernels.wanted(kind) != "gpu":
        return kernels.Choice("xla")
    return exact_kernel("window_attention", kind, dtype, dim, width, groups)


def _name(q: Array, window: Window, kind: str) -> str:
    return window_kernel(kind, window.k.dtype, q.shape[4], window.v.shape[3], q.shape[2]).name


def attend_recent(q: Array, window: Window, mask: Mask, scale: Scale, kind: str) -> Partial:
    """Queries [B,H,G,T,D] over the recent window; kind: of kernels."""
    if (name := _name(q, window, kind)) == "xla":
        return attend(q, window.k, window.v, mask.over(window.pos[:, None]), scale)
    attention = kernels.implementation("window_attention", name).attention

    def run(*arrays: Array) -> Partial:
        return attention(*arrays, scale)

    return kernels.over_mesh(run, q, window.k, window.v, window.pos, mask.first, mask.last)


def entered(
    q: Array, window: Window, new: Window, at: Array, put: Array, mask: Mask, scale: Scale, kind: str
) -> tuple[Partial, Window]:
    """The same once a token, alone in `new`, has come into slot `at` i32[]; and the window then, but for its positions.

    put i32[B,R]: positions of tokens that came so, this one's too, which `window.pos` does not have; elsewhere -1.
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
