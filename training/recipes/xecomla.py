"""Conversion of a model's keys and values to latents (X-EcoMLA, 2503.11132).

    [W_K; W_V] = U S V^T,  W_DKV = S_r V_r^T [r, E],  W_UK, W_UV = the rows of U_r,  W_R = the mean of the heads' W_K

The joint factors have the least squared error at rank r (Eckart and Young), over the un-rotated channels of keys and
all channels of values. The other `turned` channels of every head become one rotated key that all heads share. A token
then takes r + turned numbers instead of 2 H D.

The conversion is exact if r is the rank, the un-rotated channels did not rotate before, and the heads' W_K are equal in
the rotated ones. In other models the mean and the missing rotations lose much, so the model is then trained.

Here the `turned` channels are whole pairs, the fastest ones, with their own frequencies, because slow ones lose least
without rotation. The authors take the last channels of a head, the second of each pair, and other frequencies.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from jkv.io.load import DTYPES
from jkv.models import FAMILIES, ModelConfig, Params, llama, read_config
from jkv.models.weights.linear import forms

FAMILY = "mla"
ROPE = ("rope_theta", "rope_scaling", "rope_parameters")
OWN = ("model_type", "architectures", "num_key_value_heads", "head_dim", *ROPE)
PARTS = ("embed", "project", "layer", "head")  # functions of a family; it converts if they are llama's
CHANGED = {"family", "heads", "groups", "head_dim", "ropes", "latent"}


def config_of(hf: Mapping[str, Any], rank: int, turned: int, queries: int | None) -> dict[str, Any]:
    """Build the config dict of the latent model.

    The rope base becomes theta^(turned / D), because theta^(turned / D * -2i / turned) = theta^(-2i / D).

    Args:
        hf: Config dict of the original model.
        rank: Rank r of the latents.
        turned: Channels of the shared rotated key.
        queries: Rank of the query projection, or None to leave it whole.

    Raises:
        ValueError: The model cannot be converted, or a number does not fit it.
    """
    c = read_config(hf)
    most = min(c.heads * (2 * c.head_dim - turned), c.width)
    alike = [name for name in FAMILIES if _built_as_llama(name)]
    if c.family not in alike:
        raise ValueError(f"xecomla: {c.family} models cannot be converted; give one of {', '.join(alike)}")
    if turned % 2 or not 0 < turned < c.head_dim:
        raise ValueError(f"rope_dim={turned}: an even number of the {c.head_dim} channels of a head, and not all")
    if not 0 < rank <= most:
        raise ValueError(f"rank={rank}: keys and values of this model are of rank {most}, with rope_dim={turned}")
    if queries is not None and not 0 < queries <= min(c.groups * c.heads * c.head_dim, c.width):
        raise ValueError(f"query_rank={queries}: queries of this model are of rank {c.width}; 0 leaves them whole")
    rope: dict[str, Any] = {"rope_theta": hf.get("rope_theta") or 1e4}
    rope |= (hf.get("rope_scaling") or {}) | (hf.get("rope_parameters") or {})
    made = {name: x for name, x in hf.items() if name not in OWN and x is not None} | {
        "model_type": FAMILY,
        "rope_parameters": rope | {"rope_theta": rope["rope_theta"] ** (turned / c.head_dim)},
        "kv_lora_rank": rank,
        "q_lora_rank": queries,
        "qk_nope_head_dim": c.head_dim - turned,
        "qk_rope_head_dim": turned,
        "v_head_dim": c.head_dim,
        "rope_interleave": False,
    }
    _check(c, read_config(made), turned)
    return made


def _built_as_llama(name: str) -> bool:
    net = FAMILIES[name]
    return all(getattr(net, part, None) is getattr(llama, part) for part in PARTS)


def _check(c: ModelConfig, made: ModelConfig, turned: int) -> None:
    """Raise ValueError if the converted model would differ from the original in anything but latents."""
    differ = [f.name for f in fields(c) if f.name not in CHANGED and getattr(c, f.name) != getattr(made, f.name)]
    if differ:
        raise ValueError(f"xecomla: a model of latents cannot have the {differ[0]} of this {c.family} model")
    for old, new in zip(c.ropes, made.ropes, strict=True):
        same = np.allclose(old.inv_freq[: turned // 2], new.inv_freq, rtol=1e-9, atol=0)
        if 2 * len(old.inv_freq) != c.head_dim or not same or old.scale != 1:
            told = f"rotations of this {c.family} model are not, unscaled, those of {turned} channels"
            raise ValueError(f"xecomla: {told}")


def converted(params: Params, made: Mapping[str, Any]) -> Params:
    """Convert weights to the latent model of a config from `config_of`.

    Computed in float64; only the attention changes. The query projection is cut to rank `q_lora_rank` likewise. Raises
    ValueError for quantized weights.
    """
    if forms(params) not in DTYPES:
        raise ValueError(f"xecomla: weights are {forms(params)}; load the model without weights=")
    c = read_config(made)
    return replace(params, layers=tuple(_layer(w, params.config, c) for w in params.layers), config=c)


def _layer(w: Mapping[str, Any], old: ModelConfig, c: ModelConfig) -> dict[str, Any]:
    rest = {name: x for name, x in w.items() if name != "qkv"}
    # one piece for all, as the latent model has one kv head
    rest["gate_up"] = w["gate_up"].swapaxes(0, 1).reshape(1, 2, c.hidden, c.width)
    return rest | _attention(w, old, c)


def _attention(w: Mapping[str, Any], old: ModelConfig, c: ModelConfig) -> dict[str, Any]:
    m, (h, g, d, width) = c.latent, (old.heads, old.groups, old.head_dim, old.width)
    assert m is not None
    qkv = np.asarray(w["qkv"], np.float64)  # [H, G + 2, D, E]
    first = np.arange(m.turned // 2)
    turned = np.concatenate([first, first + d // 2])
    plain = np.setdiff1d(np.arange(d), turned)
    k, v = qkv[:, g], qkv[:, g + 1]
    # Joint factors of un-rotated keys and values.
    up, down = factors(np.concatenate([k[:, plain], v], 1).reshape(-1, width), m.rank)
    up = np.repeat(up.reshape(h, -1, m.rank), g, 0)  # repeated for the query heads of each kv head
    made = {
        "kv": np.concatenate([down, k[:, turned].mean(0)]),
        "key": up[:, : m.plain],
        "value": up[:, m.plain :],
    }
    q = qkv[:, :g][:, :, np.concatenate([plain, turned])].reshape(-1, width)
    made |= dict(zip(("q_b", "q_a"), factors(q, m.queries), strict=True)) if m.queries else {"q": q}
    return {name: jnp.asarray(x, w["qkv"].dtype) for name, x in made.items()}


def factors(w: np.ndarray, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """Factor a matrix into U [out, r] and S V^T [r, in], its best rank-r approximation by squared error.

    >>> up, down = factors(np.array([[3.0, 0.0], [0.0, 1.0]]), 1)
    >>> (up @ down).round(9).tolist()
    [[3.0, 0.0], [0.0, 0.0]]
    """
    u, s, v = np.linalg.svd(w, full_matrices=False)
    return u[:, :rank], s[:rank, None] * v[:rank]


def trained(params: Params) -> dict[str, Any]:
    """Return the trained parts: the whole model, as in the paper."""
    parts = {name: getattr(params, name) for name in ("embed", "layers", "norm", "head")}
    return {name: x for name, x in parts.items() if x is not None}
