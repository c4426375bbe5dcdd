"""jkv's codecs against the quantized caches of transformers: bits, quality and speed on the same weights and tokens.

`python -m benchmarks.quantized` needs torch, transformers, optimum-quanto and hqq. A cache prefills a prompt, quantizes
it, and follows a continuation token by token. The continuation stays unquantized on both sides, except in transformers'
fp8, which quantizes it with the scale of the prompt. KL is relative to the full cache of the same library.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import jax.numpy as jnp
import numpy as np

import jkv
from benchmarks.engines import Transformers, largest_difference
from jkv import methods
from jkv.bench.environment import check_path, meta, save, use_cores
from jkv.bench.measure import turns
from jkv.bench.trials import Jkv
from jkv.core.compilation import forget
from jkv.eval import corpora
from jkv.eval.prefill_replay import Prefills
from jkv.generation.receipt import divergence, tier_bits
from jkv.generation.teacher_forcing import Follow, surprise
from jkv.methods.config import CacheConfig
from jkv.models import Params
from jkv.utils import console
from jkv.utils.json_results import versions

OURS = (
    *("full", "int8", "fp8", "int4", "int4(rotate=True)", "turboquant(bits=4, center=True, sinks=4)"),
    *("int3", "turboquant(bits=3, center=True, sinks=4)", "kivi", "nsnquant", "turboquant(bits=2)"),
)
MOST = 128  # longest continuation, because the peer requantizes its whole cache at the 128th token


@dataclass(frozen=True)
class Theirs:
    """A quantized cache of transformers with default settings except `options`; without a backend, the full cache."""

    name: str
    backend: str = ""
    options: Mapping[str, int] = field(default_factory=dict)

    def cache(self, peer: Transformers) -> Any:
        from transformers import QuantizedCache  # pyright: ignore[reportMissingImports]  an extra

        if not self.backend:
            return Transformers.cache(peer)
        return QuantizedCache(self.backend, config=peer.model.config, **self.options)


THEIRS = (
    Theirs("full"),
    Theirs("fp8", "fp8"),
    Theirs("hqq, 8 bits", "hqq", {"nbits": 8}),
    Theirs("hqq, 4 bits", "hqq", {"nbits": 4}),
    Theirs("hqq, 2 bits", "hqq", {"nbits": 2}),
    Theirs("quanto, 4 bits", "quanto", {"nbits": 4}),
    Theirs("quanto, 4 bits, keys by channel", "quanto", {"nbits": 4, "axis_key": -1}),
    Theirs("quanto, 2 bits", "quanto", {"nbits": 2}),
    Theirs("quanto, 2 bits, keys by channel", "quanto", {"nbits": 2, "axis_key": -1}),
)


class Quantized(Transformers):
    """transformers with the quantized cache `held`, a settable attribute."""

    held = Theirs("full")

    def cache(self) -> Any:
        return self.held.cache(self)

    def followed(self, ids: np.ndarray, prompt: int) -> tuple[np.ndarray, list[float]]:
        """Return logits f32[B,N,V] for ids i32[B,prompt+N], one token per pass, and the `bits` after the prompt."""
        cache, ids, c = self.cache(), ids.astype(np.int64), self.model.config
        found = [self.absorb(ids[:, :prompt], cache)]
        width = c.head_dim or c.hidden_size // c.num_attention_heads
        taken = bits(cache, len(ids) * c.num_key_value_heads * prompt * width)
        found += [self.absorb(ids[:, i : i + 1], cache) for i in range(prompt, ids.shape[1] - 1)]
        return self.torch.cat(found, 1).float().numpy(), taken


def tensor_bytes(x: Any) -> int:
    """Return the bytes of a backend's tensors for keys or values, including the parts of composite tensors."""
    if isinstance(x, Mapping):
        return sum(map(tensor_bytes, x.values()))
    if isinstance(x, tuple | list):
        return sum(map(tensor_bytes, x))
    if hasattr(x, "__tensor_flatten__"):
        return sum(tensor_bytes(getattr(x, name)) for name in x.__tensor_flatten__()[0])
    return x.numel() * x.element_size() if hasattr(x, "element_size") else 0


def bits(cache: Any, numbers: int) -> list[float]:
    """Return bits per number of the keys and of the values of a layer, in a cache that has just read a prompt.

    At this point the whole prompt is quantized; scales are included. `numbers` is the count for keys (and for values).
    """
    sides = ("_quantized_keys", "keys"), ("_quantized_values", "values")
    held = [[getattr(x, codes, getattr(x, exact)) for x in cache.layers] for codes, exact in sides]
    return [round(8 * tensor_bytes(side) / (numbers * len(side)), 4) for side in held]


# ------------------------------------------------------------------------------------------------------------ rows


def coded(text: str, new: int) -> CacheConfig:
    """Return a config that quantizes the prompt, and keeps `new` tokens after it exact.

    The newest prompt token stays exact too, and so do tokens after the codec's last whole unit (kivi: 31 of 1,024).
    """
    return replace(methods.parse(text), recent=1, block=new)


def scored(full: np.ndarray, own: np.ndarray, ids: np.ndarray) -> dict[str, Any]:
    """Compute KL to the full cache per text, and perplexity, for ids i32[B,N] and logits f32[B,N,V]."""
    kl = np.asarray(divergence(jnp.asarray(full), jnp.asarray(own))[0], np.float64).mean(1)
    nll = np.asarray(surprise(jnp.asarray(own), jnp.asarray(ids)), np.float64).mean()
    return {"kl": float(kl.mean()), "kl_by_text": kl.round(6).tolist(), "ppl": float(np.exp(nll))}


def row(engine: str, cache: str, taken: Sequence[float], found: dict[str, Any]) -> dict[str, Any]:
    """Return and print the record of one cache: its bits, and its scores from `scored`."""
    out = {"engine": engine, "cache": cache, "bits": list(taken), **found}
    print(f"{engine} {cache}: {out['bits']} bits, KL {out['kl']:.4f}, perplexity {out['ppl']:.3f}", flush=True)
    return out


def ours(params: Params, ids: np.ndarray, prompt: int, texts: Sequence[str]) -> list[dict[str, Any]]:
    """Return a record for each cache of jkv, the full cache first."""
    (before, after), prefill, rows, full = np.split(ids, [prompt], 1), Prefills(), [], None
    for text in texts:
        cache, logits = prefill(params, coded(text, after.shape[1]), before, after.shape[1])
        own = np.concatenate(list(Follow(params, cache, logits, after)), 1)
        full = own if full is None else full
        rows.append(row("jkv", text, tier_bits(cache) if text != "full" else (32, 32), scored(full, own, after)))
        forget()
    return rows


def theirs(peer: Quantized, ids: np.ndarray, prompt: int, caches: Sequence[Theirs]) -> list[dict[str, Any]]:
    """Return a record for each cache of transformers, the full one first.

    Texts run one at a time, because fp8 has one scale for all rows.
    """
    rows, full = [], None
    for peer.held in caches:
        found = [peer.followed(ids[i : i + 1], prompt) for i in range(len(ids))]
        own = np.concatenate([logits for logits, _ in found])
        full = own if full is None else full
        rows.append(row("transformers", peer.held.name, found[0][1], scored(full, own, ids[:, prompt:])))
    return rows


def timed(
    engines: tuple[Params, Quantized],
    ids: np.ndarray,
    steps: int,
    rounds: int,
    texts: Sequence[str],
    caches: Sequence[Theirs],
) -> dict[tuple[str, str], dict[str, float]]:
    """Time `steps` greedy tokens after ids i32[1,T], all caches of both libraries taking turns: median ms per token."""
    params, peer = engines
    trials = {("jkv", text): Jkv(params, text).decode(ids, steps) for text in texts}
    for peer.held in caches:
        trials["transformers", peer.held.name] = peer.decode(ids, steps)
    times = turns(list(trials.values()), rounds)
    return {key: {"ms": median(t), "ms_best": min(t)} for key, t in zip(trials, times, strict=True)}


def table(rows: Sequence[dict[str, Any]]) -> Any:
    """Format the rows as a table that also renders as markdown."""
    from rich import box
    from rich.table import Table

    out = Table("", "cache", "bits, keys / values", "KL", "perplexity", "ms a token", box=box.MARKDOWN)
    for x in rows:
        k, v = x["bits"]
        out.add_row(
            x["engine"], x["cache"], f"{k:.3g} / {v:.3g}", f"{x['kl']:.2g}", f"{x['ppl']:.2f}", f"{x['ms']:.1f}"
        )
    return out


def main(argv: Sequence[str] | None = None) -> None:
    p = argparse.ArgumentParser(prog="python -m benchmarks.quantized", description=__doc__)
    p.add_argument("--model", default="smollm2-135m")
    p.add_argument("--windows", type=int, default=8)
    p.add_argument("--prompt", type=int, default=1024, help="tokens of a window that are held in codes")
    p.add_argument("--new", type=int, default=MOST - 1, help=f"tokens of a window that are predicted, under {MOST}")
    p.add_argument("--steps", type=int, default=32, help="tokens of each timed trial")
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--threads", type=int, default=2, help="cores that the process may use")
    p.add_argument("--out", type=Path, default=Path("results/quantized.json"))
    args = p.parse_args(argv)
    if args.new >= MOST:
        p.error(f"--new {args.new}: transformers encodes all tokens anew after {MOST}; give fewer")
    check_path(args.out)
    use_cores(args.threads)  # before jax starts its threads
    params = jkv.load(args.model)
    assert params.tokenizer is not None
    ids = corpora.windows(params.tokenizer.encode(corpora.text("pydoc")), args.prompt + args.new, args.windows)
    peer = Quantized(args.model, args.threads)
    largest_difference(Jkv(params), peer)
    rows = ours(params, ids, args.prompt, OURS) + theirs(peer, ids, args.prompt, THEIRS)
    times = timed((params, peer), ids[:1, : args.prompt], args.steps, args.rounds, OURS, THEIRS)
    rows = [x | times[x["engine"], x["cache"]] for x in rows]
    about = meta(
        args.model, args.threads, prompt=args.prompt, continuation=args.new, windows=args.windows, text="pydoc"
    )
    about["versions"] |= versions(("optimum-quanto", "hqq"))
    save(args.out, about, rows)
    console.show(table(rows))


if __name__ == "__main__":
    main()
