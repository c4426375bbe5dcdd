"""DeepSeek V2: multi-head latent attention (MLA), and MoE with shared experts.

All heads of a layer share one latent vector per token and one rotated key. A head's key and value are matrices times
the latent; the key's matrix is multiplied into the query and the value's into the output instead, so the cache holds
one kv head per layer: key (rotated key, latent), value (latent).
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from einops import rearrange
from jax import Array

from .config import HEAD_DIM, Fields, ModelConfig, is_whole_number, read
from .layers.moe import experts_of, feed, shapes
from .llama import TENSORS as LLAMA
from .llama import Attend, Projected, embed, head, linear, newest, rms
from .mla import Latent
from .qwen3_moe import MLPS
from .weights.params import Names, Params, Tensors

__all__ = ["TENSORS", "config", "embed", "head", "layer", "project"]

EPS = 1e-6  # epsilon of the latent norms, independent of the config's
OWN = ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "qk_head_dim")
SPARSE = (
    *("first_k_dense_replace", "moe_layer_freq", "moe_intermediate_size", "n_routed_experts", "n_shared_experts"),
    *("num_experts_per_tok", "norm_topk_prob", "routed_scaling_factor", "n_group", "topk_group", "topk_method"),
    *("scoring_func", "rope_interleave", "aux_loss_alpha", "seq_aux", "ep_size", "num_nextn_predict_layers"),
)


def attention_shapes(c: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the MLA tensors by the end of their name."""
    m = c.latent
    assert m is not None
    q, values, low = c.groups * (m.plain + m.turned), c.groups * m.values, m.queries or 0
    return {
        "q_proj.weight": (q, c.width),
        "q_a_proj.weight": (low, c.width),
        "q_a_layernorm.weight": (low,),
        "q_b_proj.weight": (q, low),
        "kv_a_proj_with_mqa.weight": (m.rank + m.turned, c.width),
        "kv_a_layernorm.weight": (m.rank,),
        "kv_b_proj.key.weight": (c.groups, m.plain, m.rank),
        "kv_b_proj.value.weight": (c.groups, m.values, m.rank),
        "o_proj.weight": (c.width, values),
    }


def _shapes(c: ModelConfig) -> dict[str, tuple[int, ...]]:
    e = c.experts
    assert e is not None
    return {
        **(shapes(c) if e.at else {}),
        **attention_shapes(c),
        "gate.e_score_correction_bias": (e.count,),
        "shared_experts.gate_proj.weight": (e.shared, c.width),
        "shared_experts.up_proj.weight": (e.shared, c.width),
        "shared_experts.down_proj.weight": (c.width, e.shared),
    }


def split_latent(c: ModelConfig, tensors: Tensors) -> Tensors:
    """Split each kv_b_proj, stored head by head, into the matrices of keys and of values.

    The multi-token prediction block after the last block is not read.
    """
    m = c.latent
    assert m is not None
    more = f"model.layers.{c.depth}."
    extra = more + "eh_proj.weight" in tensors
    out = {n: x for n, x in tensors.items() if not (extra and n.startswith(more))}

    def part(read: Callable[[], Any], rows: slice, name: str) -> Any:
        got, wanted = read(), (c.groups * (m.plain + m.values), m.rank)
        if got.shape != wanted:
            raise ValueError(f"{name} has shape {got.shape}, the config needs {wanted}")
        return got.reshape(c.groups, -1, m.rank)[:, rows]

    for i in range(c.depth):
        name = f"model.layers.{i}.self_attn.kv_b_proj."
        if both := out.pop(name + "weight", None):
            for end, rows in (("key", slice(m.plain)), ("value", slice(m.plain, None))):
                out[f"{name}{end}.weight"] = lambda b=both, r=rows, n=name: part(b, r, n + "weight")
    return out


def absent(c: ModelConfig) -> tuple[str, ...]:
    """Return the query fields that a model lacks: those of a query latent, or the single matrix."""
    assert c.latent is not None
    return ("q",) if c.latent.queries else ("q_a", "q_a_norm", "q_b")


ATTENTION = {
    "norm1": LLAMA.block["norm1"],
    "q": ("self_attn.q_proj.weight",),
    "q_a": ("self_attn.q_a_proj.weight",),
    "q_a_norm": ("self_attn.q_a_layernorm.weight",),
    "q_b": ("self_attn.q_b_proj.weight",),
    "kv": ("self_attn.kv_a_proj_with_mqa.weight",),
    "kv_norm": ("self_attn.kv_a_layernorm.weight",),
    "key": ("self_attn.kv_b_proj.key.weight",),
    "value": ("self_attn.kv_b_proj.value.weight",),
    "o": LLAMA.block["o"],
    "norm2": LLAMA.block["norm2"],
}
SHARED = {
    "gate_up": ("mlp.shared_experts.gate_proj.weight", "mlp.shared_experts.up_proj.weight"),
    "down": ("mlp.shared_experts.down_proj.weight",),
}
TENSORS = Names(
    block={**ATTENTION, **{name: LLAMA.block[name] for name in ("gate_up", "down")}},
    sparse={**ATTENTION, **MLPS, **SHARED},
    shapes=_shapes,
    read=split_latent,
    absent=absent,
)


def routing(f: Fields) -> dict[str, Any]:
    """Read how V2 picks experts: by softmax, among all experts or those of the groups with the best expert."""
    f.only("scoring_func", "softmax", way_out="only softmax is implemented")
    f.only("norm_topk_prob", False, way_out="only false is implemented")
    method = f.take("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise f.refuse("topk_method", method, "only greedy and group_limited_greedy are implemented")
    groups, chosen = f.number("n_group", 1), f.number("topk_group", 1)
    limits = {} if method == "greedy" else {"groups": groups, "chosen": chosen}
    return {"normed": False, "gain": f.number("routed_scaling_factor", 1.0, float), **limits}


def experts(routing: Callable[[Fields], dict[str, Any]], f: Fields, blocks: int) -> dict[str, Any]:
    """Read the experts of all blocks except the first dense ones; `routing` reads the router's fields."""
    f.only("moe_layer_freq", 1, way_out="only 1 is implemented: every block after the first dense ones has experts")
    for name in ("aux_loss_alpha", "seq_aux", "ep_size", "num_nextn_predict_layers"):
        f.take(name, None)  # training, placement of experts, and blocks that are not read
    first, hidden = f.take("first_k_dense_replace", 0), f.number("moe_intermediate_size")
    if not is_whole_number(first) or not 0 <= first <= blocks:
        raise f.refuse("first_k_dense_replace", first, f"it is a number of the {blocks} blocks")
    count, active = f.number("n_routed_experts"), f.number("num_experts_per_tok")
    e = experts_of(f, count, active, hidden, **routing(f), shared=hidden * f.number("n_shared_experts"))
    size = count // e.groups
    if count % e.groups or e.best > size:
        raise f.refuse("n_group", e.groups, f"the groups are equal parts of the {count} experts, of {e.best} or more")
    if e.chosen > e.groups or e.chosen * size < active:
        raise f.refuse(
            "topk_group", e.chosen, f"it is one to {e.groups} groups of {size}, for {active} experts a token"
        )
    return {"experts": replace(e, at=tuple(range(int(first), blocks)))}


def _gain(hf: Mapping[str, Any]) -> float:
    """Return the factor of attention logits that comes with YaRN."""
    given = {**(hf.get("rope_scaling") or {}), **(hf.get("rope_parameters") or {})}
    by, factor = given.get("mscale_all_dim"), given.get("factor") or 1.0
    kind = given.get("rope_type", given.get("type", "default"))
    return (0.1 * by * math.log(factor) + 1.0) ** 2 if by and kind != "default" and factor > 1 else 1.0


def latent(
    hf: Mapping[str, Any], family: str, more: Callable[[Fields, int], dict[str, Any]] = lambda f, blocks: {}
) -> ModelConfig:
    """Read a config dict of a family with MLA; more(fields, blocks) reads the family's own fields."""
    f = Fields({name: hf[name] for name in (*OWN, *SPARSE) if name in hf}, family)
    plain, turned, values = (f.number(name) for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    m = Latent(
        rank=f.number("kv_lora_rank"),
        queries=f.number("q_lora_rank", None),
        plain=plain,
        turned=turned,
        values=values,
        paired=bool(f.take("rope_interleave", True)),
    )
    f.only("qk_head_dim", plain + turned, way_out="it is the sum of qk_nope_head_dim and qk_rope_head_dim")
    if m.rank + turned > HEAD_DIM:
        raise f.refuse("kv_lora_rank", m.rank, f"{HEAD_DIM:,} channels are the most of a key, with the rotated ones")
    rest = {name: x for name, x in hf.items() if name not in (*OWN, *SPARSE)}
    heads = hf.get("num_attention_heads")
    if rest.get("num_key_value_heads") not in (None, heads):
        raise f.refuse("num_key_value_heads", rest["num_key_value_heads"], "every query head has its own key and value")
    c = read(rest | {"num_key_value_heads": heads, "head_dim": turned}, family)
    own = {"heads": 1, "groups": c.heads, "head_dim": turned + m.rank, "latent": m}
    own |= {"scale": (plain + turned) ** -0.5 * _gain(hf), **more(f, c.layers)}
    f.done()
    return replace(c, **own)


def config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read a Hugging Face config dict with model_type deepseek_v2; ValueError names an unsupported field."""
    return latent(hf, "deepseek_v2", partial(experts, routing))


def halves(x: Array, paired: bool) -> Array:
    """Reorder x [..., R] from adjacent rotary pairs to two halves, 0 1 2 3 -> 0 2 1 3, if `paired`."""
    return jnp.concatenate([x[..., 0::2], x[..., 1::2]], -1) if paired else x


def _normed(w: Mapping[str, Array], name: str, x: Array) -> Array:
    """Apply the norm of that name; x is unchanged if the family has no such norm."""
    return rms(w[name], x, EPS) if name in w else x


def project(params: Params, i: int, x: Array, pos: Array) -> Projected:
    """Compute layer i's queries, keys and values from x [B, T, E], for one kv head: the latent.

    The key matrix is absorbed into the queries.
    """
    w, c, m = params.layers[i], params.config, params.config.latent
    assert m is not None
    x = rms(w["norm1"], x, c.eps)
    q = linear(w["q_b"], _normed(w, "q_a_norm", linear(w["q_a"], x))) if m.queries else linear(w["q"], x)
    q = rearrange(q, "b t (g d) -> b 1 g t d", g=c.groups)
    kv = linear(w["kv"], x)[:, None]
    v = _normed(w, "kv_norm", kv[..., : m.rank])
    absorbed = jnp.einsum("bhgtd,gdr->bhgtr", q[..., : m.plain], w["key"])
    return Projected(
        x=x,
        q=jnp.concatenate([halves(q[..., m.plain :], m.paired), absorbed], -1),
        k=jnp.concatenate([halves(kv[..., m.rank :], m.paired), v], -1),
        v=v,
    )


def layer(params: Params, i: int, x: Array, pos: Array, attend: Attend) -> tuple[Array, Any]:
    """Run layer i on x [B, T, E]; the caller's attend(i, projected) returns (o [B, 1, G, n, Dv], aux)."""
    w, c = params.layers[i], params.config
    with jax.named_scope("attend"):
        o, aux = attend(i, project(params, i, x, pos))
    values = jnp.einsum("bhgtr,gvr->btgv", o.astype(x.dtype), w["value"])
    x = newest(x, o) + linear(w["o"], rearrange(values, "b t g v -> b t (g v)"))
    with jax.named_scope("mlp"):
        return x + feed(w, rms(w["norm2"], x, c.eps), c), aux
