"""Texts packed by SmolLM2-135M's probabilities, beside common compressors, and whether they come back.

python results/pack.py results/pack.json. The first 8,192 bytes of held-back prose (Python's manual) and of code (its
standard library), in float32.
"""

from __future__ import annotations

import bz2
import json
import lzma
import sys
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jkv
from jkv.bench.environment import meta
from jkv.eval import corpora
from jkv.eval.pack import pack, unpack

BYTES, TEXTS, CACHES = 8192, ("pydoc:test", "stdlib:test"), ("full", "int4", "streaming(budget=512) | int4")
OTHERS: dict[str, Callable[[bytes], bytes]] = {
    "zlib": lambda x: zlib.compress(x, 9),
    "bz2": lambda x: bz2.compress(x, 9),
    "xz": lambda x: lzma.compress(x, preset=9 | lzma.PRESET_EXTREME),
}


def packed(params: jkv.models.Params, text: str, cache: str, path: Path) -> dict[str, Any]:
    tokens = pack(params, text, cache, path)
    return {"cache": cache, "bytes": path.stat().st_size, "tokens": tokens, "same": unpack(params, path) == text}


if __name__ == "__main__":
    params = jkv.load("smollm2-135m", "float32")
    about = meta("smollm2-135m", 1, dtype="float32", text_bytes=BYTES)
    rows: list[dict[str, Any]] = []
    for name in TEXTS:
        text = corpora.text(name).encode()[:BYTES].decode(errors="ignore")
        own = {"text": name, "text_bytes": len(text.encode())}
        rows += [own | {"by": by, "bytes": len(shrink(text.encode()))} for by, shrink in OTHERS.items()]
        with tempfile.TemporaryDirectory() as folder:
            for cache in CACHES:
                rows.append(own | {"by": "jkv"} | packed(params, text, cache, Path(folder) / "packed"))
                print(rows[-1], flush=True)
                Path(sys.argv[1]).write_text(json.dumps({"meta": about, "rows": rows}, indent=1) + "\n")
