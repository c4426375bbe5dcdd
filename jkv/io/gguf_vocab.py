"""The tokenizer of a GGUF file, rebuilt from its metadata."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from jkv.io.errors import FormatError, refusing
from jkv.io.gguf_keys import AGAIN, FOLDER, NONE, Metadata
from jkv.io.pretokenizers import CUTS, DEFAULT, Cut
from jkv.io.tokenizer import Tokenizer
from jkv.utils.notes import note

if TYPE_CHECKING:
    import tokenizers

_NORMAL, _CONTROL, _USER = 1, 3, 4
_MAX_TOKEN = 256
# Keys that only the other kind of tokenizer uses, and why they change nothing here.
UNUSED = {
    "gpt2": {
        "tokenizer.ggml.scores": "merges decide what is joined first",
        "tokenizer.ggml.unknown_token_id": "each byte is a token, so none is unknown",
    },
    "llama": {"tokenizer.ggml.merges": "scores decide", "tokenizer.ggml.pre": "the text is cut into no words"},
}
# Control tokens that end a generation even if the metadata names only one of them.
_ENDS = ("<|im_end|>", "<|eot_id|>", "<|end_of_text|>", "<|endoftext|>", "<end_of_turn>", "</s>")


def build_tokenizer(meta: Metadata) -> Tokenizer | None:
    """Build the file's tokenizer; None if it has none. Raises FormatError if it is broken or unsupported."""
    model = meta.text("tokenizer.ggml.model")
    if model in (None, "none", "no_vocab"):
        return None
    builders = {"gpt2": _byte_level, "llama": _sentencepiece}
    if model not in builders:
        raise FormatError(
            meta.file.path, f"its tokenizer is of kind {model!r}", f"use a model with {' or '.join(builders)}"
        )
    for key in UNUSED[model]:
        meta.take(key)
    tokens, types = _tokens(meta)
    with refusing(meta.file.path, "its tokenizer cannot be built", AGAIN):
        core, begins = builders[model](meta, tokens, types)
        _add_special(core, tokens, types)
    return Tokenizer(
        core,
        bos_id=_special_id(meta, "bos", len(tokens)),
        eos_ids=_end_ids(meta, tokens, types),
        add_bos=meta.flag("tokenizer.ggml.add_bos_token", begins),
        template=meta.text("tokenizer.chat_template"),
        tool_template=_tool_template(meta),
    )


def _tokens(meta: Metadata) -> tuple[list[str], np.ndarray]:
    tokens = meta.take("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens or len(set(tokens)) != len(tokens):
        raise FormatError(meta.file.path, "tokenizer.ggml.tokens is not a list of distinct texts", AGAIN)
    types = meta.take("tokenizer.ggml.token_type", np.full(len(tokens), _NORMAL))
    if not isinstance(types, np.ndarray) or len(types) != len(tokens):
        raise FormatError(meta.file.path, f"tokenizer.ggml.token_type is not {len(tokens)} numbers", AGAIN)
    return tokens, types


def _tool_template(meta: Metadata) -> str | None:
    """Return the chat template for tools, if the file has one; a note names templates that are not used."""
    tools = meta.text("tokenizer.chat_template.tool_use")
    if others := [key for key in meta.rest if key.startswith("tokenizer.chat_template.")]:
        for key in others:
            meta.take(key)
        note(f"{meta.file.path} has {', '.join(others)} too, which nothing here reads")
    return tools


def _special_id(meta: Metadata, name: str, size: int) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    value = meta.take(key)
    if value is None or value == NONE:
        return None
    if type(value) is not int or not 0 <= value < size:
        raise FormatError(meta.file.path, f"{key} is {value!r} but there are {size} tokens", AGAIN)
    return value


def _end_ids(meta: Metadata, tokens: list[str], types: np.ndarray) -> list[int]:
    named = [_special_id(meta, name, len(tokens)) for name in ("eos", "eot", "eom")]
    found = [int(i) for i in np.flatnonzero(types == _CONTROL) if tokens[i] in _ENDS]
    return [i for i in named if i is not None] + found


def _add_special(core: tokenizers.Tokenizer, tokens: list[str], types: np.ndarray) -> None:
    from tokenizers import AddedToken

    control = [AddedToken(tokens[i], special=True, normalized=False) for i in np.flatnonzero(types == _CONTROL)]
    user = [AddedToken(tokens[i], special=False, normalized=False) for i in np.flatnonzero(types == _USER)]
    core.add_special_tokens(control)
    core.add_tokens(user)


def _byte_level(meta: Metadata, tokens: list[str], types: np.ndarray) -> tuple[tokenizers.Tokenizer, bool]:
    """Build byte-level BPE as in GPT-2; also return whether the family's texts start with a begin token."""
    from tokenizers import Tokenizer, decoders, normalizers
    from tokenizers.models import BPE

    merges = meta.take("tokenizer.ggml.merges")
    if not isinstance(merges, list):
        raise FormatError(meta.file.path, "tokenizer.ggml.merges is missing", AGAIN)
    # Check that every merge joins two tokens into a third.
    vocab = {token: i for i, token in enumerate(tokens)}
    pairs = [tuple(merge.split(" ")) for merge in merges]
    for pair in pairs:
        if len(pair) != 2 or not (pair[0] in vocab and pair[1] in vocab and pair[0] + pair[1] in vocab):
            raise FormatError(meta.file.path, f"merge {' '.join(pair)!r} is not of two tokens into a third", AGAIN)
    if meta.flag("tokenizer.ggml.add_space_prefix", False):
        note(f"{meta.file.path} asks for a space before each text: byte-level tokenizers add none, as in llama.cpp")
    cut = _choose_cut(meta)
    core = Tokenizer(BPE(vocab, pairs, ignore_merges=cut.whole))
    if cut.composed:
        core.normalizer = normalizers.NFC()
    core.pre_tokenizer = cut.build()
    core.decoder = decoders.ByteLevel()
    return core, cut.begins


def _choose_cut(meta: Metadata) -> Cut:
    """Choose the pre-tokenizer; prints a note if the file names none, because tokens may then be wrong."""
    key = "tokenizer.ggml.pre"
    pre = meta.text(key)
    if pre not in (None, "", DEFAULT):
        if pre not in CUTS:
            raise meta.refuse(key, pre, f"a pre-tokenizer that is not known; known are {', '.join(CUTS)}", FOLDER)
        return CUTS[pre]
    how = "names no family" if pre else "is missing"
    fix = "gguf-new-metadata --pre-tokenizer NAME OLD.gguf NEW.gguf"
    note(f"{meta.file.path}: {key} {how}, so words are cut by llama.cpp's default, which is a guess; name it: {fix}")
    return CUTS[DEFAULT]


def _sentencepiece(meta: Metadata, tokens: list[str], types: np.ndarray) -> tuple[tokenizers.Tokenizer, bool]:
    """Build SentencePiece BPE: any two tokens whose concatenation is a token merge, best score first."""
    from tokenizers import Tokenizer, decoders, normalizers
    from tokenizers.models import BPE

    scores = meta.take("tokenizer.ggml.scores")
    if not isinstance(scores, np.ndarray) or len(scores) != len(tokens):
        raise FormatError(meta.file.path, f"tokenizer.ggml.scores is not {len(tokens)} numbers", AGAIN)
    if max(map(len, tokens)) > _MAX_TOKEN:
        raise FormatError(meta.file.path, f"it has a token of more than {_MAX_TOKEN} characters", AGAIN)
    # List every split of a token into two tokens, best-scored token first.
    vocab = {token: i for i, token in enumerate(tokens)}
    order = np.argsort(-scores.astype(np.float64), kind="stable")
    merges = [
        (word[:cut], word[cut:])
        for word in (tokens[i] for i in order if types[i] == _NORMAL)
        for cut in range(1, len(word))
        if word[:cut] in vocab and word[cut:] in vocab
    ]
    unknown = _special_id(meta, "unknown", len(tokens))
    core = Tokenizer(
        BPE(vocab, merges, byte_fallback=True, fuse_unk=True, unk_token=None if unknown is None else tokens[unknown])
    )
    prefix = meta.flag("tokenizer.ggml.add_space_prefix", True)
    replace: Any = [normalizers.Replace(" ", "▁")]
    core.normalizer = normalizers.Sequence(([normalizers.Prepend("▁")] if prefix else []) + replace)
    steps: Any = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    core.decoder = decoders.Sequence(steps + ([decoders.Strip(" ", 1, 0)] if prefix else []))
    return core, True
