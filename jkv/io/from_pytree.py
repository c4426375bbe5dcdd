"""Models from arrays in memory: pytrees as JAX programs train and save them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import numpy as np

from jkv.arrays.x32 import narrow
from jkv.io.load import check_weights, dtype_of, kept
from jkv.io.model_source import Source

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from jkv.models import Params


@narrow
def from_tree(
    config: Mapping[str, Any],
    tree: Mapping[str, Any],
    dtype: str | None = None,
    mesh: str | Mesh | None = None,
    weights: str | None = None,
    tokenizer: Any = None,
) -> Params:
    """Build a model from a Hugging Face config and a pytree of its weights, keyed by their names in checkpoints.

    What an orbax checkpointer restores is such a tree. Matrices are [out, in], as in checkpoints.

    Args:
        config: Hugging Face config dict.
        tree: {"model": {"embed_tokens": {"weight": array [V,E]}, "layers": {"0": ...}}}. Levels may be joined by dots
            ("model.embed_tokens.weight"); lists are numbered.
        dtype: As in `load`.
        mesh: As in `load`.
        weights: As in `load`.
        tokenizer: Tokenizer to attach.

    Raises:
        ValueError: Tensors are missing, unused or misshapen; the message lists them.

    >>> import numpy as np
    >>> from jkv import models
    >>> from_tree(models.TINY, {"model": {"norm": {"weight": np.ones(32)}}})
    Traceback (most recent call last):
    ValueError: the checkpoint does not fit the config of this llama model: 20 tensors missing: \
model.embed_tokens.weight, lm_head.weight, model.layers.0.input_layernorm.weight, \
model.layers.0.self_attn.q_proj.weight, model.layers.0.self_attn.k_proj.weight and 15 more; take the config and the \
tensors of one model that is not quantized
    """
    check_weights(weights)
    import jax.numpy as jnp

    from jkv.core import sharding
    from jkv.models import build, read_config, settle_head
    from jkv.models.weights.params import copied
    from jkv.models.weights.quantize import check_divided

    put, dtype = copied, dtype_of(dtype)
    source = Source(*settle_head(config, dict(_tensors("", tree))))
    with ExitStack() as bars:
        form, blocks = kept("a tree", source, dtype, weights, bars)
        if mesh is not None:
            check_divided(form)
            put = sharding.placing(sharding.here(mesh, read_config(source.config)) if isinstance(mesh, str) else mesh)
        params = build(source.config, source.tensors, jnp.dtype(dtype), put, form, blocks)
    return dataclasses.replace(params, tokenizer=tokenizer)


def _tensors(name: str, tree: Any) -> Iterator[tuple[str, Callable[[], np.ndarray]]]:
    """Yield the dotted name and a reader of every array."""
    inner = tree.items() if isinstance(tree, Mapping) else enumerate(tree) if isinstance(tree, list | tuple) else None
    if inner is None:
        if not hasattr(tree, "shape"):
            raise ValueError(f"{name or 'the tree'} is a {type(tree).__name__}: give arrays, in mappings or lists")
        yield name, lambda: np.asarray(tree)
        return
    for key, x in inner:
        yield from _tensors(f"{name}.{key}" if name else str(key), x)
