"""Events as bodies of OpenAI's API: whole answers, and the chunks of a stream."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from jkv.io.tokenizer import Tokenizer
from jkv.serve.openai_requests import Asked
from jkv.serve.request_state import Echo, End, Event, Kept, Piece, Token


def error(status: int, message: str) -> dict[str, Any]:
    """The body of an answer that is none."""
    kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}


class Answer:
    """What is said of one call, as its events come."""

    def __init__(self, asked: Asked, model: str, tokenizer: Tokenizer) -> None:
        self.asked, self.tokenizer = asked, tokenizer
        kind = "chat.completion" if asked.chat else "text_completion"
        self.id = f"{'chatcmpl' if asked.chat else 'cmpl'}-{uuid.uuid4().hex}"
        self.head = {"id": self.id, "created": int(time.time()), "model": model}
        self.kind, self.new = kind, 0
        self.offsets = [0] * len(asked.requests)
        self.heard = [tokenizer.stream() for _ in asked.requests]

    @property
    def usage(self) -> dict[str, int]:
        prompts = sum(len(x.tokens) for x in self.asked.requests[:: self.asked.n])
        return {"prompt_tokens": prompts, "completion_tokens": self.new, "total_tokens": prompts + self.new}

    # ---------------------------------------------------------------------------------------------------------- whole

    def whole(self, events: Sequence[Sequence[Event]]) -> dict[str, Any]:
        """The answer of all rows that have ended."""
        choices = [self._choice(i, row) for i, row in enumerate(events)]
        return {**self.head, "object": self.kind, "choices": choices, "usage": self.usage}

    def _choice(self, i: int, events: Sequence[Event]) -> dict[str, Any]:
        (end,) = (x for x in events if isinstance(x, End))
        text = "".join(x.text for x in events if isinstance(x, Piece))
        tokens = [t for x in events if isinstance(x, Piece | Echo) for t in x.tokens]
        if self.asked.echo is not None:
            text = self.asked.echo[i] + text
        said = {"message": {"role": "assistant", "content": text}} if self.asked.chat else {"text": text}
        return {"index": i, **said, "logprobs": self._logprobs(i, tokens), **self._ended(end)}

    def _ended(self, end: End) -> dict[str, Any]:
        self.new += end.tokens
        return {"finish_reason": end.why, "receipt": None if end.receipt is None else asdict(end.receipt)}

    # --------------------------------------------------------------------------------------------------------- stream

    def opening(self) -> Iterator[dict[str, Any]]:
        """The chunks before the first event."""
        for i in range(len(self.asked.requests)):
            if self.asked.chat:
                yield self._chunk(i, {"role": "assistant", "content": ""}, [])
            elif self.asked.echo is not None and self.asked.top is None:
                yield self._chunk(i, self.asked.echo[i], [])

    def chunk(self, i: int, event: Event) -> dict[str, Any]:
        """The chunk of an event of row i."""
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
        """The chunk after the last event."""
        if self.asked.usage:
            yield {**self.head, "object": self._streamed, "choices": [], "usage": self.usage}

    @property
    def _streamed(self) -> str:
        return "chat.completion.chunk" if self.asked.chat else self.kind

    def _chunk(self, i: int, said: Any, tokens: list[Token], end: dict[str, Any] | None = None) -> dict[str, Any]:
        name = "delta" if self.asked.chat else "text"
        choice = {"index": i, name: said, "logprobs": self._logprobs(i, tokens) if tokens else None}
        choice |= {"finish_reason": None} if end is None else end
        return {**self.head, "object": self._streamed, "choices": [choice]}

    # ------------------------------------------------------------------------------------------------------- logprobs

    def _logprobs(self, i: int, tokens: Iterable[Token]) -> dict[str, Any] | None:
        if self.asked.top is None:
            return None
        if self.asked.chat:
            return {"content": [{**self._said(t.id, t.logprob), "top_logprobs": self._tops(t)} for t in tokens]}
        names, offsets = [], []
        for t in tokens:
            names.append(self._name(t.id))
            offsets.append(self.offsets[i])
            self.offsets[i] += len(self.heard[i].push(t.id))  # halves of a character begin where it does
        return {
            "tokens": names,
            "token_logprobs": [t.logprob for t in tokens],
            "top_logprobs": [None if t.logprob is None else self._named(t) for t in tokens],
            "text_offset": offsets,
        }

    def _tops(self, token: Token) -> list[dict[str, Any]]:
        return [self._said(i, p) for i, p in token.top]

    def _named(self, token: Token) -> dict[str, float]:
        """By their text, the token itself too; of two with one text (halves of characters) the more probable one."""
        own = {self._name(token.id): token.logprob or 0.0}
        return {**own, **{self._name(i): p for i, p in reversed(token.top)}}

    def _said(self, i: int, logprob: float | None) -> dict[str, Any]:
        return {"token": self._name(i), "logprob": logprob, "bytes": list(self.tokenizer.piece(i))}

    def _name(self, i: int) -> str:
        return self.tokenizer.piece(i).decode(errors="replace")
