"""OpenAI response bodies: whole answers, and the chunks of a stream."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from jkv.io.tokenizer import Tokenizer
from jkv.serve.openai_requests import OpenAIRequest
from jkv.serve.request_state import Echo, End, Event, Kept, Piece, Token


def error(status: int, message: str) -> dict[str, Any]:
    """Return the body of an error response."""
    kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}


class Answer:
    """Builds the response to one call from the events of its rows.

    Attributes:
        id: id of the response.
        head: fields that all of its bodies have.
        kind: the `object` field of a whole answer.
        new: generated tokens of the rows that have ended.
        offsets: characters of each row's tokens so far, for `text_offset`.
        heard: incremental decoder of each row's tokens.
    """

    def __init__(self, asked: OpenAIRequest, model: str, tokenizer: Tokenizer) -> None:
        self.asked, self.tokenizer = asked, tokenizer
        kind = "chat.completion" if asked.chat else "text_completion"
        self.id = f"{'chatcmpl' if asked.chat else 'cmpl'}-{uuid.uuid4().hex}"
        self.head = {"id": self.id, "created": int(time.time()), "model": model}
        self.kind, self.new = kind, 0
        self.offsets = [0] * len(asked.requests)
        self.heard = [tokenizer.stream() for _ in asked.requests]

    @property
    def usage(self) -> dict[str, int]:
        """Token counts; each prompt counts once, however many samples it has."""
        prompts = sum(len(x.tokens) for x in self.asked.requests[:: self.asked.n])
        return {"prompt_tokens": prompts, "completion_tokens": self.new, "total_tokens": prompts + self.new}

    # ---------------------------------------------------------------------------------------------------------- whole

    def whole(self, events: Sequence[Sequence[Event]]) -> dict[str, Any]:
        """Return the answer to all rows, from all events of each row."""
        choices = [self._choice(i, row) for i, row in enumerate(events)]
        return {**self.head, "object": self.kind, "choices": choices, "usage": self.usage}

    def _choice(self, i: int, events: Sequence[Event]) -> dict[str, Any]:
        """Return the choice of row i, from its events."""
        (end,) = (x for x in events if isinstance(x, End))
        text = "".join(x.text for x in events if isinstance(x, Piece))
        tokens = [t for x in events if isinstance(x, Piece | Echo) for t in x.tokens]
        if self.asked.echo is not None:
            text = self.asked.echo[i] + text
        said = {"message": {"role": "assistant", "content": text}} if self.asked.chat else {"text": text}
        return {"index": i, **said, "logprobs": self._logprobs(i, tokens), **self._ended(end)}

    def _ended(self, end: End) -> dict[str, Any]:
        """Return the finish reason and the receipt, and count the row's tokens."""
        self.new += end.tokens
        return {"finish_reason": end.why, "receipt": None if end.receipt is None else asdict(end.receipt)}

    # --------------------------------------------------------------------------------------------------------- stream

    def opening(self) -> Iterator[dict[str, Any]]:
        """Yield the chunks before the first event: the role, or the echoed prompt."""
        for i in range(len(self.asked.requests)):
            if self.asked.chat:
                yield self._chunk(i, {"role": "assistant", "content": ""}, [])
            elif self.asked.echo is not None and self.asked.top is None:
                yield self._chunk(i, self.asked.echo[i], [])

    def chunk(self, i: int, event: Event) -> dict[str, Any]:
        """Return the chunk for an event of row i."""
        empty: Any = {} if self.asked.chat else ""
        if isinstance(event, End):
            return self._chunk(i, empty, [], self._ended(event))
        if isinstance(event, Kept):
            return self._chunk(i, empty, [], {"finish_reason": None, "receipt": asdict(event.receipt)})
        if isinstance(event, Echo):
            assert self.asked.echo is not None
            return self._chunk(i, self.asked.echo[i], event.tokens)
        assert isinstance(event, Piece)
        return self._chunk(i, {"content": event.text} if self.asked.chat else event.text, event.tokens)

    def closing(self) -> Iterator[dict[str, Any]]:
        """Yield the chunk after the last event: token counts, if the request wants them."""
        if self.asked.usage:
            yield {**self.head, "object": self._streamed, "choices": [], "usage": self.usage}

    @property
    def _streamed(self) -> str:
        """The `object` field of a chunk."""
        return "chat.completion.chunk" if self.asked.chat else self.kind

    def _chunk(self, i: int, said: Any, tokens: list[Token], end: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return a chunk with text, log-probabilities and, at the end, the finish reason."""
        name = "delta" if self.asked.chat else "text"
        choice = {"index": i, name: said, "logprobs": self._logprobs(i, tokens) if tokens else None}
        choice |= {"finish_reason": None} if end is None else end
        return {**self.head, "object": self._streamed, "choices": [choice]}

    # ------------------------------------------------------------------------------------------------------- logprobs

    def _logprobs(self, i: int, tokens: Iterable[Token]) -> dict[str, Any] | None:
        """Return the log-probabilities of tokens, in the form of chat or of text completions."""
        if self.asked.top is None:
            return None
        if self.asked.chat:
            return {"content": [{**self._said(t.id, t.logprob), "top_logprobs": self._tops(t)} for t in tokens]}
        names, offsets = [], []
        for t in tokens:
            names.append(self._name(t.id))
            offsets.append(self.offsets[i])
            self.offsets[i] += len(self.heard[i].push(t.id))  # parts of a character have the offset of the character
        return {
            "tokens": names,
            "token_logprobs": [t.logprob for t in tokens],
            "top_logprobs": [None if t.logprob is None else self._named(t) for t in tokens],
            "text_offset": offsets,
        }

    def _tops(self, token: Token) -> list[dict[str, Any]]:
        """Return the alternatives of a token, for chat completions."""
        return [self._said(i, p) for i, p in token.top]

    def _named(self, token: Token) -> dict[str, float]:
        """Return the alternatives of a token by their text, with the token itself, for text completions.

        If two tokens have one text, as parts of a character do, the more probable one is kept.
        """
        own = {self._name(token.id): token.logprob or 0.0}
        return {**own, **{self._name(i): p for i, p in reversed(token.top)}}

    def _said(self, i: int, logprob: float | None) -> dict[str, Any]:
        """Return a token with its log-probability and bytes, for chat completions."""
        return {"token": self._name(i), "logprob": logprob, "bytes": list(self.tokenizer.piece(i))}

    def _name(self, i: int) -> str:
        """Return the text of a token, with U+FFFD for parts of a character."""
        return self.tokenizer.piece(i).decode(errors="replace")
