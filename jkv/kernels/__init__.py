"""Hand-written kernels: one package an operation, one module a platform, and which of them runs.

kernels="auto" takes the platform's own where it reads the codes in question, and the portable loop of
`jkv.attention.tier_attention` ("xla") where not; what it took, and why, is logged once and stands in the report. "tpu"
or "gpu" means that one or an error.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from math import lcm
from types import ModuleType
from typing import Any

import jax
from jax import Array
from jax.sharding import PartitionSpec

ROWS, HEADS, CONTEXT = "data", "model", "context"  # axes of a mesh: rows, kv heads, slots of tiers
SLOTS = 128  # of a tier, that the kernels read together
STEPS = 8  # of keys' steps that tokens share, that the TPU kernels read together
KERNELS = ("auto", "xla", "tpu", "gpu")
# Versions of jax for which a GPU kernel's compiled loop is known, in tests/kernels/golden_gpu.json: Mosaic GPU may
# change from one to the next. Others are for whoever asks for kernels="gpu".
PROVEN = {
    "decode_attention": ("0.10", "0.11"),
    "paged_attention": ("0.10", "0.11"),
    "prefill_attention": ("0.10", "0.11"),
    "attention_column_sums": ("0.10", "0.11"),
    "window_attention": ("0.10", "0.11"),
}
log = logging.getLogger("jkv")


@cache
def native() -> str:
    """The kind of kernel that this process's default device runs.

    >>> native() in KERNELS
    True
    """
    if jax.devices()[0].platform == "tpu":
        return "tpu"
    return "gpu" if capability() == 9 else "xla"  # Mosaic GPU's wgmma is Hopper's


def capability() -> float | None:
    """The compute capability of this process's default device, if it is a GPU that has a number for it.

    >>> capability()
    """
    device = jax.devices()[0]
    try:
        return float(device.compute_capability) if device.platform == "gpu" else None
    except (AttributeError, ValueError):  # such as gfx942
        return None


def foreign() -> str:
    """Why a GPU that is no Hopper runs on xla; "" for every other device, which has kernels or is a CPU.

    >>> foreign()
    ''
    """
    device = jax.devices()[0]
    if device.platform != "gpu" or native() != "xla":
        return ""
    capability = getattr(device, "compute_capability", "unknown")
    return f"attention runs on xla: the GPU kernels are for Hopper (9.0), and {device.device_kind} has {capability}"


def wanted(kernels: str) -> str:
    """The kind that is asked for, "auto" made out."""
    return native() if kernels == "auto" else kernels


def together(kernels: str, unit: int, grain: int) -> int:
    """Slots of a tier that are read together, in whole `unit`s, where each `grain` of them share steps of their keys.

    A multiple of it is read in place; kernels copy a tier of other sizes before they read it.

    >>> together("xla", 32, 32), together("gpu", 32, 32), together("tpu", 32, 32), together("tpu", 1, 1)
    (32, 128, 256, 128)
    """
    name = wanted(kernels)
    if name == "xla":
        return unit
    shared = name == "tpu" and 1 < grain <= SLOTS and SLOTS % grain == 0  # others no TPU kernel reads
    return lcm(unit, SLOTS, STEPS * grain if shared else 1)


def check(kernels: str) -> None:
    """Raise ValueError for kernels that this process's devices do not run."""
    if kernels not in KERNELS:
        raise ValueError(f"kernels={kernels!r}: one of {', '.join(KERNELS)}")
    if kernels not in ("auto", "xla", native()):
        have = f"xla, {native()}" if native() != "xla" else "xla"
        raise ValueError(f"kernels={kernels!r}: this process runs on {jax.devices()[0].device_kind}, which has {have}")


def implementation(operation: str, name: str) -> ModuleType:
    return import_module(f"jkv.kernels.{operation}.{name}")


@dataclass(frozen=True)
class Choice:
    """The implementation that runs, and why the platform's own does not, if it does not."""

    name: str
    why: str = ""


def choose(operation: str, kernels: str, refusal: Callable[[ModuleType], str | None]) -> Choice:
    """The implementation that runs; `refusal` asks a module what it does not take. ValueError if that one is asked for.

    >>> choose("decode_attention", "xla", lambda module: None).name
    'xla'
    """
    name = wanted(kernels)
    if name == "xla":
        if why := foreign() if kernels == "auto" else "":
            _say(why)
        return Choice(name, why)
    if kernels != "auto":
        if (why := refusal(implementation(operation, name))) is None:
            return Choice(name)
        raise ValueError(f"kernels={kernels!r}: the {name} kernel of {operation} does not take {why}; use 'auto'")
    if (why := unready(operation, name)) is None:
        if (taken := refusal(implementation(operation, name))) is None:
            return Choice(name)
        why = f"does not take {taken}"
    choice = Choice("xla", f"{operation} runs on xla: the {name} kernel {why}")
    _say(choice.why)
    return choice


def unready(operation: str, name: str) -> str | None:
    """Why no kernel of an operation runs in this process whatever it reads, or None.

    >>> unready("decode_attention", "tpu")
    """
    version = ".".join(jax.__version__.split(".")[:2])
    if name == "gpu" and version not in (proven := PROVEN[operation]):
        return f"is not known to compile well under jax {version}, as it is under {', '.join(proven)}"
    try:
        implementation(operation, name)
    except ImportError as error:
        return f"cannot be imported: {error}"
    return None


def plain(kernels: str, capped: bool) -> str:
    """The kernels of a model's attention; ValueError where one is asked for and logits saturate: no kernel caps them.

    >>> plain("auto", capped=False), plain("auto", capped=True)
    ('auto', 'xla')
    """
    if not capped or wanted(kernels) == "xla":
        return kernels if not capped else "xla"
    if kernels != "auto":
        raise ValueError(f"kernels={kernels!r}: no kernel takes logits with a soft cap; use 'auto' or 'xla'")
    _say("attention runs on xla: no kernel takes logits with a soft cap")
    return "xla"


def uneven(keys: int, values: int) -> str | None:
    """Why no kernel of attention takes keys and values of so many channels, or None.

    >>> uneven(128, 128), uneven(192, 128)
    (None, 'values of 128 channels beside keys of 192')
    """
    return None if keys == values else f"values of {values} channels beside keys of {keys}"


def over_mesh(run: Callable[..., Any], *args: Any) -> Any:
    """run(*args) on every device's own rows and kv heads: the compiler cannot divide a kernel by itself.

    Arrays are [B,H,...] or, for all heads, [B,1,...] and [B,n]; of 1 row they are of all.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or set(mesh.manual_axes) == set(mesh.axis_names):
        return run(*args)
    rows, heads = (name if name in mesh.axis_names else None for name in (ROWS, HEADS))

    def spec(x: Array) -> PartitionSpec:
        return PartitionSpec(rows if x.shape[0] > 1 else None, heads if x.ndim > 2 and x.shape[1] > 1 else None)

    return jax.shard_map(run, in_specs=jax.tree.map(spec, args), out_specs=spec(args[0]), check_vma=False)(*args)


@cache
def _say(text: str) -> None:
    """Once a process."""
    log.info(text)
