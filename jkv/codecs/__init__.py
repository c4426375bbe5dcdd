"""How bytes are kept."""

from jkv.codecs.affine import Affine
from jkv.codecs.dense import Dense
from jkv.codecs.separable import Separable
from jkv.codecs.sparse import Sparse

__all__ = ["Affine", "Dense", "Separable", "Sparse"]
