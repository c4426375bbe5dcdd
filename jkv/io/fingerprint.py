"""The fingerprint of a model: a digest of everything that its answers depend on, computed where its weights lie."""

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

_TEXTS = ("eos", "bos")  # where texts begin and end, which the tokenizer says too: no weight and no product of one
_KNOWN: dict[tuple[int, str], tuple[weakref.ref[Array], np.ndarray]] = {}


def fingerprint(params: Params, dtype: Any = None) -> str:
    """Hex digest of a model: its config, and every bit of every weight with its name, type and place.

    Equal weights have one fingerprint, however they were read and over whatever devices they are divided. Another type
    is another model, as its products round differently; dtype: that of the model if it had been read as this type.
    Where several processes share an array, all of them must ask: each sums what it has, and only sums travel.

    >>> from jkv import models
    >>> one, two = models.random(models.TINY), models.random(models.TINY, seed=1)
    >>> fingerprint(one) == fingerprint(models.random(models.TINY)), fingerprint(one) == fingerprint(two)
    (True, False)
    """
    leaves = [(jax.tree_util.keystr(where), x) for where, x in jax.tree_util.tree_leaves_with_path(params)]
    exact = tuple(f"['{name}']" for name in EXACT)
    made = [dtype is None or name.endswith(exact) or name.count(".") > 1 for name, _ in leaves]  # dots: parts of codes
    kinds = [str(x.dtype if own else jnp.dtype(dtype)) for (_, x), own in zip(leaves, made, strict=True)]
    # On one device all are begun before the first is waited for.
    sums = [_known(x, kind) for (_, x), kind in zip(leaves, kinds, strict=True)]
    digest = hashlib.sha256(repr(_said(params.config)).encode())
    for (name, x), kind, known in zip(leaves, kinds, sums, strict=True):
        digest.update(f"{name} {kind} {x.shape} {_kept(x, kind, known).tolist()}".encode())
    return digest.hexdigest()[:32]


def weights(plan: Any) -> str:
    """Hex digest of what a config has learned; empty where it is nothing."""
    arrays = [np.asarray(x) for x in jax.tree.leaves(plan)]
    return hashlib.sha256(b"".join(x.tobytes() for x in arrays)).hexdigest()[:32] if arrays else ""


def sampled(config: ModelConfig, tensors: Tensors) -> str:
    """Hex digest of a model that is not in memory: its config, and the first row of every tensor, in float32."""
    digest = hashlib.sha256(repr(_said(config)).encode())
    for name in sorted(tensors):
        x = tensors[name]()
        digest.update(f"{name} {tuple(x.shape)}".encode())
        digest.update(np.asarray(x[:1], np.float32).tobytes())
    return digest.hexdigest()[:32]


def _said(x: Any) -> Any:
    """A config in plain values: floats as the float32 that products are made with, as files keep more or fewer digits.

    Without what is at its default, so that a field that is added later changes no name.
    """
    if is_dataclass(x):
        said = {f.name: (getattr(x, f.name), f.default) for f in fields(x) if f.name not in _TEXTS}
        return {name: _said(value) for name, (value, default) in said.items() if value != default}
    if isinstance(x, tuple):
        return [_said(y) for y in x]
    return float(np.float32(x)) if isinstance(x, float) else x


def _known(x: Array, kind: str) -> Array | np.ndarray:
    """The sums of an array, which does not change: they are made once."""
    found = _KNOWN.get((id(x), kind))
    if found is not None and found[0]() is x:
        return found[1]
    over = getattr(x, "sharding", None)
    if not isinstance(over, NamedSharding):
        return _summing(None)(x, kind)
    # One by one: many sums over devices that are under way at once starve a CPU's simulated devices of threads.
    return jax.block_until_ready(_summing(over.mesh)(x, kind))


def _kept(x: Array, kind: str, sums: Array | np.ndarray) -> np.ndarray:
    """The sums as numbers, remembered for as long as the array is."""
    key, plain = (id(x), kind), np.asarray(sums)
    if isinstance(x, Array):
        _KNOWN[key] = weakref.ref(x, partial(_forget, key)), plain
    return plain


def _forget(key: tuple[int, str], gone: Any) -> None:
    # The next array may have the same id before this one's end is heard of.
    if key in _KNOWN and _KNOWN[key][0] is gone:
        del _KNOWN[key]


@cache
def _summing(over: Any) -> Any:
    """`_sums` for arrays on a mesh, every device of which has the result; or on one device."""
    where = None if over is None else NamedSharding(over, PartitionSpec())
    return jax.jit(_sums, static_argnums=1, out_shardings=where)


def _sums(x: Array, kind: str) -> Array:
    """u32[2]: two sums modulo 2^32 over all elements, each scrambled together with its place.

    For a place, an element's bits give another term each, so a change of one element always changes the first sum, and
    any other change goes unseen by both with odds of 2^-64. Sums have no order: parts of an array can be summed apart.
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
    """A permutation of u32, the finalizer of MurmurHash3 (Appleby): each bit of x turns half of the others."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
