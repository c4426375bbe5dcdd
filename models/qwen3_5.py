"""Qwen3.5, text only: three of four blocks use the gated delta rule; the others attend, with gated heads.

The norms are centered at zero (1 + w), and a quarter of a head's channels rotates. Families with experts share
everything but the MLP.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
from einops import rearrange
from jax import Array

from jkv.models.rope import Rope

from .config import LAYERS, Fields, Mixers, ModelConfig, one_rope, read
from .gemma3 import rms
from .layers.moe import feed, names, shapes
from .llama import TENSORS as LLAMA
from .llama import Attend, Projected, block, embed, linear, unembed
from .moe_router import Experts
from .qwen3 import NORMS
from .weights.params import Names, Params

__all__ = ["TENSORS", "config", "embed", "head", "layer", "project", "recur"]

MLP = {name: LLAMA.block[name] for name in ("norm2", "gate_up", "down")}
EXPERTS = {
    "norm2": MLP["norm2"],
    **names("mlp.gate.weight", *(f"mlp.experts.*.{name}_proj.weight" for name in ("gate", "up", "down"))),
    "gate_up": ("mlp.shared_expert.gate_proj.weight", "mlp.shared_expert.up_proj.weight"),
    "down": ("mlp.shared_expert.down_proj.weight",),
    "shared_gate": ("mlp.shared_expert_gate.weight",),
}
ATTENTION = {**{name: LLAMA.block[name] for name in ("norm1", "qkv", "o")}, **NORMS}
DELTA = {
    "norm1": LLAMA.block["norm1"],
    "mix": ("linear_attn.in_proj_qkv.weight",),
    "z": ("linear_attn.in_proj_z.weight",),
    "pace": ("linear_attn.in_proj_b.weight", "linear_attn.in_proj_a.weight"),
    "conv": ("linear_attn.conv1d.weight",),
    "dt_bias": ("linear_attn.dt_bias",),
    "a_log": ("linear_attn.A_log",),
    "norm": ("linear_attn.norm.weight",),
    "o": ("linear_attn.out_proj.weight",),
}
PART, EVERY = "partial_rotary_factor", 4  # every fourth block attends
OWN = ("layer_types", "full_attention_interval", "attn_output_gate", "mamba_ssm_dtype", "rope_parameters", PART)
WINDOW = ("use_sliding_window", "sliding_window", "max_window_layers")  # unused according to published configs


def _shapes(c: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the family's tensors by the end of their name."""
    m, e, q = c.mixers, c.experts, c.heads * c.groups * c.head_dim
    assert m is not None
    out: dict[str, tuple[int, ...]] = {}
    if e:  # specific ends come first, because one end may be the end of another
        out |= {f"shared_expert.{name}_proj.weight": (e.shared, c.width) for name in ("gate", "up")}
        out |= {"shared_expert.down_proj.weight": (c.width, e.shared), "shared_expert_gate.weight": (1, c.width)}
        out |= shapes(c)
    return out | {
        "q_proj.weight": (2 * q, c.width),
        "in_proj_qkv.weight": (m.channels, c.width),
        "in_proj_z.weight": (m.inner, c.width),
        "in_proj_b.weight": (m.heads, c.width),
        "in_proj_a.weight": (m.heads, c.width),
        "linear_attn.norm.weight": (m.head_dim,),
    }


TENSORS = Names(
    block={**ATTENTION, **MLP},
    sparse={**ATTENTION, **EXPERTS},
    mixer={**DELTA, **MLP},
    sparse_mixer={**DELTA, **EXPERTS},
    shapes=_shapes,
    unread=("mtp.",),  # multi-token prediction blocks
)


def _ropes(
    part: float, f: Fields, dim: int, context: int, windows: tuple[int | None, ...]
) -> tuple[tuple[Rope, ...], int]:
    turning = int(dim * part)
    if turning < 2 or turning % 2:
        raise f.refuse(PART, part, f"{turning} of {dim} channels would turn, and channels turn in pairs")
    return one_rope(f, turning, context, windows)


def _mixers(f: Fields, depth: int) -> Mixers:
    every = f.number("full_attention_interval", EVERY)
    default = ["linear_attention" if (i + 1) % every else "full_attention" for i in range(depth)]
    kinds = f.take("layer_types", default)
    if not isinstance(kinds, list) or len(kinds) != depth:
        raise f.refuse("layer_types", kinds, f"it is a list of num_hidden_layers = {depth} texts")
    at = tuple(i for i, kind in enumerate(kinds) if kind == "linear_attention")
    if len(at) + kinds.count("full_attention") != depth or len(at) in (0, depth):
        raise f.refuse("layer_types", kinds, "blocks are linear_attention or full_attention, one or more of each")
    groups, heads = f.number("linear_num_key_heads", 16), f.number("linear_num_value_heads", 32)
    if heads % groups:
        raise f.refuse("linear_num_key_heads", groups, f"it must divide the {heads} heads of values")
    return Mixers(
        at=at,
        heads=heads,
        head_dim=f.number("linear_value_head_dim", 128),
        state=f.number("linear_key_head_dim", 128),
        groups=groups,
        kernel=f.number("linear_conv_kernel_dim", 4),
        rule="delta",
    )


def hybrid(
    hf: Mapping[str, Any],
    family: str,
    fields: Sequence[str] = (),
    experts: Callable[[Fields, int], Experts] | None = None,
) -> ModelConfig:
    """Read a config dict of the Qwen3.5 family.

    Args:
        hf: Hugging Face config dict.
        family: Expected model_type.
        fields: Names of the fields that `experts` reads.
        experts: experts(fields, blocks) reads the experts of a MoE model; None: no experts.
    """
    f = Fields(
        {
            k: x
            for k, x in hf.items()
            if k in (*OWN, *WINDOW, "mlp_only_layers", *fields) or k.startswith(("linear_", "mtp_"))
        },
        family,
    )
    rest = {k: x for k, x in hf.items() if k not in f.rest}
    f.only("attn_output_gate", True, way_out="only true is implemented")
    f.only("mamba_ssm_dtype", "float32", way_out="only float32 is implemented")
    f.only("use_sliding_window", False, way_out="only false is implemented")
    for name in WINDOW[1:]:
        f.take(name, None)
    if "mlp_only_layers" not in fields:
        f.only("mlp_only_layers", [], way_out="experts in every block, or in none")
    for name in [name for name in f.rest if name.startswith("mtp_")]:
        f.take(name, None)  # multi-token prediction, not read
    depth = Fields(rest, family).number("num_hidden_layers", most=LAYERS)
    mixers, part, turns = _mixers(f, depth), f.number(PART, 0.25, float, most=1), f.mapping("rope_parameters")
    part = Fields({PART: turns.get(PART)}, family, "rope_parameters.").number(PART, part, float, most=1)
    # M-RoPE fields assign channels to image axes, whose positions are all equal for text
    turns = {k: x for k, x in turns.items() if k not in (PART, "mrope_section", "mrope_interleaved")}
    rest |= {"num_hidden_layers": depth - len(mixers.at), "rope_parameters": turns}
    c = read(rest, family, head_dim=256, ropes=partial(_ropes, part))
    made = experts(f, depth) if experts else None
    f.done()
    return replace(c, mixers=mixers, experts=made)


def config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read a Hugging Face config dict with model_type qwen3_5_text; ValueError names an unsupported field."""
    return hybrid(hf, "qwen3_5_text")


def both(params: Params, i: int, x: Array) -> tuple[Projected, Array]:
    """Compute queries, keys and values of x [B, T, E], and the gates [B, H, G, T, D] before their sigmoid."""
    w, c = params.layers[i], params.config
    x = rms(w["norm1"], x, c.eps)
    every = rearrange(linear(w["qkv"], x), "b t h g d -> b h g t d")
    k, v = every[:, :, 2 * c.groups], every[:, :, 2 * c.groups + 1]
    q, gate = (every[:, :, first : 2 * c.groups : 2] for first in (0, 1))
    return Projected(x=x, q=rms(w["q_norm"], q, c.eps), k=rms(w["k_norm"], k, c.eps), v=v), gate


def project(params: Params, i: int, x: Array, pos: Array) -> Projected:
    """Compute layer i's queries, keys and values before RoPE from x [B, T, E]; q and k are normed."""
    return both(params, i, x)[0]


def layer(params: Params, i: int, x: Array, pos: Array, attend: Attend) -> tuple[Array, Any]:
    """Run layer i on x [B, T, E]; the caller's attend(i, projected) returns (o [B, H, G, n, D], aux)."""
    p, gate = both(params, i, x)

    def gated(i: int, p: Projected) -> tuple[Array, Any]:
        o, aux = attend(i, p)
        return o * jax.nn.sigmoid(gate[..., gate.shape[3] - o.shape[3] :, :].astype(o.dtype)), aux

    return block(params, i, x, p, gated, feed, rms)


def recur(params: Params, i: int, x: Array, mix: Any) -> tuple[Array, Any]:
    """Run recurrent block i on x [B, T, E]; the caller's mix(weights, normed x) returns (output, aux)."""
    w, c = params.layers[i], params.config
    y, aux = mix(w, rms(w["norm1"], x, c.eps))
    x = x + y
    with jax.named_scope("mlp"):
        return x + feed(w, rms(w["norm2"], x, c.eps), c), aux


def head(params: Params, x: Array) -> Array:
    """Compute logits f32[B, T, V] from x [B, T, E], with the final norm."""
    return unembed(params, rms(params.norm, x, params.config.eps))
