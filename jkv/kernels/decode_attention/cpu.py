"""CPU kernel (C++ through jax.ffi): decodes tiles of slots in the first-level cache, with an online softmax.

It reads every form of codes, float32 tiers and soft-capped logits included, and tiers of any number of slots.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jkv.arrays.bitpacking import together
from jkv.arrays.online_softmax import Partial
from jkv.kernels import cpu_library
from jkv.kernels.decode_attention import unclear
from jkv.protocols import KernelCodes

MAX_DIM = 512  # as in cpu.cc
WHOLE = 16  # channels of queries and sums are a multiple of this, which is whole registers on every CPU
FLOATS = (jnp.float32, jnp.bfloat16, jnp.float16)


def supports(k: KernelCodes, v: KernelCodes, dim: int, queries: int) -> str | None:
    """Explain why the kernel does not support these codes; None if it does.

    Args:
        dim: Head dimension.
        queries: Query rows per kv head (G * T); any number is supported.
    """
    if dim > MAX_DIM:
        return f"head_dim={dim}; {MAX_DIM} and fewer are"
    for name, x in (("keys", k), ("values", v)):
        if (reason := _unsupported(x, dim)) is not None:
            return f"{name} with {reason}"
    return None


def _unsupported(x: KernelCodes, dim: int) -> str | None:
    if x.step is None:
        good = x.codes.dtype in (*FLOATS, jnp.float8_e4m3fn)
        return None if good else f"{x.codes.dtype} floats; float32, bfloat16, float16 and float8_e4m3fn are"
    if (why := unclear(x)) is not None:
        return why
    if x.bits not in (1, 2, 3, 4, 5, 6, 8):
        return f"{x.bits} bits; 1 to 6 and 8 are"
    if dim % together(x.bits):
        return f"{x.bits} bits of {dim} channels; multiples of {together(x.bits)} are"
    for name, y in (("steps", x.step), ("lows", x.low), ("entries of a table", x.table)):
        if y is not None and y.dtype not in (*FLOATS, *([jnp.uint8] if name == "steps" else [])):
            return f"{y.dtype} {name}; float32, bfloat16 and float16 are"
    return None if dim % x.step.shape[3] == 0 else f"{x.step.shape[3]} groups of {dim} channels; divisors are"


def attention(
    q: Array,
    k: KernelCodes,
    v: KernelCodes,
    pos: Array,
    first: Array,
    last: Array,
    scale: Any,
    ends: Array | None = None,
) -> Partial:
    """Compute attention, as the package describes; scale may have a soft cap.

    Raises:
        ValueError: `supports` names the reason.
        OSError: The kernel cannot be built or loaded.
    """
    b, h, g, t, d = q.shape
    if (reason := supports(k, v, d, g * t)) is not None:
        raise ValueError(f"the cpu kernel of decode_attention does not take {reason}")
    rows = jnp.pad(q.astype(jnp.float32), [(0, 0)] * 4 + [(0, -d % WHOLE)])
    sums = jax.ShapeDtypeStruct((b, h, g, t), jnp.float32)
    results = jax.ShapeDtypeStruct(rows.shape, jnp.float32), sums, sums
    acc, m, l = jax.ffi.ffi_call(cpu_library.target("decode_attention"), results)(  # noqa: E741
        rows,
        pos,
        *(jnp.broadcast_to(x, (b, t)) for x in (first, last)),
        jnp.full((*pos.shape[:2], 1), pos.shape[2], jnp.int32) if ends is None else ends,
        *_operands(k),
        *_operands(v),
        key_bits=np.int32(k.bits),
        value_bits=np.int32(v.bits),
        dim=np.int32(d),
        scale=np.float32(float(scale)),
        cap=np.float32(getattr(scale, "cap", 0)),  # 0 for none
    )
    return Partial(acc=acc[..., :d], m=m, l=l)


def _operands(x: KernelCodes) -> list[Array]:
    """Return all arrays of x; those that it lacks have no elements."""
    return [jnp.zeros(0, jnp.uint8) if y is None else y for y in (x.codes, x.step, x.low, x.kept, x.table)]
