"""Self-test of the kernel on this accelerator: `python -m jkv.kernels.attention_column_sums.selftest`.

It runs the problems of prefill attention and compares with float64 numpy; the bound is the error of float32
accumulation.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jkv import kernels
from jkv.kernels.decode_attention.selftest import EXACT, judgement, print_verdicts, twice
from jkv.kernels.prefill_attention.selftest import Case, cases, problem


def inputs(case: Case, seed: int = 0) -> dict[str, Any]:
    """Return the kernel's arguments in numpy, with true log-sum-exps (NaN for queries that see no key)."""
    p = problem(case, seed)
    p = {name: x for name, x in p.items() if name not in ("v", "until")}
    logits, _ = scored(p)
    top = logits.max(-1, keepdims=True)
    top = np.where(np.isfinite(top), top, 0)
    with np.errstate(divide="ignore"):
        lse = (top + np.log(np.exp(logits - top).sum(-1, keepdims=True)))[..., 0]
    return p | {"lse": np.where(np.isfinite(lse), lse, np.nan).astype(np.float32)}


def scored(p: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Return logits f64[B,H,G,T,S], -inf where masked, and the sums of the absolute values of their terms."""
    at = p["pos"][:, None, None]
    see = (at >= 0) & (at >= p["first"][:, None, :, None]) & (at <= p["last"][:, None, :, None])
    q, k = (np.nan_to_num(p[name].astype(np.float64)) for name in ("q", "k"))
    logits, size = (np.einsum("bhgtd,bhsd->bhgts", *x) * p["scale"] for x in ((q, k), (abs(q), abs(k))))
    return np.where(see[:, :, None], logits, -np.inf), size


def judged(p: dict[str, Any], got: Any) -> tuple[bool, str]:
    """Check sums f32[B,H,S]. Returns whether they are right, and the worst error with its bound."""
    logits, size = scored(p)
    lse = np.nan_to_num(p["lse"].astype(np.float64))[..., None]
    paid = np.exp(logits - lse)
    bound = EXACT * (paid * (1 + size + abs(lse))).sum((2, 3)) + 1e-30
    error = np.abs(np.asarray(got, np.float64) - paid.sum((2, 3)))
    return bool((error <= bound).all()), f"off by {error.max():.1e}, {(error / bound).max():.2f} of the bound"


def run(case: Case, sums: Any, seed: int = 0, again: bool = False) -> tuple[bool, str]:
    """Check a kernel on a random problem; `again` also requires a second run to give the same bits.

    Returns:
        Whether the result is right, and the worst error with its bound.
    """
    p = inputs(case, seed)
    scale, arrays = p["scale"], {name: jnp.asarray(x) for name, x in p.items() if name != "scale"}
    program = jax.jit(lambda a: sums(**a, scale=scale))
    found, other = twice(lambda: program(arrays)) if again else (program(arrays), "")
    good, text = judged(p, found)
    return good and not other, text + other


def verdicts(kernel: str, every: Iterable[Case], seed: int = 0) -> Iterator[tuple[str, str]]:
    """Yield ("ok", "WRONG" or "refused", description) for each case; kernel "xla" checks the reference in float32."""
    module = kernels.implementation("attention_column_sums", "reference" if kernel == "xla" else kernel)
    for case in every:
        if kernel == "xla":
            why, sums = None, lambda q, **kw: module.sums(q.astype(jnp.float32), **kw)
        else:
            why, sums = module.supports(jnp.dtype(case.floats), case.dim, case.group), module.sums
        good, text = (False, why) if why is not None else run(case, sums, seed, again=True)
        yield judgement(good, why), f"{case}: {text}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m jkv.kernels.attention_column_sums.selftest", description=__doc__)
    parser.add_argument("--tokens", type=int, default=1000, help="of a prompt")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if (name := kernels.native()) == "xla":
        print(f"no kernel runs on {jax.devices()[0].device_kind}; there are some for TPUs and for Hopper GPUs")
        return 2
    return print_verdicts(name, verdicts(name, cases(args.tokens), args.seed))


if __name__ == "__main__":
    sys.exit(main())
