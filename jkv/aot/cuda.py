"""NVIDIA GPUs that are not there: the real compiler, memory analysis and machine code, without the device.

Run it in a process of its own (with JAX_PLATFORMS=cpu): loading the plugin changes what jax sees as its platforms.
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
CHIPS = {  # name: bytes a second, bytes, GHz; one compute capability (9.0) and one SM
    "h100": ("NVIDIA H100 80GB HBM3", 3_350_000_000_000, 85_045_280_768, 1.98),
    "h200": ("NVIDIA H200", 4_800_000_000_000, 150_754_820_096, 1.98),
}
FLOPS = 989e12  # a second, of either in bfloat16
TARGET = """gpu_device_info {{
 threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 shared_memory_per_core: 233472
 shared_memory_per_block_optin: 232448 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
 block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535 memory_bandwidth: {bandwidth}
 l2_cache_size: 52428800 clock_rate_ghz: {clock} device_memory_size: {memory} registers_per_core_limit: 65536
 registers_per_block_limit: 65536 cuda_compute_capability {{ major: 9 minor: 0 }} }}
 platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 }} device_description_str: "{name}" """


def missing() -> str | None:
    """What to install before anything here works, or None."""
    try:
        absent = [name for name in MODULES if importlib.util.find_spec(name) is None]
    except ModuleNotFoundError:  # the parent package is absent
        absent = [MODULES[0]]
    if tools() is None:
        absent.append("ptxas (nvidia-cuda-nvcc)")
    return f"compiling for a GPU needs {', '.join(absent)}: {PIP}" if absent else None


@functools.cache
def tools() -> Path | None:
    """The folder of ptxas and nvdisasm, from the wheels of the CUDA compiler."""
    spec = importlib.util.find_spec("nvidia")
    for root in (spec.submodule_search_locations or ()) if spec else ():
        for path in sorted(Path(root).glob("cu*/bin/ptxas")):
            return path.parent
    return None


@functools.cache
def device(chip: str = "h200") -> Any:
    """A compile-only device: what is compiled for it cannot run here."""
    if chip not in CHIPS:
        raise ValueError(f"unknown GPU {chip!r}; known: {', '.join(CHIPS)}")
    if (text := missing()) is not None:
        raise RuntimeError(text)
    folder = str(tools())
    if folder not in os.environ["PATH"].split(os.pathsep):  # XLA and Mosaic look for ptxas there
        os.environ["PATH"] = folder + os.pathsep + os.environ["PATH"]
    name, bandwidth, memory, clock = CHIPS[chip]
    target = TARGET.format(name=name, bandwidth=bandwidth, memory=memory, clock=clock)
    return topologies.get_topology_desc("1x1x1", platform="cuda", topology="1x1x1", target_config=target).devices[0]


def sharding(chip: str = "h200") -> NamedSharding:
    """For a jax.ShapeDtypeStruct: an array that lies on one such GPU."""
    return NamedSharding(Mesh([device(chip)], ("gpu",)), PartitionSpec())


def compiled(function: Any, *args: Any, chip: str = "h200") -> Any:
    """The program of a function for arguments of these shapes: as_text(), memory_analysis(), cost_analysis()."""
    where = sharding(chip)
    args = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), args)
    return jax.jit(function).lower(*args).compile()


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What the assembler made of one Mosaic kernel."""

    registers: int  # of a thread
    spilled: int  # bytes, stores and loads
    serialised: bool  # a wgmma waits for each instruction before the next
    loop: int  # instructions of the inner loop: the smallest one with a tensor core instruction; 0: none
    opcodes: dict[str, int]  # of that loop


def machines(function: Any, *args: Any, chip: str = "h200") -> list[Machine]:
    """Compiles, and reads the machine code of each Mosaic kernel in the program."""
    with dumps() as folder:
        compiled(function, *args, chip=chip)
        return [machine(path) for path in sorted(folder.rglob("*.ptx"))]


@contextlib.contextmanager
def dumps() -> Iterator[Path]:
    """A folder that the Mosaic compiler writes its PTX into."""
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
    """Assembles one PTX file and reads the assembler's report and the disassembly."""
    bin_folder, cubin = tools(), ptx.with_suffix(".cubin")
    assert bin_folder is not None
    assemble = [bin_folder / "ptxas", "-arch=sm_90a", "-v", ptx, "-o", cubin]
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
    """Opcodes of the smallest backward branch's body that holds a HGMMA, from nvdisasm -c.

    A branch without a condition closes no loop: it comes back from a wait, which lies behind everything else.
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
