"""Falcon-H1: attention and a Mamba-2 mixer in parallel in every layer, with a multiplier for each product.

A layer is two blocks here: the first one is recurrent and passes its input and the mixer's output [B, T, 2 E] to the
second one, which attends and has the MLP. The multipliers are applied to the weights when these are read.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from .bamba import MLP
from .config import LAYERS, Fields, Mixers, ModelConfig, read
from .llama import TENSORS as LLAMA
from .llama import Attend, block, project, rms, unembed
from .mamba2 import MIX, checked, limit
from .weights.linear import rows
from .weights.params import Names, Params, Tensors

__all__ = ["TENSORS", "config", "embed", "head", "layer", "project", "recur"]

ONE = ("attention_in", "key", "attention_out", "ssm_in", "ssm_out", "lm_head", "embedding")


def scaled(c: ModelConfig, tensors: Tensors) -> Tensors:
    """Return the tensors times their multipliers."""
    gains, out = dict(c.gains), dict(tensors)

    def times(x: Any, parts: tuple[tuple[int, float], ...]) -> Any:
        rows = np.concatenate([np.full(n, gain, np.float32) for n, gain in parts])
        got = np.asarray(x())
        if got.shape[:1] != rows.shape:
            return got  # rejected later for its shape
        return (got.astype(np.float32) * rows[:, None]).astype(got.dtype)

    for name, x in tensors.items():
        if parts := gains.get(".".join(name.split(".")[3:])):
            out[name] = partial(times, x, parts)
    return out


TENSORS = Names(
    block={**LLAMA.block, **MLP},
    mixer={"norm1": LLAMA.block["norm1"], **{name: (f"mamba.{tensor}",) for name, tensor in MIX.items()}},
    norm="model.final_layernorm.weight",
    place=lambda i: i // 2,
    absent=lambda c: () if c.mixers and c.mixers.normed else ("norm",),
    read=scaled,
)


def _gains(f: Fields, c: ModelConfig, m: Mixers) -> tuple[tuple[str, tuple[tuple[int, float], ...]], ...]:
    """Return multipliers by tensor name within a layer, as (rows, multiplier) in order of rows."""
    x = {name: f.number(f"{name}_multiplier", 1.0, float) for name in ONE[:-2]}
    gate, down = _several(f, "mlp_multipliers", 2)
    z, inner, write, ask, step = _several(f, "ssm_multipliers", 5)
    q, kv, shared = c.heads * c.groups * c.head_dim, c.heads * c.head_dim, m.groups * m.state
    parts = ((m.inner, z), (m.inner, inner), (shared, write), (shared, ask), (m.heads, step))
    return (
        ("mamba.in_proj.weight", tuple((n, x["ssm_in"] * gain) for n, gain in parts)),
        ("mamba.out_proj.weight", ((c.width, x["ssm_out"]),)),
        ("self_attn.q_proj.weight", ((q, x["attention_in"]),)),
        ("self_attn.k_proj.weight", ((kv, x["attention_in"] * x["key"]),)),
        ("self_attn.v_proj.weight", ((kv, x["attention_in"]),)),
        ("self_attn.o_proj.weight", ((c.width, x["attention_out"]),)),
        ("feed_forward.gate_proj.weight", ((c.hidden, gate),)),
        ("feed_forward.down_proj.weight", ((c.width, down),)),
    )


def _several(f: Fields, name: str, count: int) -> list[float]:
    given = f.take(name, [1.0] * count)
    if not isinstance(given, list) or len(given) != count:
        raise f.refuse(name, given, f"it is a list of {count} numbers")
    return [Fields({name: x}, f.family).number(name, kind=float) for x in given]


def _mixers(f: Fields, layers: int, width: int) -> Mixers:
    heads, expanded = f.number("mamba_n_heads", 128), f.number("mamba_expand", 2) * width
    inner = f.number("mamba_d_ssm", 1024 if "mamba_d_ssm" not in f.rest else expanded)
    dim = f.take("mamba_d_head", "auto")
    if inner % heads or dim not in ("auto", inner // heads):
        raise f.refuse("mamba_d_head", dim, f"{heads} heads of a mixer share {inner} channels evenly")
    normed = bool(f.take("mamba_rms_norm", False))
    before = f.take("mamba_norm_before_gate", True)
    if normed and before:
        raise f.refuse("mamba_norm_before_gate", before, "only false is implemented, where mamba_rms_norm is true")
    made = Mixers(
        at=tuple(range(0, 2 * layers, 2)),
        heads=heads,
        head_dim=inner // heads,
        state=f.number("mamba_d_state", 256),
        groups=f.number("mamba_n_groups", 1),
        kernel=f.number("mamba_d_conv", 4),
        limit=limit(f),
        normed=normed,
    )
    return checked(f, made)


def config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read a Hugging Face config dict with model_type falcon_h1; ValueError names an unsupported field."""
    names = ("projectors_bias", "time_step_limit", "num_logits_to_keep", "mlp_multipliers", "ssm_multipliers")
    names += ("attn_layer_indices", "layers_block_type", "layer_types", "mlp_expansion_factor")
    names += tuple(f"time_step_{end}" for end in ("floor", "min", "max", "rank"))
    own = {k: v for k, v in hf.items() if k in names or k.startswith("mamba_") or k.endswith("_multiplier")}
    f = Fields(own, "falcon_h1")
    for name in ("num_logits_to_keep", "mamba_chunk_size", "mlp_expansion_factor", *names[-4:]):
        f.take(name, None)  # the returned logits, chunking of the same function, initialization
    for name in ("projectors_bias", "mamba_proj_bias"):
        f.only(name, False, way_out="only false is implemented")
    for name in ("mamba_conv_bias", "mamba_use_mlp"):
        f.only(name, True, way_out="only true is implemented")
    f.only("attn_layer_indices", way_out="only null is implemented: every layer attends")
    layers = Fields(dict(hf), "falcon_h1").number("num_hidden_layers", 32, most=LAYERS // 2)
    for name in ("layers_block_type", "layer_types"):
        f.only(name, ["hybrid"] * layers, way_out="every layer is hybrid")
    shared = {"num_hidden_layers": layers, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5}
    c = read(shared | {k: v for k, v in hf.items() if k not in own}, "falcon_h1")
    mixers = _mixers(f, layers, c.width)
    embed_scale, head_scale = (f.number(f"{name}_multiplier", 1.0, float) for name in ("embedding", "lm_head"))
    gains = _gains(f, c, mixers)
    f.done()
    return replace(c, mixers=mixers, gains=gains, embed_scale=embed_scale, head_scale=head_scale)


def recur(params: Params, i: int, x: Array, mix: Any) -> tuple[Array, Any]:
    """Run the mixer of a layer on x [B, T, E]; return x and the mixer's output side by side, [B, T, 2 E].

    The caller's mix(weights, normed x) returns (output, aux).
    """
    y, aux = mix(params.layers[i], rms(params.layers[i]["norm1"], x, params.config.eps))
    return jnp.concatenate([x, y.astype(x.dtype)], -1), aux


def layer(params: Params, i: int, x: Array, pos: Array, attend: Attend) -> tuple[Array, Any]:
    """Run attention and MLP of a layer on the output [B, T, 2 E] of `recur`.

    The caller's attend(i, projected) returns (o [B, H, G, n, D], aux).
    """
    x, y = jnp.split(x, 2, -1)
    return block(params, i, x + y, project(params, i, x, pos), attend)


def embed(params: Params, ids: Array) -> Array:
    """Embed ids i32[B, T] -> x [B, T, E], scaled in float32: unlike in Gemma, the factor is not rounded."""
    x = rows(params.embed, ids)
    return (x.astype(jnp.float32) * jnp.float32(params.config.embed_scale)).astype(x.dtype)


def head(params: Params, x: Array) -> Array:
    """Compute logits f32[B, T, V] from x [B, T, E], with the final norm.

    In a model that was cut between the two blocks of a layer, x is [B, T, 2 E] and only the layer's input is used.
    """
    return unembed(params, rms(params.norm, x[..., : params.config.width], params.config.eps))
