"""Quality and latency of chunk reuse: prompts with reused passages against the same prompts prefilled in full."""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jkv.attention.dequantization import dequantize
from jkv.cache.cache import Cache
from jkv.core.compilation import Cost
from jkv.eval import corpora
from jkv.eval import quality as quality_eval
from jkv.eval.store_replay import leading
from jkv.eval.tasks.registry import Example
from jkv.eval.tasks.words import coined, numbers, prose
from jkv.generation.api import generate
from jkv.generation.receipt import divergence
from jkv.generation.teacher_forcing import Follow
from jkv.methods.config import CacheConfig
from jkv.models import Params
from jkv.prefix_cache.chunk_reuse import ChunkCache, Joins, kind
from jkv.prefix_cache.prefix import BegunPrompts, PrefixReuse, doubling
from jkv.prefix_cache.store import BLOCK, chain
from jkv.prompts.prefill import prefilled

NEW = 16  # tokens after a prompt over which KL is measured
POOL, EACH, SAID = 8, 4, 96  # passages in the pool, passages per prompt, tokens that an agent generates
APART, EDITS = 24, (1, 4, 8)  # least distance of two edits in tokens; numbers of edits per prompt
WHOLE, PLAIN = "none", "pie"  # policies: prefill in full; reuse without recomputation


@dataclass(frozen=True)
class ReusePrompt:
    """A test prompt with the passages to cache before it.

    Attributes:
        ids: Token ids of the prompt.
        follow: Token ids after the prompt, over which KL is measured.
        add: Adds to `ChunkCache` the text that is prefilled before the prompt.
        answer: Number of tokens at the start of `follow` that are the right answer; 0 if the prompt asks nothing.
        counts: Whether the prompt is measured. If not, it only warms the passages up.
        edits: Number of places in which the cached text differed from the prompt.
    """

    ids: list[int]
    follow: list[int]
    add: Callable[[ChunkCache], None]
    answer: int = 0
    counts: bool = True
    edits: int = 0


@dataclass(frozen=True)
class Bed:
    """A test set of prompts, in order.

    Attributes:
        asked: The prompts.
        shared: Whether all prompts share one set of passages, instead of each having its own.
    """

    asked: list[ReusePrompt]
    shared: bool

    def __iter__(self) -> Iterator[ReusePrompt]:
        return iter(self.asked)

    @property
    def measured(self) -> list[ReusePrompt]:
        """The prompts that are measured."""
        return [x for x in self.asked if x.counts]


def documents(params: Params, samples: int, length: int, seed: int) -> Bed:
    """Build questions about `EACH` of `POOL` documents, drawn by Zipf's law and placed in any order.

    Each document hides a needle, and a question asks for one of them. The first prompts hold each document once and are
    not measured.

    Args:
        samples: Number of measured prompts.
        length: Tokens of a document.
    """
    # Documents with a needle each, and the text that follows a right answer.
    rng, tokenizer = np.random.default_rng(seed), _tokenizer(params)
    towns, codes = [x.capitalize() for x in coined(rng, POOL)], numbers(rng, POOL, 6)
    texts, after = [], []
    for town, code in zip(towns, codes, strict=True):
        said = f"The lighthouse keeper of {town} opens the door with the code {code}."
        text = prose(rng, 2 * length, [(float(rng.uniform(0.1, 0.4)), said)])
        ids = tokenizer.within(text)[:length]
        texts.append([*ids, *tokenizer.within("\n\n")])
        after.append(tokenizer.within(f" {code}. " + text.split(said)[1].strip()))

    def add(passages: ChunkCache) -> None:
        if not passages.passages:
            for ids in texts:
                passages.add(params, ids)

    def ask(which: Sequence[int], about: int, counts: bool = True) -> ReusePrompt:
        example = Example(
            context="Read the texts below, then answer the question after them.\n\n",
            question=f"With which code does the lighthouse keeper of {towns[about]} open the door?\n",
            prefix=f"The lighthouse keeper of {towns[about]} opens the door with the code",
            answers=(codes[about],),
            meta={},
        )
        head, tail = quality_eval.cut(params, example)
        ids = [*head, *(x for i in which for x in texts[i]), *tail]
        return ReusePrompt(ids, after[about][:NEW], add, len(tokenizer.within(f" {codes[about]}")), counts)

    # Warm-up prompts with every document once, then the measured ones.
    order = rng.permutation(POOL).tolist()
    first = [ask(order[i : i + EACH], order[i], False) for i in range(0, POOL, EACH)]
    odds = 1 / np.arange(1, POOL + 1)
    drawn = [rng.choice(POOL, EACH, replace=False, p=odds / odds.sum()).tolist() for _ in range(samples)]
    return Bed([*first, *(ask(some, int(rng.choice(some))) for some in drawn)], shared=True)


def edits(params: Params, samples: int, length: int, seed: int) -> Bed:
    """Build prompts of code that was cached before an edit: in one, four or eight places, prompt by prompt.

    An edit deletes 0 to 5 tokens and inserts 0 to 5 tokens of the same code, at least one of the two.

    Args:
        samples: Number of prompts.
        length: A quarter of a prompt's tokens; prompts have `EACH * length`.
    """
    rng, tokenizer, length = np.random.default_rng(seed), _tokenizer(params), EACH * length
    text = corpora.text("stdlib")[: 20 * samples * (length + NEW)]
    windows = corpora.windows(tokenizer.encode(text), length + NEW, samples, seed)
    sizes = [(gone, size) for gone in range(6) for size in range(6) if gone or size]

    def one(row: list[int], places: int) -> ReusePrompt:
        old, new = row[:length], row[:length]
        for at in sorted(rng.choice(np.arange(APART, length - APART, APART), places, replace=False), reverse=True):
            gone, size = sizes[int(rng.integers(len(sizes)))]
            other = int(rng.integers(length - size))
            new[at : at + gone] = row[other : other + size]
        return ReusePrompt(new, row[length:], lambda passages: passages.add(params, old), edits=places)

    return Bed([one(row, EDITS[i % len(EDITS)]) for i, row in enumerate(windows.tolist())], shared=False)


def agents(params: Params, samples: int, length: int, seed: int) -> Bed:
    """Build prompts in which a second run reads what a first run of the model generated about a text.

    Args:
        samples: Number of prompts.
        length: Words of each text that the first run reads.
    """
    rng = np.random.default_rng(seed)
    about = {"prefix": "", "answers": ("",), "meta": {}}

    def says(prompts: list[list[int]], new: int) -> tuple[list[list[int]], Cache]:
        out: Any = generate(params, CacheConfig(), prompts, max_new_tokens=new, stop_ids=())
        return out.tokens, out.cache

    # First run: an explanation of each text, with the cache rows that hold it.
    told = [
        sum(
            quality_eval.cut(params, Example(context=f"{prose(rng, length)}\n\n", question="Explain this.", **about)),
            [],
        )
        for _ in range(samples)
    ]
    caches: list[Cache] = []
    said: list[list[int]] = []
    for some in (told[i : i + 5] for i in range(0, samples, 5)):
        tokens, cache = says(some, SAID)
        said += tokens
        caches += [cache.pick(jnp.array([i])) for i in range(len(some))]

    def one(tokens: list[int], cache: Cache) -> ReusePrompt:
        example = Example(
            context="A colleague wrote about a text:\n\n",
            question="\n\nName the most important thing in it, and why it matters.",
            **about,
        )
        before, after = quality_eval.cut(params, example)
        return ReusePrompt([*before, *tokens, *after], [], lambda passages: passages.add_answer(params, tokens, cache))

    # Second run: its own continuation is what KL is measured over.
    asked = [one(*x) for x in zip(said, caches, strict=True)]
    goes, _ = says([x.ids for x in asked], NEW)
    return Bed([replace(x, follow=y) for x, y in zip(asked, goes, strict=True)], shared=False)


BEDS: dict[str, Callable[[Params, int, int, int], Bed]] = {"documents": documents, "edits": edits, "agents": agents}


def _tokenizer(params: Params) -> Any:
    if params.tokenizer is None:
        raise ValueError("reuse is measured on texts: this model was built without a tokenizer")
    return params.tokenizer


class Ready(PrefixReuse):
    """Prefix source that returns caches that are already prefilled, one per prompt."""

    def __init__(self, given: Sequence[tuple[Cache, int, int]], params: Params, config: CacheConfig) -> None:
        super().__init__(params, config)
        self.given = iter(given)

    def read(self, params: Params, ids: Sequence[int], cost: Cost, capacity: int) -> tuple[Cache, int, int]:
        return next(self.given)


def quality(
    params: Params, bed: Bed, configs: Sequence[CacheConfig], renews: Sequence[str], done: Container[int] = ()
) -> Iterator[tuple[int, str, str, dict[str, Any]]]:
    """Measure the quality of chunk reuse, prompt by prompt.

    A prompt is prefilled once per recompute policy. The resulting caches then go through `follow` as rows of one batch.
    Configs that load the same records and always recompute the same number of last tokens share the prefill.

    Args:
        bed: The prompts.
        configs: Caches to measure.
        renews: Recompute policies, as `ChunkCache(renew=...)` takes them. The full prefill (`WHOLE`) is measured too.
        done: Prompt numbers that were measured before and are skipped.

    Yields:
        (prompt number, cache, policy, row). Columns of a row:
        kl: mean KL in nats over `follow`, to the same cache after a full prefill;
        right: whether the answer is predicted token for token, if the prompt has one;
        read: the share of the prompt's (token, layer) pairs that were computed;
        ms: time of the prefill without compilation and without the last tokens, which every cache computes itself. If
        every prompt has its own passages, prefilling those is included (`times` leaves it out);
        tokens: tokens of the prompt; edits: number of edits, if any.

    Raises:
        ValueError: A config cannot reuse anything.
    """
    # Group configs that can share a prefill.
    alike: dict[tuple[str, int], list[CacheConfig]] = {}
    for config in configs:
        joins = Joins(ChunkCache(PLAIN), params, config.bound(params))
        if joins.refusal:
            raise ValueError(f"{config}: {joins.refusal}, so nothing is reused: give another cache")
        alike.setdefault((joins.root, joins.least), []).append(config.bound(params))

    def fresh() -> dict[str, ChunkCache]:
        return {renew: passages_of(renew) for renew in (WHOLE, *renews)}

    ways = {key: fresh() for key in alike}
    for number, x in enumerate(bed):
        for key, some in alike.items():
            if not bed.shared:
                ways[key] = fresh()
            # Prefill the prompt once per policy.
            begun, read, ms = [], [], []
            for renew, passages in ways[key].items():
                if renew != WHOLE:
                    x.add(passages)
                if number in done and passages.renew.alpha is None:  # its policy keeps no state between prompts
                    continue
                before, joins, cost, start = (
                    passages.read,
                    Joins(passages, params, some[0]),
                    Cost(),
                    time.perf_counter(),
                )
                begun.append(joins.read(params, x.ids, cost, doubling(max(joins.whole(len(x.ids)), 1))))
                ms.append(1e3 * (time.perf_counter() - start - cost.compiling))
                read.append((passages.read - before) / len(x.ids))
            # Compare each config after these prefills, one row per policy.
            for config in some if x.counts and number not in done else ():
                kind = partial(BegunPrompts, begins=partial(Ready, begun))
                cache, last, *_ = prefilled(params, config, [x.ids] * len(begun), 2 * NEW, 0, kind=kind)
                run = Follow(params, cache, last, np.asarray([x.follow] * len(begun), np.int32))
                logits = jnp.concatenate(list(run), 1)
                kl = np.asarray(divergence(logits[:1], logits)[0].mean(1), float)
                right = (np.asarray(logits[:, : x.answer].argmax(-1)) == x.follow[: x.answer]).all(1)
                for renew, far, hit, share, spent in zip(ways[key], kl, right, read, ms, strict=True):
                    row = {"kl": round(float(far), 6), **({"right": bool(hit)} if x.answer else {})}
                    row |= {"read": round(share, 4), "ms": round(spent, 1), "tokens": len(x.ids)}
                    row |= {"edits": x.edits} if x.edits else {}
                    yield number, str(config), renew, row


def passages_of(renew: str) -> ChunkCache:
    """Return empty passages with a recompute policy. For `WHOLE` no passage is ever added."""
    return ChunkCache(PLAIN if renew == WHOLE else renew)


def times(params: Params, bed: Bed, config: CacheConfig, renew: str) -> list[float]:
    """Measure the time to the first logits of each measured prompt, in ms without compilation.

    Prefilling the passages before a prompt does not count. If every prompt has its own passages, the prompt is
    prefilled twice and the second time counts.

    Args:
        renew: Recompute policy, or `WHOLE`.
    """
    out, passages = [], passages_of(renew)
    for x in bed:
        passages = passages if bed.shared else passages_of(renew)
        if renew != WHOLE:
            x.add(passages)
        for last in (True,) if bed.shared else (False, True):
            start = time.perf_counter()
            _, logits, cost, _ = prefilled(
                params, config, [x.ids], 2 * NEW, 0, kind=kind(None if renew == WHOLE else passages)
            )
            jax.block_until_ready(logits)
            if last and x.counts:
                out.append(1e3 * (time.perf_counter() - start - cost.compiling))
    return out


def drift(params: Params, bed: Bed) -> list[float]:
    """Return 1 - cos of cached values against values prefilled in the prompt, per layer, averaged over prompts."""
    out = []
    for x in bed.measured:
        passages = ChunkCache(PLAIN)
        x.add(passages)
        a, b = (
            [
                np.asarray(y.v[0], float)
                for y in dequantize(prefilled(params, CacheConfig(), [x.ids], 0, 0, kind=kind(z))[0])
            ]
            for z in (passages, None)
        )
        here = np.concatenate([np.arange(y.place, y.place + y.length) for y in passages.match(x.ids[:-1])])
        each = ([y[:, here].transpose(1, 0, 2).reshape(len(here), -1) for y in layers] for layers in (a, b))
        dots = [(y * z).sum(1) / np.sqrt((y * y).sum(1) * (z * z).sum(1)) for y, z in zip(*each, strict=True)]
        out.append([1 - float(np.mean(y)) for y in dots])
    return np.mean(out, axis=0).round(5).tolist()


def prefix_tokens(bed: Bed) -> int:
    """Count the tokens that the measured prompts prefill if only whole blocks of a shared prefix are reused."""
    seen: set[str] = set()
    read = 0
    for x in bed:
        names = chain("", x.ids[:-1])
        hits = leading(names, seen) if bed.shared else 0
        seen |= set(names)
        read += (len(x.ids) - BLOCK * hits) * x.counts
    return read


def summed(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Aggregate rows per cache, number of edits and recompute policy: means, and the median of `ms`.

    Statistics that are compared come as (mean, standard error), or None if they were not measured.

    Returns:
        One row per group. `score` is the share of right answers, or None if nothing was asked. `fewer` is how many
        right answers the same prompts lose against the full prefill, and `less` how many nats less they lose than with
        `PLAIN`.
    """
    groups: dict[tuple[str, int, str], dict[int, dict[str, Any]]] = {}
    for row in rows:
        if "prompt" in row:
            groups.setdefault((row["cache"], row.get("edits", 0), row["renew"]), {})[row["prompt"]] = row
    out = []
    for (cache, places, renew), own in groups.items():
        some = [*own.values()]
        # Pair each prompt with itself under the policy it is compared with.
        paired = {
            name: [(own[i][key], other[i][key]) for i in own if i in other and key in own[i]]
            for name, key, other in (
                ("fewer", "right", groups.get((cache, places, WHOLE), {})),
                ("less", "kl", groups.get((cache, places, PLAIN), {})),
            )
        }
        right = [x["right"] for x in some if "right" in x]
        out.append(
            {
                "cache": cache,
                "renew": renew,
                "edits": places,
                "kl": spread([x["kl"] for x in some]),
                "score": float(np.mean(right)) if right else None,
                **{name: spread([float(b) - float(a) for a, b in pairs]) for name, pairs in paired.items()},
                "read": float(np.average([x["read"] for x in some], weights=[x["tokens"] for x in some])),
                "ms": float(np.median([x["ms"] for x in some])),
                "samples": len(some),
            }
        )
    return out


def spread(values: Sequence[float]) -> tuple[float, float] | None:
    """Return the mean and its standard error, or None for fewer than two values.

    >>> spread([1.0, 2.0, 3.0, 2.0]), spread([1.0])
    ((2.0, 0.408248290463863), None)
    """
    if len(values) < 2:
        return None
    return float(np.mean(values)), float(np.std(values, ddof=1) / np.sqrt(len(values)))
