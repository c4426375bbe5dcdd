"""The common product of all readers: a model that is described but not yet loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jkv.io.tokenizer import Tokenizer


@dataclass(frozen=True)
class Source:
    """A model on disk: Hugging Face style config, tensors by Hugging Face name (read when called), tokenizer.

    blocks: tensors that the file has in codes, by the same names: read for the float type that they stand for; kinds:
    what a file that has such tensors calls the type of each. commit: that of the hub repository which was
    read, if one was. file: the .gguf file, if it is one.
    """

    config: dict[str, Any]
    tensors: Mapping[str, Callable[[], Any]]
    tokenizer: Tokenizer | None = None
    commit: str | None = None
    blocks: Mapping[str, Callable[[Any], Any]] = field(default_factory=dict)
    kinds: Mapping[str, str] = field(default_factory=dict)
    file: Path | None = None

    @classmethod
    def of(
        cls,
        config: dict[str, Any],
        tensors: Mapping[str, Callable[[], Any]],
        tokenizer: Tokenizer | None,
    ) -> Source:
        """A Source whose config names the begin and end ids that the tokenizer knows, if there is one.

        >>> Source.of({"eos_token_id": 2}, {}, None).config
        {'eos_token_id': 2}
        """
        if tokenizer is not None:
            config = config | {"eos_token_id": list(tokenizer.eos_ids), "bos_token_id": tokenizer.bos_id}
        return cls(config, tensors, tokenizer)
