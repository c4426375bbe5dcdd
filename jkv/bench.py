"""How fast this machine runs: jkv beside transformers with the same weights, and against what the memory allows.

`python -m jkv.bench --compare` needs torch and transformers, `--flat` does not. A trial of one engine is always
followed by a trial of the other, so that a noisy neighbour slows both; the table gives medians.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from jkv import loop, methods, sampling
from jkv.cache import tree_bytes
from jkv.io.load import load, read
from jkv.models import Params

Trial = Callable[[], float]  # runs once -> milliseconds per unit (a token, or a prompt)


@dataclass(frozen=True)
class Line:
    """One row of the comparison, in milliseconds: medians, fastest trials, and what the hardware would need."""

    what: str
    tokens: int
    jkv: float
    other: float
    jkv_best: float
    other_best: float
    floor: float

    @property
    def ratio(self) -> float:
        return self.jkv / self.other


def clock(run: Callable[[], Any]) -> float:
    """Milliseconds until the arrays that `run` returns are there.

    >>> clock(lambda: None) >= 0
    True
    """
    start = time.perf_counter()
    jax.block_until_ready(run())
    return (time.perf_counter() - start) * 1e3


def alternate(a: Trial, b: Trial, rounds: int) -> tuple[list[float], list[float]]:
    """Times of both, after a warm-up of each, measured A B A B.

    >>> alternate(lambda: 1.0, lambda: 2.0, 2)
    ([1.0, 1.0], [2.0, 2.0])
    """
    for warm in (a, b):
        warm()
    times = [(a(), b()) for _ in range(rounds)]
    return [x for x, _ in times], [y for _, y in times]


class Jkv:
    """Trials of jkv: i32[1,n] prompts of random tokens, greedy decoding, float32."""

    def __init__(self, params: Params, method: str = "full") -> None:
        self.params = replace(params, tokenizer=None)
        self.config = methods.parse(method)
        vocab = params.config.vocab
        self.sampling = sampling.make(1, vocab, seeds=(0,), stop_ids=())

    def empty(self, longest: int, new: int) -> Any:
        return loop.empty(self.config, self.params.config, 1, longest, new, jnp.float32)

    def prefill(self, ids: np.ndarray) -> Trial:
        cache, x = self.empty(ids.shape[1] + 16, 16), jnp.asarray(ids, jnp.int32)
        return lambda: clock(lambda: loop.absorb(self.params, cache, x, fresh=True))

    def decoding(self, ids: np.ndarray, new: int) -> loop.Decoding:
        """The state after the prompt, with room for `new` tokens."""
        cache = self.empty(ids.shape[1] + new, new)
        cache, logits = loop.absorb(self.params, cache, jnp.asarray(ids, jnp.int32), fresh=True)
        out = jnp.full((1, new), -1, jnp.int32)
        alive, count = jnp.ones(1, bool), jnp.int32(0)
        return loop.Decoding(cache=cache, logits=logits, alive=alive, used=None, out=out, count=count)

    def run(self, state: loop.Decoding, stop: int) -> loop.Decoding:
        return loop.run_blocks(self.params, state, self.sampling, jnp.int32(stop))

    def decode(self, ids: np.ndarray, steps: int) -> Trial:
        start = self.decoding(ids, steps)

        def trial() -> float:
            state = jax.block_until_ready(jax.tree.map(jnp.copy, start))  # the loop consumes its state
            return clock(lambda: self.run(state, steps)) / steps

        return trial


class Transformers:
    """The same trials with transformers on torch CPU; its own attention and cache, its own defaults."""

    def __init__(self, name: str, threads: int) -> None:
        import torch  # pyright: ignore[reportMissingImports]  an extra
        from transformers import LlamaConfig, LlamaForCausalLM  # pyright: ignore[reportMissingImports]  an extra

        torch.set_num_threads(threads)
        torch.manual_seed(0)
        source = read(name)
        self.torch = torch
        self.model = LlamaForCausalLM(LlamaConfig(**source.config)).to(torch.float32).eval()
        weights = {key: torch.tensor(np.asarray(get(), np.float32)) for key, get in source.tensors.items()}
        missing, unused = self.model.load_state_dict(weights, strict=False)
        if unused or [key for key in missing if key != "lm_head.weight"]:
            raise ValueError(f"transformers does not fit this model: missing {missing}, unused {unused}")
        self.model.tie_weights()

    def absorb(self, ids: np.ndarray, cache: Any) -> Any:
        """Logits f32[1,1,V] of the newest token; the cache grows in place."""
        with self.torch.inference_mode():
            x = self.torch.as_tensor(ids)
            return self.model(x, past_key_values=cache, use_cache=True, logits_to_keep=1).logits

    def cache(self) -> Any:
        from transformers import DynamicCache  # pyright: ignore[reportMissingImports]  an extra

        return DynamicCache(config=self.model.config)

    def prefill(self, ids: np.ndarray) -> Trial:
        return lambda: clock(lambda: self.absorb(ids, self.cache()))

    def decode(self, ids: np.ndarray, steps: int) -> Trial:
        cache = self.cache()
        first = self.absorb(ids, cache)

        def run() -> None:
            logits = first
            for _ in range(steps):
                logits = self.absorb(logits[:, -1].argmax(-1, keepdim=True), cache)

        def trial() -> float:
            spent = clock(run) / steps
            cache.crop(-steps)
            return spent

        return trial


def bandwidth() -> float:
    """Bytes a second that a product of a 512 MiB matrix and a vector reads: the fastest of nine."""
    a, x = jnp.ones((1 << 16, 1 << 11)), jnp.ones(1 << 11)
    dot = jax.jit(jnp.dot)
    jax.block_until_ready(dot(a, x))
    return tree_bytes(a) / min(clock(lambda: dot(a, x)) for _ in range(9)) * 1e3


def arithmetic() -> float:
    """Operations a second of a float32 matrix product of width 2048: the fastest of nine."""
    a = jnp.ones((2048, 2048))
    dot = jax.jit(jnp.dot)
    jax.block_until_ready(dot(a, a))
    return 2 * 2048**3 / min(clock(lambda: dot(a, a)) for _ in range(9)) * 1e3


def step_bytes(params: Params, cached: int) -> int:
    """Bytes that a float32 step must read: every weight and `cached` tokens of keys and values."""
    c = params.config
    spare = 0 if c.tied else tree_bytes(params.embed)
    weights = tree_bytes((params.embed, params.layers, params.norm, params.head)) - spare
    return weights + cached * c.layers * 2 * c.heads * c.head_dim * 4


def prompt_operations(params: Params, tokens: int) -> int:
    """Multiplications and additions of a causal prompt; of the head, only the newest token's row."""
    c = params.config
    weights = sum(x.size for x in jax.tree.leaves(params.layers))
    attention = 4 * c.heads * c.groups * c.head_dim * c.layers * tokens * (tokens + 1) // 2
    return 2 * weights * tokens + attention + 2 * c.vocab * c.width


def compare(name: str, lengths: Sequence[int], prompts: Sequence[int], steps: int, rounds: int, threads: int) -> dict:
    """Every line of the comparison and the hardware's measured rates."""
    params = load(name)
    engines = Jkv(params), Transformers(name, threads)
    rng = np.random.default_rng(0)
    vocab = params.config.vocab
    first = rng.integers(0, vocab, (1, 16))
    ours = np.asarray(loop.absorb(engines[0].params, engines[0].empty(32, 16), jnp.asarray(first, jnp.int32), True)[1])
    theirs = engines[1].absorb(first, engines[1].cache())[:, -1].numpy()
    apart = float(abs(ours - theirs).max())
    if apart > 1e-2:
        raise ValueError(f"the two engines do not run the same model: logits differ by {apart:.3g}")
    lines, speeds = [], []
    for kind, tokens in [("decode", n) for n in lengths] + [("prefill", n) for n in prompts]:
        ids = rng.integers(0, vocab, (1, tokens))
        trials = [e.decode(ids, steps) if kind == "decode" else e.prefill(ids) for e in engines]
        a, b = alternate(trials[0], trials[1], rounds)
        speeds.append((bandwidth(), arithmetic()))
        read_, compute = (max(s) for s in zip(*speeds, strict=True))
        amount = step_bytes(params, tokens) / read_ if kind == "decode" else prompt_operations(params, tokens) / compute
        line = Line(kind, tokens, median(a), median(b), min(a), min(b), amount * 1e3)
        print(f"{kind} {tokens}: jkv {line.jkv:.1f}, transformers {line.other:.1f} ms", flush=True)
        lines.append(line)
    rates = {"bytes_per_s": max(s[0] for s in speeds), "operations_per_s": max(s[1] for s in speeds)}
    return {"lines": [asdict(x) | {"ratio": x.ratio} for x in lines], "logits_apart": apart} | rates


def flat(name: str, method: str, marks: Sequence[int], over: int) -> dict:
    """Milliseconds per token over the last `over` tokens before each mark, all tokens really generated."""
    params = load(name)
    ropes = tuple(replace(r, longest=max(r.longest, marks[-1] + 64)) for r in params.config.ropes)
    engine = Jkv(replace(params, config=replace(params.config, ropes=ropes)), method)
    state = engine.run(engine.decoding(np.ones((1, 16), np.int32), marks[-1]), 1)
    lines = []
    for mark in marks:
        state = jax.block_until_ready(engine.run(state, mark - over))
        done = []
        for at in range(mark - over + 16, mark + 1, 16):
            start = time.perf_counter()
            state = jax.block_until_ready(engine.run(state, at))
            done.append((time.perf_counter() - start) / 16 * 1e3)
        lines.append({"tokens": mark, "ms": median(done), "best": min(done), "nbytes": state.cache.nbytes})
        print(f"{method} at {mark}: {median(done):.1f} ms", flush=True)
    return {"method": method, "lines": lines}


def machine(threads: int) -> dict[str, Any]:
    """What a reader of the numbers must know."""
    info = Path("/proc/cpuinfo")
    names = (
        [x.split(":")[1].strip() for x in info.read_text().splitlines() if "model name" in x] if info.exists() else []
    )
    packages = ("jax", "jaxlib", "numpy", "torch", "transformers")
    versions = {p: metadata.version(p) for p in packages if any(metadata.distributions(name=p))}
    load_average = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    cpu = names[0] if names else platform.processor()
    return {"cpu": cpu, "threads": threads, "python": platform.python_version(), "load": load_average, **versions}


def table(result: dict) -> Table:
    """The comparison as a table that is markdown too."""
    from rich import box

    out = Table("", "jkv ms", "transformers ms", "ratio", "floor ms", "jkv best", "transformers best", box=box.MARKDOWN)
    for x in result["lines"]:
        numbers = (x["jkv"], x["other"], x["ratio"], x["floor"], x["jkv_best"], x["other_best"])
        unit = "ms/token at" if x["what"] == "decode" else "ms for"
        out.add_row(f"{x['what']}, {unit} {x['tokens']}", *(f"{n:.2f}" if n < 10 else f"{n:.1f}" for n in numbers))
    return out


def numbers(text: str) -> tuple[int, ...]:
    """
    >>> numbers("512,2048")
    (512, 2048)
    """
    return tuple(int(x) for x in text.split(",") if x)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    p = argparse.ArgumentParser(prog="python -m jkv.bench", description=__doc__)
    p.add_argument("--compare", action="store_true", help="jkv beside transformers")
    p.add_argument("--flat", action="store_true", help="time per token while a budget holds the cache")
    p.add_argument("--model", default="smollm2-135m")
    p.add_argument("--lengths", type=numbers, default=(512, 2048, 4096), help="tokens in the cache while decoding")
    p.add_argument("--prompts", type=numbers, default=(512, 2048), help="tokens of a prefill")
    p.add_argument("--steps", type=int, default=32, help="decode steps of a trial")
    p.add_argument("--rounds", type=int, default=5, help="trials of each engine")
    p.add_argument("--threads", type=int, default=2, help="cores that the process may use")
    p.add_argument("--method", default="streaming(budget=256)", help="of --flat")
    p.add_argument("--marks", type=numbers, default=(1024, 8192, 32768), help="of --flat: tokens generated")
    p.add_argument("--over", type=int, default=128, help="of --flat: tokens timed before each mark, in blocks of 16")
    p.add_argument("--out", type=Path, default=Path("results"), help="folder of the JSON files")
    return p.parse_args(argv)


def save(kind: str, result: dict, args: argparse.Namespace) -> None:
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"{kind}.json"
    text = json.dumps({"machine": machine(args.threads), "model": args.model, **result}, indent=1)
    path.write_text(text + "\n")
    print(f"written to {path}")


def main(argv: Sequence[str] | None = None) -> None:
    args = arguments(argv)
    if hasattr(os, "sched_setaffinity"):  # before the first computation: XLA starts a thread for every core it may use
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.threads])
    if args.compare:
        result = compare(args.model, args.lengths, args.prompts, args.steps, args.rounds, args.threads)
        Console(width=120).print(table(result))
        save("compare", result, args)
    if args.flat:
        save("flat", flat(args.model, args.method, args.marks, args.over), args)


if __name__ == "__main__":
    main()
