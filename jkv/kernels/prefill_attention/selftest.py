"""Self-test of the kernel on this accelerator: `python -m jkv.kernels.prefill_attention.selftest`.

It runs rows of several lengths, with and without tokens before the prompt, with NaN in all dead entries, and compares
with float64 numpy. The bound is decode attention's, the expected rounding error. A second run must give the same bits.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jkv.kernels.decode_attention.selftest import EXACT, ROUNDING, judged, judgement, print_verdicts, truth, twice
from jkv.protocols import KernelCodes

NEVER = np.iinfo(np.int32).max


@dataclass(frozen=True, kw_only=True)
class Case:
    """A test case of two rows: the first has no dead entries, the second has a third of old and new entries dead."""

    floats: str = "bfloat16"
    dim: int = 128
    group: int = 4  # query heads per kv head
    new: int = 1000  # prompt tokens
    before: int = 0  # entries before the prompt
    window: int = 0  # sliding window in positions; 0: all up to the query's own
    lasting: bool = False  # whether keys expire (`until`)

    def __str__(self) -> str:
        some = f"{self.floats} D={self.dim} G={self.group} T={self.new}"
        more = ((name, getattr(self, name)) for name in ("before", "window", "lasting"))
        return some + "".join(f" {name}={int(x)}" for name, x in more if x)


def cases(new: int = 1000) -> Iterator[Case]:
    """Yield cases of every head dimension and group size, then all edge cases on one of them."""
    for dim in (64, 128, 256):
        yield from (Case(dim=dim, group=group, new=new) for group in (1, 3, 4, 8))
    base = Case(new=new)
    yield from (replace(base, floats=x) for x in ("float32", "float16"))
    yield from (replace(base, before=n) for n in (1, new // 2, new * 3))
    yield replace(base, window=new // 4, before=new // 2)
    yield replace(base, lasting=True, before=new // 2)
    yield replace(base, dim=64, group=3, new=65, window=30, lasting=True)


def problem(case: Case, seed: int = 0) -> dict[str, Any]:
    """Return the kernel's arguments in numpy. Positions are ascending, with gaps in the second row."""
    rng, (b, h), t, s = np.random.default_rng(seed), (2, 2), case.new, case.before + case.new
    live = np.ones((b, s), bool)
    live[1] = rng.random(s) < 2 / 3
    live[1, case.before : case.before + t // 5] = False  # the padding of a shorter prompt
    live[1, -1] = True
    step = np.where(np.arange(b)[:, None] == 1, rng.integers(1, 4, (b, s)), 1)
    pos = np.where(live, np.cumsum(np.where(live, step, 0), 1) - 1, -1).astype(np.int32)
    last = pos[:, case.before :]
    first = np.maximum(last - case.window + 1, 0) if case.window else np.zeros_like(last)
    floats: Any = np.dtype(case.floats) if case.floats != "bfloat16" else ml_dtypes.bfloat16
    q = rng.normal(size=(b, h, case.group, t, case.dim))
    k, v = rng.normal(size=(2, b, h, s, case.dim))
    q[np.broadcast_to((last < 0)[:, None, None], q.shape[:4])] = np.nan
    for x in (k, v):
        x[np.broadcast_to((pos < 0)[:, None], x.shape[:3])] = np.nan
    arrays = {name: x.astype(floats) for name, x in dict(q=q, k=k, v=v).items()}
    out = dict(**arrays, pos=pos, first=first, last=last, scale=case.dim**-0.5)
    if case.lasting:
        soon = rng.random((b, h, s)) < 0.5
        until = np.where(soon, pos[:, None] + rng.integers(0, t // 2, (b, h, s)), NEVER)
        until[:, -1] = np.where(pos < 4, NEVER, pos + t // 8)  # whole tiles of this head expire
        out["until"] = until.astype(np.int32)
    return out


def rounding(case: Case, kernel: str) -> tuple[float, float]:
    """Return the relative rounding error of the operands of K @ q (a TPU rounds the scaled q) and of V @ p."""
    of = EXACT if kernel == "xla" else ROUNDING.get(case.floats, EXACT)
    return of if kernel == "tpu" else EXACT, of


def run(case: Case, kernel: str, attention: Any, seed: int = 0, again: bool = False) -> tuple[bool, str]:
    """Check a kernel on a random problem; `again` also requires a second run to give the same bits.

    Returns:
        Whether the result is right, and the worst error with its bound.
    """
    p = problem(case, seed)
    scale = p.pop("scale")
    program, arrays = jax.jit(lambda a: attention(**a, scale=scale)), jax.tree.map(jnp.asarray, p)
    part, other = twice(lambda: program(arrays)) if again else (program(arrays), "")
    sides = {name: KernelCodes(codes=p[name]) for name in ("k", "v")}
    good, text = judged(truth(p | sides | {"pos": p["pos"][:, None], "scale": scale}, rounding(case, kernel)), part)
    return good and not other, text + other


def verdicts(kernel: str, every: Iterable[Case], seed: int = 0) -> Iterator[tuple[str, str]]:
    """Yield ("ok", "WRONG" or "refused", description) for each case; kernel "xla" checks the reference in float32."""
    module = importlib.import_module(f"jkv.kernels.prefill_attention.{'reference' if kernel == 'xla' else kernel}")
    for case in every:
        if kernel == "xla":
            why, attention = None, lambda q, **kw: module.attention(q.astype(jnp.float32), **kw)
        else:
            why, attention = module.supports(jnp.dtype(case.floats), case.dim, case.group), module.attention
        good, text = (False, why) if why is not None else run(case, kernel, attention, seed, again=True)
        yield judgement(good, why), f"{case}: {text}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m jkv.kernels.prefill_attention.selftest", description=__doc__)
    parser.add_argument("--kernel", choices=("gpu", "tpu"), default=jax.default_backend())
    parser.add_argument("--tokens", type=int, default=1000, help="of a prompt")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.kernel not in ("gpu", "tpu"):
        print(f"no kernel runs on {args.kernel}; --kernel gpu or tpu, where there is one")
        return 2
    return print_verdicts(args.kernel, verdicts(args.kernel, cases(args.tokens), args.seed))


if __name__ == "__main__":
    sys.exit(main())
