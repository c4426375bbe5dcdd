"""Programs for accelerators that are not here, by their real compilers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Target:
    """What is compiled for: its devices, bytes of memory of each (None: not known), and its kernels.

    rates: of each device, bfloat16 FLOP and bytes of memory a second, as its vendor states them; clock: cycles a
    second; None: not known.
    """

    name: str
    devices: list[Any]
    memory: int | None
    kernels: str
    rates: tuple[float, float] | None = None
    clock: float | None = None


def target(name: str) -> Target:
    """A TPU topology (v5e:2x4), a GPU (h200, h100), or cpu: this machine. Raises ValueError with what to install.

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
