"""Mamba-2: all blocks are recurrent, none attends."""

import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jax import Array

from .config import LAYERS, Fields, Mixers, ModelConfig, ends
from .llama import rms, unembed
from .weights.linear import rows
from .weights.params import Names, Params

MIX = {
    "mix": "in_proj.weight",
    "conv": "conv1d.weight",
    "conv_bias": "conv1d.bias",
    "dt_bias": "dt_bias",
    "a_log": "A_log",
    "skip": "D",
    "norm": "norm.weight",
    "o": "out_proj.weight",
}  # field of a mixer -> its tensor

TENSORS = Names(
    mixer={"norm1": ("norm.weight",), **{n: (f"mixer.{t}",) for n, t in MIX.items()}},
    blocks="backbone.layers",
    embed="backbone.embeddings.weight",
    norm="backbone.norm_f.weight",
)

LONGEST = 1 << 30  # positions; a state has no limit


def config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read a Hugging Face config dict with model_type mamba2; ValueError names an unsupported field."""
    f = Fields(hf, "mamba2")
    width, depth, expand = f.number("hidden_size"), f.number("num_hidden_layers", most=LAYERS), f.number("expand", 2)
    heads, dim = f.number("num_heads", 128), f.number("head_dim", 64)
    if heads * dim != width * expand:
        raise f.refuse("num_heads", heads, f"num_heads * head_dim = {heads * dim} must be {width * expand}")
    f.only("use_bias", False, way_out="only false is implemented")
    f.only("use_conv_bias", True, way_out="only true is implemented")
    f.only("residual_in_fp32", True, way_out="only true is implemented")
    f.only("hidden_act", "silu", way_out="only silu is implemented")
    for name in ("time_step_rank", "time_step_min", "time_step_max", "time_step_floor", "rescale_prenorm_residual"):
        f.take(name, None)  # initialization
    f.only("rms_norm", True, way_out="only true is implemented")
    for name in ("chunk_size", "norm_before_gate"):  # chunking of the same function; a field that no code reads
        f.take(name, None)
    mixers = Mixers(
        at=tuple(range(depth)),
        heads=heads,
        head_dim=dim,
        state=f.number("state_size", 128),
        groups=f.number("n_groups", 8),
        kernel=f.number("conv_kernel", 4),
        limit=limit(f),
    )
    out = ModelConfig(
        family="mamba2",
        layers=0,
        heads=heads,
        groups=1,
        head_dim=dim,
        width=width,
        hidden=0,
        vocab=f.number("vocab_size"),
        context=LONGEST,
        eps=f.number("layer_norm_epsilon", 1e-5, float),
        act="silu",
        scale=1.0,
        ropes=(),
        windows=(),
        tied=bool(f.take("tie_word_embeddings", False)),
        mixers=checked(f, mixers),
        **ends(f),
    )
    f.done()
    return out


def limit(f: Fields) -> tuple[float, float]:
    """Read the range of time steps; transformers writes infinity, which JSON lacks, as {"__float__": "Infinity"}."""
    given = f.take("time_step_limit", (0.0, math.inf))
    try:
        low, high = (float(x["__float__"] if isinstance(x, dict) else x) for x in given)
    except (KeyError, TypeError, ValueError):
        low, high = 1.0, 0.0
    if not 0 <= low <= high:
        raise f.refuse("time_step_limit", given, "it is two numbers, from 0 on, the smaller one first")
    return low, high


def checked(f: Fields, m: Mixers) -> Mixers:
    """Return the mixers after checking that their groups divide their heads."""
    if m.heads % m.groups:
        raise f.refuse("n_groups", m.groups, f"it must divide the {m.heads} heads of a mixer")
    return m


def embed(params: Params, ids: Array) -> Array:
    """Embed ids i32[B, T] -> x f32[B, T, E]: the residual stream is float32, as in training."""
    return rows(params.embed, ids).astype(jnp.float32)


def recur(params: Params, i: int, x: Array, mix: Any) -> tuple[Array, Any]:
    """Run recurrent block i on x [B, T, E]; the caller's mix(weights, normed x) returns (output, aux)."""
    w, c = params.layers[i], params.config
    y, aux = mix(w, rms(w["norm1"], x.astype(w["norm1"].dtype), c.eps))
    return x + y.astype(x.dtype), aux


def head(params: Params, x: Array) -> Array:
    """Compute logits f32[B, T, V] from x [B, T, E], with the final norm."""
    return unembed(params, rms(params.norm, x.astype(params.norm.dtype), params.config.eps))
