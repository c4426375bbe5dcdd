"""Self-test of the kernel on this accelerator: `python -m jkv.kernels.window_attention.selftest`.

It runs windows of several sizes, partly empty, with NaN in all dead slots, and compares with float64 numpy. The bound
is decode attention's, the expected rounding error. A second run must give the same bits, and appended tokens must be
stored exactly.
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
    """A test case: the first row has no dead slots; the others end earlier, have dead slots, and are shuffled.

    With `enters` the newest token is appended after the slots of the first row, which leave the window partly empty.
    """

    floats: str = "bfloat16"
    dim: int = 128
    group: int = 4  # query heads per kv head
    new: int = 1  # query tokens; each sees the ones before it
    slots: int = 32
    rows: int = 2
    window: int = 0  # sliding window in positions; 0: all up to the query's own
    enters: bool = True

    def __str__(self) -> str:
        some = f"{self.floats} D={self.dim} G={self.group} T={self.new} R={self.slots} B={self.rows}"
        return some + f" window={self.window}" * (self.window > 0) + " enters" * self.enters


def cases() -> Iterator[Case]:
    """Yield cases of every head dimension and number of rows, then all edge cases on one of them."""
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
    """Return the kernel's arguments for a case, in numpy."""
    rng, (b, h), n = np.random.default_rng(seed), (case.rows, 2), case.slots
    at = n - 1 - n // 4  # slots after it are empty
    pos = np.where(np.arange(n) < at, 100 + np.arange(n), -1)[None].repeat(b, 0)
    for row in range(1, b):
        pos[row, :at] = rng.permutation(pos[row, :at])
        pos[row, rng.random(n) < row / b / 2] = -1
    put = np.full((b, n), -1)
    put[:, at] = np.where(np.arange(b) % 3 == 2, -1, 100 + at)  # some rows do not append
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
    """Return the problem with the new token written into the window."""
    if "at" not in p:
        return p
    k, v = p["k"].copy(), p["v"].copy()
    k[:, :, p["at"]], v[:, :, p["at"]] = p["new_k"][:, :, 0], p["new_v"][:, :, 0]
    return p | dict(k=k, v=v, pos=np.maximum(p["pos"], p["put"]))


def rounding(case: Case, kernel: str) -> tuple[float, float]:
    """Return the relative rounding error of the operands of K @ q and of V @ p."""
    return EXACT, EXACT if kernel == "xla" else ROUNDING.get(case.floats, EXACT)


def run(case: Case, kernel: str, module: Any, seed: int = 0, again: bool = False) -> tuple[bool, str]:
    """Check a kernel on a random problem.

    Args:
        module: Kernel module with both functions.
        again: Whether a second run must give the same bits.

    Returns:
        Whether the result is right, and the worst error with its bound.
    """
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
    """Yield ("ok", "WRONG" or "refused", description) for each case; kernel "xla" checks the reference."""
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
