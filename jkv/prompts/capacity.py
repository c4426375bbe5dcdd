"""Capacity checks: raise before tokens would be dropped or rotated past the last position."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jkv.cache.cache import Cache, Counts
from jkv.cache.padding import bucket
from jkv.core import sharding
from jkv.models import Params
from jkv.prompts.tokenization import check_total, reaching


def with_room(cache: Cache, given: np.ndarray, new: np.ndarray) -> Cache:
    """Return the cache with positions for more tokens, or raise if it has no capacity for them.

    Args:
        given: i[B], tokens of a text to append.
        new: i[B], tokens to generate after it.

    Raises:
        ValueError: if the model's context is too short, or if the cache would hold more tokens than it was made for.
    """
    seen, added = np.asarray(cache.seen), given + new
    longest = int((seen + added).max())
    for plan in cache.plan if all(plan.budget.statistic is None for plan in cache.plan) else cache.plan[:1]:
        if plan.tiers and plan.capacity >= plan.longest < longest:  # it keeps every token, up to its capacity
            raise ValueError(
                f"the cache was made for {plan.longest} tokens and would hold {longest}: prefill with a larger reserve="
            )
    later = int((seen - np.asarray(cache.prompt) + added).max())
    if later > cache.new and any(plan.taught for plan in cache.plan):
        raise ValueError(
            f"the cache has room for {cache.new} tokens after the prompt that taught it, and would hold {later}: "
            "prefill with a larger reserve="
        )
    _check_on_top(cache, given, new)
    unlimited = any(plan.budget.bounded and any(t.rope == "rank" for t in plan.tiers) for plan in cache.plan)
    most = int(new.max())
    check_total(cache.model, unlimited, longest - most, most, "cache and prompt have")
    return replace(cache, model=reaching(cache.model, bucket(longest))) if unlimited else cache


def _check_on_top(cache: Cache, given: np.ndarray, new: np.ndarray) -> None:
    """Raise ValueError if a cache that keeps later tokens on top of the budget has no capacity for them."""
    for plan in cache.plan[:1]:
        if not plan.budget.on_top:
            return
        nothing = jnp.zeros(1, jnp.int32)
        made = Counts(seen=nothing + cache.new, prompt=nothing, later=nothing)
        then = cache.counts.given(jnp.asarray(given, jnp.int32), True)
        then = replace(then, seen=then.seen + jnp.asarray(new, jnp.int32))
        room, needed = (int(plan.budget.beyond(counts, plan.recent).max()) for counts in (made, then))
        if needed > room:
            raise ValueError(
                f"the cache has room for {room} tokens on top of its budget, after its prompt, and would hold "
                f"{needed}: prefill with a larger reserve="
            )


def check_there(cache: Cache) -> None:
    """Raise ValueError for a cache that was donated to a step."""
    if any(not isinstance(x, Tracer) and x.is_deleted() for x in jax.tree.leaves(cache)):
        raise ValueError(
            "this cache was given to jkv.step, which uses its memory for the next one: go on with the cache that step "
            "returned, or call jkv.branch where the given one is still needed"
        )


def check_beside(params: Params, cache: Cache) -> None:
    """Raise ValueError if cache and model lie on different devices, or if the model's mesh cannot divide the cache."""
    if (over := sharding.mesh_of(params)) is not None:
        over.divide(cache)
    elif len(cache.counts.seen.sharding.device_set) > 1:
        raise ValueError(
            "this cache lies on a mesh of devices, and the model on one: load the model with that mesh, or move the "
            "cache by jax.device_put(cache, jax.devices()[0])"
        )
