"""The batch size: as many rows as fit, by the compiler's memory analysis of the job's own programs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any

import jax
import jax.numpy as jnp

from jkv.aot.memory_estimate import bytes_of, search
from jkv.cache.cache import tree_bytes
from jkv.core.compilation import Cost, compiled, peak_bytes
from jkv.core.decode_loop import prefill_own, run_block, run_blocks
from jkv.core.sharding import MeshPlan
from jkv.engine.spec import Shapes
from jkv.generation.sampling_params import SamplingParams
from jkv.models import Params
from jkv.prompts.prefill import prefill_step
from jkv.prompts.tokenization import stop_ids_of
from jkv.speculative.draft_length import NODES
from jkv.speculative.verify import Draft, verify

AT_ONCE = {"cpu": 32}  # rows from which step time grows with the rows: more rows only lengthen the end of a job
ELSEWHERE = 256
WAVE = 8  # a wave has 1 / WAVE of the rows


def several(rows: int, unit: int) -> int:
    """Return the rows of a wave: few, so that free slots are filled soon, and a multiple of `unit`.

    >>> several(32, 1), several(8, 4)
    (4, 4)
    """
    return max(rows // WAVE // unit * unit, unit)


def round_up(rows: int, unit: int) -> int:
    """Round rows up to a multiple of `unit`."""
    return -(-rows // unit) * unit


def needed(params: Params, shapes: Shapes, over: MeshPlan | None) -> int:
    """Return the bytes that a batch needs on each device beside the weights.

    The largest of: a decode block, a verify pass if the batch drafts, and the prefill of a wave beside the running
    rows.

    Args:
        shapes: cache, rows and sampling settings of the batch.
        over: the mesh, or None for one device.
    """
    params = replace(params, config=shapes.model)
    state, blank = jax.eval_shape(shapes.state), jax.eval_shape(partial(shapes.cache, shapes.several))
    draws = jax.eval_shape(
        lambda: shapes.sampling([SamplingParams()] * shapes.rows, [0] * shapes.rows, stop_ids_of(params))
    )
    shape = partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    width, fresh = prefill_step(shapes.bucket.length, shapes.bucket.chunk)
    ids = shape((shapes.several, width))
    # On one device, compile block, verify pass and prefill from shapes.
    if over is None:
        block, prefill = Cost(runs=False), Cost(runs=False)
        block.begin(run_block, params, state, draws, shape(()))
        if shapes.top is not None:
            nodes = jnp.zeros((shapes.rows, NODES), jnp.int32)
            draft = jax.eval_shape(lambda: Draft(ids=nodes, parent=nodes))
            block.begin(verify, params, state, draws, draft, shape(()), top=shapes.top)
        prefill.begin(prefill_own, params, blank, ids, fresh=fresh)
        held = tree_bytes(state) + (tree_bytes(jax.eval_shape(shapes.heads)) if shapes.bucket.shared else 0)
        return max(block.peak, held + prefill.peak)
    # On a mesh, compile each program whole and count its shards.
    block, _ = compiled(run_blocks.whole, params, state, draws, shape(()), over=over)
    prefill, _ = compiled(prefill_own.whole, params, blank, ids, over=over, fresh=fresh)

    def here(tree: Any) -> int:
        return bytes_of(tree, over.shardings(tree))

    held = here(state) + (here(jax.eval_shape(shapes.heads)) if shapes.bucket.shared else 0)
    return max(peak_bytes(block), held + peak_bytes(prefill)) - here(params)


def largest(
    params: Params, shapes: Callable[[int], Shapes], rows: int, unit: int, over: MeshPlan | None, free: int
) -> int:
    """Find the largest batch that fits.

    Args:
        shapes: maps a number of rows to the shapes of the batch.
        rows: rows to run, which limits the batch.
        unit: the batch size is a multiple of it.
        over: the mesh, or None for one device.
        free: free bytes per device.

    Raises:
        ValueError: not even `unit` rows fit.
    """

    def share(batch: int) -> float:
        try:
            return needed(params, shapes(batch), over) / free
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            return inf

    most = round_up(min(rows, AT_ONCE.get(jax.default_backend(), ELSEWHERE)), unit)
    found = search(share, unit, most)
    if not found:
        raise ValueError(f"not even {unit} rows fit into the {free:,} free bytes: take a smaller cache or shorter rows")
    return found
