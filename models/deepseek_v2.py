"""DeepSeek V2: multi-head latent attention, and fine experts beside shared ones.

All heads of a layer read one latent vector a token, and one rotated key. A head's key and value are matrices times the
latent; the key's matrix is multiplied into the query and the value's into the output instead, so what is cached is one
kv head: key (rotated key, latent), value (latent).
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

from .config import HEAD_DIM, Fields, ModelConfig, read, whole
from .layers.moe import experts_of, feed, shapes
from .llama import TENSORS as LLAMA
from .llama import Attend, Projected, embed, head, linear, newest, rms
from .mla import Latent
from .qwen3_moe import MLPS
from .weights.params import Names, Params, Tensors

__all__ = ["TENSORS", "config", "embed", "head", "layer", "project"]

EPS = 1e-6  # of the norms of latents, whatever the config says of the others
OWN = ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "qk_head_dim")
SPARSE = (
    *("first_k_dense_replace", "moe_layer_freq", "moe_intermediate_size", "n_routed_experts", "n_shared_experts"),
    *("num_experts_per_tok", "norm_topk_prob", "routed_scaling_factor", "n_group", "topk_group", "topk_method"),
    *("scoring_func", "rope_interleave", "aux_loss_alpha", "seq_aux", "ep_size", "num_nextn_predict_layers"),
)


def attention_shapes(c: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shape of a tensor of latent attention by the end of its name."""
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


def apart(c: ModelConfig, tensors: Tensors) -> Tensors:
    """What makes keys and what makes values of a latent, which checkpoints have head by head in one tensor.

    The block behind the last one, which predicts a token more, is left unread.
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
    """Fields of queries that a model lacks: those of a latent of theirs, or the one matrix without."""
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
    read=apart,
    absent=absent,
)


def routing(f: Fields) -> dict[str, Any]:
    """How V2 picks experts: by a softmax, all of them or those of the groups with the best one."""
    f.only("scoring_func", "softmax", way_out="only softmax is implemented")
    f.only("norm_topk_prob", False, way_out="only false is implemented")
    method = f.take("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise f.refuse("topk_method", method, "only greedy and group_limited_greedy are implemented")
    groups, chosen = f.number("n_group", 1), f.number("topk_group", 1)
    limits = {} if method == "greedy" else {"groups": groups, "chosen": chosen}
    return {"normed": False, "gain": f.number("routed_scaling_factor", 1.0, float), **limits}


def experts(routing: Callable[[Fields], dict[str, Any]], f: Fields, blocks: int) -> dict[str, Any]:
    """The experts of all blocks but the first ones, which `routing` reads the choice of."""
    f.only("moe_layer_freq", 1, way_out="only 1 is implemented: every block after the first dense ones has experts")
    for name in ("aux_loss_alpha", "seq_aux", "ep_size", "num_nextn_predict_layers"):
        f.take(name, None)  # of training, of where experts lie, and of blocks that are not read
    first, hidden = f.take("first_k_dense_replace", 0), f.number("moe_intermediate_size")
    if not whole(first) or not 0 <= first <= blocks:
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
    """By which yarn makes logits larger."""
    given = {**(hf.get("rope_scaling") or {}), **(hf.get("rope_parameters") or {})}
    by, factor = given.get("mscale_all_dim"), given.get("factor") or 1.0
    kind = given.get("rope_type", given.get("type", "default"))
    return (0.1 * by * math.log(factor) + 1.0) ** 2 if by and kind != "default" and factor > 1 else 1.0


def latent(
    hf: Mapping[str, Any], family: str, more: Callable[[Fields, int], dict[str, Any]] = lambda f, blocks: {}
) -> ModelConfig:
    """ModelConfig of a config dict of a family with latent attention; more(fields, blocks) reads the family's own."""
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
    """ModelConfig of a config dict with model_type deepseek_v2; ValueError names a field that is not supported."""
    return latent(hf, "deepseek_v2", partial(experts, routing))


def halves(x: Array, paired: bool) -> Array:
    """x [..., R] with what turns together in two halves, where it lies in pairs: 0 1 2 3 -> 0 2 1 3."""
    return jnp.concatenate([x[..., 0::2], x[..., 1::2]], -1) if paired else x


def _normed(w: Mapping[str, Array], name: str, x: Array) -> Array:
    """x behind the norm of that name; a family without it has x itself."""
    return rms(w[name], x, EPS) if name in w else x


def project(params: Params, i: int, x: Array, pos: Array) -> Projected:
    """Queries, keys and values of layer i for the rows x [B, T, E] at pos i32[B, T], of one kv head: the latent's."""
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
    """Layer i of x [B, T, E] at pos i32[B, T]; `attend(i, projected) -> (o [B, 1, G, T, Dv], aux)` is the caller's."""
    w, c = params.layers[i], params.config
    with jax.named_scope("attend"):
        o, aux = attend(i, project(params, i, x, pos))
    values = jnp.einsum("bhgtr,gvr->btgv", o.astype(x.dtype), w["value"])
    x = newest(x, o) + linear(w["o"], rearrange(values, "b t g v -> b t (g v)"))
    with jax.named_scope("mlp"):
        return x + feed(w, rms(w["norm2"], x, c.eps), c), aux
