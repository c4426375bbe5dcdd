"""Compilation targets: accelerators that this machine need not have, with their real compilers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Target:
    """A machine to compile for.

    Attributes:
        name: name on the command line.
        devices: its devices, for jax.
        memory: bytes of each device, or None if unknown.
        kernels: platform of its kernels: "tpu", "gpu" or "xla".
        rates: bfloat16 FLOP/s and memory bytes/s of each device, as stated by the vendor, or None if unknown.
        clock: cycles per second, or None if unknown.
    """

    name: str
    devices: list[Any]
    memory: int | None
    kernels: str
    rates: tuple[float, float] | None = None
    clock: float | None = None


def target(name: str) -> Target:
    """Return the target of a name.

    Args:
        name: a TPU topology such as v5e:2x4, a GPU (h200, h100), or cpu for this machine.

    Raises:
        ValueError: an unknown name, or a missing compiler, with what to install.

    >>> target("cpu").kernels
    'xla'
    """
    import jax

    from jkv.aot import cuda, tpu

    if name == "cpu":
        return Target(name=name, devices=jax.devices("cpu")[:1], memory=None, kernels="xla")
    if name in cuda.CHIPS:
        if (text := cuda.missing()) is not None:
            raise ValueError(text)
        _, bandwidth, memory, _ = cuda.CHIPS[name]
        return Target(
            name=name, devices=[cuda.device(name)], memory=memory, kernels="gpu", rates=(cuda.FLOPS, bandwidth)
        )
    devices, chip = tpu.devices(name), name.partition(":")[0]
    clock = tpu.RATES[chip][0] / tpu.PER_CYCLE[chip]
    return Target(name=name, devices=devices, memory=tpu.CHIPS[chip], kernels="tpu", rates=tpu.RATES[chip], clock=clock)
