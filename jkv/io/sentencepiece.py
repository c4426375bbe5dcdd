"""SentencePiece BPE models (tokenizer.model), read without the sentencepiece package."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from jkv.io.errors import FormatError, refusing
from jkv.io.gguf import File
from jkv.io.gguf_keys import Metadata
from jkv.io.gguf_vocab import build_tokenizer
from jkv.io.tokenizer import Tokenizer

# Field numbers of sentencepiece_model.proto that change tokenization.
_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3
_PIECE, _SCORE, _TYPE = 1, 2, 3
_KIND, _SUFFIX, _BPE = 3, 24, 2
_IDS = {"unknown": (40, 0), "bos": (41, 1), "eos": (42, 2)}  # field number, default
_TABLE, _PREFIX, _SQUEEZE, _ESCAPE = 2, 3, 4, 5


def build(path: Path, content: bytes, way_out: str) -> Tokenizer | None:
    """Build the tokenizer from the bytes of a SentencePiece model.

    Args:
        path: The file, for error messages.
        content: The bytes of the file.
        way_out: Advice for error messages.

    Raises:
        FormatError: The file is broken, or its model would tokenize differently from the supported kind.
    """
    with refusing(path, "it is no SentencePiece model", way_out):
        fields: dict[int, list[Any]] = {}
        for number, value in _fields(content):
            fields.setdefault(number, []).append(value)
        pieces = [dict(_fields(piece)) for piece in fields[_PIECES]]
        trainer, normalizer = (dict(_fields(fields.get(n, [b""])[-1])) for n in (_TRAINER, _NORMALIZER))
        tokens = [piece[_PIECE].decode() for piece in pieces]
        scores = [struct.unpack("<f", piece.get(_SCORE, bytes(4)))[0] for piece in pieces]
    # Reject settings that are not implemented.
    other = {
        "it cuts texts by a unigram model or by words": trainer.get(_KIND, 1) != _BPE,
        "it marks the ends of words": trainer.get(_SUFFIX, 0),
        "it replaces characters of a text": normalizer.get(_TABLE, b""),
        "it drops spaces of a text": normalizer.get(_SQUEEZE, 1),
        "it keeps spaces apart": not normalizer.get(_ESCAPE, 1),
    }
    if found := [cause for cause, holds in other.items() if holds]:
        raise FormatError(path, f"{found[0]}, which is not implemented", way_out)
    ids = {name: trainer.get(number, default) for name, (number, default) in _IDS.items()}
    meta = {
        "model": "llama",
        "tokens": tokens,
        "scores": np.array(scores, np.float32),
        "token_type": np.array([piece.get(_TYPE, 1) for piece in pieces]),
        **{f"{name}_token_id": i for name, i in ids.items() if i < len(tokens)},  # an absent id is -1, unsigned
        "add_space_prefix": bool(normalizer.get(_PREFIX, 1)),
    }
    # The same metadata as in a GGUF file of such a model.
    file = File(path, {f"tokenizer.ggml.{name}": x for name, x in meta.items()}, {})
    return build_tokenizer(Metadata(file))


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Yield number and value (int or bytes) of each field of a protobuf message; ValueError if it is malformed."""
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            if at >= len(data) or shift > 63:
                raise ValueError(f"a number is cut at byte {at}")
            byte, at = data[at], at + 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while at < len(data):
        key = varint()
        number, wire = key >> 3, key & 7
        if wire == 0:
            yield number, varint()
            continue
        size = {1: 8, 5: 4}.get(wire) or (varint() if wire == 2 else len(data))
        if size > len(data) - at:
            raise ValueError(f"field {number} of kind {wire} at byte {at} does not fit")
        yield number, data[at : at + size]
        at += size
