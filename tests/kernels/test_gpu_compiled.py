"""What the real compiler makes of the GPU kernel, without a GPU: spills, instructions of the inner loop, copies.

The compiling runs in a process of its own, this file as a script: loading the CUDA plugin changes a process's jax.
`python tests/kernels/test_gpu_compiled.py [KERNEL ...]` prints what it measures; `--write` makes it the golden numbers.
"""

import functools
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jkv.aot import cuda
from jkv.arrays.gather import put
from jkv.cache import codec_map as codes_of
from jkv.cache.empty import empty_side
from jkv.methods.base import Dense
from jkv.methods.quantization.float8 import Float
from jkv.methods.quantization.integer import Affine
from jkv.methods.quantization.ksort import Bfp
from jkv.methods.quantization.lookup import Levels

if __name__ != "__main__":
    from support.cases import cases

    pytest.importorskip("jax.experimental.mosaic.gpu", reason="before jax 0.11 it imports absl: pip install absl-py")

from jkv.kernels.attention_column_sums import gpu as column_sums  # noqa: E402
from jkv.kernels.decode_attention import gpu  # noqa: E402
from jkv.kernels.paged_attention import gpu as paged  # noqa: E402
from jkv.kernels.prefill_attention import gpu as prefill  # noqa: E402
from jkv.kernels.window_attention import gpu as window  # noqa: E402

pytestmark = pytest.mark.hardware

GOLDEN = Path(__file__).with_name("golden_gpu.json")  # version of jax -> name -> instructions of the inner loop
SHORT, MIDDLE, LONG = 1024, 16384, 131072
KIVI = Affine(bits=2, axis="channel", group=32), Affine(bits=2, group=32)
FORMS = {"bf16": Dense(), "fp8": Float(), "int8": Affine(bits=8), "int4": Affine(bits=4), "int2": Affine(bits=2)}
FORMS = {name: (codec, codec) for name, codec in FORMS.items()}  # of keys and values
MIXED = {"bf16 keys int4": (Dense(), Affine(bits=4)), "bf16 values int2": (Affine(bits=2), Dense())}
GROUPED = {f"int{n} groups of 32": (Affine(bits=n, group=32),) * 2 for n in (4, 2)} | {"kivi int2": KIVI}
TABLES = {f"table of {2**n}": (Levels(bits=n),) * 2 for n in (2, 4)}
POWERS = {f"bfp{n}": (Bfp(mantissa=n),) * 2 for n in (4, 8)}
THIRDS = {"int3": (Affine(bits=3),) * 2, "table of 8": (Levels(bits=3),) * 2}  # of 128 channels and more
THIRDS |= {"kivi int3": (Affine(bits=3, axis="channel", group=32), Affine(bits=3, group=32))}
EVERY = FORMS | GROUPED | TABLES | POWERS | THIRDS
Shape = jax.ShapeDtypeStruct
PAGES = Shape((2, 8, 64), jnp.int32)


def tiers(form, dim, slots, heads=(2, 8)):
    """Codes as they are stored, of keys and of values."""
    return tuple(jax.eval_shape(lambda c=codec: empty_side(c, *heads, slots, dim, jnp.bfloat16)[0]) for codec in form)


def linear(form, codes):
    return tuple(codes_of.kernel_codes(codec, code) for codec, code in zip(form, codes, strict=True))


def arguments(form, dim, group, slots, heads=(2, 8)):
    k, v = jax.eval_shape(functools.partial(linear, form), tiers(form, dim, slots, heads))
    bounds = Shape((heads[0], 1), jnp.int32)
    return Shape((*heads, group, 1, dim), jnp.bfloat16), k, v, Shape((*heads, slots), jnp.int32), bounds, bounds


def whole(*arrays):
    return gpu.attention(*arrays, 0.1)


def resident(q, k, v, unit=0) -> int:
    """Programs that the kernel counts on running at once on a multiprocessor."""
    dim, tile = q.shape[-1], gpu.tile_of(v, unit)
    forms, queries = gpu.Form.both(k, v, dim, tile), q.shape[2] * q.shape[3]
    return gpu.resident(*forms, -(-queries // (8 * -(-queries // gpu.most_rows(*forms)))) * 8)


def pages_of_16(*arrays):
    return paged.attention(*arrays[:-1], 0.1, arrays[-1], 16)


def programs():
    """name -> function, arguments"""
    for dim in (64, 128):
        for name, form in FORMS.items():
            for group, slots in ((1, SHORT), (4, LONG), (8, MIDDLE), (16, MIDDLE)):
                if group in (1, 8) and (dim, name) != (128, "int4"):  # kernels like that of 4
                    continue
                yield f"{name} D={dim} G={group}", whole, *arguments(form, dim, group, slots)
        more = GROUPED | TABLES | POWERS
        for name, form in (more | THIRDS | MIXED if dim == 128 else more).items():
            yield f"{name} D={dim} G=4", whole, *arguments(form, dim, 4, MIDDLE)
        for name, form in TABLES.items():
            yield f"{name} D={dim} G=16", whole, *arguments(form, dim, 16, MIDDLE)
    for name in (*FORMS, "int2 groups of 32", "kivi int2", *TABLES, "int3", "table of 8"):
        yield f"{name} D=256 G=4", whole, *arguments(EVERY[name], 256, 4, MIDDLE)
    for name, dim, group in (
        ("bf16", 128, 4),
        ("int4", 128, 4),
        ("int8", 64, 4),
        ("int2", 64, 8),
        ("kivi int2", 128, 4),
        ("table of 8", 128, 4),
    ):
        form = EVERY[name]
        yield f"{name} D={dim} G={group} pages", pages_of_16, *arguments(form, dim, group, LONG), PAGES


def prompt(*arrays):
    return prefill.attention(*arrays[:6], 0.1, *arrays[6:])


def columns(*arrays):
    return column_sums.sums(*arrays, 0.1)


def prompts():
    """The same, of whole prompts, one with keys that not all later queries see, and of the sums of their columns."""
    for dim, group, tokens, lasting in (
        (64, 3, 2048, False),
        (128, 4, 32768, False),
        (128, 4, 2048, True),
        (256, 2, 4096, True),
    ):
        q, k = (Shape((2, 8, *x, tokens, dim), jnp.bfloat16) for x in ((group,), ()))
        places = Shape((2, tokens), jnp.int32)
        until = [Shape((2, 8, tokens), jnp.int32)] * lasting
        yield f"prompt D={dim} G={group} T={tokens}", prompt, q, k, k, places, places, places, *until
    for dim, group, tokens in ((64, 3, 2048), (128, 4, 32768), (256, 2, 4096)):
        q, k, lse = (Shape((2, 8, *x), jnp.bfloat16) for x in ((group, tokens, dim), (tokens, dim), (group, tokens)))
        places, lse = Shape((2, tokens), jnp.int32), Shape(lse.shape, jnp.float32)
        yield f"columns D={dim} G={group} T={tokens}", columns, q, k, places, places, places, lse


def seen(*arrays):
    return window.attention(*arrays, 0.1)


def entered(*arrays):
    return window.entered(*arrays, 0.1)


def windows():
    """The same, of recent windows of two tiles, so that there is a loop, and of what enters them."""
    for dim, group, new in ((64, 3, 1), (128, 4, 1), (128, 4, 8), (256, 2, 1)):
        q, k, one = (Shape((2, 8, *x, dim), jnp.bfloat16) for x in ((group, new), (111,), (1,)))
        places, bounds, at = Shape((2, 111), jnp.int32), Shape((2, new), jnp.int32), Shape((), jnp.int32)
        name = f"window D={dim} G={group} T={new}"
        yield name, seen, q, k, k, places, bounds, bounds
        if new == 1:
            yield f"{name} enters", entered, q, k, k, one, one, at, places, places, bounds, bounds


def decode(form, q, codes, pos, first, last, *pages):
    """Steps in an inner loop, and a flush that scatters into the tier in an outer one, as `decode_loop` has them."""

    def write(x, i):
        at = (jnp.arange(32, dtype=jnp.int32) * 7 + i) % x.shape[2]
        return put(x, jnp.broadcast_to(at[None, None], (*x.shape[:2], 32)), x[:, :, :32] + 1)

    def block(i, state):
        q, codes = state

        def step(j, q):
            k, v = linear(form, codes)
            part = (pages_of_16 if pages else whole)(q, k, v, pos, first, last + j, *pages)
            return part.finish().astype(q.dtype)

        q = jax.lax.fori_loop(0, 16, step, q)
        return q, jax.tree.map(lambda x: write(x, i), codes)

    return jax.lax.fori_loop(0, 8, block, (q, codes))


def moved(text: str, leaves: list[tuple[int, ...]]) -> list[str]:
    """Instructions inside loops that write an array as long and as large as a leaf [B,H,C,...], but for the scatters,
    which are in place."""
    quiet = ("parameter", "get-tuple-element", "bitcast", "tuple", "while", "custom-call")
    found, inside = [], False
    loops = set(re.findall(r"body=%?([\w.\-]+)", text))
    for line in text.splitlines():
        if (head := re.match(r"(?:ENTRY )?%?([\w.\-]+) \(", line)) is not None:
            inside = head[1] in loops
        op = re.match(r"\s*(?:ROOT )?%?([\w.\-]+) = (\w+)\[([\d,]+)\]\S* ([\w\-]+)\(", line)
        if inside and op is not None and op[2] != "s32" and op[4] not in quiet and "scatter" not in op[1]:
            shape = [int(x) for x in op[3].split(",")]
            if any(leaf[2] in shape and math.prod(shape) >= math.prod(leaf) for leaf in leaves):
                found.append(line.strip()[:160])
    return found


LOOPS = {
    name: (name,) for name in ("bf16", "int8", "int4 groups of 32", "kivi int2", "bfp4", "table of 8", "kivi int3")
}
LOOPS |= {"int4 pages": ("int4", "pages")}


def machine(name: str, function, *args) -> dict:
    """What ptxas says of the one kernel of a program, and how many of it are counted on at once."""
    machines = cuda.machines(function, *args)
    assert len(machines) == 1, f"{name}: {len(machines)} kernels"
    found = {key: value for key, value in vars(machines[0]).items() if key != "opcodes"}
    units = {whole: 0, pages_of_16: 16}
    return found | ({"resident": resident(*args[:3], units[function])} if function in units else {})


def moves(name: str, *pages: str) -> list[str]:
    """What a decode loop writes of a tier's size."""
    form = EVERY[name]
    q, _, _, *places = arguments(form, 128, 4, 8192)
    codes = tiers(form, 128, 8192)
    text = cuda.compiled(functools.partial(decode, form), q, codes, *places, *[PAGES for _ in pages]).as_text()
    return moved(text, [x.shape for x in jax.tree.leaves(codes)])


def temporary() -> int:
    h100 = cuda.compiled(whole, *arguments(FORMS["int4"], 128, 4, LONG), chip="h100")
    return h100.memory_analysis().temp_size_in_bytes


def measure(asked: list[str]) -> dict:
    """By name, of all if none is asked for: kernels, decode loops (as `loop NAME`), and "temporary"."""
    every = {x[0]: functools.partial(machine, *x) for x in (*programs(), *prompts(), *windows())}
    every |= {f"loop {name}": functools.partial(moves, *x) for name, x in LOOPS.items()}
    every |= {"temporary": temporary}
    return {name: every[name]() for name in asked or every}


def golden() -> dict[str, int]:
    """Instructions of the inner loops, by this jax or the newest one that is known."""
    found = json.loads(GOLDEN.read_text())
    own = jax.__version__.rpartition(".")[0]
    return found.get(own) or found[max(found, key=lambda x: tuple(map(int, x.split("."))))]


@pytest.fixture(scope="module")
def measured(request: pytest.FixtureRequest) -> dict:
    """Of what this session asks for, by one process."""
    if (reason := cuda.missing()) is not None:
        pytest.skip(reason)
    asked = cases(request, test_compiled_kernel_does_not_regress)
    asked += [f"loop {name}" for name in cases(request, test_decode_loop_copies_no_tier)]
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    run = subprocess.run([sys.executable, __file__, *asked, "temporary"], capture_output=True, text=True, env=env)
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.parametrize("case", golden())
def test_compiled_kernel_does_not_regress(measured: dict, case: str):
    """It neither spills nor serialises, its inner loop is as short as it was, and a multiprocessor has registers for as
    many programs as are counted on: of 65,536; a program is 128 threads, and registers are given out by eight."""
    found = measured[case]
    assert not found["spilled"] and not found["serialised"]
    assert 0 < found["loop"] <= golden()[case] * 1.05
    if "resident" in found:
        assert found["resident"] <= 65536 // (128 * -(-found["registers"] // 8) * 8)


def test_golden_covers_all_kernels():
    assert set(golden()) == {x[0] for x in (*programs(), *prompts(), *windows())}


@pytest.mark.parametrize("case", LOOPS)
def test_decode_loop_copies_no_tier(measured: dict, case: str):
    assert not measured[f"loop {case}"]


def test_slot_minor_values_need_at_most_one_tier_of_temporaries(measured: dict):
    tier = 16 * LONG * 64  # bytes of the int4 codes of keys; values are transposed here, outside a loop
    assert measured["temporary"] < 1.6 * tier


def test_copy_inside_loop_is_detected():
    text = """
%body.1 (p: (u8[2,8192,64])) -> (u8[2,8192,64]) {
  %copy.1 = u8[2,8192,64]{2,1,0} copy(%get-tuple-element.1)
  ROOT %input_scatter_fusion = u8[2,8192,64]{2,1,0} fusion(%copy.1), kind=kInput, calls=%fused
}
ENTRY %main (p: u8[2,8192,64]) -> u8[2,8192,64] {
  %copy.2 = u8[2,8192,64]{2,1,0} copy(%p)
  %while.1 = (u8[2,8192,64]{2,1,0}) while(%copy.2), condition=%cond.1, body=%body.1
"""
    assert [line[:7] for line in moved(text, [(1, 2, 8192, 64)])] == ["%copy.1"]


@pytest.mark.parametrize("chip", ["a100", ""])
def test_unknown_chips_are_refused(chip):
    with pytest.raises(ValueError, match="h100, h200"):
        cuda.device(chip)


def test_missing_cuda_tools_are_named(monkeypatch):
    monkeypatch.setattr(cuda, "tools", lambda: None)
    monkeypatch.setattr(cuda, "MODULES", ("jax_plugins.no_such_plugin",))
    assert "jax-cuda13-plugin" in (text := cuda.missing() or "") and "no_such_plugin" in text
    cuda.device.cache_clear()
    with pytest.raises(RuntimeError, match="nvidia-cuda-nvcc"):
        cuda.device("h100")


def test_inner_loop_is_smallest_with_tensor_core_instruction():
    code = """
.L_x_1:
        /*0000*/                   MOV R1, R2 ;
.L_x_2:
        /*0010*/                   HGMMA.64x8x16.F32 R4, R8, gdesc[UR4], R4 ;
        /*0020*/              @!P0 BRA `(.L_x_2) ;
        /*0030*/                   IADD3 R1, R1, R2, RZ ;
        /*0040*/               @P1 BRA `(.L_x_1) ;
.L_x_3:
        /*0050*/               @P2 BRA `(.L_x_3) ;
"""
    assert cuda.inner_loop(code) == ["HGMMA", "BRA"]


def test_jump_back_from_wait_is_not_a_loop():
    code = """
.L_x_1:
        /*0000*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR9], R10 ;
        /*0010*/              @!P0 BRA `(.L_x_3) ;
.L_x_2:
        /*0020*/                   HGMMA.64x8x16.F32 R4, R8, gdesc[UR4], R4 ;
        /*0030*/               @P1 BRA `(.L_x_1) ;
.L_x_3:
        /*0040*/                   BRA `(.L_x_2) ;
"""
    assert cuda.inner_loop(code) == ["SYNCS", "BRA", "HGMMA", "BRA"]


if __name__ == "__main__":
    result = measure([name for name in sys.argv[1:] if name != "--write"])
    if "--write" in sys.argv:
        known = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
        loops = {name: x["loop"] for name, x in result.items() if isinstance(x, dict)}
        own = jax.__version__.rpartition(".")[0]
        known[own] = known.get(own, {}) | loops
        GOLDEN.write_text(json.dumps(known, indent=1) + "\n")
    print(json.dumps(result))
