"""Split GGUF models: the other parts are found beside any one of them."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from jkv.io.errors import FormatError
from jkv.io.gguf import File, open_file

_NAME = re.compile(r"(?P<model>.+)-(?P<part>\d{5})-of-(?P<count>\d{5})\.gguf")
_COUNT, _PLACE, _TENSORS = "split.count", "split.no", "split.tensors.count"
_MOST = 1000  # maximum parts of a model: the largest have a few hundred


def list_parts(name: str) -> list[str]:
    """List the file names of all parts of a model, given the name of one part.

    >>> list_parts("m-00002-of-00003.gguf")
    ['m-00001-of-00003.gguf', 'm-00002-of-00003.gguf', 'm-00003-of-00003.gguf']
    >>> list_parts("m.gguf")
    ['m.gguf']
    """
    if not (match := _NAME.fullmatch(name)) or not 1 <= int(match["part"]) <= int(match["count"]) <= _MOST:
        return [name]
    return [f"{match['model']}-{i + 1:05}-of-{match['count']}.gguf" for i in range(int(match["count"]))]


def open_model(path: str | Path) -> File:
    """Open the GGUF file at `path`, joined with the other parts if its model is split.

    The metadata is that of the first part, because only that part has it.

    Raises:
        FormatError: A part is broken, missing, or belongs to another model.
    """
    file = open_file(path)
    count = file.meta.get(_COUNT, 1)
    if count in (0, 1):
        return file
    names = list_parts(file.path.name)
    if len(names) != count:
        cause = f"it is a part of {count!r}, which its name does not say"
        raise FormatError(path, cause, f"name it as it was made, such as MODEL-00001-of-0000{count}.gguf")
    return _join([_open_part(file.path.with_name(name), i, count) for i, name in enumerate(names)])


def _open_part(path: Path, place: int, count: int) -> File:
    if not path.exists():
        way_out = "put it beside the others, or join them elsewhere with llama-gguf-split --merge"
        raise FormatError(path, f"part {place + 1} of {count} is missing", way_out)
    file = open_file(path)
    said = file.meta.get(_PLACE), file.meta.get(_COUNT)
    if said != (place, count):
        cause = f"{_PLACE} and {_COUNT} are {said[0]!r} and {said[1]!r}, where its name means {place} and {count}"
        raise FormatError(path, cause, "download all parts again")
    return file


def _join(files: list[File]) -> File:
    first, tensors = files[0], dict(files[0].tensors)
    for file in files[1:]:
        if own := [key for key in file.meta if not key.startswith(("split.", "general."))]:
            raise FormatError(file.path, f"it has {own[0]}, which only a first part has", "download all parts again")
        if twice := tensors.keys() & file.tensors.keys():
            raise FormatError(
                file.path, f"tensor {min(twice)!r} is in a part before it too", "download all parts again"
            )
        tensors |= file.tensors
    if (told := first.meta.get(_TENSORS, len(tensors))) != len(tensors):
        cause = f"{_TENSORS} is {told!r} but its parts have {len(tensors):,}"
        raise FormatError(first.path, cause, "download all parts again")
    return replace(first, tensors=tensors)
