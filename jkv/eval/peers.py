"""jkv beside kvpress, the torch library of the field: which tokens stay, and what is then predicted.

`python -m jkv.eval.peers` needs torch, transformers and kvpress. Both sides run the same float32 weights over the same
prompts, once: what a layer drops after a prompt concerns no later layer. Then each cache stays frozen while both read
the same continuation at its true positions. A name in brackets is a variant that takes one difference away.
"""

from __future__ import annotations

import argparse
import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jkv
from jkv import loop, methods, models, sampling
from jkv.attend import attend_causal
from jkv.bench.engines import Transformers
from jkv.bench.results import check_path, meta, save
from jkv.budgets import pyramid
from jkv.cache import Cache, LayerCache, Queries, Window, take
from jkv.config import CacheConfig, LayerConfig
from jkv.flush import flush
from jkv.models import Params
from jkv.protocols import Code
from jkv.rope import Rope

KEEPS = (0.5, 0.25, 0.125)
WINDOW = 32  # queries that snapkv and pyramidkv ask, in both
BLOCK = 128  # tokens of a chunk of keydiff, in both


@dataclass(frozen=True, kw_only=True)
class Peer:
    """One comparison: jkv's text with {n} tokens to keep, and kvpress's press from (kvpress, share that goes, n)."""

    method: str
    spec: str
    press: Callable[[Any, float, int], Any]
    chunk: int = 0
    relative: bool = False  # keys act at their rank among the kept
    note: str = ""

    def text(self, n: int) -> str:
        return self.spec.format(n=n)

    def key(self, n: int) -> str:
        return self.text(n) + (" in chunks" if self.chunk else "")


@dataclass(frozen=True)
class Held:
    """What a cache holds: positions i[L,B,H] of n tokens each (n may differ by layer), and ppl after it."""

    positions: list[np.ndarray]
    ppl: float


def observed(kv: Any, gone: float, n: int) -> Any:
    """kvpress's observed attention with two of its choices undone: sums, and the newest half of n protected."""

    class Summed(kv.ObservedAttentionPress):
        def score(self, module: Any, hidden: Any, keys: Any, values: Any, attentions: Any, kwargs: Any) -> Any:
            mean = super().score(module, hidden, keys, values, attentions, kwargs)
            total = mean.shape[-1]
            sums = mean * mean.new_tensor(range(total, 0, -1))
            sums[..., total - n // 2 :] = float("inf")
            return sums

    return Summed(gone)


def sized(kv: Any, gone: float, n: int) -> Any:
    """kvpress's PyramidKV with jkv's sizes of the layers."""

    class Sized(kv.PyramidKVPress):
        def get_layer_budget(self, module: Any, q_len: int) -> int:
            return WINDOW + pyramid(n - WINDOW, module.config.num_hidden_layers, 20)[module.layer_idx]

    return Sized(gone, window_size=WINDOW)


PEERS = (
    Peer(
        method="streaming",
        spec="streaming(budget={n}, relative=False, recent=0)",
        press=lambda kv, gone, n: kv.StreamingLLMPress(gone, n_sink=4),
    ),
    Peer(
        method="streaming (ranks)",
        spec="streaming(budget={n}, recent=0)",
        press=lambda kv, gone, n: kv.KeyRerotationPress(kv.StreamingLLMPress(gone, n_sink=4)),
        relative=True,
        note="positions within the cache, as in the paper: in kvpress that is KeyRerotationPress",
    ),
    Peer(
        method="knorm",
        spec="knorm(budget={n}, recent=0)",
        press=lambda kv, gone, n: kv.KnormPress(gone),
        note="recent=0 to match; by default jkv keeps the newest 16 too. What differs is in layer 0: keys of one token "
        "have one norm wherever it stands, and rounding breaks the tie",
    ),
    Peer(
        method="snapkv",
        spec=f"snapkv(budget={{n}}, window={WINDOW})",
        press=lambda kv, gone, n: kv.SnapKVPress(gone, window_size=WINDOW),
        note="window 32 in both, the default of jkv and of the authors; kvpress's is 64",
    ),
    Peer(
        method="pyramidkv",
        spec=f"pyramidkv(budget={{n}}, window={WINDOW})",
        press=lambda kv, gone, n: kv.PyramidKVPress(gone, window_size=WINDOW),
        note="other sizes: kvpress's pyramid includes the window (jkv adds it to each layer, as the authors do), and "
        "is uniform where its smallest layer would be below the window, which predicts better here",
    ),
    Peer(
        method="pyramidkv (jkv's sizes)",
        spec=f"pyramidkv(budget={{n}}, window={WINDOW})",
        press=sized,
        note="kvpress is given jkv's sizes of the layers",
    ),
    Peer(
        method="keydiff",
        spec="keydiff(budget={n})",
        press=lambda kv, gone, n: kv.KeyDiffPress(gone),
        note="after the whole prompt, in both",
    ),
    Peer(
        method="keydiff (blocks)",
        spec="keydiff(budget={n})",
        press=lambda kv, gone, n: kv.BlockPress(kv.KeyDiffPress(gone), block_size=BLOCK),
        chunk=BLOCK,
        note="in jkv a chunk attends to what the cache holds, as in the paper; kvpress replays the blocks after a full "
        "prefill, so hidden states differ above layer 0",
    ),
    Peer(
        method="tova",
        spec="tova(budget={n})",
        press=lambda kv, gone, n: kv.TOVAPress(gone),
        note="kvpress forces the newest token in; the paper's rule, and jkv, do not",
    ),
    Peer(
        method="tova (newest forced)",
        spec="tova(budget={n}, recent=1)",
        press=lambda kv, gone, n: kv.TOVAPress(gone),
        note="jkv forces the newest token in too",
    ),
    Peer(
        method="expected_attention",
        spec="expected_attention(budget={n}, recent=0)",
        press=lambda kv, gone, n: kv.ExpectedAttentionPress(gone),
        note="recent=0 to match; by default jkv keeps the newest 16 too",
    ),
    Peer(
        method="h2o",
        spec="h2o(budget={n}, recent=0)",
        press=lambda kv, gone, n: kv.ObservedAttentionPress(gone),
        note="jkv is the paper's: sums over all queries, half of the budget for the newest tokens; kvpress divides "
        "each sum by the number of queries that see the token, and protects none",
    ),
    Peer(
        method="h2o (newest=0)",
        spec="h2o(budget={n}, newest=0.0, recent=0)",
        press=lambda kv, gone, n: kv.ObservedAttentionPress(gone),
        note="what is left: sums against means over the queries that see a token",
    ),
    Peer(
        method="h2o (sums, newest half)",
        spec="h2o(budget={n}, recent=0)",
        press=observed,
        note="kvpress's score times the number of queries, the newest half protected",
    ),
)


def windows(params: Params, rows: int, length: int) -> np.ndarray:
    """i32[rows,length]: evenly spaced stretches of Python's manual."""
    from pydoc_data.topics import topics

    assert params.tokenizer is not None
    ids = np.asarray(params.tokenizer.encode("\n".join(topics[name] for name in sorted(topics))), np.int32)
    starts = np.linspace(0, len(ids) - length, rows, dtype=int)
    return np.stack([ids[start : start + length] for start in starts])


def perplexity(logits: np.ndarray, ids: np.ndarray) -> float:
    """exp of the mean loss of ids i[B,T] under logits f[B,T,V].

    >>> round(perplexity(np.zeros((1, 2, 8)), np.array([[3, 5]])), 6)
    8.0
    """
    picked = np.take_along_axis(logits, ids[..., None], -1)[..., 0].astype(np.float64)
    top = logits.max(-1).astype(np.float64)
    total = np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, dtype=np.float64)) + top
    return float(np.exp((total - picked).mean()))


def overlap(a: Sequence[np.ndarray], b: Sequence[np.ndarray]) -> np.ndarray:
    """f[L,B,H]: share of the positions a i[B,H,n] that is in b, layer by layer.

    >>> overlap([np.array([[[0, 1, 5, 7]]])], [np.array([[[7, 5, 2]]])]).tolist()
    [[[0.5]]]
    """
    return np.stack([(x[..., None] == y[..., None, :]).any(-1).mean(-1) for x, y in zip(a, b, strict=True)])


# ------------------------------------------------------------------------------------------------------------- jkv


@partial(jax.jit, static_argnames=("rope",))
def layer(params: Params, x: jax.Array, pos: jax.Array, rope: Rope) -> tuple[jax.Array, Any]:
    """One dense layer (params hold no other), and its keys and values, rotated, and queries."""

    def run(i: int, new: Any) -> tuple[jax.Array, Any]:
        q, k = rope.rotate(new.q, pos[:, None, None]), rope.rotate(new.k, pos[:, None])
        part = attend_causal(q, k, new.v, pos, pos, params.config.scale, None)
        return part.finish(), (k, new.v, Queries(q=q, pos=pos, lse=part.lse))

    return models.family(params.config).layer(params, 0, x, pos, run)


@partial(jax.jit, static_argnames=("model", "rope"))
def cut(old: LayerCache, plan: LayerConfig, tap: Any, seen: jax.Array, model: Any, rope: Rope) -> LayerCache:
    """What `loop.absorb` makes of a layer of an empty cache."""
    k, v, queries = tap
    window = Window(k=k, v=v, pos=queries.pos, columns=plan.score.birth(k, v))
    asked, kept = loop._ask(old, plan, queries)
    old = replace(old, queries=kept)
    return flush(old, window, asked, seen, jnp.zeros_like(seen), plan, rope, model, fresh=True)


Contents = list[list[jax.Array]]  # per layer keys as rotated, values f32[B,H,n,D], and positions i32[B,H,n]: the live


def contents(held: LayerCache, rope: Rope) -> list[jax.Array]:
    """What a layer holds, oldest first, without its dead entries; every row and head holds as many."""
    b, heads = held.recent.k.shape[:2]
    parts = [(held.recent.k, held.recent.v, held.recent.pos[:, None])]
    for tier in held.tiers:
        k = tier.k.slots if tier.at is None else rope.rotate(tier.k.slots, tier.at)
        parts.append((k, tier.v.slots, tier.pos))
    k, v = (jnp.concatenate([p[i] for p in parts], 2) for i in range(2))
    pos = jnp.concatenate([jnp.broadcast_to(p, (b, heads, p.shape[2])) for *_, p in parts], 2)
    order = jnp.argsort(pos, -1)[:, :, pos.shape[2] - int((pos[0, 0] >= 0).sum()) :]
    return [take(x, order) for x in (k, v, pos)]


def prefill(params: Params, configs: Sequence[CacheConfig], ids: np.ndarray, new: int) -> tuple[list[Contents], Any]:
    """`jkv.prefill` with each config, but the model runs once; and the logits f32[B,V] of what comes next."""
    model, (rows, length) = params.config, ids.shape
    if len(set(model.ropes)) > 1 or set(model.windows) != {None}:
        raise ValueError("layers must not differ in their positions")
    seen, rope = jnp.full(rows, length, jnp.int32), model.ropes[0]
    pos = jnp.broadcast_to(jnp.arange(length), (rows, length))
    empty = [jax.eval_shape(partial(loop.empty, c, model, rows, length + new, new, jnp.float32)) for c in configs]
    x, out = jnp.asarray(params.embed)[ids], [[] for _ in configs]
    for i, weights in enumerate(params.layers):
        x, tap = layer(replace(params, layers=(weights,)), x, pos, rope)
        for cache, held in zip(empty, out, strict=True):
            plan = cache.plan[i]
            old = jax.tree.map(lambda s: jnp.full(s.shape, -1 if s.dtype == jnp.int32 else 0, s.dtype), cache.layers[i])
            held.append(contents(cut(old, plan, tap, seen, model, rope), rope))
    return out, models.family(model).head(params, x[:, -1:])[:, 0]


def frozen(params: Params, held: Sequence[Contents], longest: int, new: int) -> Cache:
    """All in one cache of one tier, with room for `new` tokens and no flush: one program reads any."""
    model, rows = params.config, sum(x[0][0].shape[0] for x in held)
    config = replace(methods.parse(f"knorm(budget={longest}, recent=0)"), block=new)
    out = loop.empty(config, model, rows, longest + new, new, jnp.float32)
    layers = []
    for empty, *parts in zip(out.layers, *held, strict=True):
        k, v, pos = (jnp.concatenate([_fitted(p[i], longest) for p in parts]) for i in range(3))
        tier = replace(empty.tiers[0], k=Code(slots=k), v=Code(slots=v), pos=pos)
        layers.append(replace(empty, tiers=(tier,)))
    seen, prompt = jnp.full((2, rows), longest, jnp.int32)
    return replace(out, layers=tuple(layers), seen=seen, prompt=prompt)


def _fitted(x: jax.Array, n: int) -> jax.Array:
    """x [B,H,m,...] with -1 behind, n in all."""
    return jnp.pad(x, [(0, n - x.shape[2]) if axis == 2 else (0, 0) for axis in range(x.ndim)], constant_values=-1)


def forced(params: Params, held: Sequence[Contents], logits: jax.Array, prompt: int, after: np.ndarray) -> list[float]:
    """Perplexity of i32[B,T] after each cache, token by token; logits f32[caches * B,V] of the first."""
    (rows, new), vocab = after.shape, params.config.vocab
    everyone = rows * len(held)
    state = loop.Decoding(
        cache=frozen(params, held, prompt, new),
        logits=logits,
        alive=jnp.ones(everyone, bool),
        used=None,
        out=jnp.full((everyone, new), -1, jnp.int32),
        count=jnp.int32(0),
        trace=jnp.zeros((everyone, new, vocab), jnp.float32),
        forced=jnp.tile(jnp.asarray(after), (len(held), 1)),
    )
    greedy = sampling.make(everyone, vocab, seeds=(0,) * everyone, stop_ids=())
    trace = loop.run_blocks(params, state, greedy, jnp.int32(new)).trace
    return [perplexity(np.asarray(trace[i : i + rows]), after) for i in range(0, everyone, rows)]


def ours(params: Params, ids: np.ndarray, prompt: int) -> dict[str, Held]:
    """Every spec of every keep, and "full"."""
    before, after = ids[:, :prompt], ids[:, prompt:]
    params, new = replace(params, tokenizer=None), after.shape[1]
    sizes = [int(keep * prompt) for keep in KEEPS]
    texts = list(dict.fromkeys([p.text(n) for p in PEERS if not p.chunk for n in sizes] + ["full"]))
    held, logits = prefill(params, [replace(methods.parse(t), block=new) for t in texts], before, new)
    made = {text: (x, logits) for text, x in zip(texts, held, strict=True)}
    results: dict[str, Held] = {}
    for peer in PEERS:
        if peer.chunk:
            for n in sizes:
                config = replace(methods.parse(peer.text(n)), block=new)
                cache, last = jkv.prefill(params, config, before, room=new, chunk=peer.chunk)
                layers = zip(cache.layers, cache.model.ropes, strict=True)
                made[peer.key(n)] = [contents(*x) for x in layers], last
        if peer.key(sizes[0]) not in results:
            results |= _read(params, {peer.key(n): made.pop(peer.key(n)) for n in sizes}, prompt, after)
    return results | _read(params, {"full": made["full"]}, prompt, after)


def _read(params: Params, made: dict[str, tuple[Contents, Any]], prompt: int, after: np.ndarray) -> dict[str, Held]:
    """Always as many rows as for a whole group, so that there is one program."""
    group = list(made.values()) * (len(KEEPS) // len(made))
    ppl = forced(params, [x for x, _ in group], jnp.concatenate([x for _, x in group]), prompt, after)
    out = {}
    for (key, (held, _)), x in zip(made.items(), ppl, strict=False):
        out[key] = Held([np.asarray(pos) for *_, pos in held], x)
        print(f"jkv {key}: {x:.3f}", flush=True)
    return out


# --------------------------------------------------------------------------------------------------------- kvpress


class Kvpress:
    """The presses on transformers: one eager prompt, every press on every layer of it, then the continuation."""

    def __init__(self, name: str, threads: int) -> None:
        import kvpress  # pyright: ignore[reportMissingImports]  an extra
        import torch  # pyright: ignore[reportMissingImports]  an extra
        from transformers.modeling_utils import (  # pyright: ignore[reportMissingImports]  an extra
            ALL_ATTENTION_FUNCTIONS,
        )

        self.kv, self.torch = kvpress, torch
        self.model = Transformers(name, threads).model
        ALL_ATTENTION_FUNCTIONS["lower_right"] = self._attend

    def _attend(self, module: Any, q: Any, k: Any, v: Any, mask: Any, **options: Any) -> tuple[Any, None]:
        """New tokens see all that is cached, however much each layer has, and each other causally."""
        from torch.nn.attention.bias import causal_lower_right  # pyright: ignore[reportMissingImports]  an extra

        groups = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
        bias = causal_lower_right(q.shape[2], k.shape[2])
        out = self.torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=options["scaling"])
        return out.transpose(1, 2), None

    def run(self, ids: np.ndarray, prompt: int) -> dict[tuple[str, float], Held]:
        """Every peer at every keep, and ("full", 1)."""
        presses = {(p.method, keep): p.press(self.kv, 1 - keep, int(keep * prompt)) for p in PEERS for keep in KEEPS}
        relative = {p.method for p in PEERS if p.relative}
        cut: dict[Any, list[Any]] = {key: [] for key in presses} | {("full", 1.0): []}

        def hook(module: Any, args: Any, kwargs: Any, output: Any) -> None:
            held = kwargs["past_key_values"].layers[module.layer_idx]
            cut["full", 1.0].append((held.keys, held.values, None))
            for key, press in presses.items():
                wants = isinstance(press, self.kv.ObservedAttentionPress)
                given = kwargs["hidden_states"], held.keys, held.values, output[1] if wants else None, kwargs
                k, v = press.compress(module, *given)
                at = press.press.compress(module, *given)[0] if key[0] in relative else k
                cut[key].append((k, v, self._positions(held.keys, at)))

        before, after = (self.torch.as_tensor(x, dtype=self.torch.long) for x in (ids[:, :prompt], ids[:, prompt:]))
        self.model.set_attn_implementation("eager")
        hooks = []
        for part in self.model.model.layers:
            part.self_attn.rotary_emb = self.model.model.rotary_emb
            hooks.append(part.self_attn.register_forward_hook(hook, with_kwargs=True))
        with self.torch.inference_mode():
            first = self.model(before, use_cache=True, logits_to_keep=1).logits
            for handle in hooks:
                handle.remove()
            self.model.config._attn_implementation = "lower_right"
            results = {}
            for key, layers in cut.items():
                start = layers[0][0].shape[2] if key[0] in relative else prompt
                rest = self._continue(layers, after[:, :-1], start)
                logits = self.torch.cat([first, rest], 1).numpy()
                kept = [np.arange(prompt) if p is None else np.sort(p.numpy(), -1) for *_, p in layers]
                results[key] = Held(kept, perplexity(logits, ids[:, prompt:]))
                print(f"kvpress {key[0]} {key[1]}: {results[key].ppl:.3f}", flush=True)
        return results

    def _continue(self, layers: list[Any], ids: Any, start: int) -> Any:
        """Logits [B,T,V] of ids at positions from `start` on, after a cache of `layers`."""
        from transformers import DynamicCache  # pyright: ignore[reportMissingImports]  an extra

        cache = DynamicCache()
        for i, (k, v, _) in enumerate(layers):
            cache.update(k, v, i)
        places = self.torch.arange(start, start + ids.shape[1])[None].expand(len(ids), -1)
        return self.model(ids, past_key_values=cache, position_ids=places, use_cache=True).logits

    def _positions(self, keys: Any, kept: Any) -> Any:
        """i[B,H,n]: where the rows `kept` [B,H,n,D] are in `keys` [B,H,S,D], by the bits of two numbers of each."""
        bits = [x[..., :2].contiguous().view(self.torch.int64)[..., 0] for x in (keys, kept)]
        ordered, order = bits[0].sort(-1)
        if (ordered[..., 1:] == ordered[..., :-1]).any():
            raise ValueError("two keys begin alike: positions are not known")
        return order.gather(-1, self.torch.searchsorted(ordered, bits[1].contiguous()))


# ----------------------------------------------------------------------------------------------------------- table


def compared(prompt: int, mine: dict[str, Held], theirs: dict[tuple[str, float], Held]) -> list[dict[str, Any]]:
    """Every row of what `ours` and `Kvpress.run` found."""
    lines = [line("full", 1.0, mine["full"].ppl, theirs["full", 1.0].ppl, np.ones((1, 1)), "")]
    for peer in PEERS:
        for keep in KEEPS:
            a, b = mine[peer.key(int(keep * prompt))], theirs[peer.method, keep]
            lines.append(line(peer.method, keep, a.ppl, b.ppl, overlap(a.positions, b.positions), peer.note))
    return lines


def about(args: argparse.Namespace, ids: np.ndarray) -> dict[str, Any]:
    """What stands above the rows."""
    hashes = [hashlib.sha256(x.astype("<i4").tobytes()).hexdigest() for x in ids]
    tokens = {"text": "pydoc_data.topics", "sha256 of little-endian int32": hashes}
    out = meta(args.model, args.threads, prompt=args.prompt, continuation=args.new, windows=tokens)
    return out | {"versions": out["versions"] | {"kvpress": metadata.version("kvpress")}}


def line(method: str, keep: float, jkv_: float, kvpress: float, same: np.ndarray, note: str) -> dict[str, Any]:
    """One row: overlaps are shares of what jkv keeps; the least is that of the worst layer, window and head."""
    out = {"method": method, "keep": keep, "overlap": round(float(same.mean()), 4)}
    out |= {"least_overlap": round(float(same.min()), 4)}
    out |= {"ppl_jkv": round(jkv_, 3), "ppl_kvpress": round(kvpress, 3), "note": note}
    if same.ndim > 1:
        out["overlap_layer_0"] = round(float(same[0].mean()), 4)
    return out


def table(lines: Sequence[dict[str, Any]]) -> Any:
    """The rows as a table that is markdown too."""
    from rich import box
    from rich.table import Table

    names = ("method", "keep", "overlap", "least_overlap", "ppl_jkv", "ppl_kvpress")
    out = Table(*names, box=box.MARKDOWN)
    for row in lines:
        out.add_row(*(str(row[name]) for name in names))
    return out


def main(argv: Sequence[str] | None = None) -> None:
    p = argparse.ArgumentParser(prog="python -m jkv.eval.peers", description=__doc__)
    p.add_argument("--model", default="smollm2-135m")
    p.add_argument("--windows", type=int, default=4)
    p.add_argument("--prompt", type=int, default=1024, help="tokens of a window that are compressed")
    p.add_argument("--new", type=int, default=128, help="tokens of a window that are predicted")
    p.add_argument("--threads", type=int, default=2, help="cores that the process may use")
    p.add_argument("--out", type=Path, default=Path("results/kvpress.json"))
    args = p.parse_args(argv)
    check_path(args.out)
    if hasattr(os, "sched_setaffinity"):  # before the first computation, as in jkv.bench
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.threads])
    params = jkv.load(args.model)
    ids = windows(params, args.windows, args.prompt + args.new)
    theirs = Kvpress(args.model, args.threads).run(ids, args.prompt)
    lines = compared(args.prompt, ours(params, ids, args.prompt), theirs)
    save(args.out, about(args, ids), lines)
    from rich.console import Console

    Console(width=120).print(table(lines))


if __name__ == "__main__":
    main()
