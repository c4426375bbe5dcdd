"""Compressed caches on disk: encoded arrays, tied to the model and the config that made them."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jkv.arrays.x32 import narrow
from jkv.cache.cache import Cache
from jkv.cache.offload import is_far, settled
from jkv.core import sharding
from jkv.io import array_file
from jkv.io.errors import FormatError
from jkv.io.fingerprint import fingerprint, weights
from jkv.methods import parse
from jkv.methods.config import MOST, CacheConfig
from jkv.models import Params
from jkv.prompts.allocation import CacheShape
from jkv.prompts.capacity import check_there
from jkv.prompts.tokenization import reaching
from jkv.protocols import LayerSize, Sizes
from jkv.utils.json_results import versions

_FIELDS = ("layers", "states", "counts", "fill")
_AGAIN = "prefill the prompt again"
_FAR = 1 << 30  # beyond any position; the sum of two still fits in int32
_LONGEST_TEXT = 1 << 16  # characters of a config: far above any real one, far below the limits of Python's parser


@narrow
def save_cache(cache: Cache, path: str | Path, params: Params) -> None:
    """Write the cache to one file, atomically; raises OSError if it cannot be written."""
    array_file.write(path, *packed(cache, params))


def packed(cache: Cache, params: Params) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Return the arrays of a cache by name, in memory, and its JSON description."""
    check_there(cache)
    leaves = jax.tree_util.tree_leaves_with_path(_whole(cache))
    meta = {
        "model": fingerprint(params),
        **versions(("jkv",)),
        "plan": _numbers(cache.plan),
        "config": cache.name,
        "rows": cache.rows,
        "longest": cache.plan[0].longest if cache.plan else 0,
        "new": cache.new,
        "devices": cache.devices,
        "sizes": [asdict(plan.size) for plan in cache.plan],
        "dtype": cache.dtype.name,
        "weights": weights(cache.plan),
    }
    return {jax.tree_util.keystr(where): np.asarray(x) for where, x in leaves}, meta


def row(arrays: Mapping[str, np.ndarray], meta: dict[str, Any], i: int) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Return row i of a packed cache, packed as a cache of one row; arrays without axes are shared by all rows."""
    return {name: x[i : i + 1] if x.ndim else x for name, x in arrays.items()}, meta | {"rows": 1}


@narrow
def load_cache(path: str | Path, params: Params, config: CacheConfig | None = None) -> Cache:
    """Load a cache that `save_cache` wrote with the same model, onto the model's device or mesh.

    Args:
        config: only for a cache whose config has no text form.

    Raises:
        FormatError: if the file is damaged, or belongs to another model (both fingerprints are named), another version
            of jkv, or other shapes.
        ValueError: if the model's mesh cannot divide the cache.
    """
    path, over = Path(path), sharding.mesh_of(params)
    with array_file.opened(path) as (meta, _, read):
        # The layout of the slots is the file's, whichever devices load it.
        config = config and replace(config, devices=meta.get("devices", 1))
        cache = unpacked(path, meta, read, params, config)
    if over is None:
        return cache
    over.divide(cache)
    return jax.device_put(cache, over.shardings(cache))


def unpacked(
    path: Path,
    meta: dict[str, Any],
    read: Callable[[Iterable[str]], dict[str, np.ndarray]],
    params: Params,
    config: CacheConfig | None = None,
) -> Cache:
    """Rebuild the cache that `packed` described.

    Args:
        path: named in errors.
        meta: the description.
        read: returns the arrays of the given names.
        config: only for a cache whose config has no text form.

    Raises:
        FormatError: as `load_cache` does.
    """
    own = fingerprint(params)
    if meta.get("model") != own:
        cause = f"its cache belongs to the model {meta.get('model')}, and this one is {own}"
        raise FormatError(path, cause, "load the model that the cache was made with")
    # Check names, shapes and dtypes against the shapes of an empty cache.
    empty = _described(path, meta, params, config)
    found, tree = jax.tree_util.tree_flatten_with_path(_whole(empty))
    arrays = read(jax.tree_util.keystr(where) for where, _ in found)
    leaves: list[Any] = []
    for where, want in found:
        name = jax.tree_util.keystr(where)
        x = arrays[name]
        if x.shape != want.shape or x.dtype != want.dtype:
            cause = f"array {name} is {x.dtype}{list(x.shape)}, not {want.dtype}{list(want.shape)}"
            raise FormatError(path, cause, _AGAIN)
        leaves.append(x)
    # Check the values, and place the arrays.
    layers, states, counts, fill = jax.tree_util.tree_unflatten(tree, leaves)
    cache = replace(empty, layers=layers, states=states, counts=counts, fill=fill)
    if (wrong := _impossible(cache)) is not None:
        raise FormatError(path, f"its {wrong} cannot be so", _AGAIN)
    return replace(cache, **jax.tree.map(_placed, _fields(empty), _fields(cache), is_leaf=is_far))


def _placed(want: Any, x: Any) -> Any:
    """Return an array on the device, or the pages of an offloaded code where the config puts them."""
    if not is_far(want):
        return jnp.array(x)
    return settled(replace(x, lines=want.lines.of(x.lines), hot=jax.tree.map(jnp.array, x.hot)))


def _fields(cache: Cache) -> dict[str, Any]:
    return {name: getattr(cache, name) for name in _FIELDS}


def _whole(cache: Cache) -> tuple[Any, ...]:
    """Return the arrays of a cache, with offloaded pages as one array, on host or disk alike."""
    whole = lambda x: replace(x, lines=x.lines.whole()) if is_far(x) else x  # noqa: E731
    return tuple(jax.tree.map(whole, list(_fields(cache).values()), is_leaf=is_far))


def _numbers(plan: Any) -> str:
    """Return a hex digest of the resolved plan, which detects versions that resolve the same config differently."""
    text = re.sub(" at 0x[0-9a-f]+", "", str(jax.tree.structure(plan)))  # addresses of functions are of one process
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _described(path: Path, meta: dict[str, Any], params: Params, config: CacheConfig | None) -> Cache:
    """Return the cache of a file's description, with shapes in place of arrays."""
    try:
        if config is None and (not isinstance(meta["config"], str) or len(meta["config"]) > _LONGEST_TEXT):
            raise ValueError("its config is no text, or far too long")
        numbers = rows, longest, new, devices = meta["rows"], meta["longest"], meta["new"], meta.get("devices", 1)
        if not all(type(n) is int and 0 <= n < MOST for n in numbers) or not devices:
            raise ValueError(f"rows, longest, new and devices are {numbers}")
        config = (config or replace(parse(meta["config"]), devices=devices)).bound(params)
        dtype = jnp.dtype(meta["dtype"])
        model = reaching(params.config, longest) if config.unlimited else params.config
        sizes = Sizes(layers=tuple(LayerSize(**{k: _tuples(x) for k, x in size.items()}) for size in meta["sizes"]))
        cache = CacheShape(config, model, rows, longest, new, dtype, sizes).shapes()
    except (KeyError, TypeError, ValueError, ArithmeticError, MemoryError, RecursionError) as error:
        raise FormatError(path, f"its description cannot be used ({type(error).__name__}: {error})", _AGAIN) from error
    # The description is usable. Compare config, trained weights and plan with this process's own.
    if meta["config"] != config.name:
        cause = f"its cache is {meta['config'] or 'of a config without a text'}, not {config}"
        raise FormatError(path, cause, "leave out config=, or prefill the prompt again with it")
    if meta.get("weights", "") != weights(cache.plan):
        cause = "the weights that its score was trained to are not those of this config"
        raise FormatError(path, cause, "load it with the gate that it was made with, or " + _AGAIN)
    if meta.get("plan") != _numbers(cache.plan):
        made, this = meta.get("jkv", "another"), versions(("jkv",)).get("jkv", "this one")
        cause = f"{config} meant other numbers to the jkv that wrote it ({made}) than to this one ({this})"
        raise FormatError(path, cause, _AGAIN)
    return cache


def _tuples(x: Any) -> Any:
    """Convert JSON lists to tuples of whole numbers; ValueError for anything else."""
    if isinstance(x, list):
        return tuple(map(_tuples, x))
    if x is not None and not (type(x) is int and 0 <= x < MOST):
        raise ValueError(f"a layer of {x!r} tokens")
    return x


def _impossible(cache: Cache) -> str | None:
    """Name the part of a cache of numpy arrays that no prompt can produce, such as an index out of range, or None."""
    # Numbers of tokens, and the fill of windows and states.
    seen, tiers = np.asarray(cache.seen), [t for plan in cache.plan for t in plan.tiers]
    parts = [np.asarray(x) for x in (cache.prompt, cache.counts.later, cache.counts.generated)]
    most = _FAR if any(tier.rope == "rank" for tier in tiers) or not cache.plan else cache.model.context
    if (seen > most).any() or any((x < 0).any() or (x > seen).any() for x in parts):
        return "number of tokens (seen, prompt, later)"
    if not cache.stay <= cache.fill <= cache.recent_size:
        return "fill"
    if any((x.count < 0).any() or (x.count > x.dt.shape[1]).any() for x in cache.states):
        return "number of tokens that wait (count)"
    # Indices of each layer: positions, heads of pooled tiers, positions at which keys act.
    for i, layer in enumerate(cache.layers):
        held = [layer.recent.pos, *([layer.queries.pos] if layer.queries else []), *(t.pos for t in layer.tiers)]
        for pos in map(np.asarray, held):
            end = seen.reshape(-1, *(1,) * (pos.ndim - 1))
            if (pos < -1).any() or (pos >= end).any():
                return f"positions in layer {i}"
        for tier in layer.tiers:
            if tier.head is not None and (np.asarray(tier.head) >= cache.model.heads).any():
                return f"heads in layer {i}"
            if tier.at is not None and not all(-_FAR <= x < _FAR for x in (np.min(tier.at), np.max(tier.at))):
                return f"places of keys in layer {i}"
    return None
