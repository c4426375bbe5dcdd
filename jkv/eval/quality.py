"""Quality of a compressed cache: perplexity, fidelity to the full cache, and answers to questions."""

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

PIECE = 512  # tokens of an endless text per extend


@dataclass(frozen=True, kw_only=True)
class CacheUsage:
    """Size of a cache, per row.

    Attributes:
        kept: Fraction of the tokens seen that the cache holds.
        context: Tokens seen.
        bytes: Bytes of the cache.
        bytes_full: Bytes of the full cache.
        bits: Bits per number of keys and of values in tiers, metadata included.
    """

    kept: float
    context: int
    bytes: int
    bytes_full: int
    bits: tuple[float, float]


def measure_usage(params: Params, config: CacheConfig, cache: Cache, count: int | None = None) -> list[CacheUsage]:
    """Measure each of the first `count` rows (None: all) of a cache as it is now, independent of the other rows.

    `bytes` counts all arrays of a cache allocated for exactly the tokens that the row has seen: no capacity to grow,
    except the recent window, which has as many steps as that of `cache`.
    """
    seen, states = np.asarray(cache.seen), tree_bytes(cache.states)
    token = (full_bytes(cache) - states) // int(seen.sum())
    sizes = None
    if config.budget.statistic:  # keep the sizes that this prompt led to
        sizes = Sizes(layers=tuple(replace(plan.size, beyond=0) for plan in cache.plan))
    config = replace(config.bound(params), block=cache.plan[0].block) if cache.plan else config
    made = {n: tree_bytes(layout(config, cache.model, 1, n, 0, cache.dtype, sizes)[1]) for n in set(seen.tolist())}
    bits = tier_bits(cache)
    return [
        CacheUsage(
            kept=float(kept) / n, context=n, bytes=made[n], bytes_full=n * token + states // cache.rows, bits=bits
        )
        for n, kept in zip(seen.tolist()[:count], kept_by_row(cache), strict=False)
    ]


def mean(rows: Sequence[CacheUsage]) -> CacheUsage:
    """Average the sizes of rows.

    >>> of = dict(context=10, bytes_full=20, bits=(8, 8))
    >>> mean([CacheUsage(kept=0.5, bytes=10, **of), CacheUsage(kept=1.0, bytes=12, **of)])
    CacheUsage(kept=0.75, context=10, bytes=11, bytes_full=20, bits=(8.0, 8.0))
    """
    k, v = (round(float(np.mean(side)), 4) for side in zip(*(x.bits for x in rows), strict=True))
    return CacheUsage(
        kept=round(float(np.mean([x.kept for x in rows])), 4),
        context=round(float(np.mean([x.context for x in rows]))),
        bytes=int(np.mean([x.bytes for x in rows])),
        bytes_full=int(np.mean([x.bytes_full for x in rows])),
        bits=(k, v),
    )


def batches(samples: int, most: int) -> Iterator[tuple[list[int], int]]:
    """Yield (rows, number that counts) in batches of one size; the last batch is filled up with earlier rows.

    >>> list(batches(3, 2))
    [([0, 1], 2), ([2, 0], 1)]
    """
    size = min(most, samples)
    for start in range(0, samples, size):
        rows = list(range(start, min(start + size, samples)))
        yield rows + [i % samples for i in range(size - len(rows))], len(rows)


@dataclass(frozen=True)
class Texts:
    """Texts whose prefix is compressed and whose remaining tokens go through the cache one by one.

    Attributes:
        ids: i32[n,T], token ids.
        prefix: Tokens of the prefix.
        frozen: Whether nothing is compressed after the prefix.
        batch: Texts per batch.
        prefill: Prefills of prefixes, which caches share.
    """

    ids: np.ndarray
    prefix: int
    frozen: bool = False
    batch: int = 4
    prefill: Prefills = field(default_factory=Prefills)

    def follow(self, params: Params, config: CacheConfig, rows: list[int]) -> Follow:
        """Prefill the prefixes of some rows and return the teacher forcing of the rest."""
        some, reserve = self.ids[rows], self.ids.shape[1] - self.prefix
        if self.frozen:  # one flush at the end of the prefix, the next after the text
            config = replace(config, block=max(config.block, reserve))
        cache, logits = self.prefill(params, config, some[:, : self.prefix], reserve)
        return Follow(params, cache, logits, some[:, self.prefix :])


def perplexity(params: Params, config: CacheConfig, texts: Texts) -> dict[str, Any]:
    """Measure the perplexity of the tokens after the prefix.

    Returns:
        `ppl` = exp(mean nll in nats), `nll`, `nll_se` (its standard error over the texts), the fields of
        `CacheUsage`, and `ms_token`, the median time of a step.
    """
    by_text, ms, cost = [], [], []
    for rows, count in batches(len(texts.ids), texts.batch):
        run = texts.follow(params, config, rows)
        cost += measure_usage(params, config, run.cache, count)
        by_text.append(np.concatenate([_surprise(run, i, part) for i, part in enumerate(run)], 1)[:count].mean(1))
        ms += run.ms
    return {**_ppl(np.concatenate(by_text)), **vars(mean(cost)), "ms_token": _median(ms)}


def _median(ms: Sequence[float]) -> float:
    return round(float(np.median(ms)), 2)


def endless(
    params: Params, config: CacheConfig, ids: np.ndarray, ends: Sequence[int], prefix: int, rest: int
) -> Iterator[dict[str, Any]]:
    """Measure the perplexity along a text that goes through one cache, however long.

    Args:
        params: The model.
        config: The cache, without a limit of positions.
        ids: i32[T], the text.
        ends: Places, ascending, after each of which tokens are predicted.
        prefix: Tokens prefilled first, and the context of the comparison.
        rest: Tokens predicted at each place.

    Yields:
        Per place `ppl` of the next `rest` tokens; `fresh`, their perplexity after a new cache that has seen only the
        `prefix` tokens before them; `bytes` of all arrays as allocated; and `ms_token`.
    """
    tokens = ids[None]
    cache, logits = prefill(params, config, tokens[:, :prefix], reserve=len(ids) - prefix)
    for end in ends:
        # Read up to this place.
        for start in range(int(cache.seen[0]), end, PIECE):
            cache, logits = extend(params, cache, tokens[:, start : min(start + PIECE, end)])
        after, beside = tokens[:, end : end + rest], tokens[:, end - prefix : end]
        runs = (
            Follow(params, cache, logits, after),
            Follow(params, *prefill(params, config, beside, reserve=rest), after),
        )
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
    """Comparison with the full cache, which runs once for any number of caches.

    The full cache's logits, n * N * vocab floats, and its attention to each prefix token, a float per layer, kv head
    and token, stay in memory.
    """

    def __init__(self, params: Params, texts: Texts) -> None:
        self.params, self.texts = params, texts
        self.groups = list(batches(len(texts.ids), texts.batch))
        self.full = [[np.asarray(x) for x in texts.follow(params, CacheConfig(), rows)] for rows, _ in self.groups]
        self.paid = [paid(params, jnp.asarray(texts.ids[rows]), texts.prefix) for rows, _ in self.groups]

    def __call__(self, config: CacheConfig, layers: bool = False) -> dict[str, Any]:
        """Measure how far a cache is from the full one.

        Args:
            config: The cache.
            layers: Whether to measure the compression of each layer alone too, on the first batch.

        Returns:
            `kl` (nats; also by text, and the 99th percentile); `agree`, the top-1 agreement; `first`, the mean index of
            the first token where the full cache would have chosen another (N if none); perplexity; `mass` f32[L][H],
            the share of the full model's attention to the prefix on tokens that the cache holds; the fields of
            `CacheUsage`; `ms_token`. With `layers` also `by_layer`, the KL if one layer alone is compressed, as the
            prefix left it, and `spare`, the layers that cost most.
        """
        kl, same, nll, masses, by_layer, cost, ms = [], [], [], [], [], [], []
        for (rows, count), full, whole in zip(self.groups, self.full, self.paid, strict=True):
            # One teacher-forced pass per batch, compared slice by slice.
            run = self.texts.follow(self.params, config, rows)
            cost += measure_usage(self.params, config, run.cache, count)
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


def conversation_prompt(params: Params, turns: Sequence[Example]) -> str:
    """Render a conversation up to its last answer prefix, with the right answers to earlier questions."""
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
    """Tokenize a prompt in two parts, split at the end of its context; no token spans the split."""
    text = conversation_prompt(params, [example])
    end = text.index(example.context) + len(example.context)
    assert params.tokenizer is not None
    return params.tokenizer.encode(type(text)(text[:end])), added(params, text[end:])


def added(params: Params, text: str) -> list[int]:
    """Tokenize text that follows other text."""
    assert params.tokenizer is not None
    return params.tokenizer.within(text)


def overhead(params: Params) -> int:
    """Count the tokens that the chat template adds to a question."""
    empty = Example(context="", question="", prefix="", answers=("",), meta={})
    return len(encode(params, conversation_prompt(params, [empty]) or " ")[0][0])


Prompt = tuple[list[int], list[int]]  # token ids of the context, and of the rest of the prompt


def answer(
    params: Params, config: CacheConfig, prompts: Sequence[Prompt], new: int, seen: bool, batch: int
) -> tuple[list[str], list[CacheUsage]]:
    """Generate greedy answers to prompts.

    Args:
        params: The model.
        config: The cache.
        prompts: The prompts.
        new: Most tokens of an answer.
        seen: Whether the question is compressed with the context (query-aware). If not, the context is compressed
            alone, as for a cache that serves unknown questions, and the question is read afterwards.
        batch: Prompts per batch.

    Returns:
        The answers, and what the cache held of each prompt.
    """
    texts: list[str] = []
    cost: list[CacheUsage] = []
    for rows, count in batches(len(prompts), batch):
        heads, tails = [prompts[i][0] for i in rows], [prompts[i][1] for i in rows]
        if seen:
            out = generate(params, config, [a + b for a, b in zip(heads, tails, strict=True)], max_new_tokens=new)
            cost += measure_usage(params, config, out.cache, count)
        else:
            cache, _ = prefill(params, config, heads, reserve=_reserve(params, heads, new + max(map(len, tails))))
            cost += measure_usage(params, config, cache, count)
            out = generate(params, cache, tails, max_new_tokens=new)
        texts += out.text[:count]
    return texts, cost


def _reserve(params: Params, heads: Sequence[Sequence[int]], n: int) -> int:
    """Return capacity for n tokens after the contexts, rounded up so that most prompts share compiled programs."""
    return max(n, min(-(-n // 128) * 128, params.config.context - max(map(len, heads))))


def converse(
    params: Params, config: CacheConfig, session: Session, new: int, mode: str, batch: int
) -> tuple[list[str], CacheUsage]:
    """Generate greedy answers to the questions of a session, then to its probe.

    Args:
        params: The model.
        config: The cache.
        session: The session.
        new: Most tokens of an answer.
        mode: "rebuilt": a prompt per question with its context, compressed together. "reused": the context is
            compressed once, before any question, and each question is asked on a copy of that cache. "turns": one
            conversation on one cache that is compressed repeatedly, each question after the right answers to earlier
            ones.
        batch: Questions per batch, where they are independent.

    Returns:
        The answers, and the mean size of the cache.
    """
    questions = [*session.turns, session.probe]
    prompts = [cut(params, q) for q in questions]
    if mode == "rebuilt":
        texts, cost = answer(params, config, prompts, new, True, batch)
        return texts, mean(cost)
    head, tails = prompts[0][0], [tail for _, tail in prompts]
    if mode == "reused":
        cache, _ = prefill(params, config, [head], reserve=_reserve(params, [head], new + max(map(len, tails))))
        texts = []
        for rows, count in batches(len(tails), batch):
            asked = [tails[i] for i in rows]
            texts += generate(params, cache.fork(len(rows)), asked, max_new_tokens=new).text[:count]
        return texts, mean(measure_usage(params, config, cache))
    # One conversation: the text that each turn adds.
    spoken = [conversation_prompt(params, questions[: i + 1]) for i in range(len(questions))]
    ends = [spoken[0].index(session.context) + len(session.context), *map(len, spoken)]
    tails = [added(params, text[end:]) for text, end in zip(spoken, ends, strict=False)]
    cache, _ = prefill(params, config, [head], reserve=_reserve(params, [head], new + sum(map(len, tails))))
    cost, texts = mean(measure_usage(params, config, cache)), []
    for tail in tails:
        texts.append(generate(params, cache, [tail], max_new_tokens=new).text[0])
        cache, _ = extend(params, cache, [tail])
    return texts, cost


def honest(session: Session, text: str) -> float:
    """Return 1 if the answer to the probe is no value of the context. Values made up entirely are not detected."""
    return none_named(text, session.probe.answers)
