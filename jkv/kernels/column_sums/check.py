"""Does the kernel compute what it should, here? `python -m jkv.kernels.column_sums.check` on the accelerator.

The problems are prefill attention's, against float64 in numpy; the bound is what accumulation in float32 explains.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jkv import kernels
from jkv.kernels.decode_attention.check import EXACT
from jkv.kernels.prefill_attention.check import Case, cases, problem


def inputs(case: Case, seed: int = 0) -> dict[str, Any]:
    """The arguments of a kernel, in numpy: log-sum-exps are the true ones, NaN where a query sees nothing."""
    p = problem(case, seed)
    p = {name: x for name, x in p.items() if name not in ("v", "until")}
    logits, _ = scored(p)
    top = logits.max(-1, keepdims=True)
    top = np.where(np.isfinite(top), top, 0)
    with np.errstate(divide="ignore"):
        lse = (top + np.log(np.exp(logits - top).sum(-1, keepdims=True)))[..., 0]
    return p | {"lse": np.where(np.isfinite(lse), lse, np.nan).astype(np.float32)}


def scored(p: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Logits f64[B,H,G,T,S], -inf where they are not seen, and the sums of the sizes of their terms."""
    at = p["pos"][:, None, None]
    see = (at >= 0) & (at >= p["first"][:, None, :, None]) & (at <= p["last"][:, None, :, None])
    q, k = (np.nan_to_num(p[name].astype(np.float64)) for name in ("q", "k"))
    logits, size = (np.einsum("bhgtd,bhsd->bhgts", *x) * p["scale"] for x in ((q, k), (abs(q), abs(k))))
    return np.where(see[:, :, None], logits, -np.inf), size


def judged(p: dict[str, Any], got: Any) -> tuple[bool, str]:
    """Are sums f32[B,H,S] right, and the worst error beside its bound."""
    logits, size = scored(p)
    lse = np.nan_to_num(p["lse"].astype(np.float64))[..., None]
    paid = np.exp(logits - lse)
    bound = EXACT * (paid * (1 + size + abs(lse))).sum((2, 3)) + 1e-30
    error = np.abs(np.asarray(got, np.float64) - paid.sum((2, 3)))
    return bool((error <= bound).all()), f"off by {error.max():.1e}, {(error / bound).max():.2f} of the bound"


def run(case: Case, sums: Any, seed: int = 0) -> tuple[bool, str]:
    p = inputs(case, seed)
    scale, arrays = p["scale"], {name: jnp.asarray(x) for name, x in p.items() if name != "scale"}
    return judged(p, jax.jit(lambda a: sums(**a, scale=scale))(arrays))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m jkv.kernels.column_sums.check", description=__doc__)
    parser.add_argument("--tokens", type=int, default=1000, help="of a prompt")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if (name := kernels.native()) == "xla":
        print(f"no kernel runs on {jax.devices()[0].device_kind}; there are some for TPUs and for Hopper GPUs")
        return 2
    own = kernels.implementation("column_sums", name)
    print(f"{name} kernel on {jax.devices()[0].device_kind}, jax {jax.__version__}")
    right = wrong = refused = 0
    for case in cases(args.tokens):
        if (why := own.supports(jnp.dtype(case.floats), case.dim, case.group)) is not None:
            refused += 1
            print(f"refused  {case}: {why}")
            continue
        good, text = run(case, own.sums, args.seed)
        right, wrong = right + good, wrong + (not good)
        print(f"{'ok      ' if good else 'WRONG   '} {case}: {text}", flush=True)
    print(f"{right} right, {wrong} wrong, {refused} refused")
    return 1 if wrong or not right else 0


if __name__ == "__main__":
    sys.exit(main())
