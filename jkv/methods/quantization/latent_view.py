"""Values that are part of the keys, as with MLA's latents."""

from __future__ import annotations

from jax import Array

from jkv.arrays.pytree import leaf, part
from jkv.protocols import Code, Codec


@part
class Within(Codec):
    """Values that are the last channels of their keys, from `first` on, without a code of their own."""

    within = True

    keys: Codec = leaf()
    first: int

    @property
    def label(self) -> str:
        return "within keys"

    @property
    def grain(self) -> int:
        return self.keys.grain

    @property
    def exact(self) -> bool:
        return self.keys.exact

    def encode(self, x: Array) -> Code:
        return Code(slots=())

    def decode(self, code: Code) -> Array:
        return self.keys.decode(code)[:, self.first :]

    def mix(self, w: Array, tile: Code) -> Array:
        return self.keys.mix(w, tile)

    def output(self, acc: Array, l: Array) -> Array:  # noqa: E741
        return self.keys.output(acc, l)[:, self.first :]
