"""How bytes are kept."""

from jkv.methods.codecs.affine import Affine
from jkv.methods.codecs.dense import Dense
from jkv.methods.codecs.separable import Separable
from jkv.methods.codecs.sparse import Sparse
from jkv.methods.codecs.within import Within

__all__ = ["Affine", "Dense", "Separable", "Sparse", "Within"]
