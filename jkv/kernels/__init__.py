"""Kernels: one package per operation, one module per platform that has a kernel of it, and the choice between them.

Those of TPUs and GPUs are Pallas, those of CPUs C++. kernels="auto" picks the platform's kernel if it supports the
codes, and the portable loop of `jkv.attention.tier_attention` ("xla") otherwise. The choice and its reason are logged
once and put into the report. kernels="tpu", "gpu" or "cpu" uses that kernel or raises.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from math import lcm
from types import ModuleType
from typing import Any

import jax
from jax import Array
from jax.sharding import PartitionSpec

from jkv.kernels import cpu_library

ROWS, HEADS, CONTEXT = "data", "model", "context"  # mesh axes: rows, kv heads, slots of tiers
SLOTS = 128  # slots of a tier that a kernel reads together
STEPS = 8  # key steps shared by several tokens that the TPU kernels read together
KERNELS = ("auto", "xla", "tpu", "gpu", "cpu")
ON_CPU = "xla"  # what "auto" is on a CPU: the C++ kernels sum in another order, and must be asked for by name
# Versions of jax for which the compiled loop of each GPU kernel is verified (tests/kernels/golden_gpu.json), because
# Mosaic GPU may change from one version to the next. Under other versions only kernels="gpu" uses the kernels.
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
    """Return the kind of kernel that this process's default device runs: "tpu", "gpu" or "xla".

    >>> native() in KERNELS
    True
    """
    if jax.devices()[0].platform == "tpu":
        return "tpu"
    return "gpu" if capability() == 9 else "xla"  # the kernels use wgmma, which only Hopper has


def capability() -> float | None:
    """Return the compute capability of the default device, or None if it is not a GPU with a numeric one.

    >>> capability()
    """
    device = jax.devices()[0]
    try:
        return float(device.compute_capability) if device.platform == "gpu" else None
    except (AttributeError, ValueError):  # AMD names such as gfx942
        return None


def foreign() -> str:
    """Explain why a GPU other than Hopper runs on xla; "" for every other device.

    >>> foreign()
    ''
    """
    device = jax.devices()[0]
    if device.platform != "gpu" or native() != "xla":
        return ""
    capability = getattr(device, "compute_capability", "unknown")
    return f"attention runs on xla: the GPU kernels are for Hopper (9.0), and {device.device_kind} has {capability}"


def wanted(kernels: str) -> str:
    """Resolve "auto" to the kind of kernel of the default device."""
    if kernels != "auto":
        return kernels
    return ON_CPU if native() == "xla" and jax.devices()[0].platform == "cpu" else native()


def together(kernels: str, unit: int, grain: int) -> int:
    """Return the number of slots that a kernel reads together; tiers with a multiple of it are read in place.

    Kernels copy a tier of any other size before they read it.

    Args:
        kernels: "auto", "xla", "tpu", "gpu" or "cpu".
        unit: The result is a multiple of this many slots.
        grain: Slots that share one step of their keys.

    >>> together("xla", 32, 32), together("gpu", 32, 32), together("tpu", 32, 32), together("tpu", 1, 1)
    (32, 128, 256, 128)
    """
    name = wanted(kernels)
    if name in ("xla", "cpu"):
        return unit
    shared = name == "tpu" and 1 < grain <= SLOTS and SLOTS % grain == 0  # the TPU kernel supports no other grain
    return lcm(unit, SLOTS, STEPS * grain if shared else 1)


def check(kernels: str) -> None:
    """Raise ValueError for kernels that this process's devices cannot run."""
    if kernels not in KERNELS:
        raise ValueError(f"kernels={kernels!r}: one of {', '.join(KERNELS)}")
    device = jax.devices()[0]
    have = list(dict.fromkeys(["xla", native(), "cpu" if device.platform == "cpu" else "xla"]))
    if kernels not in ("auto", *have):
        raise ValueError(f"kernels={kernels!r}: this process runs on {device.device_kind}, which has {', '.join(have)}")
    if kernels == "cpu" and (why := unready("decode_attention", kernels)) is not None:
        raise ValueError(f"kernels='cpu': the cpu kernel of decode_attention {why}; use 'auto'")


@cache
def exists(operation: str, name: str) -> bool:
    """Return whether a platform has a kernel of an operation; without one, XLA computes it there.

    >>> exists("decode_attention", "cpu"), exists("prefill_attention", "cpu")
    (True, False)
    """
    return find_spec(f"jkv.kernels.{operation}.{name}") is not None


def implementation(operation: str, name: str) -> ModuleType:
    return import_module(f"jkv.kernels.{operation}.{name}")


@dataclass(frozen=True)
class Choice:
    """The implementation that runs.

    Attributes:
        name: "xla", "tpu", "gpu" or "cpu".
        why: Why the platform's own kernel does not run; "" if it does or is not available.
    """

    name: str
    why: str = ""


def choose(operation: str, kernels: str, refusal: Callable[[ModuleType], str | None]) -> Choice:
    """Choose the implementation of an operation.

    Args:
        operation: Package name of the operation.
        kernels: "auto", "xla", "tpu", "gpu" or "cpu".
        refusal: Returns what a kernel module does not support about the inputs, or None.

    Raises:
        ValueError: `kernels` names a kernel that does not support the inputs.

    >>> choose("decode_attention", "xla", lambda module: None).name
    'xla'
    """
    name = wanted(kernels)
    if name == "xla" or not exists(operation, name):
        if why := foreign() if kernels == "auto" else "":
            _say(why)
        return Choice("xla", why)
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
    """Explain why a kernel cannot run in this process for any inputs; None if it can.

    >>> unready("decode_attention", "tpu")
    """
    version = ".".join(jax.__version__.split(".")[:2])
    if name == "gpu" and version not in (proven := PROVEN[operation]):
        return f"is not known to compile well under jax {version}, as it is under {', '.join(proven)}"
    try:
        implementation(operation, name)
    except ImportError as error:
        return f"cannot be imported: {error}"
    return cpu_library.missing(operation) if name == "cpu" else None


def plain(kernels: str, capped: bool) -> str:
    """Return the `kernels` argument for a model's attention; "xla" if logits have a soft cap and no kernel supports it.

    Raises:
        ValueError: A kernel is requested by name for capped logits.

    >>> plain("auto", capped=False), plain("auto", capped=True)
    ('auto', 'xla')
    """
    name = wanted(kernels)
    if not capped or name == "cpu":
        return kernels
    if name == "xla":
        return name
    if kernels != "auto":
        raise ValueError(f"kernels={kernels!r}: no {name} kernel takes logits with a soft cap; use 'auto' or 'xla'")
    _say(f"attention runs on xla: no {name} kernel takes logits with a soft cap")
    return "xla"


def uneven(keys: int, values: int) -> str | None:
    """Explain why attention kernels do not support these head dimensions of keys and values; None if they do.

    >>> uneven(128, 128), uneven(192, 128)
    (None, 'values of 128 channels beside keys of 192')
    """
    return None if keys == values else f"values of {values} channels beside keys of {keys}"


def over_mesh(run: Callable[..., Any], *args: Any) -> Any:
    """Call run(*args) under shard_map over rows and kv heads, because the compiler cannot partition a kernel.

    Args:
        run: Computes on one device's rows and heads; its result is sharded like the first argument.
        args: Arrays [B,H,...], or [B,1,...] and [B,n], which all heads share. Arrays with one row are replicated.
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
    """Log a message once per process."""
    log.info(text)
