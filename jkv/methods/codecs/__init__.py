"""How bytes are kept."""

from jkv.methods.codecs.affine import Affine
from jkv.methods.codecs.dense import Dense
from jkv.methods.codecs.float4 import Float4
from jkv.methods.codecs.float8 import Float
from jkv.methods.codecs.gear import Gear
from jkv.methods.codecs.lowrank import LowRank
from jkv.methods.codecs.merged import Merged
from jkv.methods.codecs.nsn import Nsn
from jkv.methods.codecs.polar import Polar
from jkv.methods.codecs.prompted import OfPrompt, Stretches
from jkv.methods.codecs.separable import Separable
from jkv.methods.codecs.sparse import Sparse
from jkv.methods.codecs.turned import Balanced, Permuted, Projected, Rotated
from jkv.methods.codecs.vid import Mixed, Ternary
from jkv.methods.codecs.within import Within

__all__ = [
    "Affine",
    "Balanced",
    "Dense",
    "Float",
    "Float4",
    "Gear",
    "LowRank",
    "Merged",
    "Mixed",
    "Nsn",
    "OfPrompt",
    "Permuted",
    "Polar",
    "Projected",
    "Rotated",
    "Separable",
    "Sparse",
    "Stretches",
    "Ternary",
    "Within",
]
