"""What each layer launches in a step of the decode loop on a Hopper GPU, by the real compiler: JSON.

`python tests/kernels/gpu_loop.py [CACHE ...]` prints it; `--write` makes it the golden numbers.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp

from jkv import methods, models
from jkv.aot.memory_estimate import Job, decode
from jkv.aot.targets import target
from jkv.bench.model_shapes import SHAPES

GOLDEN = Path(__file__).with_name("golden_gpu_loop.json")
CACHES = (
    "full",
    "int4",
    "kivi",
    "streaming(budget=1024)",
    "snapkv(budget=1024) | int4",
    "h2o(budget=1024)",
    "quest(pages=64, dense_layers=0)",
    "quest(pages=64, dense_layers=0) | int4",
)
SMALL = dict(hidden_size=1024, head_dim=128, intermediate_size=2048, vocab_size=4096)  # Llama's heads, and little else
QUIET = {"parameter", "constant", "get-tuple-element", "bitcast", "tuple"}  # instructions that launch nothing
CALLS = {"while": r"(?:body|condition)=(%[\w.\-]+)", "call": r"to_apply=(%[\w.\-]+)"}


def program(cache: str, layers: int) -> str:
    model = models.read_config({**SHAPES["llama-3.1-8b"], **SMALL, "num_hidden_layers": layers})
    config = methods.parse(cache)
    job = Job(model=model, config=config, batch=8, context=8192, chunk=0, dtype=jnp.bfloat16)
    return decode(job, target("h200")).text


def launches(text: str) -> Counter[str]:
    """Kernels and copies of one step by the operations of jax that they end with; of a loop inside it, one turn."""
    bodies: dict[str, list[tuple[str, str, str]]] = {}  # of a computation: opcode, operation of jax, line
    name = ""
    for line in text.splitlines():
        if (head := re.match(r"(?:ENTRY )?(%[\w.\-]+) \(", line)) is not None:
            name = head[1]
        elif (op := re.match(r"\s+(?:ROOT )?%[\w.\-]+ = .*? ([a-z][\w\-]*)\(", line)) is not None:
            by = re.search(r'op_name="([^"]*)"', line)
            bodies.setdefault(name, []).append((op[1], by[1] if by else op[1], line))

    def inside(name: str) -> Iterator[str]:
        for op, by, line in bodies[name]:
            if op in CALLS:
                for called in re.findall(CALLS[op], line):
                    yield from inside(called)
            elif op not in QUIET:
                name = by.split("step/while/body/")[-1].removeprefix("jit(attending)/")
                yield re.sub(r"jit\(_of_few\)/cond/branch_\d_fun/", "", name)  # a product, of few rows

    (step,) = (line for body in bodies.values() for op, by, line in body if op == "while" and by.endswith("step/while"))
    return Counter(inside(re.findall(CALLS["while"], step)[-1]))


def layer(cache: str) -> dict[str, int]:
    """What a third layer adds to two."""
    two, three = (launches(program(cache, n)) for n in (2, 3))
    return {name: three[name] - two[name] for name in sorted(three | two) if three[name] != two[name]}


if __name__ == "__main__":
    caches = [text for text in sys.argv[1:] if text != "--write"]
    found = {cache: layer(cache) for cache in caches or CACHES}
    if "--write" in sys.argv:
        golden = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {"why": {}, "layer": {}}
        golden |= {"jax": jax.__version__, "layer": golden["layer"] | found}
        GOLDEN.write_text(json.dumps(golden, indent=1) + "\n")
    print(json.dumps(found))
