"""GGUF model metadata: every key is read, known to be harmless, or rejected."""

from __future__ import annotations

from typing import Any

import numpy as np

from jkv.io.errors import FormatError
from jkv.io.gguf import File

AGAIN = "download or convert it again"
FOLDER = "use the model's safetensors folder"
NONE = (1 << 32) - 1  # llama.cpp's tools write this or 0 for "none"
_SHARED = ("general.", "split.", "tokenizer.")  # all other keys begin with the architecture's name
_UNSET: Any = object()

# Keys whose value changes no token and no logit here, and why.
HARMLESS = {
    "vocab_size": "the rows of the embedding are the vocabulary",
    "attention.layer_norm_epsilon": "of norms that subtract a mean, which no architecture here has",
    "pooling_type": "makes one vector of a text, which is not done here",
    "rope.scaling.finetuned": "how a model learned its scaling; Granite's meaning is read before",
    "split.no": "read when the parts were joined",
    "split.count": "read when the parts were joined",
    "split.tensors.count": "read when the parts were joined",
    "tokenizer.ggml.token_type_count": "kinds of segments, as BERT has",
    "tokenizer.chat_templates": "names of templates, which their own keys say too",
    "tokenizer.huggingface.json": "the same tokenizer once more",
}
HARMLESS |= dict.fromkeys(
    [f"tokenizer.ggml.{name}_token_id" for name in ("padding", "seperator", "mask")],
    "rows are padded with any token and masked; no task here separates or masks",
)
HARMLESS |= dict.fromkeys(
    [f"tokenizer.ggml.fim_{name}_token_id" for name in ("pre", "suf", "mid", "pad", "rep", "sep")]
    + [f"tokenizer.ggml.{name}_token_id" for name in ("prefix", "suffix", "middle")],
    "marks of a gap in a text, which prompts hold as text",
)
# Optional parts that a model lacks if the key is 0, false, empty or `NONE`.
OPTIONAL = frozenset(
    [f"expert_{x}" for x in ("used_count", "shared_count", "group_count", "group_used_count", "feed_forward_length")]
    + [f"expert_{x}" for x in ("shared_feed_forward_length", "weights_scale", "weights_norm", "gating_func")]
    + [f"attention.{x}" for x in ("q_lora_rank", "kv_lora_rank", "clamp_kqv", "max_alibi_bias", "shared_kv_layers")]
    + ["attn_logit_softcapping", "final_logit_softcapping", "attention.scale", "attention.sliding_window_pattern"]
    + ["leading_dense_block_count", "nextn_predict_layers", "n_deepstack_layers", "use_parallel_residual"]
    + ["rope.scaling.yarn_log_multiplier", "rope.scaling.alpha", "rope.dimension_sections"]
    + [f"tokenizer.ggml.{x}" for x in ("add_eos_token", "add_sep_token", "remove_extra_whitespaces")]
    + ["tokenizer.ggml.precompiled_charsmap"]
)


class Metadata:
    """Metadata of a file that tracks which keys were read, so that none is overlooked.

    Keys are given without the architecture: `attention.head_count`.

    Attributes:
        file: The GGUF file.
        arch: The architecture.
        rest: Metadata not read yet.
    """

    def __init__(self, file: File) -> None:
        self.file, self.arch = file, str(file.meta.get("general.architecture", ""))
        self.rest = dict(file.meta)

    def name(self, key: str) -> str:
        """Return the full name of a key in the file."""
        return key if key.startswith(_SHARED) else f"{self.arch}.{key}"

    def refuse(self, key: str, value: Any, cause: str, way_out: str = AGAIN) -> FormatError:
        """Build the error for a key's value, with the cause and the way out."""
        shown = repr(value)
        shown = shown if len(shown) < 60 else f"{shown[:50]}..."
        return FormatError(self.file.path, f"metadata {self.name(key)} is {shown}, {cause}", way_out)

    def take(self, key: str, default: Any = None) -> Any:
        """Take a key's value of any type."""
        return self.rest.pop(self.name(key), default)

    def number(self, key: str, kind: type, default: Any = None) -> Any:
        """Take a positive number; raises FormatError if it is absent and has no default."""
        value = self.take(key, default)
        valid = isinstance(value, int if kind is int else int | float) and not isinstance(value, bool)
        if not valid or not 0 < value < 1 << 32:
            raise self.refuse(key, value, "not a positive number")
        return kind(value)

    def optional(self, key: str, kind: type) -> Any:
        """Take a positive number; None if the key is absent or its value means none."""
        if _says_none(self.rest.get(self.name(key))):
            self.take(key)
            return None
        return self.number(key, kind)

    def flag(self, key: str, default: bool) -> bool:
        """Take a bool."""
        value = self.take(key, default)
        if not isinstance(value, bool):
            raise self.refuse(key, value, "neither true nor false")
        return value

    def text(self, key: str, default: str | None = None) -> str | None:
        """Take a string."""
        value = self.take(key, default)
        if value is not None and not isinstance(value, str):
            raise self.refuse(key, value, "no text")
        return value

    def only(self, key: str, *allowed: Any, cause: str, way_out: str = FOLDER) -> None:
        """Raise FormatError unless a key is absent or one of `allowed`; any other value would change the model."""
        value = self.take(key, allowed[0])
        plain = isinstance(value, int | float | str)
        if not plain or not any(value == x and isinstance(value, bool) == isinstance(x, bool) for x in allowed):
            raise self.refuse(key, value, cause, way_out)

    def done(self) -> None:
        """Raise FormatError if an unread key may change the model or tokenizer."""
        ours = (f"{self.arch}.", "split.", "tokenizer.")
        for name, value in self.rest.items():
            key = name.removeprefix(f"{self.arch}.")
            if not name.startswith(ours) or key in HARMLESS or (key in OPTIONAL and _says_none(value)):
                continue
            cut = f"if it changes nothing, take it out: gguf-new-metadata --remove-metadata {name} OLD.gguf NEW.gguf"
            raise self.refuse(
                key,
                value,
                "which nothing here reads, so it might change the model's function silently",
                f"{FOLDER}, or, {cut}",
            )


def _says_none(value: Any) -> bool:
    """Return whether a value means that the model lacks the part."""
    if isinstance(value, list | np.ndarray):
        return not any(value)
    return value is None or value == "" or (isinstance(value, int | float) and value in (0, NONE))
