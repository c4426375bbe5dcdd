"""How bytes are kept."""

from jkv.codecs.affine import Affine
from jkv.codecs.dense import Dense
from jkv.codecs.separable import Separable

__all__ = ["Affine", "Dense", "Separable"]
