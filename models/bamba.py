"""Bamba: Mamba-2 blocks and some attention blocks, each followed by an MLP."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
from jax import Array

from jkv.models.rope import Rope

from .config import LAYERS, Fields, Mixers, ModelConfig, one_rope, read
from .llama import TENSORS as LLAMA
from .llama import embed, head, layer, mlp, project, rms
from .mamba2 import MIX, checked, limit
from .weights.params import Names, Params

__all__ = ["TENSORS", "config", "embed", "head", "layer", "project", "recur"]

MLP = {
    "norm2": ("pre_ff_layernorm.weight",),
    "gate_up": ("feed_forward.gate_proj.weight", "feed_forward.up_proj.weight"),
    "down": ("feed_forward.down_proj.weight",),
}
TENSORS = Names(
    block={**LLAMA.block, **MLP},
    mixer={"norm1": ("input_layernorm.weight",), **{n: (f"mamba.{t}",) for n, t in MIX.items()}, **MLP},
    norm="model.final_layernorm.weight",
)
TURNING = 0.5  # fraction of a head's channels with RoPE, in every Bamba


def _half(f: Fields, dim: int, context: int, windows: tuple[int | None, ...]) -> tuple[tuple[Rope, ...], int]:
    return one_rope(f, int(dim * TURNING), context, windows)


def config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read a Hugging Face config dict with model_type bamba; ValueError names an unsupported field."""
    own = {k: v for k, v in hf.items() if k.startswith("mamba_")}
    names = ("attn_layer_indices", "time_step_limit", "partial_rotary_factor", "z_loss_coefficient")
    f = Fields(own | {k: hf[k] for k in (*names, "num_logits_to_keep") if k in hf}, "bamba")
    f.only("partial_rotary_factor", TURNING, way_out=f"only {TURNING} is implemented")
    for name in ("z_loss_coefficient", "num_logits_to_keep", "mamba_chunk_size"):
        f.take(name, None)  # training, the returned logits, and chunking of the same function
    f.only("mamba_proj_bias", False, way_out="only false is implemented")
    f.only("mamba_conv_bias", True, way_out="only true is implemented")
    depth = Fields(hf, "bamba").number("num_hidden_layers", 32, most=LAYERS)
    attending = sorted(set(f.take("attn_layer_indices", ())))
    if not attending or not 0 <= attending[0] <= attending[-1] < depth:
        raise f.refuse("attn_layer_indices", attending, f"it names one or more of the {depth} blocks; see mamba2")
    rest = {k: v for k, v in hf.items() if k not in own and k not in names and k != "num_logits_to_keep"}
    turns = {k: v for k, v in (hf.get("rope_parameters") or {}).items() if k != "partial_rotary_factor"}
    rest |= {"num_hidden_layers": len(attending), "rope_parameters": turns}
    c = read({"max_position_embeddings": 262144} | rest, "bamba", ropes=_half)
    heads, inner = f.number("mamba_n_heads", 128), f.number("mamba_expand", 2) * c.width
    dim = f.take("mamba_d_head", "auto")
    if inner % heads or dim not in ("auto", inner // heads):
        raise f.refuse("mamba_d_head", dim, f"{heads} heads of a mixer share {inner} channels evenly")
    mixers = Mixers(
        at=tuple(i for i in range(depth) if i not in attending),
        heads=heads,
        head_dim=inner // heads,
        state=f.number("mamba_d_state", 256),
        groups=f.number("mamba_n_groups", 1),
        kernel=f.number("mamba_d_conv", 4),
        limit=limit(f),
    )
    f.done()
    return replace(c, mixers=checked(f, mixers))


def recur(params: Params, i: int, x: Array, mix: Any) -> tuple[Array, Any]:
    """Run recurrent block i on x [B, T, E]; the caller's mix(weights, normed x) returns (output, aux)."""
    w, c = params.layers[i], params.config
    y, aux = mix(w, rms(w["norm1"], x, c.eps))
    x = x + y
    with jax.named_scope("mlp"):
        return x + mlp(w, rms(w["norm2"], x, c.eps), c.act), aux
