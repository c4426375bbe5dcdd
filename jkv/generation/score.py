"""Log-probabilities of given continuations, through a compressed cache."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jkv.arrays.x32 import narrow
from jkv.cache.cache import Cache
from jkv.generation import nan_check
from jkv.generation.api import prefill
from jkv.generation.arguments import model
from jkv.generation.receipt import kept_by_row
from jkv.generation.teacher_forcing import Follow, surprise
from jkv.methods.config import CacheConfig
from jkv.models import Params
from jkv.prompts.prefill import extended
from jkv.prompts.tokenization import Prompt, encode, encode_row
from jkv.utils.validation import short


@dataclass(frozen=True, kw_only=True)
class Scored:
    """A continuation's log-probability after a prompt.

    logprobs: of each of its tokens, in nats; greedy: each of them has the largest logit; seen, kept: tokens of the
    prompt, and those that the cache held of them, a mean over layers and heads: as many if nothing was evicted.
    """

    tokens: list[int]
    logprobs: list[float]
    greedy: bool
    seen: int
    kept: float

    @property
    def logprob(self) -> float:
        """The sum over the tokens, nats."""
        return sum(self.logprobs)


@narrow
def score(
    params: Params,
    cache: str | CacheConfig | Cache | None,
    prompt: Prompt,
    continuation: Prompt,
    *,
    chunk: int | None = None,
) -> Scored | list[Scored]:
    """log p(token | prompt, tokens before it) of every token of a continuation, as the cache gives it.

    cache: as `generate` takes it; prompt: of one row or several. continuation: a text or token ids, or a list of them:
    one a row, or, of a single prompt, several of which each is scored after it. The prompt is read and compressed once,
    whatever number of continuations it has; they go through the cache token by token, flushes included. A text is
    tokenized together with the prompt's text before it, where the prompt's own tokens stay what they are. One
    continuation gives one `Scored`, a list gives a list. Raises ValueError for a continuation that is empty, for
    numbers of prompts and continuations that do not fit, for logits that are NaN, and as `generate` does.

    >>> import jkv
    >>> params = jkv.models.random(jkv.models.TINY)
    >>> two = jkv.score(params, "snapkv(budget=40, window=8)", [5, 6, 7] * 40, [[8, 9], [10]])
    >>> [len(x.logprobs) for x in two], two[0].seen, two[0].kept
    ([2, 1], 120, 40.0)
    """
    model(params)
    rows, one = encode(params, prompt)
    texts, single = _listed(continuation)
    if len(rows) != 1 and len(rows) != len(texts):
        raise ValueError(
            f"{len(rows)} prompts and {len(texts)} continuations: give one continuation a prompt, or a single prompt"
        )
    n, prompts = len(rows), [prompt] if one else list(prompt)
    ids = [_ids(params, prompts[i % n], rows[i % n], x, i) for i, x in enumerate(texts)]
    room = max(map(len, ids)) - 1  # the last one is predicted, and not read
    if isinstance(cache, Cache):
        held, logits, _ = extended(params, cache, rows, room)
    else:
        held, logits = prefill(params, cache, rows, room=room, chunk=chunk)
    seen, kept = np.asarray(held.seen), kept_by_row(held)
    if n == 1:
        held, logits = held.fork(len(ids)), jnp.repeat(logits, len(ids), 0)
    scored = [
        Scored(tokens=row, logprobs=found, greedy=greedy, seen=int(seen[i % n]), kept=float(kept[i % n]))
        for i, (row, (found, greedy)) in enumerate(zip(ids, followed(params, held, logits, ids)[0], strict=True))
    ]
    return scored[0] if single else scored


def followed(
    params: Params, cache: Cache, logits: Array, ids: list[list[int]]
) -> tuple[list[tuple[list[float], bool]], Cache]:
    """Of each row's tokens: their log-probabilities, and whether they are the largest logits; and the cache after all
    but the last place, whose tokens are predicted, and not read.

    Raises ValueError for one that is NaN.
    """
    longest = max(map(len, ids))
    forced = np.asarray([row + [0] * (longest - len(row)) for row in ids])
    found, best = np.zeros(forced.shape, np.float32), np.zeros(forced.shape, bool)
    run, done = Follow(params, cache, logits, forced[:, :-1]), 0
    for part in _to_the_last(run):
        here = slice(done, done + part.shape[1])
        found[:, here] = -surprise(part, jnp.asarray(forced[:, here]))
        best[:, here] = np.asarray(part.argmax(-1)) == forced[:, here]
        done = here.stop
    nan_check.check_scores(params, found)
    answers = [(found[i, : len(row)].tolist(), bool(best[i, : len(row)].all())) for i, row in enumerate(ids)]
    return answers, run.cache


def _to_the_last(run: Follow) -> Iterator[Array]:
    """The logits of all that is read, and of what comes next."""
    yield from run
    yield run.logits[:, None]


def _listed(continuation: Any) -> tuple[list[Any], bool]:
    """The continuations, and whether it is a single one."""
    if isinstance(continuation, np.ndarray | jax.Array):
        continuation = np.asarray(continuation).tolist()
    if isinstance(continuation, str):
        return [continuation], True
    if not isinstance(continuation, Sequence) or isinstance(continuation, bytes) or not len(continuation):
        raise ValueError(f"the continuation is {short(continuation)}: give text or token ids, or a list of them")
    if isinstance(continuation[0], str) or not np.isscalar(continuation[0]):
        return list(continuation), False
    return [list(continuation)], True


def _ids(params: Params, prompt: Any, row: list[int], continuation: Any, i: int) -> list[int]:
    """Token ids of a continuation; of a text as they are behind the prompt's, if its tokens do not change by that."""
    name = f"continuation {i}"
    if isinstance(continuation, Mapping):
        raise ValueError(f"{name} is one message: give text or token ids")
    if not isinstance(continuation, str) or params.tokenizer is None or not continuation:
        return encode_row(params, continuation, name)
    if isinstance(prompt, str):
        whole = encode_row(params, prompt + continuation, name)
        if whole[: len(row)] == row and len(whole) > len(row):
            return whole[len(row) :]
    return encode_row(params, params.tokenizer.within(continuation), name)
