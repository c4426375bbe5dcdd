"""Caches whose codes lie on the host or on its disk, beside the same on the device: bytes, what a step moves, and hits.

python -m benchmarks.placement results/placement.json, which goes on where it was. The prompt is the beginning of
docs/design.md, read by SmolLM2-135M in float32.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import jkv
from jkv.generation.receipt import moved_bytes, pages_asked

PROMPT, NEW, EIGHTH = 1419, 32, 9332400  # tokens; bytes of an eighth of the full cache
HOT = "host='all', hot=16"
CACHES = (
    "full",
    f"full(host='auto', device_bytes={EIGHTH})",
    "quest(pages=8, page=16, dense_layers=0)",
    f"quest(pages=8, page=16, dense_layers=0, host='auto', device_bytes={EIGHTH})",
    f"full(host='auto', device_bytes={EIGHTH}, disk='.')",
    f"quest(pages=8, page=16, dense_layers=0, {HOT})",
    f"quest(pages=8, page=16, dense_layers=0, {HOT}, disk='.')",
    f"attentionpredictor(pages=8, page=16, dense_layers=0, {HOT})",
    f"lrqk(tokens=128, page=16, {HOT})",
    f"icecache(pages=8, page=16, {HOT})",
    f"infinigen(tokens=128, page=16, dense_layers=0, {HOT})",
)

if __name__ == "__main__":
    out, params = Path(sys.argv[1]), jkv.load("smollm2-135m", "float32")
    assert params.tokenizer is not None
    text = (Path(__file__).parent.parent / "docs" / "design.md").read_text()
    prompt, known = params.tokenizer.encode(text)[:PROMPT], {}
    found = json.loads(out.read_text()) if out.exists() else {"model": "smollm2-135m", "dtype": "float32", "rows": []}

    def ran(cache: str) -> jkv.Result:
        return jkv.generate(params, cache, [prompt], max_new_tokens=NEW, stop_ids=())

    for cache in CACHES:
        if any(row["cache"] == cache for row in found["rows"]):
            continue
        here = re.sub(r"(, )?host=.*\)|\(host=.*\)", lambda m: ")" if m[1] else "", cache)
        far = ran(cache)
        near = known[here] = far if here == cache else known.get(here) or ran(here)
        hits, misses = pages_asked(far.cache)
        row = {
            "cache": cache,
            "prompt": PROMPT,
            "new": NEW,
            "same": far.tokens == near.tokens,
            "device": far.cache.nbytes - far.cache.on_host - far.cache.on_disk,
            "host": far.cache.on_host,
            "disk": far.cache.on_disk,
            "moved": moved_bytes(far.cache, ran=True),
            "hits": hits,
            "misses": misses,
        }
        found["rows"].append(row)
        out.write_text(json.dumps(found, indent=1) + "\n")
        print(row, flush=True)
