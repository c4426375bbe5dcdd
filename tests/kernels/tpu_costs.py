"""What the TPU compiler makes of the kernels: python tests/kernels/tpu_costs.py [--write] [CASE ...] prints JSON, a row
a case, of all cases if none is named.

A process of its own: the compiler is loaded once, with its dumps, and the tests' process stays without it.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jkv.aot import tpu
from jkv.kernels.attention_column_sums import tpu as columns
from jkv.kernels.decode_attention.tpu import TOGETHER, attention, tile_size
from jkv.kernels.decode_attention.tpu_operands import least_tile
from jkv.kernels.paged_attention.tpu import attention as paged
from jkv.kernels.prefill_attention import tpu as prefill
from jkv.methods.quantization.sparse import Sparse
from jkv.protocols import KernelCodes

GOLDEN = Path(__file__).with_name("golden_tpu.json")
C, H, PAGES = 131072, 8, 64
FORMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "bf16": (dict(bits=0), dict(bits=0)),
    "fp8": (dict(bits=0, form="float8"),) * 2,
    "int8": (dict(bits=8), dict(bits=8)),
    "int4": (dict(bits=4), dict(bits=4)),
    "int4 groups of 32": (dict(bits=4, group=32), dict(bits=4, group=32)),
    "int2": (dict(bits=2), dict(bits=2)),
    "kivi 2": (dict(bits=2, tokens=32), dict(bits=2, group=32)),
    "int3": (dict(bits=3), dict(bits=3)),
    "kivi 3": (dict(bits=3, tokens=32), dict(bits=3, group=32)),
    **{f"turboquant {bits}": (dict(bits=bits, form="table"),) * 2 for bits in (2, 3, 4)},
    "bfp 4": (dict(bits=4, group=32, form="power"),) * 2,
    "sparse 0.7": (dict(bits=0, sparsity=0.7), dict(bits=0, sparsity=0.7)),
    "sparse 0.5": (dict(bits=0, sparsity=0.5), dict(bits=0, sparsity=0.5)),
}
CASES = [
    *(("v5e:2x2", form, d, 8) for form in FORMS for d in (64, 128, 256)),
    *(("v5e:2x2", "int8", 128, g) for g in (1, 3, 4)),
    *((chip, form, 128, 8) for chip in ("v6e:2x2", "v5p:2x2x1") for form in FORMS),
    # Pages of 16 slots.
    *(("v5e:2x2", form, 128, 8, 16) for form in ("bf16", "int4", "kivi 2", "turboquant 4", "sparse 0.7")),
    *(("v5e:2x2", "int4", d, 8, 16) for d in (64, 256)),
    *(("v5e:2x2", "int8", 128, g, 16) for g in (1, 3, 4)),
    ("v5e:2x2", "int4", 128, 8, 512),
    *((chip, "int4", 128, 8, 16) for chip in ("v6e:2x2", "v5p:2x2x1")),
    *((chip, "int4", 128, 8, 0, "one line") for chip in ("v5e:2x2", "v6e:2x2", "v5p:2x2x1")),
    # A last step that begins among slots of the one before; of 2,176 the kernel pads to what caches have, 2,304.
    *(("v5e:2x2", "kivi 2", 128, 8, 0, "one line", H, c) for c in (2176, 2304)),
    ("v5p:2x2x1", "kivi 2", 128, 8, 0, "one line", 1, 8320),  # two cores, one block
]
PROMPTS = [  # head dim, groups, tokens; a seventh word: of keys that not all later queries see
    ("v5e:2x2", "prompt", 64, 3, 2048, "until"),
    ("v5e:2x2", "prompt", 128, 4, 2048),
    ("v5e:2x2", "prompt", 128, 8, 2048),
    ("v5e:2x2", "prompt", 256, 2, 2048),
    *((chip, "prompt", 128, 4, 32768) for chip in ("v6e:2x2", "v5p:2x2x1")),
]
COLUMNS = [
    ("v5e:2x2", "columns", 64, 3, 2048),
    ("v5e:2x2", "columns", 128, 4, 2048),
    ("v5e:2x2", "columns", 256, 2, 2048),
    *((chip, "columns", 128, 4, 32768) for chip in ("v6e:2x2", "v5p:2x2x1")),
]


def stored(
    shape: Any,
    h: int,
    c: int,
    d: int,
    bits: int,
    group: int = 0,
    tokens: int = 1,
    sparsity: float | None = None,
    form: str = "affine",
) -> KernelCodes:
    """A tier's codes with tokens last, as the compiler would keep them in a loop."""

    def lying(*x: Any) -> Any:  # alone, few or an odd number of rows would change with heads
        made = shape(*x)
        return made.update(sharding=Format(Layout((0, 1, 2, 3)), made.sharding))

    if sparsity is not None:
        values = lying((1, h, Sparse(sparsity=sparsity).kept(d), c), jnp.uint16)
        return KernelCodes(codes=values, kept=shape((1, h, d // 8, c), jnp.uint8))
    if not bits:
        return KernelCodes(codes=shape((1, h, d, c), jnp.uint8 if form == "float8" else jnp.bfloat16))
    sizes = (1, h, c // tokens, d) if tokens > 1 else (1, h, d // (group or d), c)
    codes, step = shape((1, h, d * bits // 8, c), jnp.uint8), lying(sizes, jnp.uint16)
    if form == "power":
        return KernelCodes(codes=codes, step=lying(sizes, jnp.uint8), bits=bits)
    if form == "table":
        return KernelCodes(codes=codes, step=step, table=shape((1, h, 2**bits), jnp.bfloat16), bits=bits)
    return KernelCodes(codes=codes, step=step, low=lying(sizes, jnp.uint16), bits=bits)


def logical(x: KernelCodes) -> KernelCodes:
    """[B,H,C,...] again, and floats that are kept as their bits."""

    def turn(y: Any) -> Any:
        if y.ndim < 4:
            return y
        y = jnp.swapaxes(y, 2, 3) if y.shape[3] == x.codes.shape[3] else y
        if y.dtype == jnp.uint8 and not x.bits and x.kept is None:
            return jax.lax.bitcast_convert_type(y, jnp.float8_e4m3fn)
        return jax.lax.bitcast_convert_type(y, jnp.bfloat16) if y.dtype == jnp.uint16 else y

    return jax.tree.map(turn, x)


def cost(
    folder: Path, topology: str, form: str, d: int, g: int, unit: int = 0, line: str = "", h: int = H, c: int = C
) -> dict[str, Any]:
    """Of decode attention: cycles of a token and kv head, their fetching among them; of those in tiles of picked pages.
    line: of positions, that all heads share."""
    shape, mesh = placed(topology)
    k, v = (stored(shape, h, c, d, **how) for how in FORMS[form])
    bounds = shape((1, 1), jnp.int32)
    arguments = shape((1, h, g, 1, d), jnp.bfloat16), k, v, shape((1, 1 if line else h, c), jnp.int32), bounds, bounds

    def run(q: Any, k: KernelCodes, v: KernelCodes, pos: Any, first: Any, last: Any, *pages: Any) -> Any:
        function = (lambda *x: paged(*x, *pages, unit)) if pages else attention
        return function(q, logical(k), logical(v), pos, first, last, d**-0.5)

    pages = [shape((1, h, PAGES), jnp.int32)] if unit else []
    name, tokens = ("paged_attention", TOGETHER) if unit else ("decode_attention", tile_of(k, v) * h)
    found = compiled(mesh, run, name, *arguments, *pages, slots=c)
    return found | {"cycles": round(tpu.kernel_cycles(folder, name, tpu.loop) / tokens, 4)}


def prompt(folder: Path, topology: str, _: str, d: int, g: int, t: int, *until: str) -> dict[str, Any]:
    """Of prefill attention: cycles of 128 queries, those of all groups counted, and 128 keys."""
    shape, mesh = placed(topology)
    q, k = (shape((1, H, *x, t, d), jnp.bfloat16) for x in ((g,), ()))
    places = [shape(x, jnp.int32) for x in (*[(1, t)] * 3, *[(1, H, t)] * len(until))]

    def run(q: Any, k: Any, v: Any, pos: Any, first: Any, last: Any, *until: Any) -> Any:
        return prefill.attention(q, k, v, pos, first, last, d**-0.5, *until)

    tq, tk = prefill.tile_sizes(g, t, t, jnp.bfloat16)
    found = compiled(mesh, run, "prefill_attention", q, k, k, *places)
    blocks = g * tq * tk / 128**2
    return found | {"cycles": round(tpu.kernel_cycles(folder, "prefill_attention", tpu.largest) / blocks, 1)}


def column(folder: Path, topology: str, _: str, d: int, g: int, t: int) -> dict[str, Any]:
    """Of column sums: cycles of 128 queries, those of all groups counted, and 128 keys."""
    shape, mesh = placed(topology)
    q, k = (shape((1, H, *x, t, d), jnp.bfloat16) for x in ((g,), ()))
    places, lse = [shape((1, t), jnp.int32)] * 3, shape((1, H, g, t), jnp.float32)
    tq, tk = columns.tile_sizes(g, t, t)
    found = compiled(mesh, lambda *x: columns.sums(*x, d**-0.5), "column_sums", q, k, *places, lse)
    return found | {"cycles": round(tpu.kernel_cycles(folder, "column_sums", tpu.largest) / (g * tq * tk / 128**2), 1)}


def placed(topology: str) -> tuple[Any, Mesh]:
    """A shape on one device of a topology, and its mesh."""
    mesh = Mesh(np.array(tpu.devices(topology)[:1]), ("x",))
    return lambda s, t: jax.ShapeDtypeStruct(s, t, sharding=NamedSharding(mesh, PartitionSpec())), mesh


def compiled(mesh: Mesh, function: Any, name: str, *arguments: Any, slots: int = C) -> dict[str, Any]:
    """Temporaries, copies of something large, and the kernel's memory on the chip, VMEM, all in bytes."""
    with jax.set_mesh(mesh):
        program = jax.jit(function).trace(*arguments).lower().compile()
    text = program.as_text()
    return {
        "temporaries": program.memory_analysis().temp_size_in_bytes,
        "copies": len(re.findall(rf"= (?:u8|u16|bf16)\[1,\d+,\d+,{slots}\]\S* copy\(", text)),
        "vmem": tpu.kernel_memory(text, name),
    }


def tile_of(k: KernelCodes, v: KernelCodes) -> int:
    """Tokens of a grid step."""
    _, h, _, c = k.codes.shape
    of_slot = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((k, v))) // (h * c)
    return tile_size(of_slot, h, c, least_tile(jax.eval_shape(logical, k)))


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        tpu.dump_schedules(folder)
        found, asked = {}, [name for name in sys.argv[1:] if name != "--write"]
        every = {cost: CASES, prompt: PROMPTS, column: COLUMNS}
        for measure, case in ((measure, case) for measure, cases in every.items() for case in cases):
            name = " ".join(map(str, case))
            if asked and name not in asked:
                continue
            for old in Path(folder).iterdir():
                old.unlink()
            found[name] = measure(Path(folder), *case)
    if "--write" in sys.argv:
        assert not asked, "a part of the golden rows would take the place of all"
        GOLDEN.write_text(json.dumps({"jax": jax.__version__, "rows": found}, indent=1) + "\n")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
