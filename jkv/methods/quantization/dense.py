"""Uncompressed keys and values."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array

from jkv.arrays.matmul import products
from jkv.arrays.pytree import part
from jkv.protocols import Code, Codec, KernelCodes


@part
class Dense(Codec):
    """Floats of the cache's own dtype, exact."""

    exact = True

    def encode(self, x: Array) -> Code:
        return Code(slots=x)

    def decode(self, code: Code) -> Array:
        return code.slots.astype(jnp.float32)

    def kernel_codes(self, code: Code) -> KernelCodes:
        return KernelCodes(codes=code.slots)

    def logits(self, q: Array, tile: Code) -> Array:
        return products(q.astype(tile.slots.dtype), tile.slots)

    def mix(self, w: Array, tile: Code) -> Array:
        x: Any = tile.slots
        return jnp.einsum("qn,nd->qd", w.astype(x.dtype), x, preferred_element_type=jnp.float32)
