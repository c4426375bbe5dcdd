"""The tokenizer inside a GGUF file, rebuilt from its metadata."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from jkv.io.errors import FormatError, refusing
from jkv.io.gguf import File
from jkv.io.tokenizer import Tokenizer

if TYPE_CHECKING:
    import tokenizers

_AGAIN = "download or convert it again"
_NORMAL, _CONTROL, _USER = 1, 3, 4
_MAX_TOKEN = 256
# How words are cut before merging, per family: contractions, letters, digits, punctuation, line ends, spaces.
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = ("llama-bpe", "llama3", "llama-v3", "smaug-bpe")
_QWEN = ("qwen2", "deepseek-r1-qwen")
_GPT2 = ("default", "gpt-2")
# Control tokens that end an answer even where the metadata names only one of them.
_ENDS = ("<|im_end|>", "<|eot_id|>", "<|end_of_text|>", "<|endoftext|>", "<end_of_turn>", "</s>")


def build_tokenizer(file: File) -> Tokenizer | None:
    """The file's tokenizer, None if it has none; raises FormatError if it is broken or of an unknown kind."""
    meta = file.meta
    model = meta.get("tokenizer.ggml.model")
    if model is None:
        return None
    builders = {"gpt2": _byte_level, "llama": _sentencepiece}
    if model not in builders:
        raise FormatError(file.path, f"its tokenizer is of kind {model!r}", f"use a model with {' or '.join(builders)}")
    tokens, types = _tokens(file)
    with refusing(file.path, "its tokenizer cannot be built", _AGAIN):
        core = builders[model](file, tokens, types)
        _add_special(core, tokens, types)
    pre = meta.get("tokenizer.ggml.pre")
    # Files often leave this out where the family always does it.
    add_bos = meta.get("tokenizer.ggml.add_bos_token", model == "llama" or pre in _LLAMA3)
    template = meta.get("tokenizer.chat_template")
    return Tokenizer(
        core,
        bos_id=_special_id(file, "bos", len(tokens)),
        eos_ids=_end_ids(file, tokens, types),
        add_bos=bool(add_bos),
        template=template if isinstance(template, str) else None,
    )


def _tokens(file: File) -> tuple[list[str], np.ndarray]:
    tokens = file.meta.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens or len(set(tokens)) != len(tokens):
        raise FormatError(file.path, "tokenizer.ggml.tokens is not a list of distinct texts", _AGAIN)
    types = file.meta.get("tokenizer.ggml.token_type", np.full(len(tokens), _NORMAL))
    if not isinstance(types, np.ndarray) or len(types) != len(tokens):
        raise FormatError(file.path, f"tokenizer.ggml.token_type is not {len(tokens)} numbers", _AGAIN)
    return tokens, types


def _special_id(file: File, name: str, size: int) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    value = file.meta.get(key)
    if value is None:
        return None
    if not isinstance(value, int) or not 0 <= value < size:
        raise FormatError(file.path, f"{key} is {value!r} but there are {size} tokens", _AGAIN)
    return value


def _end_ids(file: File, tokens: list[str], types: np.ndarray) -> list[int]:
    named = [_special_id(file, name, len(tokens)) for name in ("eos", "eot", "eom")]
    found = [int(i) for i in np.flatnonzero(types == _CONTROL) if tokens[i] in _ENDS]
    return [i for i in named if i is not None] + found


def _add_special(core: tokenizers.Tokenizer, tokens: list[str], types: np.ndarray) -> None:
    from tokenizers import AddedToken

    control = [AddedToken(tokens[i], special=True, normalized=False) for i in np.flatnonzero(types == _CONTROL)]
    user = [AddedToken(tokens[i], special=False, normalized=False) for i in np.flatnonzero(types == _USER)]
    core.add_special_tokens(control)
    core.add_tokens(user)


def _byte_level(file: File, tokens: list[str], types: np.ndarray) -> tokenizers.Tokenizer:
    """Byte-pair encoding over bytes, as GPT-2 has it; the families differ in how they cut words first."""
    from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers
    from tokenizers.models import BPE

    pre = file.meta.get("tokenizer.ggml.pre", "default")
    merges = file.meta.get("tokenizer.ggml.merges")
    if not isinstance(merges, list):
        raise FormatError(file.path, "tokenizer.ggml.merges is missing", _AGAIN)
    vocab = {token: i for i, token in enumerate(tokens)}
    pairs = [tuple(merge.split(" ")) for merge in merges]
    for pair in pairs:
        if len(pair) != 2 or not (pair[0] in vocab and pair[1] in vocab and pair[0] + pair[1] in vocab):
            raise FormatError(file.path, f"merge {' '.join(pair)!r} is not of two tokens into a third", _AGAIN)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pre == "smollm":
        cut: Any = [pre_tokenizers.Digits(individual_digits=True), byte_level]
    elif pre in _GPT2:
        cut = [byte_level]
    elif pre in _LLAMA3 or pre in _QWEN:
        pattern = Regex(_SPLIT % ("{1,3}" if pre in _LLAMA3 else ""))
        plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        cut = [pre_tokenizers.Split(pattern, "isolated"), plain]
    else:
        known = ", ".join(("smollm", *_GPT2, *_LLAMA3, *_QWEN))
        raise FormatError(file.path, f"its pre-tokenizer {pre!r} is unknown", f"use a model with one of {known}")
    # Llama 3 takes a whole word that is a token as it is, even if no merges lead to it.
    core = Tokenizer(BPE(vocab, pairs, ignore_merges=pre in _LLAMA3))
    if pre in _QWEN:
        core.normalizer = normalizers.NFC()
    core.pre_tokenizer = pre_tokenizers.Sequence(cut)
    core.decoder = decoders.ByteLevel()
    return core


def _sentencepiece(file: File, tokens: list[str], types: np.ndarray) -> tokenizers.Tokenizer:
    """SentencePiece byte-pair encoding: any two tokens whose join is a token merge, the best-scored join first."""
    from tokenizers import Tokenizer, decoders, normalizers
    from tokenizers.models import BPE

    scores = file.meta.get("tokenizer.ggml.scores")
    if not isinstance(scores, np.ndarray) or len(scores) != len(tokens):
        raise FormatError(file.path, f"tokenizer.ggml.scores is not {len(tokens)} numbers", _AGAIN)
    if max(map(len, tokens)) > _MAX_TOKEN:
        raise FormatError(file.path, f"it has a token of more than {_MAX_TOKEN} characters", _AGAIN)
    vocab = {token: i for i, token in enumerate(tokens)}
    order = np.argsort(-scores.astype(np.float64), kind="stable")
    merges = [
        (word[:cut], word[cut:])
        for word in (tokens[i] for i in order if types[i] == _NORMAL)
        for cut in range(1, len(word))
        if word[:cut] in vocab and word[cut:] in vocab
    ]
    unknown = _special_id(file, "unknown", len(tokens))
    core = Tokenizer(
        BPE(vocab, merges, byte_fallback=True, fuse_unk=True, unk_token=None if unknown is None else tokens[unknown])
    )
    prefix = bool(file.meta.get("tokenizer.ggml.add_space_prefix", True))
    replace: Any = [normalizers.Replace(" ", "▁")]
    core.normalizer = normalizers.Sequence(([normalizers.Prepend("▁")] if prefix else []) + replace)
    steps: Any = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    core.decoder = decoders.Sequence(steps + ([decoders.Strip(" ", 1, 0)] if prefix else []))
    return core
