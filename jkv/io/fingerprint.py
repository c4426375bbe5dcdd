"""Model fingerprints: digests of everything a model's output depends on, computed on its devices."""

from __future__ import annotations

import hashlib
import weakref
from dataclasses import fields, is_dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from jkv.models.weights.params import EXACT

if TYPE_CHECKING:
    from jkv.models import ModelConfig, Params
    from jkv.models.weights.params import Tensors

_TEXTS = ("eos", "bos")  # ids that the tokenizer also has; no logit depends on them
_KNOWN: dict[tuple[int, str], tuple[weakref.ref[Array], np.ndarray]] = {}


def fingerprint(params: Params, dtype: Any = None) -> str:
    """Return the hex digest of a model: its config, and every bit of every weight with its name, type and place.

    Equal weights have one fingerprint, however they were read and sharded. Another dtype is another model, because its
    products round differently. If several processes share an array, all of them must call this: each sums its own
    shards, and only the sums are exchanged.

    Args:
        params: The model.
        dtype: Compute the fingerprint of the model as if it had been loaded in this dtype. None: as it is.

    >>> from jkv import models
    >>> one, two = models.random(models.TINY), models.random(models.TINY, seed=1)
    >>> fingerprint(one) == fingerprint(models.random(models.TINY)), fingerprint(one) == fingerprint(two)
    (True, False)
    """
    leaves = [(jax.tree_util.keystr(where), x) for where, x in jax.tree_util.tree_leaves_with_path(params)]
    exact = tuple(f"['{name}']" for name in EXACT)
    made = [dtype is None or name.endswith(exact) or name.count(".") > 1 for name, _ in leaves]  # dots: parts of codes
    kinds = [str(x.dtype if own else jnp.dtype(dtype)) for (_, x), own in zip(leaves, made, strict=True)]
    # On one device all sums are dispatched before the first is waited for.
    sums = [_known(x, kind) for (_, x), kind in zip(leaves, kinds, strict=True)]
    digest = hashlib.sha256(repr(_said(params.config)).encode())
    for (name, x), kind, known in zip(leaves, kinds, sums, strict=True):
        digest.update(f"{name} {kind} {x.shape} {_kept(x, kind, known).tolist()}".encode())
    return digest.hexdigest()[:32]


def weights(plan: Any) -> str:
    """Return the hex digest of a config's learned arrays; "" if it has none."""
    arrays = [np.asarray(x) for x in jax.tree.leaves(plan)]
    return hashlib.sha256(b"".join(x.tobytes() for x in arrays)).hexdigest()[:32] if arrays else ""


def sampled(config: ModelConfig, tensors: Tensors) -> str:
    """Return the hex digest of a model on disk: its config, and the first row of every tensor in float32."""
    digest = hashlib.sha256(repr(_said(config)).encode())
    for name in sorted(tensors):
        x = tensors[name]()
        digest.update(f"{name} {tuple(x.shape)}".encode())
        digest.update(np.asarray(x[:1], np.float32).tobytes())
    return digest.hexdigest()[:32]


def _said(x: Any) -> Any:
    """Convert a config to plain values; floats become float32, because files store more or fewer digits.

    Values at their default are left out, so that a field added later changes no fingerprint.
    """
    if is_dataclass(x):
        said = {f.name: (getattr(x, f.name), f.default) for f in fields(x) if f.name not in _TEXTS}
        return {name: _said(value) for name, (value, default) in said.items() if value != default}
    if isinstance(x, tuple):
        return [_said(y) for y in x]
    return float(np.float32(x)) if isinstance(x, float) else x


def _known(x: Array, kind: str) -> Array | np.ndarray:
    """Return the sums of an array, cached because arrays are immutable."""
    found = _KNOWN.get((id(x), kind))
    if found is not None and found[0]() is x:
        return found[1]
    over = getattr(x, "sharding", None)
    if not isinstance(over, NamedSharding):
        return _summing(None)(x, kind)
    # One by one: many concurrent sums over a mesh starve a CPU's simulated devices of threads.
    return jax.block_until_ready(_summing(over.mesh)(x, kind))


def _kept(x: Array, kind: str, sums: Array | np.ndarray) -> np.ndarray:
    """Fetch the sums to the host and cache them for as long as the array lives."""
    key, plain = (id(x), kind), np.asarray(sums)
    if isinstance(x, Array):
        _KNOWN[key] = weakref.ref(x, partial(_forget, key)), plain
    return plain


def _forget(key: tuple[int, str], gone: Any) -> None:
    # A new array may get the same id before this callback runs.
    if key in _KNOWN and _KNOWN[key][0] is gone:
        del _KNOWN[key]


@cache
def _summing(over: Any) -> Any:
    """Compile `_sums` for arrays on a mesh, replicating the result, or for one device."""
    where = None if over is None else NamedSharding(over, PartitionSpec())
    return jax.jit(_sums, static_argnums=1, out_shardings=where)


def _sums(x: Array, kind: str) -> Array:
    """Sum all elements, each scrambled together with its place: u32[2], two sums modulo 2^32.

    At a given place every bit pattern gives a different term, so a change of one element always changes the first sum;
    any other change is missed by both sums with probability 2^-64. Sums have no order, so the shards of an array can be
    summed separately.
    """
    x = jnp.asarray(x).astype(kind)
    unsigned = {1: jnp.uint8, 2: jnp.uint16}.get(x.dtype.itemsize, jnp.uint32)
    bits = jax.lax.bitcast_convert_type(x, unsigned).astype(jnp.uint32)
    place = jnp.zeros(bits.shape, jnp.uint32)
    for axis, n in enumerate(bits.shape):
        place = place * jnp.uint32(n % (1 << 32)) + jax.lax.broadcasted_iota(jnp.uint32, bits.shape, axis)
    first = _scrambled(bits ^ _scrambled(place + jnp.uint32(1)))
    second = _scrambled(first + jnp.uint32(0x9E3779B9))
    return jnp.stack([jnp.sum(first, dtype=jnp.uint32), jnp.sum(second, dtype=jnp.uint32)])


def _scrambled(x: Array) -> Array:
    """Permute u32 values with the finalizer of MurmurHash3 (Appleby): each input bit flips half of the others."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
