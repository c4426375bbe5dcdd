"""Compilation for NVIDIA GPUs without a GPU: the real compiler, memory analysis and machine code.

Run it in a process of its own with JAX_PLATFORMS=cpu, because loading the plugin changes the platforms that jax sees.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

PIP = (
    f"pip install --no-deps jax-cuda13-plugin=={jax.__version__} jax-cuda13-pjrt=={jax.__version__} && "
    "pip install nvidia-cuda-nvcc nvidia-nvvm nvidia-cuda-nvdisasm absl-py"
)
MODULES = ["jax_plugins.xla_cuda13", "jax_cuda13_plugin"]
if jax.__version_info__ < (0, 11):  # Mosaic GPU imports it
    MODULES.append("absl")
CHIPS = {  # name: description, bytes/s, bytes, GHz; both have compute capability 9.0 and the same SM
    "h100": ("NVIDIA H100 80GB HBM3", 3_350_000_000_000, 85_045_280_768, 1.98),
    "h200": ("NVIDIA H200", 4_800_000_000_000, 150_754_820_096, 1.98),
}
FLOPS = 989e12  # FLOP/s of each in bfloat16
TARGET = """gpu_device_info {{
 threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 shared_memory_per_core: 233472
 shared_memory_per_block_optin: 232448 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
 block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535 memory_bandwidth: {bandwidth}
 l2_cache_size: 52428800 clock_rate_ghz: {clock} device_memory_size: {memory} registers_per_core_limit: 65536
 registers_per_block_limit: 65536 cuda_compute_capability {{ major: 9 minor: 0 }} }}
 platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 }} device_description_str: "{name}" """


def missing() -> str | None:
    """Return what to install before this module works, or None."""
    try:
        absent = [name for name in MODULES if importlib.util.find_spec(name) is None]
    except ModuleNotFoundError:  # the parent package is absent
        absent = [MODULES[0]]
    if tools() is None:
        absent.append("ptxas (nvidia-cuda-nvcc)")
    return f"compiling for a GPU needs {', '.join(absent)}: {PIP}" if absent else None


@functools.cache
def tools() -> Path | None:
    """Return the folder of ptxas and nvdisasm from the wheels of the CUDA compiler, or None."""
    spec = importlib.util.find_spec("nvidia")
    for root in (spec.submodule_search_locations or ()) if spec else ():
        for path in sorted(Path(root).glob("cu*/bin/ptxas")):
            return path.parent
    return None


@functools.cache
def device(chip: str = "h200") -> Any:
    """Return a compile-only device. Programs compiled for it cannot run here."""
    if chip not in CHIPS:
        raise ValueError(f"unknown GPU {chip!r}; known: {', '.join(CHIPS)}")
    if (text := missing()) is not None:
        raise RuntimeError(text)
    folder = str(tools())
    if folder not in os.environ["PATH"].split(os.pathsep):  # XLA and Mosaic search PATH for ptxas
        os.environ["PATH"] = folder + os.pathsep + os.environ["PATH"]
    name, bandwidth, memory, clock = CHIPS[chip]
    target = TARGET.format(name=name, bandwidth=bandwidth, memory=memory, clock=clock)
    return topologies.get_topology_desc("1x1x1", platform="cuda", topology="1x1x1", target_config=target).devices[0]


def sharding(chip: str = "h200") -> NamedSharding:
    """Return the sharding of an array on one GPU, for `jax.ShapeDtypeStruct`."""
    return NamedSharding(Mesh([device(chip)], ("gpu",)), PartitionSpec())


def compiled(function: Any, *args: Any, chip: str = "h200") -> Any:
    """Compile a function for arguments of the given shapes.

    Returns:
        The program, with as_text(), memory_analysis() and cost_analysis().
    """
    where = sharding(chip)
    args = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), args)
    return jax.jit(function).lower(*args).compile()


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Machine code of one Mosaic kernel, as reported by the assembler.

    Attributes:
        registers: registers per thread.
        spilled: bytes of spill stores and loads.
        serialised: whether each wgmma waits for the instruction before it.
        loop: instructions of the inner loop, the smallest one with a tensor core instruction; 0 without one.
        opcodes: number of each opcode in that loop.
    """

    registers: int  # per thread
    spilled: int  # bytes of stores and loads
    serialised: bool  # a wgmma waits for each instruction before the next
    loop: int  # instructions of the inner loop: the smallest one with a tensor core instruction; 0: none
    opcodes: dict[str, int]  # in that loop


def machines(function: Any, *args: Any, chip: str = "h200") -> list[Machine]:
    """Compile a function and return the machine code of each Mosaic kernel in it."""
    with dumps() as folder:
        compiled(function, *args, chip=chip)
        return [machine(path) for path in sorted(folder.rglob("*.ptx"))]


@contextlib.contextmanager
def dumps() -> Iterator[Path]:
    """Yield a folder into which the Mosaic compiler writes its PTX."""
    with tempfile.TemporaryDirectory() as folder:
        wanted = {"MOSAIC_GPU_DUMP_TO": folder, "MOSAIC_GPU_DUMP_PTX": "1"}
        before = {name: os.environ.get(name) for name in wanted}
        os.environ.update(wanted)
        try:
            yield Path(folder)
        finally:
            for name, value in before.items():
                os.environ.pop(name)
                if value is not None:
                    os.environ[name] = value


def machine(ptx: Path) -> Machine:
    """Assemble a PTX file and parse the assembler's report and the disassembly."""
    bin_folder, cubin = tools(), ptx.with_suffix(".cubin")
    assert bin_folder is not None
    assemble = [bin_folder / "ptxas", "-arch=sm_90a", "-v", ptx, "-o", cubin]
    # Assemble, then disassemble.
    report = subprocess.run(assemble, check=True, capture_output=True, text=True).stderr
    code = subprocess.run([bin_folder / "nvdisasm", "-c", cubin], check=True, capture_output=True, text=True).stdout
    registers = re.search(r"Used (\d+) registers", report)
    if registers is None:
        raise RuntimeError(f"ptxas reported no register count:\n{report}")
    loop = inner_loop(code)
    return Machine(
        registers=int(registers[1]),
        spilled=sum(map(int, re.findall(r"(\d+) bytes spill", report))),
        serialised="serialized" in report,
        loop=len(loop),
        opcodes={name: loop.count(name) for name in sorted(set(loop))},
    )


def inner_loop(code: str) -> list[str]:
    """Return the opcodes of the smallest loop body that contains a HGMMA.

    A loop ends in a conditional backward branch. An unconditional one returns from a wait, which is placed after all
    other code.

    Args:
        code: output of nvdisasm -c.
    """
    labels: dict[str, int] = {}
    ops: list[str] = []
    best: list[str] = []
    for line in code.splitlines():
        if (label := re.match(r"\s*(\.L_\w+):", line)) is not None:
            labels[label[1]] = len(ops)
        elif (op := re.match(r"\s*/\*[0-9a-f]+\*/\s+(@!?U?P\w+\s+)?([A-Z][\w.]*)(.*)", line)) is not None:
            ops.append(op[2].split(".")[0])
            target = re.search(r"\.L_\w+", op[3]) if op[1] and ops[-1] == "BRA" else None
            if target is not None and target[0] in labels:
                body = ops[labels[target[0]] :]
                if "HGMMA" in body and (not best or len(body) < len(best)):
                    best = body
    return best
