"""What enters a window on four devices, and on one: how far a Partial and the windows after it differ.

XLA_FLAGS=--xla_force_host_platform_device_count=4 python window_mesh.py; by the oracle, since the kernel's interpreter
is of one device.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jkv.attention.mask import Mask
from jkv.attention.recent_window import entered
from jkv.kernels.window_attention import gpu, reference, selftest
from jkv.protocols import Window


def run(scale: float, a: dict[str, jax.Array]) -> tuple[jax.Array, ...]:
    window = Window(k=a["k"], v=a["v"], pos=a["pos"], columns={})
    new = Window(k=a["new_k"], v=a["new_v"], pos=a["put"], columns={})
    mask = Mask(first=a["first"], last=a["last"])
    part, window = entered(a["q"], window, new, a["at"], a["put"], mask, scale, "gpu")
    return part.finish(), jnp.nan_to_num(window.k), jnp.nan_to_num(window.v)


if __name__ == "__main__":
    gpu.entered = reference.entered
    p = selftest.problem(selftest.Case(slots=20))
    program, arrays = jax.jit(partial(run, p.pop("scale"))), jax.tree.map(jnp.asarray, p)
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    names = {0: (), 2: ("data",), 4: ("data", "model"), 5: ("data", "model")}
    put = {x: jax.device_put(y, NamedSharding(mesh, PartitionSpec(*names[y.ndim]))) for x, y in arrays.items()}
    with jax.set_mesh(mesh):
        found = program(put)
    assert all(x.sharding.spec[:2] == ("data", "model") for x in found)
    pairs = zip(found, program(arrays), strict=True)
    print(max(np.abs(np.asarray(a, np.float32) - np.asarray(b, np.float32)).max() for a, b in pairs))
