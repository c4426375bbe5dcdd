"""Benchmark models: a model with its weights, or the shape of a public model with random weights."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from math import prod
from typing import Any

import jax

from jkv import models
from jkv.bench.environment import SEED
from jkv.io.load import read
from jkv.io.model_source import Source
from jkv.models.weights import params as weights
from jkv.utils import memory

# From the checkpoints' configs: only the fields that determine the computation, and so bytes and time.
SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": dict(
        model_type="llama",
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        rope_theta=500000.0,
        rope_scaling=dict(
            rope_type="llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=8192,
        ),
        tie_word_embeddings=False,
    ),
    "llama-3.2-1b": dict(
        model_type="llama",
        vocab_size=128256,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        rope_theta=500000.0,
        rope_scaling=dict(
            rope_type="llama3",
            factor=32.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=8192,
        ),
        tie_word_embeddings=True,
    ),
    "qwen3-8b": dict(
        model_type="qwen3",
        vocab_size=151936,
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40960,
        rms_norm_eps=1e-6,
        rope_theta=1000000.0,
        tie_word_embeddings=False,
    ),
    "smollm2-135m": dict(
        model_type="llama",
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_theta=100000.0,
        tie_word_embeddings=True,
    ),
    **{
        f"mamba2-{name}": dict(
            model_type="mamba2",
            vocab_size=50288,
            hidden_size=width,
            num_hidden_layers=depth,
            num_heads=width // 32,
            head_dim=64,
            state_size=128,
            n_groups=1,
            tie_word_embeddings=True,
        )
        for name, width, depth in (("130m", 768, 24), ("780m", 1536, 48), ("2.7b", 2560, 64))
    },
    "bamba-9b": dict(
        model_type="bamba",
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=262144,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        attn_layer_indices=[9, 18, 27],
        mamba_n_heads=128,
        mamba_d_state=128,
        mamba_n_groups=1,
        tie_word_embeddings=False,
    ),
}


def subject(
    model: str | None, shape: str | None, random_weights: bool, itemsize: int, copies: int
) -> tuple[str, Source]:
    """Return the name of the measured model and its source (config, and tensors that are read lazily).

    Args:
        model: Model to read; None for the default or with `shape`.
        shape: Shape of a public model.
        random_weights: Whether to use random weights.
        itemsize: Bytes per weight.
        copies: Copies of the weights that must fit in memory.

    Raises:
        ValueError: The name is unknown, the options contradict each other, or random weights do not fit in memory.
    """
    if shape is None:
        name = model or "smollm2-135m"
        source = read(name)
        return (f"{name}, random weights", noise(source.config, itemsize, copies)) if random_weights else (name, source)
    if model is not None:
        raise ValueError(f"--model {model} and --shape {shape}: give one of them")
    config = find(shape)
    if not random_weights:
        raise ValueError(f"--shape {shape} has no weights of its own: add --random-weights, or use --model")
    return f"{shape}, random weights", noise(config, itemsize, copies)


def find(shape: str) -> dict[str, Any]:
    """Return the config of a shape. Raises ValueError for an unknown one, and suggests the nearest."""
    if shape not in SHAPES:
        near = difflib.get_close_matches(shape.lower(), SHAPES, 1, 0.4)
        raise ValueError(
            f"unknown shape {shape!r}: " + (f"did you mean {near[0]}?" if near else f"it is one of {', '.join(SHAPES)}")
        )
    return SHAPES[shape]


def config_of(model: str) -> Mapping[str, Any]:
    """Return the config of a public model's shape, or of a model that can be read."""
    return SHAPES[model] if model in SHAPES else read(model).config


def noise(config: Mapping[str, Any], itemsize: int, copies: int) -> Source:
    """Return seeded random weights in a model's shape. Raises ValueError if `copies` of them do not fit in memory."""
    c = models.read_config(config)
    table = models.FAMILIES[c.family].TENSORS
    sizes = [prod(shape) for shape in weights.names(c, table).values()]
    need = copies * itemsize * sum(sizes) + 4 * max(sizes)  # tensors are generated in float32, one at a time
    left = memory.free(jax.devices()[0])
    if need > left:
        raise ValueError(
            f"the random weights of {sum(sizes) / 1e9:.2f} billion parameters need {need / 2**30:.1f} GiB and "
            f"{left / 2**30:.1f} GiB are free; use --weights int8, --dtype bfloat16, a smaller shape, no --vs, or a "
            "larger machine"
        )
    return Source(dict(config), weights.seeded(c, table, SEED), None)
