"""BitStack calibration (2410.23918): weight blocks of a model and their order, by forward passes alone.

Matrices of a layer that multiply the same input are stored as one matrix in jkv, so a Llama layer has four instead of
the paper's seven.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jkv.io.bitstack import Folder, Place, shapes
from jkv.models import Params, family, fresh, layer, linear, plain
from jkv.models.weights.bitstack import Blocks, Signed, decompose
from jkv.models.weights.linear import product
from jkv.training.calibrate.heads import Say
from jkv.training.resumable_search import Measured

FLOOR = 1e-3  # added to input norms


@dataclass(frozen=True)
class Heard:
    """A matrix that reports its inputs while a program is traced.

    Attributes:
        matrix: The matrix.
        tell: Called with each input.
    """

    matrix: Array
    tell: Callable[[Array], None]


@product.register
def _(w: Heard, x: Array, dtype: Any) -> Array:
    w.tell(x)
    return linear(w.matrix, x, dtype)


def steps(params: Params, levels: int) -> int:
    """Return the number of progress messages of `calibrate`."""
    return params.config.depth + len(shapes(params.config)) * levels


def calibrate(params: Params, ids: np.ndarray, judged: int, folder: Folder, kept: Measured, say: Say) -> list[Place]:
    """Decompose each matrix into blocks in the folder, and order the blocks. Existing blocks are kept.

    Args:
        params: The model, in floats.
        ids: i32[N,T], texts for the input norms.
        judged: Number of texts, from the first on, that the order is measured on.
        folder: The folder.
        kept: Losses measured so far.
        say: Progress callback.

    Returns:
        The matrix of each block, in order.

    Raises:
        ValueError: `decompose` cannot decompose a matrix, or the model gives NaN or infinity.
    """
    k, levels = folder.what["k"], folder.what["levels"]
    weigh = norms(params, ids, say)
    for place in weigh:
        name = f"layer {place[0] + 1}, {place[1]}"
        if folder.file(place).exists():
            folder.blocks(place)
        else:
            w = np.asarray(params.layers[place[0]][place[1]], np.float32)
            try:
                folder.write(place, decompose(w, k, levels, weigh[place]))
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
        say(f"{name}: {levels} blocks")
    given = jnp.asarray(ids[:judged])
    losses = [_level(params, given, folder, list(weigh), level, kept, say) for level in range(1, levels)]
    return order(losses, list(weigh))


def order(losses: list[np.ndarray], places: list[Place]) -> list[Place]:
    """Order the blocks level by level, within a level by loss f64[matrices], least first.

    If a level has a loss that is not finite, the losses of the next level decide.

    >>> order([np.array([np.nan, 1.0]), np.array([3.0, 2.0])], [(0, "qkv"), (0, "o")])
    [(0, 'o'), (0, 'qkv'), (0, 'o'), (0, 'qkv')]
    """
    found, following = [], np.zeros(len(places))
    for own in losses[::-1]:
        following = own if np.isfinite(own).all() else following
        found.append([places[i] for i in np.argsort(following, kind="stable")])
    return [place for level in found[::-1] for place in level]


def norms(params: Params, ids: np.ndarray, say: Say) -> dict[Place, np.ndarray]:
    """Compute the L2 norm f64[in] of each input channel of each matrix over a text, averaged over texts i32[N,T].

    Raises ValueError if the model gives NaN or infinity.
    """
    rows = [family(params.config).embed(params, jnp.asarray(ids[i : i + 1])) for i in range(len(ids))]
    found: dict[Place, np.ndarray] = {}
    for i in range(params.config.depth):
        told = []
        for j, x in enumerate(rows):
            rows[j], squares = _heard(params.block(i), x)
            told.append({name: np.sqrt(np.asarray(s, np.float64)) for name, s in squares.items()})
        own = {name: np.mean([x[name] for x in told], 0) + FLOOR for name in told[0]}
        if not all(np.isfinite(x).all() for x in own.values()):
            raise ValueError(f"calibrate bitstack: layer {i + 1} gives NaN or infinity; load it in float32")
        found |= {place: own[place[1]] for place in shapes(params.config) if place[0] == i}
        say(f"layer {i + 1}: inputs")
    return found


@jax.jit
def _heard(one: Params, x: Array) -> tuple[Array, dict[str, Array]]:
    """Run the only layer on x [1,T,E]; also return the sums of squares f32[in] of each matrix's inputs."""
    squares: dict[str, Array] = {}

    def tell(name: str, x: Array) -> None:
        own = jnp.square(x.astype(jnp.float32)).reshape(-1, x.shape[-1]).sum(0)
        squares[name] = squares[name] + own if name in squares else own

    names = {name for _, name in shapes(one.config)}
    heard: Any = {n: Heard(w, partial(tell, n)) if n in names else w for n, w in one.layers[0].items()}
    return _block(replace(one, layers=(heard,)), x), squares


def _block(one: Params, x: Array) -> Array:
    """Run the only layer on x [B,T,E]."""
    pos = jnp.broadcast_to(jnp.arange(x.shape[1], dtype=jnp.int32)[None], x.shape[:2])
    return layer(one, 0, x, pos, plain(one.config, pos), fresh(one.config, pos))[0]


@jax.jit
def _through(one: Params, x: Array) -> Array:
    """Run the only layer on x [B,T,E], one text at a time."""
    return jax.lax.map(lambda row: _block(one, row[None])[0], x)


@jax.jit
def _loss(ends: Params, x: Array, ids: Array) -> Array:
    """Compute the mean next-token loss f32[] in nats of texts i32[N,T] from last hidden states x [N,T,E]."""

    def one(given: tuple[Array, Array]) -> Array:
        x, ids = given
        said = jax.nn.log_softmax(family(ends.config).head(ends, x[None])[0, :-1])
        return -jnp.take_along_axis(said, ids[1:, None], 1).mean()

    return jax.lax.map(one, (x, ids)).mean()


def _level(
    params: Params, ids: Array, folder: Folder, places: list[Place], level: int, kept: Measured, say: Say
) -> np.ndarray:
    """Measure the loss if all matrices have `level` blocks and one has one more, f64[matrices].

    Layers before that matrix run once.
    """
    names = {place: f"level {level}, layer {place[0] + 1}, {place[1]}" for place in places}
    # Load the model at this level, unless everything is measured already.
    at = params
    if not all(name in kept for name in names.values()):
        layers = tuple(dict(w) for w in params.layers)
        for i, field in places:
            layers[i][field] = _floats(folder.blocks((i, field)), level)
        at = replace(params, layers=layers)
    found, below, x = [], 0, None
    for i, field in places:

        def measure(i: int = i, field: str = field) -> np.ndarray:
            nonlocal below, x
            x = family(at.config).embed(at, ids) if x is None else x
            for j in range(below, i):
                x = _through(at.block(j), x)
            below = i
            own = at.block(i)
            more = {**own.layers[0], field: _floats(folder.blocks((i, field)), level + 1)}
            y = _through(replace(own, layers=(more,)), x)
            for j in range(i + 1, at.config.depth):
                y = _through(at.block(j), y)
            return np.asarray(_loss(at.ends, y, ids))

        found.append(float(kept(names[i, field], measure)))
        say(f"{names[i, field]}: perplexity {np.exp(found[-1]):.4g}")
    return np.array(found)


def _floats(blocks: Blocks, n: int) -> Array:
    """Sum the first n blocks of a matrix."""
    signs, left, right = (jnp.asarray(x) for x in blocks)
    return _summed(Signed(signs=signs[..., :n, :], left=left[..., :n, :], right=right[:n]))


@jax.jit
def _summed(w: Signed) -> Array:
    return w.floats()
