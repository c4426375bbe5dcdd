"""What reuse of passages costs in quality, and what it saves: prompts beside the same prompts that are read whole."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jkv.attention.decoded import stored
from jkv.eval import corpora, measure
from jkv.eval.task import Example
from jkv.eval.words import coined, numbers, prose
from jkv.generation.api import generate
from jkv.generation.follow import Follow
from jkv.generation.passages import Passages, kind
from jkv.generation.prefill import prefilled
from jkv.generation.report import divergence
from jkv.io.store import chain
from jkv.memory.cache import Cache
from jkv.methods.config import CacheConfig
from jkv.models import Params

NEW = 16  # tokens after a prompt, over which caches are compared
POOL, EACH, SAID = 10, 5, 128  # passages, those of a prompt; tokens that a run says
WHOLE = "none"  # the name of what is read whole


@dataclass(frozen=True)
class Asked:
    """A prompt, token ids; what follows it, of which the first `answer` tokens answer it; add(passages): what has been
    read before it. counts: whether it is measured, and does not only fill the passages."""

    ids: list[int]
    follow: list[int]
    add: Callable[[Passages], None]
    answer: int = 0
    counts: bool = True


@dataclass(frozen=True)
class Bed:
    """Prompts in order; shared: all of them use the same passages, or each its own."""

    asked: list[Asked]
    shared: bool

    def __iter__(self) -> Iterator[Asked]:
        return iter(self.asked)

    @property
    def measured(self) -> list[Asked]:
        return [x for x in self.asked if x.counts]


def documents(params: Params, samples: int, length: int, seed: int) -> Bed:
    """Questions about `EACH` of `POOL` texts of `length` tokens, in any order: which, by Zipf's law. Each text has a
    needle. The first prompts hold each text once, and are not counted."""
    rng, tokenizer = np.random.default_rng(seed), _tokenizer(params)
    towns, codes = [x.capitalize() for x in coined(rng, POOL)], numbers(rng, POOL, 6)
    texts, after = [], []
    for town, code in zip(towns, codes, strict=True):
        said = f"The lighthouse keeper of {town} opens the door with the code {code}."
        text = prose(rng, 2 * length, [(float(rng.uniform(0.1, 0.4)), said)])
        ids = tokenizer.within(text)[:length]
        texts.append([*ids, *tokenizer.within("\n\n")])
        after.append(tokenizer.within(f" {code}. " + text.split(said)[1].strip()))

    def add(passages: Passages) -> None:
        if not passages.passages:
            for ids in texts:
                passages.add(params, ids)

    def ask(which: Sequence[int], about: int, counts: bool = True) -> Asked:
        example = Example(
            context="Read the texts below, then answer the question after them.\n\n",
            question=f"With which code does the lighthouse keeper of {towns[about]} open the door?\n",
            prefix=f"The lighthouse keeper of {towns[about]} opens the door with the code",
            answers=(codes[about],),
            meta={},
        )
        head, tail = measure.cut(params, example)
        ids = [*head, *(x for i in which for x in texts[i]), *tail]
        return Asked(ids, after[about][:NEW], add, len(tokenizer.within(f" {codes[about]}")), counts)

    order = rng.permutation(POOL)
    first = [ask(some, int(some[0]), False) for some in np.split(order, POOL // EACH)]
    odds = 1 / np.arange(1, POOL + 1)
    drawn = [rng.choice(POOL, EACH, replace=False, p=odds / odds.sum()) for _ in range(samples)]
    return Bed([*first, *(ask(some, int(rng.choice(some))) for some in drawn)], shared=True)


def edits(params: Params, samples: int, length: int, seed: int) -> Bed:
    """Code of `EACH * length` tokens, read before it was edited in four places, by a few tokens each."""
    rng, tokenizer, length = np.random.default_rng(seed), _tokenizer(params), EACH * length
    windows = corpora.windows(tokenizer.encode(corpora.text("stdlib")), length + NEW, samples, seed)

    def one(row: list[int]) -> Asked:
        old, new = row[:length], row[:length]
        for at in sorted(rng.choice(np.arange(40, length - 40, 40), 4, replace=False), reverse=True):
            gone, size = int(rng.integers(0, 6)), int(rng.integers(1, 6))
            place = int(rng.integers(length - size))
            new[at : at + gone] = row[place : place + size]
        return Asked(new, row[length:], lambda passages: passages.add(params, old))

    return Bed([one(row) for row in windows.tolist()], shared=False)


def agents(params: Params, samples: int, length: int, seed: int) -> Bed:
    """A text is summed up by a run of the model, and what that said stands in a second run's prompt."""
    rng, full = np.random.default_rng(seed), CacheConfig()

    def one() -> Asked:
        text = prose(rng, length)
        ask = Example(context=f"{text}\n\n", question="Explain what this says.", prefix="", answers=("",), meta={})
        head, tail = measure.cut(params, ask)
        out = generate(params, full, [*head, *tail], max_new_tokens=SAID, stop_ids=())
        says = [int(x) for x in out.tokens]  # pyright: ignore[reportArgumentType]
        example = Example(
            context="A colleague wrote about a text:\n\n",
            question="\n\nName the most important thing in it, and why it matters.",
            prefix="",
            answers=("",),
            meta={},
        )
        before, after = measure.cut(params, example)
        ids = [*before, *says, *after]
        goes = generate(params, full, ids, max_new_tokens=NEW, stop_ids=())
        follow = [int(x) for x in goes.tokens]  # pyright: ignore[reportArgumentType]
        return Asked(ids, follow, lambda passages: passages.said(params, says, out.cache))

    return Bed([one() for _ in range(samples)], shared=False)


BEDS: dict[str, Callable[[Params, int, int, int], Bed]] = {"documents": documents, "edits": edits, "agents": agents}


def _tokenizer(params: Params) -> Any:
    if params.tokenizer is None:
        raise ValueError("reuse is measured on texts: this model was built without a tokenizer")
    return params.tokenizer


class Reuse:
    """Prompts of a bed through caches, with passages and without."""

    def __init__(self, params: Params, bed: Bed) -> None:
        self.params, self.bed = params, bed
        self.whole: dict[str, list[Array]] = {}

    def __call__(self, config: CacheConfig, renew: str) -> dict[str, Any]:
        """kl in nats to the same cache after the prompt that is read whole, a mean of texts, and its standard error;
        score: the answers that are given word for word; read: of the tokens and layers of prompts; first_ms: the median
        of what prompts take, without compilation; prefix: what a store of beginnings would have to read."""
        logits, ms, read = self._run(config, renew)
        if renew == WHOLE:
            self.whole[str(config)] = logits
        elif str(config) not in self.whole:
            self.whole[str(config)] = self._run(config, WHOLE)[0]
        asked = self.bed.measured
        pairs = zip(self.whole[str(config)], logits, strict=True)
        kl = np.array([float(divergence(a, b)[0].mean()) for a, b in pairs])
        hits = [
            (np.asarray(y[0, : x.answer]).argmax(-1) == x.follow[: x.answer]).all()
            for x, y in zip(asked, logits, strict=True)
            if x.answer
        ]
        total = sum(len(x.ids) for x in asked)
        return {
            "kl": round(float(kl.mean()), 6),
            "kl_se": round(float(kl.std(ddof=1) / np.sqrt(len(kl))), 6) if len(kl) > 1 else None,
            **({"score": round(float(np.mean(hits)), 4)} if hits else {}),
            "samples": len(asked),
            "tokens": round(total / len(asked)),
            "read": round(read / total, 4),
            **({"prefix": round(beginnings(self.bed) / total, 4)} if renew == WHOLE else {}),
            "first_ms": round(float(np.median(ms)), 1),
        }

    def _run(self, config: CacheConfig, renew: str) -> tuple[list[Array], list[float], float]:
        """Logits f32[1,N,V] of what follows each prompt, milliseconds of each, and the tokens that were read."""
        logits, ms, read, passages = [], [], 0.0, None if renew == WHOLE else Passages(renew)
        for x in self.bed:
            if passages is not None:
                passages = passages if self.bed.shared else Passages(renew)
                x.add(passages)
                if not self.bed.shared:  # what is read before a prompt is no part of it
                    self._prefill(config, x, passages)
            before = 0.0 if passages is None else passages.read
            cache, last, spent = self._prefill(config, x, passages)
            if not x.counts:
                continue
            read += len(x.ids) if passages is None else passages.read - before
            ms.append(spent)
            run = Follow(self.params, cache, last, np.asarray([x.follow], np.int32))
            logits.append(jnp.concatenate(list(run), 1))
        return logits, ms, read

    def _prefill(self, config: CacheConfig, x: Asked, passages: Passages | None) -> tuple[Cache, Array, float]:
        start = time.perf_counter()
        cache, logits, cost, _ = prefilled(self.params, config, [x.ids], 2 * NEW, 0, kind=kind(passages))
        jax.block_until_ready(logits)
        return cache, logits, 1e3 * (time.perf_counter() - start - cost.compiling)

    def drift(self) -> list[float]:
        """1 - cos of the values of what was read before, as held and as read in the prompt, a mean of texts, by layer:
        nothing of it is read again."""
        out = []
        for x in self.bed.measured:
            passages = Passages("pie")
            x.add(passages)
            a, b = (
                [np.asarray(y.v[0], float) for y in stored(self._prefill(CacheConfig(), x, z)[0])]
                for z in (passages, None)
            )
            here = np.concatenate([np.arange(y.place, y.place + y.length) for y in passages.match(x.ids[:-1])])
            each = [[y[:, here].transpose(1, 0, 2).reshape(len(here), -1) for y in layers] for layers in (a, b)]
            dots = [(y * z).sum(1) / np.sqrt((y * y).sum(1) * (z * z).sum(1)) for y, z in zip(*each, strict=True)]
            out.append([1 - float(np.mean(y)) for y in dots])
        return np.mean(out, axis=0).round(5).tolist()


def beginnings(bed: Bed) -> int:
    """Tokens that the measured prompts have to read where whole blocks of their beginnings are found again."""
    seen: set[str] = set()
    read = 0
    for x in bed:
        names = chain("", x.ids[:-1])
        hits = next((i for i, name in enumerate(names) if name not in seen), len(names)) if bed.shared else 0
        seen |= set(names)
        read += (len(x.ids) - 64 * hits) * x.counts
    return read
