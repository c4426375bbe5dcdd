"""The result of all model readers: a model that is described but not loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jkv.io.tokenizer import Tokenizer


@dataclass(frozen=True)
class Source:
    """A model on disk: config, tensors that are read when called, and tokenizer.

    Attributes:
        config: Config in Hugging Face style.
        tensors: Readers of the tensors, by Hugging Face name.
        tokenizer: The tokenizer, if the model has one.
        commit: Commit of the hub repository that was read, if any.
        blocks: Readers of the tensors that the file has quantized, by the same names; each takes the float type the
            codes stand for.
        kinds: Type name of each tensor, for files that can have quantized tensors.
        file: The .gguf file, if the model is one.
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
        """Build a Source whose config has the begin and end ids of the tokenizer, if there is one.

        >>> Source.of({"eos_token_id": 2}, {}, None).config
        {'eos_token_id': 2}
        """
        if tokenizer is not None:
            config = config | {"eos_token_id": list(tokenizer.eos_ids), "bos_token_id": tokenizer.bos_id}
        return cls(config, tensors, tokenizer)
