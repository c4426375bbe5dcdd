"""Programs for accelerators that are not here, by their real compilers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Target:
    """What is compiled for: its devices, bytes of memory of each (None: not known), and its kernels."""

    name: str
    devices: list[Any]
    memory: int | None
    kernels: str


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
        return Target(name=name, devices=[cuda.device(name)], memory=cuda.CHIPS[name][2], kernels="gpu")
    devices = tpu.devices(name)
    return Target(name=name, devices=devices, memory=tpu.CHIPS[name.partition(":")[0]], kernels="tpu")
