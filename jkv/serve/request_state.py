"""Per-row request state: settings, streamed events, final receipt."""

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

TOP = 20  # most alternatives per token in logprobs


@dataclass(frozen=True, kw_only=True)
class Token:
    """A token with log-probabilities.

    Attributes:
        id: token id.
        logprob: log-probability in nats; None for the first token of a prompt, which nothing predicts.
        top: most probable tokens at its position, with their log-probabilities.
    """

    id: int
    logprob: float | None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, kw_only=True)
class RowReceipt:
    """What the cache kept of a row.

    Attributes:
        cache: the cache config, as text.
        exactness: how close its methods are to their sources.
        tokens_seen: tokens that went through the cache.
        tokens_kept: mean number of kept tokens over layers and heads.
        bytes_kept: bytes of the row's slots, used or not.
        bytes_full: bytes of a full cache of exactly the tokens seen.
        reused: prompt tokens from the prefix cache.
        store_codec: codec of the prefix cache that rounded their keys and values, or "".
        kept: tokens kept in each layer and head.
        drafted: draft tokens per row that the batch verified while the row ran, or None without drafts.
        drafted_taken: draft tokens that were accepted, or None without drafts.
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
    """New text of a row, after a stride.

    Attributes:
        text: text that later tokens cannot change.
        tokens: tokens with log-probabilities, if the request wants them.
    """

    text: str
    tokens: list[Token]


@dataclass(frozen=True, kw_only=True)
class Kept:
    """Receipt of a row that continues, after a stride."""

    receipt: RowReceipt


@dataclass(frozen=True, kw_only=True)
class Echo:
    """The prompt's tokens with their log-probabilities."""

    tokens: list[Token]


@dataclass(frozen=True, kw_only=True)
class End:
    """Last event of a row that was answered.

    Attributes:
        why: the finish reason.
        tokens: generated tokens.
        receipt: final receipt, or None for a row that generates nothing.
    """

    why: str  # "stop" or "length"
    tokens: int
    receipt: RowReceipt | None


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Last event of a row that failed, with an HTTP status."""

    status: int
    error: str


Event = Piece | Kept | Echo | End | Fault


class Ticket:
    """State of one row in the engine.

    Attributes:
        gone: the client has disconnected; any thread may set it.
        asked: time of the request, by `time.monotonic`.
        last: time of the newest token.
        reused: prompt tokens from the prefix cache.
        store_codec: codec of the prefix cache that rounded them, or "".
        checker: finds stop strings, stop tokens and the length limit.
        drafted: draft counts of the batch while the row runs, or None without drafts.
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
        """Create the state of a row that waits.

        Args:
            request: prompt and settings.
            config: the cache.
            tell: called on the engine thread with each event.
            top: alternatives per token in logprobs; None for no logprobs.
            scores: compute the log-probabilities of the prompt.
            generates: generate tokens.
            follows: send a receipt after every stride.
        """
        self.request, self.config, self.tell = request, config, tell
        self.top, self.scores, self.generates, self.follows = top, scores, generates, follows
        self.gone = False  # set by any thread
        self.asked = self.last = time.monotonic()
        self.reused, self.store_codec = 0, ""
        self.checker = StopChecker(None)
        self.drafted: Counter[str] | None = None  # counts of its batch while the row runs

    def begin(self, params: Params, stop_ids: tuple[int, ...]) -> None:
        """Create the stop checker, when the row enters a slot."""
        settings = self.request.settings
        self.checker = StopChecker(params.tokenizer, settings.stop, stop_ids, self.request.new)

    @property
    def count(self) -> int:
        """Generated tokens so far."""
        return self.checker.count

    def take(self, ids: list[int], told: list[Token]) -> str | None:
        """Emit the new tokens.

        Args:
            ids: new token ids.
            told: their log-probabilities, or [].

        Returns:
            The finish reason, or None if the row continues.
        """
        before = self.count
        piece = self.checker.take(ids)
        told = told[: self.count - before]
        if self.checker.finish_reason is not None:
            piece += self.checker.finish()
        if piece or told:
            self.tell(Piece(text=piece, tokens=told))
        return self.checker.finish_reason

    def receipt(self, seen: int, kept: list[list[int]], kept_bytes: int, token_bytes: int, fixed: int) -> RowReceipt:
        """Build the receipt.

        Args:
            seen: tokens that went through the cache.
            kept: tokens kept in each layer and head.
            kept_bytes: bytes of the row's slots.
            token_bytes: bytes of a token in a full cache.
            fixed: bytes that do not depend on the number of tokens.
        """
        heads = [n for layer in kept for n in layer]
        return RowReceipt(
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
    """Pair tokens with their log-probabilities and most probable alternatives.

    Args:
        ids: token ids.
        logs: their log-probabilities f32[n], and the most probable ones f32[n,k] with their ids i32[n,k].
        top: alternatives per token; None gives [].
    """
    if top is None:
        return []
    rows = zip(ids, *(x.tolist() for x in logs), strict=False)
    return [Token(id=i, logprob=x, top=tuple(zip(there[:top], p[:top], strict=True))) for i, x, p, there in rows]
