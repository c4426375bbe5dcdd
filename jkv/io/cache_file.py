"""A compressed cache on disk: codes as they are, tied to the model and the config that made them."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from jkv.io import checkpoint
from jkv.io.errors import FormatError

if TYPE_CHECKING:
    from jkv.cache import Cache
    from jkv.config import CacheConfig
    from jkv.models import Params


def fingerprint(params: Params) -> str:
    """Hex digest of a model: its config, and a slice of every layer's weights."""
    c = params.config
    digest = hashlib.sha256((repr(c) + (repr(c.mixers) if c.mixers else "")).encode())
    digest.update(np.asarray(params.norm, np.float32).tobytes())
    for i, layer in enumerate(params.layers):
        x = layer["qkv" if c.attends(i) else "mix"]
        digest.update(np.asarray(x[(0,) * (x.ndim - 1)], np.float32).tobytes())
    return digest.hexdigest()[:32]


def weights(plan: Any) -> str:
    """Hex digest of what a config has learned; empty where it is nothing."""
    arrays = [np.asarray(x) for x in jax.tree.leaves(plan)]
    return hashlib.sha256(b"".join(x.tobytes() for x in arrays)).hexdigest()[:32] if arrays else ""


def save(cache: Cache, path: str | Path, params: Params) -> None:
    """Write the cache to one file, whole or not at all; raises OSError if it cannot be written."""
    leaves = jax.tree_util.tree_leaves_with_path((cache.layers, cache.states, cache.counts, cache.fill))
    meta = {
        "model": fingerprint(params),
        "config": cache.name,
        "rows": cache.rows,
        "longest": cache.plan[0].longest if cache.plan else 0,
        "new": cache.new,
        "parts": cache.plan[0].budget.parts if cache.plan else None,
        "dtype": cache.dtype.name,
        "weights": weights(cache.plan),
    }
    checkpoint.write(path, {jax.tree_util.keystr(where): x for where, x in leaves}, meta)


def load(path: str | Path, params: Params, config: CacheConfig | None = None) -> Cache:
    """The cache in a file written by `save` with the same model; config: needed only for one that has no text form.

    Raises FormatError for a file that is damaged, of another model (with both fingerprints) or of another shape.
    """
    from jkv.cache import Cache, Counts
    from jkv.methods import parse
    from jkv.prompts import reaching
    from jkv.sizes import layout

    arrays, meta = checkpoint.read(path)
    own = fingerprint(params)
    if meta.get("model") != own:
        cause = f"its cache belongs to the model {meta.get('model')}, and this one is {own}"
        raise FormatError(Path(path), cause, "load the model that the cache was made with")
    again = "prefill the prompt again"
    try:
        config = (config or parse(meta["config"])).bound(params)
        if config.budget.measures:
            config = replace(config, budget=config.budget.with_parts(meta["parts"]))
        rows, longest, new, dtype = meta["rows"], meta["longest"], meta["new"], jnp.dtype(meta["dtype"])
        model = reaching(params.config, longest) if config.unlimited else params.config
        plan, (layers, states) = layout(config, model, rows, longest, new, dtype)
    except (KeyError, TypeError, ValueError) as error:
        raise FormatError(Path(path), f"its description cannot be used ({error})", again) from error
    if meta.get("weights", "") != weights(plan):
        cause = "the weights that its score was trained to are not those of this config"
        raise FormatError(Path(path), cause, "load it with the gate that it was made with, or " + again)
    vector, number = jax.ShapeDtypeStruct((rows,), jnp.int32), jax.ShapeDtypeStruct((), jnp.int32)
    counts = Counts(seen=vector, prompt=vector, later=vector)
    found, tree = jax.tree_util.tree_flatten_with_path((layers, states, counts, number))
    leaves: list[Any] = []
    for where, want in found:
        name = jax.tree_util.keystr(where)
        x = arrays.get(name)
        if x is None or x.shape != want.shape or x.dtype != want.dtype:
            got = "missing" if x is None else f"{x.dtype}{list(x.shape)}"
            raise FormatError(Path(path), f"array {name} is {got}, not {want.dtype}{list(want.shape)}", again)
        leaves.append(jnp.asarray(x))
    layers, states, counts, fill = jax.tree_util.tree_unflatten(tree, leaves)
    return Cache(
        layers=layers,
        states=states,
        counts=counts,
        fill=fill,
        plan=plan,
        model=model,
        name=config.name,
        new=new,
    )
