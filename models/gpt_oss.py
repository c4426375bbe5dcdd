"""GPT-OSS: experts with biases, attention sinks per head, a sliding window in every other layer."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from .config import Fields, ModelConfig, by_layer_type, read
from .layers.moe import ATTENTION, Weights, everywhere, experts_of, feed, names, shapes
from .llama import Attend, Projected, along, embed, head, linear, newest, out, rms, split
from .qwen2 import BIAS
from .weights.params import EACH, Names, Params, Tensors

__all__ = ["TENSORS", "config", "embed", "head", "layer", "project"]

LIMIT, ALPHA = 7.0, 1.702  # clamp of an expert's activations, and factor in its sigmoid
YARN = dict(rope_type="yarn", factor=32.0, original_max_position_embeddings=4096, truncate=False)
FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)  # by code, E2M1


def mxfp4(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Decode MXFP4 to f32[R, 32 G]: 4-bit codes (E2M1) times 2^(scales - 127).

    Source: the OCP Microscaling Formats specification 1.0.

    Args:
        blocks: uint8[R, G, 16], two codes per byte, low bits first.
        scales: uint8[R, G], exponents of the groups.

    >>> mxfp4(np.full((1, 1, 16), 0x72, np.uint8), np.full((1, 1), 128, np.uint8))[0, :4].tolist()
    [2.0, 12.0, 2.0, 12.0]
    """
    codes = np.stack([blocks & 15, blocks >> 4], -1).reshape(*blocks.shape[:2], 32)
    return np.ldexp(FP4[codes], scales[..., None].astype(np.int32) - 127).reshape(len(blocks), -1)


@dataclass(frozen=True)
class Packed:
    """A matrix in MXFP4 whose rows are decoded on access.

    Attributes:
        blocks: uint8[R, G, 16], codes.
        scales: uint8[R, G], exponents.
    """

    blocks: np.ndarray
    scales: np.ndarray
    dtype = np.dtype(np.float32)

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.blocks), 32 * self.blocks.shape[1]

    def __getitem__(self, rows: slice) -> np.ndarray:
        return mxfp4(self.blocks[rows], self.scales[rows])


def each(c: ModelConfig, tensors: Tensors) -> Tensors:
    """Split tensors that hold all experts, floats [N, in, out] or MXFP4 [N, out, ...], into one per expert.

    Rows of gate and up alternate in these tensors.
    """
    e = c.experts
    assert e is not None
    sizes = {"gate_up_proj": (2 * e.hidden, c.width), "down_proj": (c.width, e.hidden)}
    out = dict(tensors)

    def take(name: str, *shape: int) -> np.ndarray:
        got = np.asarray(tensors[name]())
        if got.shape != (e.count, *shape):
            raise ValueError(f"{name} has shape {got.shape}, the config needs {(e.count, *shape)}")
        return got

    @lru_cache(maxsize=1)
    def whole(name: str) -> tuple[np.ndarray, ...]:
        rows, wide = sizes[name.rpartition(".")[2]]
        if name in tensors:
            return (take(name, wide, rows).swapaxes(1, 2),)
        return take(name + "_blocks", rows, wide // 32, 16), take(name + "_scales", rows, wide // 32)

    def matrix(name: str, n: int, rows: slice) -> Any:
        first, *scales = (x[n, rows] for x in whole(name))
        return Packed(first, *scales) if scales else first

    @lru_cache(maxsize=1)
    def bias(name: str) -> np.ndarray:
        return take(name, sizes[name.rpartition(".")[2].removesuffix("_bias")][0])

    # Replace each packed tensor by lazy views, one per expert and part.
    for at in (f"model.layers.{i}.mlp.experts." for i in range(c.layers)):
        for name, parts in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
            whose = at + name
            found = [out.pop(whose + end, None) is not None for end in ("", "_blocks", "_scales")]
            biased = out.pop(whose + "_bias", None) is not None
            for n in range(e.count):
                for i, part in enumerate(parts):
                    rows = slice(i, None, len(parts))
                    if found[0] or all(found[1:]):
                        out[f"{at}{n}.{part}.weight"] = lambda w=whose, n=n, rows=rows: matrix(w, n, rows)
                    if biased:
                        out[f"{at}{n}.{part}.bias"] = lambda w=whose + "_bias", n=n, rows=rows: bias(w)[n, rows]
    return out


def _shapes(c: ModelConfig) -> dict[str, tuple[int, ...]]:
    e = c.experts
    assert e is not None
    out: dict[str, tuple[int, ...]] = {"router.weight": (e.count, c.width), "router.bias": (e.count,)}
    out |= {"experts.*.gate_proj.bias": (e.hidden,), "experts.*.up_proj.bias": (e.hidden,)}
    out |= {"experts.*.down_proj.bias": (c.width,), "o_proj.bias": (c.width,), "sinks": (c.heads * c.groups,)}
    return {**shapes(c), **out}


_ENDS = [f"mlp.experts.*.{name}_proj" for name in ("gate", "up", "down")]
TENSORS = Names(
    sparse={
        **ATTENTION,
        **BIAS,
        "o_bias": ("self_attn.o_proj.bias",),
        "sinks": ("self_attn.sinks",),
        **names("mlp.router.weight", *(end + ".weight" for end in _ENDS)),
        "router_bias": ("mlp.router.bias",),
        EACH + "gate_up_bias": (_ENDS[0] + ".bias", _ENDS[1] + ".bias"),
        EACH + "down_bias": (_ENDS[2] + ".bias",),
    },
    shapes=_shapes,
    read=each,
)


def _windows(f: Fields, layers: int) -> tuple[int | None, ...]:
    default = ["full_attention" if i % 2 else "sliding_attention" for i in range(layers)]
    return by_layer_type(f, layers, f.number("sliding_window", 128), default)


def _extra(f: Fields, width: int) -> dict[str, Any]:
    for name in ("experts_per_token", "initial_context_length"):
        f.take(name, None)  # duplicates of num_experts_per_tok and of a RoPE field
    f.only("swiglu_limit", LIMIT, way_out=f"only {LIMIT} is implemented")
    f.only("swiglu_alpha", ALPHA, way_out=f"only {ALPHA} is implemented")
    count, active = f.number("num_local_experts", 128), f.number("num_experts_per_tok", 4)
    return {"experts": experts_of(f, count, active)}


def config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read a Hugging Face config dict with model_type gpt_oss; ValueError names an unsupported field."""
    given = {"head_dim": 64, "rms_norm_eps": 1e-5, "rope_theta": 150000.0, "attention_bias": True} | dict(hf)
    if not hf.get("rope_scaling") and not hf.get("rope_parameters"):
        given["rope_scaling"] = YARN
    if (hf.get("quantization_config") or {}).get("quant_method") == "mxfp4":
        del given["quantization_config"]  # only the experts, which are decoded to floats
    return everywhere(read(given, "gpt_oss", windows=_windows, extra=_extra, bias=(True,)))


def project(params: Params, i: int, x: Array, pos: Array) -> Projected:
    """Compute layer i's queries, keys and values before RoPE from x [B, T, E]."""
    w, c = params.layers[i], params.config
    x = rms(w["norm1"], x, c.eps)
    qkv = linear(w["qkv"], x)
    q, k, v = split(c, qkv + along(w["bias"], qkv))
    return Projected(x=x, q=q, k=k, v=v, sinks=w["sinks"])


def expert(w: Weights, x: Array) -> Array:
    """Run an expert: down((up x + 1) * gate x * sigmoid(1.702 gate x)), [m, E] -> [m, E].

    Each product has a bias; gate x is at most 7, up x within -7 and 7.
    """
    both = linear(w["gate_up"], x)
    both = both + along(w["gate_up_bias"], both)
    gate, up = jnp.minimum(both[..., 0, :], LIMIT), jnp.clip(both[..., 1, :], -LIMIT, LIMIT)
    y = (up + 1) * gate * jax.nn.sigmoid(ALPHA * gate)
    y = linear(w["down"], y.reshape(*x.shape[:-1], -1))
    return y + along(w["down_bias"], y)


def layer(params: Params, i: int, x: Array, pos: Array, attend: Attend) -> tuple[Array, Any]:
    """Run layer i on x [B, T, E]; the caller's attend(i, projected) returns (o [B, H, G, n, D], aux)."""
    w, c = params.layers[i], params.config
    with jax.named_scope("attend"):
        o, aux = attend(i, project(params, i, x, pos))
    x = newest(x, o)
    x = x + out(w, o.astype(x.dtype)) + along(w["o_bias"], x)
    with jax.named_scope("mlp"):
        return x + feed(w, rms(w["norm2"], x, c.eps), c, expert), aux
