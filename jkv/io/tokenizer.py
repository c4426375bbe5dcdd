"""Text to token ids and back, and chat templates."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from jkv.io.chat_template import render
from jkv.io.errors import failed
from jkv.utils.unicode import check_unicode

if TYPE_CHECKING:
    import tokenizers

# A UTF-8 character is at most four bytes, so at most four tokens; twice that is never a character still arriving.
_MAX_HELD = 8
PRINTED = [*range(33, 127), *range(161, 173), *range(174, 256)]  # bytes that tokens of bytes write as they are
BYTES = {chr(b): b for b in PRINTED} | {chr(256 + i): b for i, b in enumerate(sorted({*range(256)} - {*PRINTED}))}


class Chat(str):
    """A text that a chat template wrote: it begins as the template has it, so `encode` adds no begin token."""

    def __add__(self, more: str) -> Chat:
        return Chat(str.__add__(self, more))


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
        self.options: Mapping[str, Any] = {}
        self.tool_template = tool_template  # for chats with tools, where it has one of its own
        self.texts = texts  # of tokens by their names, such as pad_token

    @property
    def vocab_size(self) -> int:
        """Number of token ids, added tokens included."""
        return self.core.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, after the begin token if the model wants one, and `text` has none and is no `Chat`."""
        ids = self.within(text)
        if isinstance(text, Chat):
            return ids
        if self.add_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            return [self.bos_id, *ids]
        return ids

    def within(self, text: str) -> list[int]:
        """Token ids of text that follows another: nothing is added to it. ValueError where the tokenizer gives up."""
        check_unicode("the text", text)
        try:
            return self.core.encode(text, add_special_tokens=False).ids
        except BaseException as error:
            if not failed(error):
                raise
            raise ValueError(
                f"the tokenizer failed on a text of {len(text):,} characters ({error}): change it"
            ) from error

    def decode(self, ids: Sequence[int], stop: Sequence[str] = ()) -> str:
        """Text of token ids without the special tokens, but with those that stop texts name.

        Raises ValueError for ids that are negative or too large.
        """
        plain = [int(i) for i in ids]
        if plain and not (min(plain) >= 0 and max(plain) < 1 << 32):
            raise ValueError(
                f"token ids run from {min(plain)} to {max(plain)}; they must be in 0..{self.vocab_size - 1}"
            )
        named = [text for text in self._special.values() if any(text in s for s in stop)]
        if not named:
            return self.core.decode(plain, skip_special_tokens=True)
        shown = [i for i in plain if i not in self._special or self._special[i] in named]
        return self.core.decode(shown, skip_special_tokens=False)

    def stream(self, stop: Sequence[str] = ()) -> Stream:
        """A decoder for tokens that arrive one at a time; stop: as for `decode`."""
        return Stream(self, stop)

    def piece(self, token: int) -> bytes:
        """The bytes that a token stands for in a text: a part of a character, a space before a word, or its own name.

        Tokens of bytes (GPT-2) are written with a character for each byte; others with U+2581 for a space, and such as
        <0x0A> for a byte alone.
        """
        text = self.core.id_to_token(token) or ""
        if token in self._added:
            return text.encode()
        if self._of_bytes and all(c in BYTES for c in text):
            return bytes(BYTES[c] for c in text)
        if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
            return bytes.fromhex(text[3:5])
        return text.replace("\u2581", " ").encode()

    @cached_property
    def _of_bytes(self) -> bool:
        return "ByteLevel" in repr(self.core.decoder)

    @cached_property
    def _added(self) -> dict[int, Any]:
        return self.core.get_added_tokens_decoder()

    @cached_property
    def _special(self) -> dict[int, str]:
        return {i: token.content for i, token in self._added.items() if token.special}

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **options: Any,
    ) -> Chat:
        """The prompt text of messages, each with "role" and "content" (or "tool_calls"); what is null is left out.

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
        if not isinstance(tools, Sequence | None):
            raise ValueError(f"tools is {tools!r}; give a list of JSON schemas")
        for tool in tools or ():
            if not isinstance(tool, Mapping):
                raise ValueError(f"a tool is {tool!r}; give its JSON schema, a mapping")
        check_unicode("messages", list(messages))
        names = {
            "messages": [{k: v for k, v in message.items() if v is not None} for message in messages],
            "add_generation_prompt": add_generation_prompt,
            "bos_token": self._text(self.bos_id),
            "eos_token": self._text(self.eos_ids[0] if self.eos_ids else None),
            "tools": [dict(tool) for tool in tools or ()] or None,
            "documents": None,
        }
        names = {**self.texts, **names}
        options = {**self.options, **options}
        fixed = sorted(set(options) & (set(names) - {"documents"}))
        if fixed:
            raise ValueError(f"{fixed[0]} is the tokenizer's own; it is no option of a chat template")
        return Chat(render(template, names | options))

    def tell(self, **options: Any) -> Tokenizer:
        """The same tokenizer, whose template is told these options in every chat that does not say otherwise."""
        made = copy(self)
        made.options = {**self.options, **options}
        return made

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

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()):
        self._tokenizer, self._stop = tokenizer, stop
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
        before = self._tokenizer.decode(self._context, self._stop)
        return self._tokenizer.decode(self._context + self._held, self._stop)[len(before) :]
