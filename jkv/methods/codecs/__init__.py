"""How bytes are kept."""

from jkv.methods.codecs.affine import Affine
from jkv.methods.codecs.dense import Dense
from jkv.methods.codecs.separable import Separable
from jkv.methods.codecs.sparse import Sparse
from jkv.methods.codecs.turned import Balanced, Permuted, Projected, Rotated

__all__ = ["Affine", "Balanced", "Dense", "Permuted", "Projected", "Rotated", "Separable", "Sparse"]
