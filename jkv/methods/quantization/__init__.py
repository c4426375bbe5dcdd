"""Codecs: how keys and values are stored."""

from jkv.methods.quantization.dense import Dense
from jkv.methods.quantization.float4 import Float4
from jkv.methods.quantization.float8 import Float
from jkv.methods.quantization.gear import Gear
from jkv.methods.quantization.integer import Affine
from jkv.methods.quantization.latent_view import Within
from jkv.methods.quantization.lowrank import LowRank
from jkv.methods.quantization.minicache import Merged
from jkv.methods.quantization.nsnquant import Nsn
from jkv.methods.quantization.per_channel_scale import Separable
from jkv.methods.quantization.per_prompt import OfPrompt, Stretches
from jkv.methods.quantization.polar import Polar
from jkv.methods.quantization.rotation import Balanced, Permuted, Projected, Rotated
from jkv.methods.quantization.sparse import Sparse
from jkv.methods.quantization.vidkv import Mixed, Ternary

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
