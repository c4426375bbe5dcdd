"""Kernel benchmark: all implementations of decode attention over the same random codes, and dense attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from rich import box
from rich.table import Table

from jkv import kernels, methods
from jkv.arrays.online_softmax import Partial
from jkv.attention.dense import attend
from jkv.attention.mask import causal, visible
from jkv.attention.tier_attention import attend_tier, kernel_codes
from jkv.bench.environment import SEED
from jkv.bench.measure import clock, copy_rate, percentiles, turns
from jkv.bench.speed import mib, number
from jkv.cache import codec_map
from jkv.cache.cache import Tier, tree_bytes
from jkv.cache.spec import TierConfig
from jkv.kernels.decode_attention import reference
from jkv.methods import compatibility
from jkv.methods.config import CacheConfig, TierSpec, resolve
from jkv.models import ModelConfig
from jkv.utils.optional_deps import install

OPERATIONS = ("decode_attention",)
DENSE = ("float32", "bfloat16")
VERSUS = ("sdpa", "cudnn")
REPEATS = 16  # chained attention calls per trial; a single call would mostly measure dispatch
CLOSE = 0.02  # tolerance for 16-bit products, relative to the largest number of the result


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One attention problem.

    Attributes:
        q: Queries f[B,H,G,1,D].
        at: Their positions i32[B,1].
        tier: The tier that they read.
        config: Its config.
        dense: The same keys and values, dequantized to f32[B,H,C,D].
        want: The expected result.
    """

    q: Array
    at: Array
    tier: Tier
    config: TierConfig
    dense: tuple[Array, Array]
    want: np.ndarray


@dataclass(frozen=True, kw_only=True)
class Case:
    """One implementation of a problem.

    Attributes:
        name: Name of the implementation.
        result: Computes the result.
        trial: Returns the milliseconds of one attention call.
        nbytes: Bytes that a call reads.
    """

    name: str
    result: Callable[[], np.ndarray]
    trial: Callable[[], float]
    nbytes: int


def check(operation: str, names: Sequence[str], versus: Sequence[str]) -> None:
    """Raise ValueError for an unknown operation, or an implementation that this platform does not have."""
    if operation not in OPERATIONS:
        raise ValueError(f"--op {operation}: there is {', '.join(OPERATIONS)}")
    for name in names:
        kernels.check(name)
    for name in versus:
        if name not in VERSUS:
            raise ValueError(f"--vs {name}: one of {', '.join(VERSUS)}")
        if jax.default_backend() != "gpu":
            raise ValueError(f"--vs {name}: it runs on a GPU, and this is {jax.devices()[0].device_kind}; leave it out")
        if name == "sdpa" and find_spec("torch") is None:
            raise ValueError(f"--vs sdpa: torch is missing; {install('parity')}")


def problem(spec: str, model: ModelConfig, batch: int, context: int, dtype: str) -> Problem:
    """Build a random problem in a model's shape, with the codecs of the last tier of a cache.

    Raises:
        ValueError: No kernel reads these codes.
    """
    cache = methods.parse(spec)
    k, v = cache.codecs(cache.tiers[-1])
    plain = CacheConfig(tiers=(TierSpec(k=k, v=v, rope=cache.tiers[-1].rope),), recent=0, sinks=0)
    compatibility.check(plain, model)
    config = resolve(plain, model, context, 0)[0].tiers[0]
    shape = (batch, model.heads, config.capacity)
    keys = jax.random.split(jax.random.key(SEED), 3)
    dims = model.head_dim, model.value_dim
    floats = [jax.random.normal(key, (*shape, d), jnp.float32) for key, d in zip(keys[:2], dims, strict=True)]
    k, v = (codec_map.encode(c, x.astype(dtype)) for c, x in zip((config.k, config.v), floats, strict=True))
    pos = jnp.broadcast_to(jnp.arange(config.capacity, dtype=jnp.int32), shape)
    tier = Tier(k=k, v=v, pos=pos, columns={}, at=None, head=None, summary=None)
    codes_k, codes_v = kernel_codes(tier, config)
    if codes_k is None or codes_v is None:
        raise ValueError(f"{spec}: keys that are rotated when they are read, and such codes, are read by no kernel")
    q = jax.random.normal(keys[2], (batch, model.heads, model.groups, 1, model.head_dim), dtype)
    at = jnp.full((batch, 1), config.capacity, jnp.int32)

    def read(q: Array) -> Partial:
        return reference.attention(q, codes_k, codes_v, pos, jnp.zeros_like(at), at, float(model.scale))

    want = codec_map.between_ends(read, q.astype(jnp.float32), config.k, config.v, float(model.scale)).finish()
    dense = (codec_map.decode(config.k, k), codec_map.decode(config.v, v))
    return Problem(q=q, at=at, tier=tier, config=config, dense=dense, want=np.asarray(want))


def repeated(name: str, run: Callable[[Array, Any], Array], q: Array, held: Any) -> Case:
    """Wrap a jax function (q, held) -> f[B,H,G,1,D] as a case of REPEATS chained calls."""

    @jax.jit
    def many(q: Array, held: Any) -> Array:
        def body(_: Array, q: Array) -> Array:
            q, now = jax.lax.optimization_barrier((q, held))  # keeps XLA from hoisting work that does not depend on q
            return q + (1e-6 * run(q, now)).astype(q.dtype)

        return jax.lax.fori_loop(0, REPEATS, body, q)

    return Case(
        name=name,
        result=lambda: np.asarray(jax.jit(run)(q, held), np.float32),
        trial=lambda: clock(lambda: many(q, held)) / REPEATS,
        nbytes=tree_bytes(held),
    )


def coded(name: str, p: Problem, model: ModelConfig) -> Case:
    """Return the case of an implementation over the codes. Raises ValueError if a kernel does not support them."""
    held = p.tier.k, p.tier.v, p.tier.pos
    config = replace(p.config, kernels=name)

    def run(q: Array, held: Any) -> Array:
        tier = replace(p.tier, k=held[0], v=held[1], pos=held[2])
        return attend_tier(q, causal(p.at, None), tier, config, model.ropes[0], float(model.scale)).finish()

    return repeated(name, run, p.q, held)


def dense(dtype: str, p: Problem, scale: float) -> Case:
    """Return the case of jkv's dense attention over the dequantized tokens."""

    def run(q: Array, held: Any) -> Array:
        k, v, pos = held
        return attend(q, k, v, visible(p.at, pos, None), scale).finish()

    return repeated(f"dense {dtype}", run, p.q.astype(dtype), (*(x.astype(dtype) for x in p.dense), p.tier.pos))


def cudnn(p: Problem, scale: float) -> Case:
    """Return the case of cuDNN, called by jax, over the same tokens in bfloat16 (with heads after tokens)."""
    b, h, g, _, d = p.q.shape

    def run(q: Array, held: Any) -> Array:
        flat = q.reshape(b, 1, h * g, d)
        return jax.nn.dot_product_attention(flat, *held, scale=scale, implementation="cudnn").reshape(q.shape)

    held = tuple(jnp.swapaxes(x, 1, 2).astype(jnp.bfloat16) for x in p.dense)
    return repeated("cudnn bfloat16", run, p.q.astype(jnp.bfloat16), held)


def sdpa(p: Problem, scale: float) -> Case:
    """Return the case of torch's scaled_dot_product_attention over the same tokens in bfloat16."""
    import torch  # pyright: ignore[reportMissingImports]  an extra

    b, h, g, _, d = p.q.shape
    q = p.q.astype(jnp.bfloat16).reshape(b, h * g, 1, d)
    q, k, v = (torch.from_dlpack(x) for x in (q, *(x.astype(jnp.bfloat16) for x in p.dense)))

    def once(q: Any) -> Any:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=True)

    def trial() -> None:
        x = q
        for _ in range(REPEATS):
            x = once(x)
        torch.cuda.synchronize()

    return Case(
        name="torch sdpa bfloat16",
        result=lambda: once(q).float().cpu().numpy().reshape(p.want.shape),
        trial=lambda: clock(trial) / REPEATS,
        nbytes=2 * k.numel() * k.element_size(),
    )


def rows(
    specs: Sequence[str],
    names: Sequence[str],
    versus: Sequence[str],
    model: ModelConfig,
    contexts: Sequence[int],
    *,
    batch: int,
    dtype: str,
    rounds: int,
) -> Iterator[dict[str, Any]]:
    """Yield a record for each cache, context and implementation: ms per attention call, and the ratio to dense.

    Implementations take turns, and `ratio` compares with the dense attention of the same turns.

    Raises:
        RuntimeError: An implementation gives a wrong result; it is checked before it is timed.
    """
    for context in contexts:
        for spec in specs:
            p = problem(spec, model, batch, context, dtype)
            cases = [coded(name, p, model) for name in names] + [dense(x, p, float(model.scale)) for x in DENSE]
            cases += [{"sdpa": sdpa, "cudnn": cudnn}[name](p, float(model.scale)) for name in versus]
            errors = [wrong(case, p.want, spec) for case in cases]
            times = [percentiles([[x] for x in some]) for some in turns([c.trial for c in cases], rounds)]
            by_name, rate = {c.name: t["ms"] for c, t in zip(cases, times, strict=True)}, copy_rate()
            for case, error, found in zip(cases, errors, times, strict=True):
                yield {
                    "cache": spec,
                    "implementation": case.name,
                    "context": context,
                    "batch": batch,
                    **found,
                    "read_bytes": case.nbytes,
                    "copy_bytes_per_s": rate,
                    "bandwidth_share": case.nbytes / (found["ms"] / 1e3) / rate,
                    "ratio": {x: found["ms"] / by_name[f"dense {x}"] for x in DENSE},
                    "error": error,
                }


def wrong(case: Case, want: np.ndarray, spec: str) -> float:
    """Return the largest error relative to the largest number. Raises RuntimeError if it exceeds rounding."""
    got = case.result()
    error = float(abs(got - want).max() / abs(want).max())
    if not error < CLOSE:  # also catches NaN
        raise RuntimeError(f"{case.name} gives a wrong result over {spec}: off by {error:.2g}; it was not timed")
    return error


def table(found: Sequence[dict[str, Any]]) -> Table:
    """Format the rows as a table that also renders as markdown."""
    heads = ("codes of", "context", "implementation", "ms", "p99", "read MiB", "of copy rate")
    out = Table(*heads, *(f"/ dense {x}" for x in DENSE), "error", box=box.MARKDOWN)
    for r in found:
        out.add_row(
            r["cache"],
            f"{r['context']:,}",
            r["implementation"],
            f"{r['ms']:.3f}" if r["ms"] < 1 else number(r["ms"]),
            f"{r['p99']:.3f}" if r["p99"] < 1 else number(r["p99"]),
            mib(r["read_bytes"]),
            f"{r['bandwidth_share']:.0%}",
            *(f"{r['ratio'][x]:.2f}" for x in DENSE),
            f"{r['error']:.1e}",
        )
    return out
