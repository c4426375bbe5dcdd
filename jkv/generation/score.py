"""Log-probabilities of given continuations through a compressed cache."""

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
    """A continuation's log-probabilities after a prompt.

    Attributes:
        tokens: token ids of the continuation.
        logprobs: of each token, in nats.
        greedy: whether every token has the largest logit.
        seen: prompt tokens.
        kept: prompt tokens that the cache held, mean over layers and heads; equals `seen` if nothing was evicted.
    """

    tokens: list[int]
    logprobs: list[float]
    greedy: bool
    seen: int
    kept: float

    @property
    def logprob(self) -> float:
        """Sum over the tokens, in nats."""
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
    """Compute log p(token | prompt, tokens before it) of continuations through a compressed cache.

    The prompt is prefilled and compressed once for all of its continuations. These are teacher-forced token by token,
    flushes included. Text is tokenized together with the prompt's text, provided that the prompt's own tokens do not
    change.

    Args:
        cache: as in `generate`.
        prompt: one row or several.
        continuation: text or token ids, or a list: one per row, or several for a single prompt.
        chunk: prompt tokens per prefill chunk, as in `prefill`.

    Returns:
        A `Scored` for one continuation, a list for a list.

    Raises:
        ValueError: for an empty continuation, numbers of prompts and continuations that do not match, NaN logits, and
            as `generate` does.

    >>> import jkv
    >>> params = jkv.models.random(jkv.models.TINY)
    >>> two = jkv.score(params, "snapkv(budget=40, window=8)", [5, 6, 7] * 40, [[8, 9], [10]])
    >>> [len(x.logprobs) for x in two], two[0].seen, two[0].kept
    ([2, 1], 120, 40.0)
    """
    # Tokenize prompts and continuations.
    model(params)
    rows, one = encode(params, prompt)
    texts, single = _listed(continuation)
    if len(rows) != 1 and len(rows) != len(texts):
        raise ValueError(
            f"{len(rows)} prompts and {len(texts)} continuations: give one continuation a prompt, or a single prompt"
        )
    n, prompts = len(rows), [prompt] if one else list(prompt)
    ids = [_ids(params, prompts[i % n], rows[i % n], x, i) for i, x in enumerate(texts)]
    reserve = max(map(len, ids)) - 1  # the last token is predicted, not fed
    # Prefill the prompts; fork a single one for its continuations.
    if isinstance(cache, Cache):
        held, logits, _ = extended(params, cache, rows, reserve)
    else:
        held, logits = prefill(params, cache, rows, reserve=reserve, chunk=chunk)
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
    """Teacher-force tokens through a cache.

    Args:
        logits: f32[B,V], of each row's first token.
        ids: tokens of each row.

    Returns:
        Per row, the tokens' log-probabilities and whether all of them have the largest logit; and the cache after all
        tokens but those at the last index, which are predicted only.

    Raises:
        ValueError: if a log-probability is NaN.
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
    """Yield the logits of every fed token, then those of the next one."""
    yield from run
    yield run.logits[:, None]


def _listed(continuation: Any) -> tuple[list[Any], bool]:
    """Return the continuations as a list, and whether the caller gave a single one."""
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
    """Return the token ids of a continuation.

    Text is tokenized together with a text prompt if that keeps the prompt's tokens, otherwise as text that follows
    another.
    """
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
