"""Model families as pure functions without a KV cache: configs, weights, layers, plain forward pass."""

from collections.abc import Callable, Mapping
from types import MappingProxyType, ModuleType
from typing import Any

import jax.numpy as jnp
from jax import Array

from jkv.arrays.online_softmax import softmax
from jkv.arrays.x32 import narrow

from . import (
    bamba,
    deepseek_v2,
    deepseek_v3,
    falcon_h1,
    gemma2,
    gemma3,
    gemma3_images,
    gpt_oss,
    granite,
    llama,
    mamba2,
    mistral,
    mixtral,
    mla_llama,
    olmo2,
    olmo3,
    olmoe,
    phi3,
    qwen2,
    qwen3,
    qwen3_5,
    qwen3_5_images,
    qwen3_5_moe,
    qwen3_moe,
    qwen3_next,
    smollm3,
)
from .config import LAYERS, Mixers, ModelConfig
from .layers import gated_delta, mamba2_ssd
from .layers.recurrent_state import State
from .llama import Attend, Projected, linear
from .softcap import Scale
from .weights import loading, params
from .weights.params import Blocks, Params, Put, Tensors
from .weights.quantize import Form

__all__ = [
    "FAMILIES",
    "RULES",
    "TINY",
    "Mix",
    "Mixers",
    "ModelConfig",
    "Params",
    "Projected",
    "Scale",
    "abstract",
    "build",
    "family",
    "forward",
    "fresh",
    "layer",
    "linear",
    "plain",
    "random",
    "read_config",
    "rule",
    "settle_head",
    "mamba2_ssd",
]

# the smallest complete config, for examples and tests
TINY = dict(
    model_type="llama",
    vocab_size=100,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
)

FAMILIES = {
    "llama": llama,
    "mistral": mistral,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "gemma2": gemma2,
    "gemma3": gemma3_images,
    "gemma3_text": gemma3,
    "phi3": phi3,
    "smollm3": smollm3,
    "olmo2": olmo2,
    "olmo3": olmo3,
    "granite": granite,
    "mamba2": mamba2,
    "bamba": bamba,
    "falcon_h1": falcon_h1,
    "mixtral": mixtral,
    "qwen3_moe": qwen3_moe,
    "qwen3_next": qwen3_next,
    "qwen3_5": qwen3_5_images,
    "qwen3_5_text": qwen3_5,
    "qwen3_5_moe": qwen3_5_images,
    "qwen3_5_moe_text": qwen3_5_moe,
    "olmoe": olmoe,
    "gpt_oss": gpt_oss,
    "deepseek_v2": deepseek_v2,
    "deepseek_v3": deepseek_v3,
    "mla": mla_llama,
}

RULES = {"ssd": mamba2_ssd, "delta": gated_delta}

Mix = Callable[[int, Mapping[str, Array], Array], tuple[Array, Any]]  # mixer, its weights, normed x -> output, extra


def family(config: ModelConfig) -> ModuleType:
    """Return the module of a model's family: `embed`, `head`, and `layer` (attention) or `recur` or both.

    >>> family(random(TINY).config) is FAMILIES["llama"]
    True
    """
    return FAMILIES[config.family]


def rule(mixers: Mixers) -> ModuleType:
    """Return the module of a recurrence, `mamba2_ssd` or `gated_delta`: `start`, `read`, `step`, `settle` and `floats`.

    >>> rule(read_config(dict(model_type="mamba2", vocab_size=100, hidden_size=32, num_hidden_layers=1, num_heads=4,
    ...     head_dim=16, n_groups=1)).mixers) is mamba2_ssd
    True
    """
    return RULES[mixers.rule]


def read_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Convert a Hugging Face config dict to a ModelConfig; ValueError names an unsupported field or family.

    >>> read_config({"model_type": "mamba"})  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ValueError: model_type 'mamba' is not supported: use one of bamba, deepseek_v2, deepseek_v3, falcon_h1, ...
    """
    kind = hf.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise ValueError(f"model_type {kind!r} is not supported: use one of {', '.join(sorted(FAMILIES))}")
    depth = hf.get("num_hidden_layers")
    if isinstance(depth, int | float) and not depth <= LAYERS:
        raise ValueError(f"config field 'num_hidden_layers' = {depth!r}: {LAYERS:,} is the most that any model has")
    try:
        return FAMILIES[kind].config(hf)
    except (TypeError, AttributeError, ArithmeticError) as error:  # a field has a type that no valid config has
        raise ValueError(f"the config of this {kind} model holds what none can ({error}): get its own") from error


def build(
    config: Mapping[str, Any],
    tensors: Tensors,
    dtype: Any,
    put: Put = params.copied,
    form: Form | str | None = None,
    blocks: Blocks = MappingProxyType({}),
) -> Params:
    """Build Params from a Hugging Face config dict and readers of the tensors.

    Rows are read from what a reader returns when `put` needs them on their device.

    Args:
        config: Hugging Face config dict.
        tensors: Functions that return a tensor, by name ("model.layers.0.self_attn.q_proj.weight", ...).
        dtype: Float type of the weights.
        put: Moves an array from the host to its devices.
        form: Weight format of the matrices, or its name, int8 or int4; None: floats.
        blocks: Readers of the tensors that are kept quantized as they are in a file.

    Raises:
        ValueError: Tensors are missing, unused, misshapen or hold NaN; the message lists them.

    >>> build(TINY, {}, jnp.float32)
    Traceback (most recent call last):
    ValueError: the checkpoint does not fit the config of this llama model: 21 tensors missing: \
model.embed_tokens.weight, model.norm.weight, lm_head.weight, model.layers.0.input_layernorm.weight, \
model.layers.0.self_attn.q_proj.weight and 16 more; take the config and the tensors of one model that is not quantized
    """
    config, tensors = settle_head(config, tensors)
    c = read_config(config)
    table = FAMILIES[c.family].TENSORS
    return params.assemble(c, table, table.read(c, tensors), dtype, put, form, blocks)


def settle_head(config: Mapping[str, Any], tensors: Tensors) -> tuple[dict[str, Any], Tensors]:
    """Return the config and tensors of a checkpoint, made consistent about a tied head.

    If the config ties the head to the embedding but the checkpoint has a head, a copy of the embedding is dropped; a
    different head is used, and the returned config says so. transformers 5 does the same.
    """
    c = read_config(config)
    table = FAMILIES[c.family].TENSORS
    if not c.tied or not {table.head, table.embed} <= set(tensors):
        return dict(config), tensors
    if loading.alike(tensors[table.head](), tensors[table.embed]()):
        return dict(config), {name: x for name, x in tensors.items() if name != table.head}
    untied = {"tie_word_embeddings": False}
    text = {"text_config": {**config["text_config"], **untied}} if config.get("text_config") else {}
    return {**config, **untied, **text}, tensors


@narrow
def random(
    config: ModelConfig | Mapping[str, Any], seed: int = 0, dtype: Any = jnp.float32, form: Form | str | None = None
) -> Params:
    """Build Params of seeded numpy noise, with the same numbers on every machine, for benchmarks and tests.

    Args:
        config: ModelConfig or Hugging Face config dict.
        seed: Seed of the noise.
        dtype: Float type of the weights.
        form: Weight format, as in `build`.

    >>> random(TINY).head.shape
    (100, 32)
    """
    c = config if isinstance(config, ModelConfig) else read_config(config)
    table = FAMILIES[c.family].TENSORS
    return params.assemble(c, table, params.seeded(c, table, seed), dtype, form=form)


def abstract(
    config: ModelConfig, dtype: Any = jnp.float32, form: Form | str | None = None, blocks: Blocks = MappingProxyType({})
) -> Params:
    """Build Params of shapes only, to compile without weights; `form` and `blocks` as in `build`.

    >>> abstract(read_config(TINY)).embed
    ShapeDtypeStruct(shape=(100, 32), dtype=float32)
    """
    return params.abstract(config, FAMILIES[config.family].TENSORS, dtype, form, blocks)


def layer(params: Params, i: int, x: Array, pos: Array, attend: Attend, mix: Mix) -> tuple[Array, Any]:
    """Run block i, which attends or recurs.

    Args:
        params: The model.
        i: Index of the block among all blocks.
        x: [B, T, E], input of the block.
        pos: i32[B, T], positions.
        attend: attend(a, projected) -> (o [B, H, G, n, D], extra) for the newest n rows, in the a-th attention block.
        mix: mix(m, weights, normed x [B, T, E]) -> (output [B, T, E], extra), in the m-th recurrent block.

    Returns:
        The block's output, and the extra that `attend` or `mix` returned.
    """
    c, net = params.config, family(params.config)
    if c.mixers is None:
        return net.layer(params, i, x, pos, attend)
    before = sum(j < i for j in c.mixers.at)
    if i in c.mixers.at:
        return net.recur(params, i, x, lambda w, x: mix(before, w, x))
    return net.layer(params, i, x, pos, lambda _, new: attend(i - before, new))


def fresh(c: ModelConfig, pos: Array) -> Mix:
    """Return mixers that start from an empty state, for rows at pos i32[B, T]; each also returns its new state."""

    def mix(_: int, w: Mapping[str, Array], x: Array) -> tuple[Array, State]:
        assert c.mixers is not None
        net = rule(c.mixers)
        return net.read(w, c.mixers, c.eps, x, pos >= 0, net.start(c.mixers, x.shape[0], 0, x.dtype))

    return mix


def plain(c: ModelConfig, pos: Array) -> Attend:
    """Return dense causal attention over rows at pos i32[B, T], without a cache.

    It computes softmax(q.k * scale) v in float32 over all visible keys.
    """
    gap = pos[:, :, None] - pos[:, None, :]  # [B, T, S]
    alive = (gap >= 0) & (pos[:, None, :] >= 0)

    def attend(i: int, a: Projected) -> tuple[Array, None]:
        q = c.ropes[i].rotate(a.q, pos[:, None, None, :]).astype(jnp.float32)
        k = c.ropes[i].rotate(a.k, pos[:, None, :]).astype(jnp.float32)
        window = c.windows[i]
        see = alive if window is None else alive & (gap < window)
        logits = jnp.einsum("bhgtd,bhsd->bhgts", q, k) * c.scale
        # a finite floor, because a pad token sees no key and its row must not become NaN
        weights = softmax(jnp.where(see[:, None, None], logits, -1e30), a.sinks)
        return jnp.einsum("bhgts,bhsd->bhgtd", weights, a.v.astype(jnp.float32)), None

    return attend


@narrow
def forward(p: Params, ids: Array, pos: Array) -> Array:
    """Compute logits f32[B, T, V] with plain attention and no cache: the reference of the tests.

    Args:
        p: The model.
        ids: i32[B, T], token ids.
        pos: i32[B, T], positions; -1 is a pad token, which no token sees.

    >>> forward(random(TINY), jnp.ones((1, 3), int), jnp.arange(3)[None]).shape
    (1, 3, 100)
    """
    c, m, attend = p.config, family(p.config), plain(p.config, pos)
    x = m.embed(p, ids)
    for i in range(c.depth):
        x, _ = layer(p, i, x, pos, attend, fresh(c, pos))
    return m.head(p, x)
