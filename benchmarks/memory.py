"""Bytes of caches of 8,192 tokens, and peaks beside the weights, by the programs that a CPU would run; none is run.

python -m benchmarks.memory results/memory.json, which goes on where it was. A bfloat16 model's decoding holds its
weights as float32 too, for CPUs have no products of bfloat16.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import jkv
from jkv.cache.cache import tree_bytes
from jkv.core import sampling
from jkv.core.compilation import Cost
from jkv.core.decode_loop import Decoding, prefill_own, run_block
from jkv.prompts.allocation import CacheShape
from jkv.prompts.tokenization import stop_ids_of

PROMPT, NEW = 8128, 64
CACHES = "full", "int4", "int4(recent=0)", "int8"


def measured(params: Any, cache: str) -> dict[str, int]:
    """Bytes of the cache, and the peaks of a prompt in one piece and of a block of steps."""
    config, model = jkv.parse(cache).bound(params), params.config

    def start() -> Decoding:
        own = CacheShape(config, model, 1, PROMPT + NEW, NEW, params.embed.dtype).empty()
        return Decoding.start(own, jnp.zeros((1, model.vocab), jnp.float32), NEW, None)

    state = jax.eval_shape(start)
    draws = jax.eval_shape(lambda: sampling.make(1, model.vocab, seeds=[0], stop_ids=stop_ids_of(params)))
    number, decode, prefill = partial(jax.ShapeDtypeStruct, dtype=jnp.int32), Cost(runs=False), Cost(runs=False)
    decode.begin(run_block, params, state, draws, number(()))
    prefill.begin(prefill_own, params, state.cache, number((1, PROMPT)), fresh=True)
    return {"bytes": tree_bytes(state.cache), "peak_prefill": prefill.peak, "peak_decode": decode.peak}


if __name__ == "__main__":
    out = Path(sys.argv[1])
    rows = json.loads(out.read_text()) if out.exists() else []
    for dtype in ("bfloat16", "float32"):
        params = jkv.load("smollm2-135m", dtype)
        for cache in CACHES:
            key = {"cache": cache, "dtype": dtype, "tokens": PROMPT + NEW}
            if not any(key.items() <= row.items() for row in rows):
                rows.append(key | measured(params, cache))
                out.write_text(json.dumps(rows, indent=1) + "\n")
