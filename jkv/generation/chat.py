"""A conversation on one cache."""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from typing import Any

from jkv.cache.cache import Cache
from jkv.generation.api import generate, prefill
from jkv.generation.arguments import composition, model
from jkv.generation.generate import Result
from jkv.io.tokenizer import Chat as Rendered
from jkv.methods.config import CacheConfig
from jkv.models import Params
from jkv.prompts.tokenization import limit_reserve
from jkv.utils.tables import abbreviate, html_table
from jkv.utils.validation import count, short

MARK = "(here is another text)"  # stands in the template for what is read before or after it
RESERVE = 1024  # default room of a conversation, in tokens


class Chat:
    """A conversation on one cache: each question continues the cache that the last answer left.

    What was said is read once, and the system prompt is not repeated. With a `context`, the cache compresses that text
    before any question is known; `copy` then asks independent questions about it.

    Args:
        cache: a composition or a CacheConfig.
        system: text of a system message.
        context: text that the first question follows, such as a document.
        reserve: tokens of questions and answers that the cache has room for, at most the rest of the model's context.
        options: of `generate`, for every answer; `ask` takes its own too.

    Attributes:
        cache: the cache so far; None before the first question, if there is no context.
        messages: the conversation so far.

    Raises:
        ValueError: the model has no chat template.

    Example:
        document = jkv.Chat(model, "kvzip(keep=0.25) | int4", context=text)
        for question in questions:
            print(document.copy().ask(question).text)
    """

    def __init__(
        self,
        params: Params,
        cache: str | CacheConfig | None = None,
        *,
        system: str | None = None,
        context: str | None = None,
        reserve: int = RESERVE,
        **options: Any,
    ) -> None:
        model(params)
        if params.tokenizer is None or params.tokenizer.template is None:
            raise ValueError("a chat needs a model with a chat template: use jkv.prefill and jkv.generate for this one")
        self.params, self.options = params, options
        self.cache: Cache | None = None
        self.messages = [] if system is None else [{"role": "system", "content": system}]
        self._config, self._last, self._context = composition(cache), None, context
        self._reserve = count("reserve", reserve, "tokens of questions and answers, 0 or more")
        if context is not None:
            head, self._tail = self._render([*self.messages, _user(f"{context}\n\n{MARK}")])
            self.cache = self._read(params.tokenizer.encode(Rendered(head)))

    def ask(self, question: str, **options: Any) -> Result:
        """Ask a question, and return the answer; the cache and the messages go on from it.

        Args:
            options: of `generate`.

        Raises:
            ValueError: the cache has no room for the question and the answer (`reserve`), and as `generate` does.
        """
        if not isinstance(question, str) or not question:
            raise ValueError(f"the question is {short(question)}: give a text")
        tokens, cache = self._tokens(question), self.cache
        if cache is None:  # all but one token, so that the cache is made with its reserve
            cache, tokens = self._read(tokens[:-1]), tokens[-1:]
        before = int(cache.seen[0])
        out = generate(self.params, cache, tokens, **self.options | options)
        assert isinstance(out.text, str) and isinstance(out.tokens, list)
        extra = int(out.cache.seen[0]) - before - len(tokens) - len(out.tokens)  # behind a stop string
        cache = out.cache.rollback(extra) if extra else out.cache
        self.cache, self._last = cache, out.tokens[-1]
        self.messages = [*self.messages, _user(question), {"role": "assistant", "content": out.text}]
        return replace(out, cache=cache)

    def copy(self) -> Chat:
        """Return a chat that goes on from here by itself; caches are values, so nothing is copied."""
        return copy(self)

    def _tokens(self, question: str) -> list[int]:
        """Return the token ids between the cache and the next answer."""
        tokenizer = self.params.tokenizer
        if self._last is not None:
            _, text = self._render([_user(MARK), {"role": "assistant", "content": MARK}, _user(question)])
            ids = tokenizer.within(text)
            return ids[1:] if ids[:1] == [self._last] else ids  # the stop token is in the cache already
        if self._context is not None:
            return tokenizer.within(question + self._tail)
        return tokenizer.encode(tokenizer.chat([*self.messages, _user(question)]))

    def _render(self, messages: list[dict[str, str]]) -> tuple[str, str]:
        """Return the text before and after the last MARK."""
        before, mark, after = self.params.tokenizer.chat(messages).rpartition(MARK)
        if not mark:
            raise ValueError("this model's chat template changes what is said, so its chats do not continue a cache")
        return before, after

    def _read(self, ids: list[int]) -> Cache:
        """Prefill the beginning of the conversation."""
        reserve = limit_reserve(self._config, self.params.config, len(ids), self._reserve)
        return prefill(self.params, self._config, [ids], reserve=reserve)[0]

    def __repr__(self) -> str:
        lines = [f"{role}: {text}" for role, text in self._facts]
        return "\n".join([*lines, f"({self.cache!r})" if self.cache else "(nothing read yet)"])

    def _repr_html_(self) -> str:
        return html_table([], self._facts) + ("" if self.cache is None else self.cache._repr_html_())

    @property
    def _facts(self) -> list[tuple[str, str]]:
        """The context, shortened, and the messages."""
        context = [] if self._context is None else [("context", abbreviate(self._context, 200))]
        return [*context, *((x["role"], x["content"]) for x in self.messages)]


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}
