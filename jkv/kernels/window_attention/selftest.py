"""Does the kernel compute what it should, here? `python -m jkv.kernels.window_attention.selftest` on the accelerator.

Windows of several sizes, part of them empty, with NaN in all that is dead, against float64 in numpy; the bound is
decode attention's: what rounding explains. A second run must give the same bits, and so must what enters.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jkv import kernels
from jkv.kernels.decode_attention.selftest import EXACT, ROUNDING, judged, judgement, print_verdicts, truth, twice
from jkv.protocols import KernelCodes


@dataclass(frozen=True, kw_only=True)
class Case:
    """Rows of a batch: the first is whole, others end earlier, hold dead slots, and their slots are in another order.

    enters: the newest token is put into the slot behind those of the first row, which it does not fill.
    """

    floats: str = "bfloat16"
    dim: int = 128
    group: int = 4  # query heads of a kv head
    new: int = 1  # query tokens, each sees those before it
    slots: int = 32
    rows: int = 2
    window: int = 0  # positions that a query sees; 0: all up to its own
    enters: bool = True

    def __str__(self) -> str:
        some = f"{self.floats} D={self.dim} G={self.group} T={self.new} R={self.slots} B={self.rows}"
        return some + f" window={self.window}" * (self.window > 0) + " enters" * self.enters


def cases() -> Iterator[Case]:
    """Every width and number of rows, then every edge on one of them."""
    for dim in (64, 128, 256):
        yield from (Case(dim=dim, group=group, rows=rows) for group, rows in ((1, 1), (4, 2), (7, 8), (32, 1)))
    base = Case()
    yield from (replace(base, floats=x) for x in ("float16", "float32"))
    yield from (replace(base, slots=n) for n in (1, 2, 17, 47, 63, 64, 65, 144, 300))
    yield from (replace(base, slots=n, dim=256, group=2) for n in (33, 144))
    yield from (replace(base, window=n, slots=47) for n in (1, 20))
    for group, new in ((1, 5), (4, 8), (2, 16), (5, 16)):
        yield replace(base, group=group, new=new, slots=48, enters=False)
        yield replace(base, group=group, new=new, slots=100, window=30)


def problem(case: Case, seed: int = 0) -> dict[str, Any]:
    """The arguments of a kernel, in numpy."""
    rng, (b, h), n = np.random.default_rng(seed), (case.rows, 2), case.slots
    at = n - 1 - n // 4  # slots behind it are empty
    pos = np.where(np.arange(n) < at, 100 + np.arange(n), -1)[None].repeat(b, 0)
    for row in range(1, b):
        pos[row, :at] = rng.permutation(pos[row, :at])
        pos[row, rng.random(n) < row / b / 2] = -1
    put = np.full((b, n), -1)
    put[:, at] = np.where(np.arange(b) % 3 == 2, -1, 100 + at)  # some rows pause
    newest = np.where(np.arange(b) % 3 == 2, -1, 100 + at - 1 + case.enters)
    last = np.maximum(newest[:, None] - np.arange(case.new)[::-1], -1)
    first = np.maximum(last - case.window + 1, 0) if case.window else last & 0
    floats: Any = np.dtype(case.floats) if case.floats != "bfloat16" else ml_dtypes.bfloat16

    def drawn(*shape: int) -> np.ndarray:
        return rng.normal(size=(b, h, *shape, case.dim))

    q, (k, v), (new_k, new_v) = drawn(case.group, case.new), (drawn(n), drawn(n)), (drawn(1), drawn(1))
    for x in (k, v):
        x[np.broadcast_to((pos < 0)[:, None], x.shape[:3])] = np.nan
    arrays = {name: x.astype(floats) for name, x in dict(q=q, k=k, v=v).items()}
    bounds = {name: x.astype(np.int32) for name, x in dict(pos=pos, first=first, last=last).items()}
    if case.enters:
        entering = dict(new_k=new_k.astype(floats), new_v=new_v.astype(floats))
        arrays |= entering | dict(at=np.int32(at), put=put.astype(np.int32))
    return dict(**arrays, **bounds, scale=case.dim**-0.5)


def after(p: dict[str, Any]) -> dict[str, Any]:
    """The window of a problem once what enters it is there."""
    if "at" not in p:
        return p
    k, v = p["k"].copy(), p["v"].copy()
    k[:, :, p["at"]], v[:, :, p["at"]] = p["new_k"][:, :, 0], p["new_v"][:, :, 0]
    return p | dict(k=k, v=v, pos=np.maximum(p["pos"], p["put"]))


def rounding(case: Case, kernel: str) -> tuple[float, float]:
    """Of the operands of K @ q, and of V @ p."""
    return EXACT, EXACT if kernel == "xla" else ROUNDING.get(case.floats, EXACT)


def run(case: Case, kernel: str, module: Any, seed: int = 0, again: bool = False) -> tuple[bool, str]:
    """Is it right for a random problem, and the worst error beside its bound; module: has both functions; again: and a
    second time, bit by bit."""
    p = problem(case, seed)
    scale, arrays = p["scale"], {name: jnp.asarray(x) for name, x in p.items() if name != "scale"}
    if kernel == "xla":  # the reference, in float32
        arrays["q"] = arrays["q"].astype(jnp.float32)
    function = partial(module.entered if case.enters else module.attention, scale=scale)
    program = jax.jit(lambda a: function(**a))
    found, other = twice(lambda: program(arrays)) if again else (program(arrays), "")
    part, *window = found if case.enters else (found,)
    p = after(p)
    for name, x in zip(("k", "v"), window, strict=False):
        if np.asarray(x).tobytes() != p[name].tobytes():
            other += f"; {name} is not what was there and what entered"
    sides = {name: KernelCodes(codes=p[name]) for name in ("k", "v")}
    good, text = judged(truth(p | sides | {"pos": p["pos"][:, None]}, rounding(case, kernel)), part)
    return good and not other, text + other


def verdicts(kernel: str, every: Iterable[Case], seed: int = 0) -> Iterator[tuple[str, str]]:
    """Of each case "ok", "WRONG" or "refused", and a line about it; kernel "xla": of the reference."""
    module = kernels.implementation("window_attention", "reference" if kernel == "xla" else kernel)
    for case in every:
        why = None if kernel == "xla" else module.supports(jnp.dtype(case.floats), case.dim, case.group)
        good, text = (False, why) if why is not None else run(case, kernel, module, seed, again=True)
        yield judgement(good, why), f"{case}: {text}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m jkv.kernels.window_attention.selftest", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if kernels.native() != "gpu":
        print(f"no kernel runs on {jax.devices()[0].device_kind}; there is one for Hopper GPUs")
        return 2
    return print_verdicts("gpu", verdicts("gpu", cases(), args.seed))


if __name__ == "__main__":
    sys.exit(main())
