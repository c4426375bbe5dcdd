"""Text to token ids and back, and chat templates."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from jkv.io.errors import failed
from jkv.io.templates import render

if TYPE_CHECKING:
    import tokenizers

# A UTF-8 character is at most four bytes, so at most four tokens; twice that is never a character still arriving.
_MAX_HELD = 8


class Tokenizer:
    """A `tokenizers.Tokenizer` with the model's begin/end ids and chat template."""

    def __init__(
        self,
        core: tokenizers.Tokenizer,
        *,
        bos_id: int | None = None,
        eos_ids: Iterable[int] = (),
        add_bos: bool = False,
        template: str | None = None,
        tool_template: str | None = None,
        texts: Mapping[str, str] = MappingProxyType({}),
    ):
        self.core = core
        self.bos_id = bos_id
        # The first is the one that templates mean; ends of any kind stop a generation.
        self.eos_ids = tuple(dict.fromkeys(eos_ids))
        self.add_bos = add_bos and bos_id is not None
        self.template = template
        self.tool_template = tool_template  # for chats with tools, where it has one of its own
        self.texts = texts  # of tokens by their names, such as pad_token

    @property
    def vocab_size(self) -> int:
        """Number of token ids, added tokens included."""
        return self.core.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, after the begin token if the model wants one and `text` has none yet."""
        ids = self.within(text)
        if self.add_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            return [self.bos_id, *ids]
        return ids

    def within(self, text: str) -> list[int]:
        """Token ids of text that follows another: nothing is added to it. ValueError where the tokenizer gives up."""
        try:
            return self.core.encode(text, add_special_tokens=False).ids
        except BaseException as error:
            if not failed(error):
                raise
            raise ValueError(
                f"the tokenizer failed on a text of {len(text):,} characters ({error}): change it"
            ) from error

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids without the special tokens; raises ValueError for ids that are negative or too large."""
        plain = [int(i) for i in ids]
        if plain and not (min(plain) >= 0 and max(plain) < 1 << 32):
            raise ValueError(
                f"token ids run from {min(plain)} to {max(plain)}; they must be in 0..{self.vocab_size - 1}"
            )
        return self.core.decode(plain, skip_special_tokens=True)

    def stream(self) -> Stream:
        """A decoder for tokens that arrive one at a time."""
        return Stream(self)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        add_generation_prompt: bool = True,
        **options: Any,
    ) -> str:
        """The prompt text of messages, each with "role" and "content" (or "tool_calls").

        tools: functions that the model may call, as JSON schemas; options: what else the template reads, such as
        `enable_thinking=False`. Raises ValueError if the template fails, or for what is no message, tool or option.
        """
        template = self.tool_template if tools and self.tool_template else self.template
        if template is None:
            raise ValueError("this model has no chat template; use plain text, or an instruction-tuned model")
        for message in messages:
            if (
                not isinstance(message, Mapping)
                or "role" not in message
                or not {"content", "tool_calls"} & set(message)
            ):
                raise ValueError(f'a chat message is {message!r}; it must be a mapping with "role" and "content"')
        for tool in tools:
            if not isinstance(tool, Mapping):
                raise ValueError(f"a tool is {tool!r}; give its JSON schema, a mapping")
        names = {
            "messages": [dict(message) for message in messages],
            "add_generation_prompt": add_generation_prompt,
            "bos_token": self._text(self.bos_id),
            "eos_token": self._text(self.eos_ids[0] if self.eos_ids else None),
            "tools": [dict(tool) for tool in tools] or None,
            "documents": None,
        }
        names = {**self.texts, **names}
        fixed = sorted(set(options) & (set(names) - {"documents"}))
        if fixed:
            raise ValueError(f"{fixed[0]} is the tokenizer's own; it is no option of a chat template")
        return render(template, names | options)

    def saved(self) -> tuple[str, dict[str, Any]]:
        """What tokenizer.json holds of it, and what tokenizer_config.json does: its begin, its end and its template.

        ValueError for one that `tokenizers` cannot write.
        """
        import tokenizers
        from tokenizers.processors import TemplateProcessing

        try:
            core = tokenizers.Tokenizer.from_str(self.core.to_str())
        except BaseException as error:
            if not failed(error):
                raise
            raise ValueError(f"the tokenizer cannot be written ({error})") from error
        begin = self._text(self.bos_id)
        if self.add_bos and self.bos_id is not None:  # readers look for it around an empty text
            core.post_processor = TemplateProcessing(single="begin $A", special_tokens=[("begin", self.bos_id)])
        end = self._text(self.eos_ids[0] if self.eos_ids else None)
        templates: Any = self.template
        if self.tool_template:
            named = {"default": self.template, "tool_use": self.tool_template}
            templates = [{"name": name, "template": text} for name, text in named.items() if text]
        said = {**self.texts, "bos_token": begin, "eos_token": end, "chat_template": templates}
        return core.to_str(), {name: text for name, text in said.items() if text}

    def _text(self, token: int | None) -> str:
        return "" if token is None else self.core.id_to_token(token) or ""


class Stream:
    """Decodes tokens as they arrive and never returns half a UTF-8 character.

    The text of a token can depend on the one before it (a leading space, a character begun), so the tokens of the
    last piece are decoded again with the new ones, and only what they add is returned.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._context: list[int] = []
        self._held: list[int] = []

    def push(self, token: int) -> str:
        """The text that `token` completes; empty while a character is still incomplete."""
        self._held.append(int(token))
        text = self._added()
        if len(self._held) < _MAX_HELD and (not text or text.endswith("\ufffd")):
            return ""
        self._context, self._held = self._held, []
        return text

    def finish(self) -> str:
        """The rest, where a character that never became complete shows as U+FFFD."""
        text = self._added()
        self._context, self._held = [], []
        return text

    def _added(self) -> str:
        before = self._tokenizer.decode(self._context)
        return self._tokenizer.decode(self._context + self._held)[len(before) :]
