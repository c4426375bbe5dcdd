"""Small files of a model folder, and git-lfs pointers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jkv.io.errors import FormatError

AGAIN = "download the folder again"
INDEX = "model.safetensors.index.json"
TEMPLATES = "additional_chat_templates"  # a folder
_LARGEST = 1 << 26  # bytes of a text file: the largest tokenizers have half of that
_POINTER = b"version https://git-lfs.github.com/spec/"


def read_json(path: Path) -> dict[str, Any] | None:
    """Read the JSON object in a file; None if the file does not exist. Raises FormatError for anything else."""
    content = read_small(path)
    if content is None:
        return None
    try:
        value = json.loads(content)
    except (ValueError, RecursionError, OSError) as error:
        raise FormatError(path, f"it cannot be read as JSON ({error})", AGAIN) from error
    if not isinstance(value, dict):
        raise FormatError(path, f"it holds a {type(value).__name__} where a JSON object belongs", AGAIN)
    return value


def read_small(path: Path) -> bytes | None:
    """Read the bytes of a file; None if it does not exist. Raises FormatError if not regular or too large."""
    try:
        if not path.exists():
            return None
        if not path.is_file():
            raise FormatError(path, "it is not a regular file", AGAIN)
        if (size := path.stat().st_size) > _LARGEST:
            raise FormatError(path, f"it has {size:,} bytes; {_LARGEST:,} are the most", AGAIN)
        refuse_pointer(path)
        return path.read_bytes()
    except OSError as error:
        raise FormatError(path, f"it cannot be read ({error.strerror})", AGAIN) from error


def read_text(path: Path) -> str | None:
    """Read a UTF-8 file; None if it does not exist. Raises FormatError as `read_small`, and if it is not UTF-8."""
    content = read_small(path)
    try:
        return None if content is None else content.decode()
    except UnicodeDecodeError as error:
        raise FormatError(path, f"it cannot be read ({error})", AGAIN) from error


def refuse_pointer(path: Path) -> None:
    """Raise FormatError for a git-lfs pointer, which stands for a file that was not downloaded. Raises OSError."""
    with path.open("rb") as file:
        if file.read(len(_POINTER)) == _POINTER:
            cause = "it is a git-lfs pointer, which stands for a file that was not downloaded"
            raise FormatError(path, cause, "run `git lfs pull` in its folder")
