"""The decode loop of two layers of Llama-3.1-8B on v5e:2x4, as the TPU compiler makes it: JSON, a row a cache."""

from __future__ import annotations

import json
import os
import re

os.environ["JAX_PLATFORMS"] = "cpu"

import jax.numpy as jnp

from jkv import methods, models
from jkv.aot import target
from jkv.bench.shapes import SHAPES
from jkv.plan import Job, decode

CACHES = "int8", "snapkv(budget=16384) | int4", "kivi", "full", "quest(pages=64, dense_layers=0)"


def cost(spec: str) -> dict[str, object]:
    model = models.read_config({**SHAPES["llama-3.1-8b"], "num_hidden_layers": 2})
    job = Job(model=model, config=methods.parse(spec), batch=8, context=32768, chunk=0, dtype=jnp.bfloat16)
    program = decode(job, target("v5e:2x4"))
    # codes of the 8 rows and the one kv head of a device, of 10,000 slots or more; a fusion's root may work in place
    moved = re.findall(r"^\s+%\S+ = ((?:u8|bf16)\[8,1,\d{5,},\d+\])\S* (copy|convert|transpose)\(", program.text, re.M)
    return {
        "kernels": program.kernels,
        "cache": program.cache,
        "temporary": program.temporary,
        "copies": sorted(set(map(" ".join, moved))),
    }


if __name__ == "__main__":
    print(json.dumps({spec: cost(spec) for spec in CACHES}))
