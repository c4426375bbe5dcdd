"""What a cache costs in quality: a text is continued, or questions are answered, through it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from jkv.cache.cache import Cache, tree_bytes
from jkv.eval.attention_recall import mass, paid, sweep, to_spare
from jkv.eval.prefill_replay import Prefills
from jkv.eval.tasks import Example, none_named
from jkv.eval.tasks.scbench import Session
from jkv.generation.api import extend, generate, prefill
from jkv.generation.receipt import divergence, full_bytes, kept_by_row, tier_bits
from jkv.generation.teacher_forcing import SLICE, Follow, surprise
from jkv.methods.config import CacheConfig
from jkv.models import Params
from jkv.prompts.allocation import layout
from jkv.prompts.tokenization import encode
from jkv.protocols import Sizes

PIECE = 512  # tokens of an endless text that are read together


@dataclass(frozen=True, kw_only=True)
class Held:
    """What a cache held of what it had seen: `kept` of `context` tokens, bytes per row, and those of the full cache.

    bits: of a number of the keys and of the values in tiers, metadata included.
    """

    kept: float
    context: int
    bytes: int
    bytes_full: int
    bits: tuple[float, float]


def held(params: Params, config: CacheConfig, cache: Cache, count: int | None = None) -> list[Held]:
    """Of each of the first `count` rows (None: all) of a cache as it is now, whatever rows are beside it.

    `bytes` are all arrays of one that is made for just the tokens that the row has seen: no room to grow, but for the
    steps of its recent window, which are as many as this cache has room for.
    """
    seen, states = np.asarray(cache.seen), tree_bytes(cache.states)
    token = (full_bytes(cache) - states) // int(seen.sum())
    sizes = None
    if config.budget.statistic:  # as its prompt divided it
        sizes = Sizes(layers=tuple(replace(plan.size, beyond=0) for plan in cache.plan))
    config = replace(config.bound(params), block=cache.plan[0].block) if cache.plan else config
    made = {n: tree_bytes(layout(config, cache.model, 1, n, 0, cache.dtype, sizes)[1]) for n in set(seen.tolist())}
    bits = tier_bits(cache)
    return [
        Held(kept=float(kept) / n, context=n, bytes=made[n], bytes_full=n * token + states // cache.rows, bits=bits)
        for n, kept in zip(seen.tolist()[:count], kept_by_row(cache), strict=False)
    ]


def mean(rows: Sequence[Held]) -> Held:
    """What rows hold on average.

    >>> a, b = (Held(kept=x, context=10, bytes=10 + i, bytes_full=20, bits=(8, 8)) for i, x in ((0, 0.5), (2, 1.0)))
    >>> mean([a, b])
    Held(kept=0.75, context=10, bytes=11, bytes_full=20, bits=(8.0, 8.0))
    """
    k, v = (round(float(np.mean(side)), 4) for side in zip(*(x.bits for x in rows), strict=True))
    return Held(
        kept=round(float(np.mean([x.kept for x in rows])), 4),
        context=round(float(np.mean([x.context for x in rows]))),
        bytes=int(np.mean([x.bytes for x in rows])),
        bytes_full=int(np.mean([x.bytes_full for x in rows])),
        bits=(k, v),
    )


def batches(samples: int, most: int) -> Iterator[tuple[list[int], int]]:
    """(rows, how many count): batches of one size, the last filled up with rows that were measured before.

    >>> list(batches(3, 2))
    [([0, 1], 2), ([2, 0], 1)]
    """
    size = min(most, samples)
    for start in range(0, samples, size):
        rows = list(range(start, min(start + size, samples)))
        yield rows + [i % samples for i in range(size - len(rows))], len(rows)


@dataclass(frozen=True)
class Texts:
    """Token ids i32[n,T]: the first `prefix` are read and compressed, the others go through the cache one by one.

    frozen: nothing is compressed after the prefix. batch: texts at a time. prefill: of prefixes; what caches have in
    common of it is computed once.
    """

    ids: np.ndarray
    prefix: int
    frozen: bool = False
    batch: int = 4
    prefill: Prefills = field(default_factory=Prefills)

    def follow(self, params: Params, config: CacheConfig, rows: list[int]) -> Follow:
        some, room = self.ids[rows], self.ids.shape[1] - self.prefix
        if self.frozen:  # one flush at the end of the prefix, the next one after the text
            config = replace(config, block=max(config.block, room))
        cache, logits = self.prefill(params, config, some[:, : self.prefix], room)
        return Follow(params, cache, logits, some[:, self.prefix :])


def perplexity(params: Params, config: CacheConfig, texts: Texts) -> dict[str, Any]:
    """Of what follows the prefix: ppl = exp(mean nll in nats); `nll_se`: its standard error over the texts."""
    by_text, ms, cost = [], [], []
    for rows, count in batches(len(texts.ids), texts.batch):
        run = texts.follow(params, config, rows)
        cost += held(params, config, run.cache, count)
        by_text.append(np.concatenate([_surprise(run, i, part) for i, part in enumerate(run)], 1)[:count].mean(1))
        ms += run.ms
    return {**_ppl(np.concatenate(by_text)), **vars(mean(cost)), "ms_token": _median(ms)}


def _median(ms: Sequence[float]) -> float:
    return round(float(np.median(ms)), 2)


def endless(
    params: Params, config: CacheConfig, ids: np.ndarray, ends: Sequence[int], prefix: int, rest: int
) -> Iterator[dict[str, Any]]:
    """A text i32[T] through one cache: perplexity of the `rest` tokens after each of `ends`, which rise.

    fresh: of the same tokens after a cache that has read but the `prefix` before them. bytes: of all arrays, as they
    are.
    """
    tokens = ids[None]
    cache, logits = prefill(params, config, tokens[:, :prefix], room=len(ids) - prefix)
    for end in ends:
        for start in range(int(cache.seen[0]), end, PIECE):
            cache, logits = extend(params, cache, tokens[:, start : min(start + PIECE, end)])
        after, beside = tokens[:, end : end + rest], tokens[:, end - prefix : end]
        runs = Follow(params, cache, logits, after), Follow(params, *prefill(params, config, beside, room=rest), after)
        far, fresh = (_ppl(np.concatenate([_surprise(r, i, part) for i, part in enumerate(r)], 1)) for r in runs)
        yield {"ppl": far["ppl"], "fresh": fresh["ppl"], "bytes": tree_bytes(cache), "ms_token": _median(runs[0].ms)}


def _surprise(run: Follow, i: int, logits: Array) -> np.ndarray:
    start = i * SLICE
    return np.asarray(surprise(logits, jnp.asarray(run.tokens[:, start : start + logits.shape[1]])))


def _ppl(nll: np.ndarray) -> dict[str, float]:
    return {
        "ppl": round(float(np.exp(nll.mean())), 4),
        "nll": round(float(nll.mean()), 5),
        "nll_se": round(float(nll.std() / np.sqrt(len(nll))), 5),
    }


class Fidelity:
    """Texts through the full cache, once; then any number of caches beside it.

    The full cache's logits and what its attention pays to each token stay in memory: n * N * vocab floats, and as many
    as all layers' kv heads have tokens.
    """

    def __init__(self, params: Params, texts: Texts) -> None:
        self.params, self.texts = params, texts
        self.groups = list(batches(len(texts.ids), texts.batch))
        self.full = [[np.asarray(x) for x in texts.follow(params, CacheConfig(), rows)] for rows, _ in self.groups]
        self.paid = [paid(params, jnp.asarray(texts.ids[rows]), texts.prefix) for rows, _ in self.groups]

    def __call__(self, config: CacheConfig, layers: bool = False) -> dict[str, Any]:
        """How far a cache is from the full one: KL in nats, top-1 agreement, first divergence; and its perplexity.

        `first`: mean index of the first token that the full cache would have chosen otherwise (N: none); `mass`
        f32[L][H]: the share of the full model's attention to the prefix that is on tokens which the cache holds.
        layers: also `by_layer`, the KL if one layer alone is compressed, as the prefix left it, over the first batch,
        and `spare`, the layers that cost most.
        """
        kl, same, nll, masses, by_layer, cost, ms = [], [], [], [], [], [], []
        for (rows, count), full, whole in zip(self.groups, self.full, self.paid, strict=True):
            run = self.texts.follow(self.params, config, rows)
            cost += held(self.params, config, run.cache, count)
            masses.append(mass(whole, run.cache)[:, :count])
            if layers and not by_layer:
                by_layer = sweep(self.params, run.cache, self.texts.ids[rows])
            parts = []
            for i, own in enumerate(run):
                parts.append((*divergence(jnp.asarray(full[i]), own), _surprise(run, i, own)))
            k, s, n = (np.concatenate([np.asarray(x) for x in xs], 1)[:count] for xs in zip(*parts, strict=True))
            kl, same, nll, ms = [*kl, k], [*same, s], [*nll, n.mean(1)], ms + run.ms
        k, s = np.concatenate(kl), np.concatenate(same)
        first = np.where(s.all(1), s.shape[1], s.argmin(1))
        return {
            "kl": round(float(k.mean()), 6),
            "kl_by_text": k.mean(1, dtype=float).round(6).tolist(),
            "kl_p99": round(float(np.quantile(k, 0.99)), 5),
            "agree": round(float(s.mean()), 4),
            "first": round(float(first.mean()), 1),
            **_ppl(np.concatenate(nll)),
            "mass": np.concatenate(masses, 1).mean(1, dtype=float).round(4).tolist(),
            **({"by_layer": [round(x, 6) for x in by_layer], "spare": to_spare(by_layer)} if layers else {}),
            **vars(mean(cost)),
            "ms_token": round(float(np.median(ms)), 2),
        }


# ---------------------------------------------------------------------------------------------------------- answers


def said(params: Params, turns: Sequence[Example]) -> str:
    """A conversation up to the answer's start of its last question, earlier ones with their right answers."""
    if params.tokenizer is None:
        raise ValueError("questions need a tokenizer: this model was built without one")
    if params.tokenizer.template is None:
        *before, last = turns
        return turns[0].context + "".join(t.question + t.prefix + t.gold for t in before) + last.question + last.prefix
    messages = []
    for i, turn in enumerate(turns):
        messages.append({"role": "user", "content": (turn.context if i == 0 else "") + turn.question.strip("\n" * i)})
        if i < len(turns) - 1:
            messages.append({"role": "assistant", "content": turn.prefix + turn.gold})
    return params.tokenizer.chat(messages) + turns[-1].prefix


def cut(params: Params, example: Example) -> tuple[list[int], list[int]]:
    """Token ids of a prompt up to the end of its context, and of the rest; the rest begins a token of its own."""
    text = said(params, [example])
    end = text.index(example.context) + len(example.context)
    assert params.tokenizer is not None
    return params.tokenizer.encode(type(text)(text[:end])), added(params, text[end:])


def added(params: Params, text: str) -> list[int]:
    """Token ids of text that follows another."""
    assert params.tokenizer is not None
    return params.tokenizer.within(text)


def overhead(params: Params) -> int:
    """Tokens that the chat template adds to a question."""
    empty = Example(context="", question="", prefix="", answers=("",), meta={})
    return len(encode(params, said(params, [empty]) or " ")[0][0])


Prompt = tuple[list[int], list[int]]  # token ids of the context, and of what comes after it


def answer(
    params: Params, config: CacheConfig, prompts: Sequence[Prompt], new: int, seen: bool, batch: int
) -> tuple[list[str], list[Held]]:
    """Greedy answers to prompts, and what the cache held of each.

    seen: the question is part of what is compressed (query-aware); else the context is compressed alone, as for a
    cache that will serve questions that nobody knows yet, and the question comes after it.
    """
    texts: list[str] = []
    cost: list[Held] = []
    for rows, count in batches(len(prompts), batch):
        heads, tails = [prompts[i][0] for i in rows], [prompts[i][1] for i in rows]
        if seen:
            out = generate(params, config, [a + b for a, b in zip(heads, tails, strict=True)], max_new_tokens=new)
            cost += held(params, config, out.cache, count)
        else:
            cache, _ = prefill(params, config, heads, room=_room(params, heads, new + max(map(len, tails))))
            cost += held(params, config, cache, count)
            out = generate(params, cache, tails, max_new_tokens=new)
        texts += out.text[:count]
    return texts, cost


def _room(params: Params, heads: Sequence[Sequence[int]], n: int) -> int:
    """Room for n tokens after the heads, in whole steps so that most prompts share their programs."""
    return max(n, min(-(-n // 128) * 128, params.config.context - max(map(len, heads))))


def converse(
    params: Params, config: CacheConfig, session: Session, new: int, mode: str, batch: int
) -> tuple[list[str], Held]:
    """Greedy answers to the questions of a session, then to its probe.

    "rebuilt": each question with its context in a prompt of its own, compressed knowing it. "reused": the context is
    compressed once, before any question, and each is asked from that cache. "turns": one conversation, each question
    after the right answers to those before it, on one cache that is compressed again and again. batch: questions at a
    time, where they do not follow each other.
    """
    questions = [*session.turns, session.probe]
    prompts = [cut(params, q) for q in questions]
    if mode == "rebuilt":
        texts, cost = answer(params, config, prompts, new, True, batch)
        return texts, mean(cost)
    head, tails = prompts[0][0], [tail for _, tail in prompts]
    if mode == "reused":
        cache, _ = prefill(params, config, [head], room=_room(params, [head], new + max(map(len, tails))))
        texts = []
        for rows, count in batches(len(tails), batch):
            asked = [tails[i] for i in rows]
            texts += generate(params, cache.fork(len(rows)), asked, max_new_tokens=new).text[:count]
        return texts, mean(held(params, config, cache))
    spoken = [said(params, questions[: i + 1]) for i in range(len(questions))]
    ends = [spoken[0].index(session.context) + len(session.context), *map(len, spoken)]
    tails = [added(params, text[end:]) for text, end in zip(spoken, ends, strict=False)]
    cache, _ = prefill(params, config, [head], room=_room(params, [head], new + sum(map(len, tails))))
    cost, texts = mean(held(params, config, cache)), []
    for tail in tails:
        texts.append(generate(params, cache, [tail], max_new_tokens=new).text[0])
        cache, _ = extend(params, cache, [tail])
    return texts, cost


def honest(session: Session, text: str) -> float:
    """Whether the answer to the probe is no value of the context; what is invented altogether is not noticed."""
    return none_named(text, session.probe.answers)
