"""Checks of classes that users wrote: errors name the class before anything is traced."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jkv.attention.dense import attend_window
from jkv.attention.evidence import evidence
from jkv.attention.mask import causal
from jkv.cache.cache import Observation, Window
from jkv.cache.empty import empty_layer
from jkv.core.flush import check_rank
from jkv.methods.budgets.sizes import Tokens
from jkv.methods.config import CacheConfig, resolve
from jkv.protocols import Born, Budget, Codec, Counts, Merge, Prefill, Queries, Score, Selector

if TYPE_CHECKING:
    from jkv.cache.spec import LayerConfig
    from jkv.models import ModelConfig

AXES = (Score, Codec, Budget, Merge, Selector, Prefill)
TOKENS = 48  # of the random prompt that a score ranks
_ranked: set[Any] = set()  # scores whose ranks were checked, by structure and model


def check_own(config: CacheConfig, model: ModelConfig) -> None:
    """Raise ValueError for a class from outside of jkv that lacks `@part` or `rank`, or that returns no ranks.

    A score ranks the tokens of a small random prompt once, on its own, as a wrapper may hide a wrong shape.
    """
    for x in _parts(config):
        if type(x).__module__.partition(".")[0] == "jkv":
            continue
        name = type(x).__qualname__
        if jax.tree_util.all_leaves([x]):
            raise ValueError(f"{name} is a class without @part: write `@part` above it (from jkv.methods import part)")
        if isinstance(x, Score):
            if type(x).rank is Score.rank:
                raise ValueError(
                    f"{name} has no rank: write rank(self, ev), which returns f32[B,H,S], the highest stay"
                )
            _check_rank(x, model, name)


def _parts(x: Any) -> Iterator[Any]:
    """Yield the scores, codecs and other parts within a config, inner ones first."""
    if isinstance(x, tuple):
        for y in x:
            yield from _parts(y)
    elif is_dataclass(x):
        for f in fields(x):
            yield from _parts(getattr(x, f.name, None))
    if isinstance(x, AXES):
        yield x


def _check_rank(score: Score, model: ModelConfig, name: str) -> None:
    """Raise ValueError if a score's ranks of a random prompt are NaN or no ranks; a flush meets its other errors."""
    key = jax.tree.structure(score), model
    if key in _ranked or score.needs.layer is not None or not model.layers:
        return
    try:
        config = CacheConfig(score=score, budget=Tokens(tokens=TOKENS // 2), recent=max(score.needs.recent, 8))
        rank = np.asarray(jax.jit(lambda: _rank(resolve(config, model, TOKENS, 0)[0], model.attending(0)))())
    except Exception:  # noqa: BLE001  of the user's code; the flush that meets it says where
        return
    check_rank(score, rank, (1, model.heads, TOKENS))
    if count := int(np.isnan(rank).sum()):
        raise ValueError(
            f"{name}.rank gives NaN for {count} of {rank.size} tokens of a random prompt, and NaN cannot be ranked: "
            "use jnp.where, -jnp.inf for what leaves and jnp.inf for what stays"
        )
    _ranked.add(key)


def _rank(plan: LayerConfig, model: ModelConfig) -> Array:
    """Rank a random prompt of TOKENS tokens in one layer."""
    random, (b, h, g, n) = np.random.default_rng(0), (1, model.heads, model.groups, TOKENS)
    draw = lambda *shape: jnp.asarray(random.normal(size=shape), jnp.float32)  # noqa: E731
    q, k, v = draw(b, h, g, n, model.head_dim), draw(b, h, n, model.head_dim), draw(b, h, n, model.value_dim)
    pos, ids = jnp.arange(n)[None], jnp.asarray(random.integers(0, model.vocab, (b, n)), jnp.int32)
    out = draw(model.width, h * g * model.value_dim)
    columns = plan.score.birth(Born(x=draw(b, n, model.width), k=k, v=v, pos=pos, ids=ids, out=out))
    window = Window(k=k, v=v, pos=pos, columns=columns)
    lse = attend_window(q, k, v, causal(pos, None), pos, model.scale, "xla").lse
    queries = Queries(q=q, pos=pos, lse=lse)
    new = queries if plan.needs.new or plan.needs.prompt else None
    seen, layer = jnp.full(b, n, jnp.int32), empty_layer(plan, b, model, jnp.float32)
    counts = Counts(seen=seen, prompt=seen, later=jnp.zeros_like(seen))
    asked = Observation(kept=queries.newest(plan.needs.queries) if plan.needs.queries else None, new=new)
    leaving = seen - plan.exact
    ev = evidence(layer, window, asked, counts, plan, model, leaving, leaving)
    return plan.score.rank(replace(ev, columns=plan.score.observe(ev)))
