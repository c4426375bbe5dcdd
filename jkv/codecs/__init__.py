"""How bytes are kept."""

from jkv.codecs.affine import Affine
from jkv.codecs.dense import Dense

__all__ = ["Affine", "Dense"]
