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

CONTEXT = "int8", "data=1,model=4,context=2"
CACHES = "int8", "snapkv(budget=16384) | int4", "kivi", "full", "quest(pages=64, dense_layers=0)"


def cost(spec: str, mesh: str | None = None) -> dict[str, object]:
    model = models.read_config({**SHAPES["llama-3.1-8b"], "num_hidden_layers": 2})
    job = Job(model=model, config=methods.parse(spec), batch=8, context=32768, chunk=0, dtype=jnp.bfloat16, mesh=mesh)
    program = decode(job, target("v5e:2x4"))
    # codes of a device's 8 rows and kv heads, of 10,000 slots or more; a fusion's root may work in place
    moved = re.findall(
        r"^\s+%\S+ = ((?:u8|bf16)\[8,[12],\d{5,},\d+\])\S* (copy|convert|transpose)\(", program.text, re.M
    )
    return {
        "kernels": program.kernels,
        "cache": program.cache,
        "temporary": program.temporary,
        "copies": sorted(set(map(" ".join, moved))),
        "messages": [[x.place, x.kind, x.shape, x.count, x.bytes] for x in program.collectives],
    }


if __name__ == "__main__":
    print(json.dumps({**{spec: cost(spec) for spec in CACHES}, "context": cost(*CONTEXT)}))
