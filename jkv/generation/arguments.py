"""Validation of the arguments of `generate` and `stream`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from inspect import signature
from typing import Any, cast

import numpy as np
from jax import Array

from jkv import methods
from jkv.cache.cache import Cache
from jkv.core import sampling as sampler
from jkv.generation.sampling_params import DRAWS, SamplingParams
from jkv.methods.config import CacheConfig
from jkv.models import Params
from jkv.prefix_cache.chunk_reuse import ChunkCache
from jkv.prefix_cache.store import PrefixCache
from jkv.prompts.tokenization import check_length
from jkv.speculative.build import build_drafter
from jkv.speculative.draft_model import check
from jkv.speculative.proposer import Drafter
from jkv.utils import fork_guard
from jkv.utils.unicode import check_unicode
from jkv.utils.validation import count, numbers, short

StopFn = Callable[[Cache, Array, list[list[int]]], Sequence[bool]]


@dataclass(frozen=True, kw_only=True)
class GenerateArguments:
    """The validated options of one generation.

    Attributes:
        cache: a config, or a cache to continue from.
        new: maximum number of new tokens per row.
        draws: the sampling arguments of `sampling.make`.
        seeds: u32 scalar, or one per row.
        stop: stop strings.
        stop_ids: stop tokens; None: the model's.
        chunk: prompt tokens per prefill chunk; 0: all; None: the config's choice, or by free memory.
        n: rows per prompt.
        compare: whether the full cache runs too, for KL and first divergence.
        stop_fn: callback that ends rows after a block.
        drafter: the drafter; None: plain decoding.
        prefix_cache: prefix store or passages; None: every prompt token is prefilled.
    """

    cache: CacheConfig | Cache
    new: int
    draws: dict[str, Any]
    seeds: np.ndarray
    stop: tuple[str, ...]
    stop_ids: tuple[int, ...] | None
    chunk: int | None
    n: int
    compare: bool
    stop_fn: StopFn | None
    drafter: Drafter | None
    prefix_cache: PrefixCache | ChunkCache | None


def parse_arguments(
    params: Params,
    cache: Any,
    *,
    max_new_tokens: Any = 128,
    seed: Any = 0,
    stop: Any = (),
    stop_ids: Any = None,
    chunk: Any = None,
    n: Any = 1,
    compare: Any = False,
    stop_fn: Any = None,
    drafter: Any = None,
    prefix_cache: Any = None,
    sampling: Any = None,
    **draws: Any,
) -> GenerateArguments:
    """Validate the arguments of `generate`; raises ValueError or TypeError with the argument's name.

    >>> from jkv import models
    >>> parse_arguments(models.random(models.TINY), None, stop_ids=5, max_new_tokens=np.int64(3)).stop_ids
    (5,)
    """
    for name in draws:
        if name not in DRAWS:
            near = get_close_matches(name, [*signature(parse_arguments).parameters, *DRAWS], 1)
            raise TypeError(f"unknown option {name!r}" + (f": did you mean {near[0]!r}?" if near else ""))
    if sampling is not None:
        keywords = dict(max_new_tokens=max_new_tokens, seed=seed, stop=stop, n=n, **draws)
        own = dict(
            stop_ids=stop_ids, chunk=chunk, compare=compare, stop_fn=stop_fn, drafter=drafter, prefix_cache=prefix_cache
        )
        return parse_arguments(params, cache, **own, **from_sampling(sampling, keywords))
    model(params)
    if not isinstance(compare, bool | np.bool_):
        raise ValueError(f"compare={compare!r}: give True or False")
    if stop_fn is not None and not callable(stop_fn):
        raise ValueError(f"stop_fn={stop_fn!r}: give a function of a cache, logits and tokens")
    if compare and isinstance(cache, Cache):
        raise ValueError("compare= needs the prompt from its start: give a config, not a Cache")
    ends = None
    if stop_ids is not None:
        last = params.config.vocab - 1
        ends = numbers("stop_ids", stop_ids, f"token ids from 0 to {last}", whole=True, least=0, most=last)
    given = cache if isinstance(cache, Cache) else composition(cache)
    if drafter is not None:
        check(params, given)
    return GenerateArguments(
        cache=given,
        new=count("max_new_tokens", max_new_tokens, "at least one: ask for a whole number of 1 or more", 1),
        draws=draws,
        seeds=seeds(seed),
        stop=texts(stop, params),
        stop_ids=None if ends is None else tuple(ends.reshape(-1).tolist()),
        chunk=None if chunk is None else count("chunk", chunk, "0 (all at once) or more"),
        n=count("n", n, "1 answer a prompt, or more", 1),
        compare=bool(compare),
        stop_fn=cast(Any, stop_fn),
        drafter=None if drafter is None else build_drafter(drafter, params),
        prefix_cache=check_prefix_cache(prefix_cache),
    )


def from_sampling(sampling: Any, keywords: dict[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments of `generate` that a SamplingParams stands for.

    Raises:
        TypeError: `sampling` is something else.
        ValueError: one of the keywords is given too.
    """
    if not isinstance(sampling, SamplingParams):
        raise TypeError(f"sampling is {short(sampling)}: give a jkv.SamplingParams")
    plain = vars(SamplingParams()) | {"seed": 0}
    for name, value in keywords.items():
        if name in plain and not np.array_equal(value, plain[name]):
            raise ValueError(f"{name}= and sampling= are both given: put it into the SamplingParams")
    return keywords | vars(sampling) | {"seed": sampling.seed or 0}


def fit(params: Params, asked: GenerateArguments, rows: list[list[int]]) -> None:
    """Raise ValueError if options and rows do not match, or if the rows are too long for the model and the cache."""
    b = len(rows) * asked.n
    heat, *_ = sampler.check(b, **asked.draws)
    if asked.n > 1 and not heat.all():
        raise ValueError(f"n={asked.n}: answers that are not drawn are all alike; give a temperature above 0, or n=1")
    if asked.seeds.ndim and len(asked.seeds) != b:
        raise ValueError(f"seed has {len(asked.seeds)} numbers for {b} rows: give one a row, or a single number")
    if isinstance(asked.cache, CacheConfig):
        check_length(asked.cache, params.config, max(map(len, rows)), asked.new)


def model(params: Any) -> None:
    """Raise TypeError if `params` is no model, RuntimeError in a process forked after JAX started."""
    fork_guard.check()
    if not isinstance(params, Params):
        raise TypeError(f"params is {short(params)}: give a model, as jkv.load makes it")


def composition(cache: Any) -> CacheConfig:
    """Return the config of a composition, a config or None; TypeError for anything else."""
    if cache is not None and not isinstance(cache, str | CacheConfig):
        raise TypeError(f"cache is {short(cache)}: give a text such as 'snapkv(budget=512)', a CacheConfig, or None")
    return methods.as_config(cache)


def check_prefix_cache(prefix_cache: Any) -> PrefixCache | ChunkCache | None:
    """Return a store, passages or None unchanged; TypeError for anything else."""
    if prefix_cache is not None and not isinstance(prefix_cache, PrefixCache | ChunkCache):
        raise TypeError(f"prefix_cache is {short(prefix_cache)}: give a jkv.PrefixCache, jkv.ChunkCache, or None")
    return prefix_cache


def texts(stop: Any, params: Params) -> tuple[str, ...]:
    """Return the stop strings of one string or several; ValueError for empty ones, or without a tokenizer.

    >>> from jkv import models
    >>> texts((), models.random(models.TINY))
    ()
    """
    stop = (stop,) if isinstance(stop, str) else stop
    if not isinstance(stop, Sequence | set | frozenset) or not all(isinstance(s, str) and s for s in stop):
        raise ValueError(f"stop={short(stop)}: give a text, or several, none of them empty")
    if stop and params.tokenizer is None:
        raise ValueError("stop texts need a tokenizer, and this model has none: use stop_ids")
    check_unicode("stop", list(stop))
    return tuple(stop)


def seeds(seed: Any) -> np.ndarray:
    """Fold one 64-bit seed, or one per row, to 32 bits."""
    least, most = sampler.SEEDS
    found = numbers("seed", seed, "a whole number of 64 bits, or one a row", whole=True, least=least, most=most)
    return np.asarray(sampler.fold(found))
