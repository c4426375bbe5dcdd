"""Speed of caches: milliseconds, bytes, peak memory and compile seconds of decoding, prefill and a flush."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from rich import box
from rich.table import Table

from jkv import methods
from jkv.bench.environment import SEED
from jkv.bench.measure import cache_bytes, clock, copy_rate, percentiles, turns, weight_bytes
from jkv.bench.trials import Jkv
from jkv.cache.cache import Cache
from jkv.core import decode_loop
from jkv.core.compilation import Compiled, compiled, peak_bytes
from jkv.methods import compatibility
from jkv.models import ModelConfig, Params

What = Literal["decode", "prefill", "flush"]

TIMED = {
    "decode": "a token at a time, from a full recent window: p99 shows the flush; blocks, as generate runs, are faster",
    "prefill": "the whole prompt in one piece",
    "flush": "one flush of all layers (flush_due on a full recent window); it comes once every block tokens",
}

flush_due = jax.jit(decode_loop.flush_due, donate_argnums=0)


@dataclass(frozen=True, kw_only=True)
class Ready:
    """A repeatable measurement.

    Attributes:
        trial: Runs once and returns samples in ms.
        program: The compiled program.
        seconds: Its compile seconds.
        cache: The cache that it runs on.
    """

    trial: Callable[[], list[float]]
    program: Compiled
    seconds: float
    cache: Cache


def decode(engine: Jkv, ids: np.ndarray, steps: int) -> Ready:
    """Measure each of `steps` decode steps, after as many tokens as `ids` has."""
    start, program, seconds = engine.full_window(ids, steps)
    stops = [start.count + i + 1 for i in range(steps)]

    def trial() -> list[float]:
        state, times = jax.block_until_ready(jax.tree.map(jnp.copy, start)), []  # the loop donates its state
        for stop in stops:
            began = time.perf_counter()
            state = jax.block_until_ready(program(engine.params, state, engine.sampling, stop))
            times.append((time.perf_counter() - began) * 1e3)
        return times

    return Ready(trial=trial, program=program, seconds=seconds, cache=start.cache)


def prefill(engine: Jkv, ids: np.ndarray) -> Ready:
    """Measure prefill; the cache has capacity for the prompt and one block."""
    compatibility.check_prefill(engine.config, "jkv bench prefill")
    cache, x = engine.empty(ids.shape[1] + 16, 16), jnp.asarray(ids, jnp.int32)
    program, seconds = compiled(decode_loop.prefill.whole, engine.params, cache, x, fresh=True)
    trial = lambda: [clock(lambda: program(engine.params, cache, x))]  # noqa: E731
    return Ready(trial=trial, program=program, seconds=seconds, cache=cache)


def flush(engine: Jkv, ids: np.ndarray) -> Ready:
    """Measure the flush after as many tokens as `ids` has."""
    cache = engine.full_window(ids, 0)[0].cache
    program, seconds = compiled(flush_due, cache)

    def trial() -> list[float]:
        own = jax.block_until_ready(jax.tree.map(jnp.copy, cache))  # the flush donates its cache
        return [clock(lambda: program(own))]

    return Ready(trial=trial, program=program, seconds=seconds, cache=cache)


def prepare(what: What, engine: Jkv, ids: np.ndarray, steps: int) -> Ready:
    """Prepare the measurement `what`; `steps` is for decoding."""
    if what == "decode":
        return decode(engine, ids, steps)
    return (prefill if what == "prefill" else flush)(engine, ids)


class Peer(Protocol):
    """An engine, or another cache, that takes turns with a measured cache."""

    name: str

    def follow(self, cache: str, tokens: int) -> str:
        """Use the peer's equivalent of this cache, if it has one, and return its name there."""
        ...

    def trial(self, what: What, ids: np.ndarray, steps: int) -> Callable[[], list[float]]:
        """Return a trial of the same measurement: milliseconds of each prompt or token."""
        ...


class Beside:
    """Another cache of jkv as the peer, the same for all measured caches."""

    def __init__(self, params: Params, spec: str) -> None:
        self.params, self.name = params, spec

    def follow(self, cache: str, tokens: int) -> str:
        return "as it is"

    def trial(self, what: What, ids: np.ndarray, steps: int) -> Callable[[], list[float]]:
        engine = Jkv(self.params, self.name, ids.shape[0], ids.shape[1] + steps + 16)
        return prepare(what, engine, ids, steps).trial


def check(what: What, specs: Sequence[str], contexts: Sequence[int], steps: int, model: ModelConfig) -> None:
    """Raise ValueError for a cache or context that does not work with the model, before its weights are loaded."""
    for spec in specs:
        config = methods.parse(spec)
        compatibility.check(config, model)
        for n in contexts:
            if what != "prefill" and n <= config.steps:
                more = f"flushes every {config.steps} tokens; give a context above that"
                raise ValueError(f"--context {n}: {config} {more}")
            if n + steps > model.context and not config.unlimited:
                more = f" and {steps} new tokens" if steps else ""
                raise ValueError(
                    f"--context {n}{more}: the model's context is {model.context}; "
                    "give less, or a cache of relative positions such as streaming(budget=512)"
                )


def rows(
    what: What,
    params: Params,
    specs: Sequence[str],
    contexts: Sequence[int],
    *,
    batch: int = 1,
    steps: int = 0,
    rounds: int = 5,
    peer: Peer | None = None,
) -> Iterator[dict[str, Any]]:
    """Yield a record for each context and cache as soon as it is measured; times in ms, memory in bytes.

    ms is the median of the rounds' means; p50 and p99 are over single tokens (prompts, flushes). With a peer, rounds of
    both alternate: its prompt has the same tokens and its cache the same budget if possible, and each continues with
    its own tokens. The copy rate is the best so far in this run. Call `check` first to validate the arguments.

    Args:
        what: "decode", "prefill" or "flush".
        contexts: Tokens in the cache.
        batch: Batch size.
        steps: Tokens per round of decoding.
        rounds: Timed rounds.
        peer: Takes turns with every cache; None for no comparison.
    """
    rng, rate = np.random.default_rng(SEED), 0.0
    for n in contexts:
        ids = rng.integers(0, params.config.vocab, (batch, n))
        for spec in specs:
            engine = Jkv(params, spec, batch, n + steps + 16)
            held = peer.follow(str(engine.config), n) if peer is not None else ""
            theirs = [] if peer is None else [peer.trial(what, ids, steps)]
            ready = prepare(what, engine, ids, steps)
            done = turns([ready.trial, *theirs], rounds)
            found = percentiles(done[0])
            row: dict[str, Any] = {"what": what, "cache": str(engine.config), "context": n, "batch": batch, **found}
            if what != "flush":
                row["tokens_per_s"] = batch * (n if what == "prefill" else 1) / found["ms"] * 1e3
            row |= {"bytes": ready.cache.nbytes, "peak_bytes": peak_bytes(ready.program), "compile_s": ready.seconds}
            if what == "flush":
                block = ready.cache.recent_size - ready.cache.stay
                row |= {"block": block, "ms_per_token": found["ms"] / block}
            if what == "decode":
                rate = max(rate, copy_rate())
                amount = weight_bytes(params) + cache_bytes(ready.cache)
                share = amount / (found["ms"] / 1e3) / rate
                row |= {"steps": steps, "read_bytes": amount, "copy_bytes_per_s": rate, "bandwidth_share": share}
            if peer is not None:
                other = percentiles(done[1])
                row |= {"peer": {"name": peer.name, "cache": held, **other}, "ratio": found["ms"] / other["ms"]}
            yield row


def table(what: What, found: Sequence[dict[str, Any]]) -> Table:
    """Format the rows as a table that also renders as markdown; sizes in MiB."""
    cells: dict[str, Callable[[dict[str, Any]], str]] = {
        "cache": lambda r: r["cache"],
        "context": lambda r: f"{r['context']:,}",
        "ms/token" if what == "decode" else "ms": lambda r: number(r["ms"]),
        "p50": lambda r: number(r["p50"]),
        "p99": lambda r: number(r["p99"]),
    }
    if what == "flush":
        cells |= {"block": lambda r: str(r["block"]), "ms/token": lambda r: number(r["ms_per_token"])}
    else:
        cells["tokens/s"] = lambda r: f"{r['tokens_per_s']:,.1f}"
    cells |= {"cache MiB": lambda r: mib(r["bytes"]), "peak MiB": lambda r: mib(r["peak_bytes"])}
    if what == "decode":
        cells |= {"read MiB": lambda r: mib(r["read_bytes"]), "of copy rate": lambda r: f"{r['bandwidth_share']:.0%}"}
    cells["compile s"] = lambda r: f"{r['compile_s']:.1f}"
    if any("peer" in r for r in found):
        cells[f"{found[0]['peer']['name']} ms"] = lambda r: f"{number(r['peer']['ms'])} ({r['peer']['cache']})"
        cells["ratio"] = lambda r: f"{r['ratio']:.2f}"
    out = Table(box=box.MARKDOWN, caption=TIMED[what])
    for name in cells:
        out.add_column(name, justify="left" if name == "cache" else "right")
    for r in found:
        out.add_row(*(show(r) for show in cells.values()))
    return out


def number(x: float) -> str:
    """Format a number with two decimals below 10, else with one.

    >>> number(3.14159), number(31.4159)
    ('3.14', '31.4')
    """
    return f"{x:.2f}" if x < 10 else f"{x:,.1f}"


def mib(x: float) -> str:
    """Format bytes as MiB.

    >>> mib(3 << 19)
    '1.5'
    """
    return f"{x / 2**20:,.1f}"
