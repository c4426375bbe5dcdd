"""Tokenizer: text to token ids and back, chat templates, incremental decoding."""

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

# A UTF-8 character is at most four bytes, so at most four tokens; twice that is never an incomplete character.
_MAX_HELD = 8
PRINTED = [*range(33, 127), *range(161, 173), *range(174, 256)]  # bytes that byte-level tokens spell as they are
BYTES = {chr(b): b for b in PRINTED} | {chr(256 + i): b for i, b in enumerate(sorted({*range(256)} - {*PRINTED}))}


ROLES = ("system", "developer", "user", "assistant", "tool", "function")  # besides those that a template compares with


class Chat(str):
    """Text rendered by a chat template; it has its own begin token if any, so `encode` adds none."""

    def __add__(self, more: str) -> Chat:
        return Chat(str.__add__(self, more))


class Tokenizer:
    """A `tokenizers.Tokenizer` with the model's begin and end ids and chat templates.

    Attributes:
        core: The `tokenizers.Tokenizer`.
        bos_id: The begin token, or None.
        eos_ids: The end tokens; all end a generation, and templates see the first.
        add_bos: Whether `encode` adds the begin token.
        template: The chat template, or None.
        options: Template options used in every chat; see `tell`.
        tool_template: Separate template for chats with tools, or None.
        texts: Texts of special tokens by name, such as pad_token.
    """

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
        # Templates see the first one; all of them end a generation.
        self.eos_ids = tuple(dict.fromkeys(eos_ids))
        self.add_bos = add_bos and bos_id is not None
        self.template = template
        self.options: Mapping[str, Any] = {}
        self.tool_template = tool_template  # for chats with tools
        self.texts = texts  # special tokens by name, such as pad_token

    @property
    def vocab_size(self) -> int:
        """Number of token ids, added tokens included."""
        return self.core.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str) -> list[int]:
        """Tokenize `text`, with the begin token first if the model wants one.

        No begin token is added if `text` is a `Chat` or already starts with it.
        """
        ids = self.within(text)
        if isinstance(text, Chat):
            return ids
        if self.add_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            return [self.bos_id, *ids]
        return ids

    def within(self, text: str) -> list[int]:
        """Tokenize text that continues another text, without a begin token; ValueError if the tokenizer fails."""
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
        """Decode token ids, leaving out special tokens except those that occur in a stop string.

        Args:
            ids: Token ids.
            stop: Stop strings.

        Raises:
            ValueError: An id is negative or too large.
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
        """Return an incremental decoder for tokens that arrive one at a time; `stop` as in `decode`."""
        return Stream(self, stop)

    def piece(self, token: int) -> bytes:
        """Return the bytes of a token: part of a character, a word with its space, or an added token's text.

        Byte-level tokens (GPT-2) spell each byte as a character; other tokens use U+2581 for a space, and the form
        <0x0A> for a single byte.
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
        """Render messages with the chat template to the text of a prompt.

        Args:
            messages: Mappings with "role" and "content" (or "tool_calls"); null values are left out.
            tools: Functions the model may call, as JSON schemas.
            add_generation_prompt: Whether the prompt ends with the start of the assistant's turn.
            options: Further variables of the template, such as `enable_thinking=False`.

        Raises:
            ValueError: There is no template, the template fails, or a message, tool or option is invalid.
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
            role = message["role"]
            if role not in ROLES and not (isinstance(role, str) and any(q + role + q in template for q in "'\"")):
                raise ValueError(f"a chat message has the role {role!r}; give {', '.join(ROLES[:-1])} or {ROLES[-1]}")
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
        """Return a copy whose template gets these options in every chat that does not override them."""
        made = copy(self)
        made.options = {**self.options, **options}
        return made

    def saved(self) -> tuple[str, dict[str, Any]]:
        """Return the text of tokenizer.json, and the dict of tokenizer_config.json (special tokens and templates).

        Raises:
            ValueError: `tokenizers` cannot serialize this tokenizer.
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
        if self.add_bos and self.bos_id is not None:  # readers detect it by encoding an empty text
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
    """Incremental decoder that never returns half a UTF-8 character.

    The text of a token can depend on the previous one (a leading space, a partial character), so the tokens of the last
    piece are decoded again with the new ones, and only the added text is returned.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()):
        self._tokenizer, self._stop = tokenizer, stop
        self._context: list[int] = []
        self._held: list[int] = []

    def push(self, token: int) -> str:
        """Return the text that `token` completes; "" while a character is still incomplete."""
        self._held.append(int(token))
        text = self._added()
        if len(self._held) < _MAX_HELD and (not text or text.endswith("\ufffd")):
            return ""
        self._context, self._held = self._held, []
        return text

    def finish(self) -> str:
        """Return the remaining text; a character that never became complete shows as U+FFFD."""
        text = self._added()
        self._context, self._held = [], []
        return text

    def _added(self) -> str:
        before = self._tokenizer.decode(self._context, self._stop)
        return self._tokenizer.decode(self._context + self._held, self._stop)[len(before) :]
