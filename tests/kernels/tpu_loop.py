"""Programs of two layers, or one, on v5e:2x4, as the TPU compiler makes them: JSON, a row a name that is asked for."""

from __future__ import annotations

import json
import os
import re
import sys
from functools import partial

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from jkv import methods, models
from jkv.aot.hlo import cycles
from jkv.aot.memory_estimate import Job, decode, programs
from jkv.aot.targets import target
from jkv.bench.model_shapes import SHAPES
from jkv.models.llama import linear

LLAMA, QWEN, SMOLLM = "llama-3.1-8b", "qwen3-8b", "smollm2-135m"
SIZES = {LLAMA: (8, 32768), QWEN: (8, 32768), SMOLLM: (64, 8192)}  # rows, and tokens of each
DECODE = [
    (QWEN, "int8", 1),
    (LLAMA, "snapkv(budget=16384) | int4"),
    (LLAMA, "kivi", 1),
    (LLAMA, "full"),
    (LLAMA, "quest(pages=64, dense_layers=0)"),
    (LLAMA, "adakv(budget=4096) | int8", 1),  # a pool, in one layer: its contests take long to compile
    (LLAMA, "mustafar", 1),
    (LLAMA, "turboquant", 1),
    (LLAMA, "fp8", 1),
    (SMOLLM, "int4(group=32)", 1),  # three kv heads: the devices divide rows
]
CONTEXT = LLAMA, "int8", 2, "data=1,model=4,context=2"
PREFILL = LLAMA, "full", 2048


def job(name: str, spec: str, tokens: int, layers: int, mesh: str | None = None) -> Job:
    model = models.read_config({**SHAPES[name], "num_hidden_layers": layers})
    batch, config = SIZES[name][0], methods.parse(spec)
    return Job(model=model, config=config, batch=batch, context=tokens, chunk=0, dtype=jnp.bfloat16, mesh=mesh)


def loop(name: str, spec: str, layers: int = 2, mesh: str | None = None) -> dict[str, object]:
    program = decode(job(name, spec, SIZES[name][1], layers, mesh), target("v5e:2x4"))
    # Codes of a device's rows and kv heads, of 4,000 slots or more; a fusion's root may work in place.
    codes = r"(?:u8|u16|bf16)\[\d+,\d+,(?:[4-9]\d{3}|\d{5,}),\d{2,}\]"
    moved = re.findall(rf"^\s+%\S+ = ({codes})\S* (copy|convert|transpose)\(", program.text, re.M)
    return {
        "kernels": program.kernels,
        "layer": program.cache // layers,
        "temporary": program.temporary,
        "copies": sorted(set(map(" ".join, moved))),
        "messages": [[x.place, x.kind, x.shape, x.count, x.bytes] for x in program.collectives],
        "encoded": encoded(program.text),
    }


def encoded(text: str) -> list[str]:
    """What makes the codes of newcomers that `place` reads, and where they are: S(1) is the chip's own memory."""
    made = {name: (op, "S(1)" in where) for name, where, op in re.findall(r"^\s+(%\S+) = (\S+) ([\w-]+)\(", text, re.M)}
    last = r"(%[^,()]+), %[^,()]+\)"  # the newcomers, and the tier
    codes = re.findall(rf"= u8\S+ custom-call\((?:%[^,()]+, )*{last},.*/place/pallas_call", text)
    return sorted({f"{op} {'on' if inside else 'off'} the chip" for op, inside in map(made.__getitem__, codes)})


def prefill(name: str, spec: str, tokens: int) -> dict[str, object]:
    program = next(programs(job(name, spec, tokens, 2), target("v5e:2x4")))
    calls = len(re.findall(r"custom-call\(.*prefill_attention", program.text))
    return {"kernels": program.kernels, "calls": calls, "temporary": program.temporary}


def product(rows: int) -> int:
    """Cycles of a product with weights bfloat16 [10576, 2560]."""
    device = SingleDeviceSharding(target("v5e:2x4").devices[0])
    w, x = (jax.ShapeDtypeStruct(s, jnp.bfloat16, sharding=device) for s in ((10576, 2560), (rows, 1, 2560)))
    return cycles(jax.jit(linear).lower(w, x).compile().as_text())["once"]


PROGRAMS = {
    **{" ".join(x[:2]): partial(loop, *x) for x in DECODE},
    "prefill": partial(prefill, *PREFILL),
    "context": partial(loop, *CONTEXT),
    "products": lambda: [product(1), product(2)],
}

if __name__ == "__main__":
    print(json.dumps({name: PROGRAMS[name]() for name in sys.argv[1:] or PROGRAMS}))
