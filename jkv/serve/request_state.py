"""Rows on their way through the engine: what is asked, what is told as it comes, and the receipt at the end."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from jkv.engine.request import Request
from jkv.generation.stop_strings import StopChecker
from jkv.methods.config import CacheConfig
from jkv.models import Params

TOP = 20  # alternatives of a token that logprobs can ask for


@dataclass(frozen=True, kw_only=True)
class Token:
    """A token with its log-probability in nats (None: nothing was before it) and the most probable ones there."""

    id: int
    logprob: float | None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Receipt:
    """What the cache kept of a row.

    tokens_kept: a mean over layers and heads, and `kept` of each of them; bytes: of the row's slots, used or not, and
    of a full cache of exactly the tokens that were seen; reused: prompt tokens that came from the store, and
    store_codec: what rounded their keys and values there, if anything; drafted: tokens of a row that its batch verified
    beside each next one while it ran, and drafted_taken: those that came; None without drafts.
    """

    cache: str
    exactness: str
    tokens_seen: int
    tokens_kept: float
    bytes_kept: int
    bytes_full: int
    reused: int
    store_codec: str
    kept: list[list[int]] = field(repr=False)
    drafted: int | None = None
    drafted_taken: int | None = None


@dataclass(frozen=True, kw_only=True)
class Piece:
    """What a stride brought: text that is complete, and tokens if somebody asked for their log-probabilities."""

    text: str
    tokens: list[Token]


@dataclass(frozen=True, kw_only=True)
class Kept:
    """What the cache keeps after a stride."""

    receipt: Receipt


@dataclass(frozen=True, kw_only=True)
class Echo:
    """The prompt's tokens with their log-probabilities."""

    tokens: list[Token]


@dataclass(frozen=True, kw_only=True)
class End:
    """The last event of a row that was answered: why it ended, how many tokens it has."""

    why: str  # "stop" or "length"
    tokens: int
    receipt: Receipt | None


@dataclass(frozen=True, kw_only=True)
class Fault:
    """The last event of a row that was not answered, with the status of HTTP."""

    status: int
    error: str


Event = Piece | Kept | Echo | End | Fault


class Ticket:
    """One row. tell(event): called by the engine's thread; top: alternatives that logprobs tell, None: no logprobs.

    scores: the prompt's own log-probabilities are wanted; generates: an answer is; follows: what the cache keeps is,
    after every stride.
    """

    def __init__(
        self,
        request: Request,
        config: CacheConfig,
        tell: Callable[[Event], None],
        *,
        top: int | None = None,
        scores: bool = False,
        generates: bool = True,
        follows: bool = False,
    ) -> None:
        self.request, self.config, self.tell = request, config, tell
        self.top, self.scores, self.generates, self.follows = top, scores, generates, follows
        self.gone = False  # the client is, whatever thread says so
        self.asked = self.last = time.monotonic()
        self.reused, self.store_codec = 0, ""
        self.checker = StopChecker(None)
        self.drafted: Counter[str] | None = None  # of its batch while it runs

    def begin(self, params: Params, stop_ids: tuple[int, ...]) -> None:
        settings = self.request.settings
        self.checker = StopChecker(params.tokenizer, settings.stop, stop_ids, self.request.new)

    @property
    def count(self) -> int:
        """Tokens of the answer so far."""
        return self.checker.count

    def take(self, ids: list[int], told: list[Token]) -> str | None:
        """Emit the new tokens. Returns the finish reason, or None if the row continues."""
        before = self.count
        piece = self.checker.take(ids)
        told = told[: self.count - before]
        if self.checker.finish_reason is not None:
            piece += self.checker.finish()
        if piece or told:
            self.tell(Piece(text=piece, tokens=told))
        return self.checker.finish_reason

    def receipt(self, seen: int, kept: list[list[int]], kept_bytes: int, token_bytes: int, fixed: int) -> Receipt:
        """token_bytes: of a token in a full cache; fixed: of what no text changes."""
        heads = [n for layer in kept for n in layer]
        return Receipt(
            cache=str(self.config),
            exactness=self.config.exactness,
            tokens_seen=seen,
            tokens_kept=round(sum(heads) / len(heads), 1) if heads else float(seen),
            bytes_kept=kept_bytes,
            bytes_full=seen * token_bytes + fixed,
            reused=self.reused,
            store_codec=self.store_codec,
            kept=kept,
            drafted=None if self.drafted is None else self.drafted["drafted"],
            drafted_taken=None if self.drafted is None else self.drafted["taken"],
        )


def tokens_of(ids: Sequence[int], logs: Sequence[Any], top: int | None) -> list[Token]:
    """Tokens with the `top` most probable ones at their places; none if nobody asks.

    logs: their log-probabilities f32[n], and the most probable ones f32[n,k], i32[n,k].
    """
    if top is None:
        return []
    rows = zip(ids, *(x.tolist() for x in logs), strict=False)
    return [Token(id=i, logprob=x, top=tuple(zip(there[:top], p[:top], strict=True))) for i, x, p, there in rows]
