"""The 13 tasks of RULER (2404.06654), reworded: comparable with each other, not with published numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import islice
from typing import Any

import numpy as np

from jkv.eval.tasks.registry import Count, Example, fit, string_match_all, string_match_part, task
from jkv.eval.tasks.words import (
    ASKED,
    chains,
    keys,
    letters,
    lines,
    listed,
    numbers,
    people,
    prose,
    uuids,
    vocabulary,
)

DEPTHS = 40  # evenly spaced, from the start to the end
LONG = 4096  # length from which cwe repeats its words as often as RULER does


def _needles(
    rng: np.random.Generator,
    length: int,
    count: Count,
    *,
    hay: str,
    key: str = "word",
    value: str = "number",
    asked: int = 1,
    others: int = 0,
    values: int = 1,
) -> Example:
    """Build a prompt with needles in a haystack.

    Args:
        hay: "line" (one line repeated), "prose", or "needles" (only needles with other keys).
        key: Kind of the keys: "word", "number" or "uuid".
        value: Kind of the values: "number" or "uuid".
        asked: Keys that are asked for.
        others: Keys that are not asked for.
        values: Values per key.
    """
    kind = {"number": "number", "uuid": "code"}[value]

    def strings(rng: np.random.Generator, n: int, form: str) -> list[str]:
        return {"word": keys, "number": lambda r, k: numbers(r, k, 7), "uuid": uuids}[form](rng, n)

    def build(rng: np.random.Generator, n: int) -> Example:
        # Sentences of all keys, in random order.
        many = asked + others + (n if hay == "needles" else 0)
        names = strings(rng, many, key)
        held = np.array(strings(rng, many * values, value)).reshape(many, values)
        pairs = [(name, v) for name, row in zip(names, held, strict=True) for v in row]
        told = [f"Remember: a magic {kind} of {name} is {v}." for name, v in pairs]
        order = rng.permutation(len(told))
        shuffled = [told[i] for i in order]
        # Place them in the haystack.
        if hay == "prose":
            at = [float(d) for d in rng.choice(DEPTHS, len(told), replace=False) / (DEPTHS - 1)]
            text = prose(rng, n, list(zip(at, shuffled, strict=True)))
        elif hay == "line":
            text, at = lines(rng, n, shuffled)
        else:
            text, at = "\n".join(shuffled), [i / max(1, len(told) - 1) for i in range(len(told))]
        depths = dict(zip(shuffled, at, strict=True))
        answers = tuple(str(v) for _, v in pairs[: asked * values])
        wanted, plural = listed(names[:asked]), "s" if len(answers) > 1 else ""
        return Example(
            context=f"Some magic {kind}s are hidden in the text below. A question about them comes after it.\n\n{text}",
            question=f"\n\nWhich magic {kind}{plural} belong{'' if plural else 's'} to {wanted}?\n",
            prefix=f"The magic {kind}{plural} of {wanted} {'are' if plural else 'is'}",
            answers=answers,
            meta={
                "kind": hay,
                "depths": tuple(depths[line] for line in told[: len(answers)]),
                "needles": tuple(told[: len(answers)]),
            },
        )

    least = {"line": 5, "prose": 24, "needles": 1}[hay]
    return fit(build, rng, length, count, least=least, text=lambda example: example.prompt)


@task("ruler", new=128, score=string_match_all)
def niah_single_1(rng: np.random.Generator, length: int, count: Count) -> Example:
    """One number in a repeated line."""
    return _needles(rng, length, count, hay="line")


@task("ruler", new=128, score=string_match_all)
def niah_single_2(rng: np.random.Generator, length: int, count: Count) -> Example:
    """One number in prose."""
    return _needles(rng, length, count, hay="prose")


@task("ruler", new=128, score=string_match_all)
def niah_single_3(rng: np.random.Generator, length: int, count: Count) -> Example:
    """One UUID in prose."""
    return _needles(rng, length, count, hay="prose", value="uuid")


@task("ruler", new=128, score=string_match_all)
def niah_multikey_1(rng: np.random.Generator, length: int, count: Count) -> Example:
    """One number in prose with three numbers of other keys."""
    return _needles(rng, length, count, hay="prose", others=3)


@task("ruler", new=128, score=string_match_all)
def niah_multikey_2(rng: np.random.Generator, length: int, count: Count) -> Example:
    """One number among numbers of other keys only."""
    return _needles(rng, length, count, hay="needles")


@task("ruler", new=128, score=string_match_all)
def niah_multikey_3(rng: np.random.Generator, length: int, count: Count) -> Example:
    """The UUID of a UUID key among other such pairs only."""
    return _needles(rng, length, count, hay="needles", key="uuid", value="uuid")


@task("ruler", new=128, score=string_match_all)
def niah_multivalue(rng: np.random.Generator, length: int, count: Count) -> Example:
    """All four numbers of one key in prose."""
    return _needles(rng, length, count, hay="prose", values=4)


@task("ruler", new=128, score=string_match_all)
def niah_multiquery(rng: np.random.Generator, length: int, count: Count) -> Example:
    """The numbers of four keys in prose, asked at once."""
    return _needles(rng, length, count, hay="prose", asked=4)


@task("ruler", new=30, score=string_match_all)
def vt(rng: np.random.Generator, length: int, count: Count) -> Example:
    """Variable tracing: a number, and the five variables that hold it through a chain of four assignments."""

    def ask(value: str) -> str:
        return f"\n\nWhich five variables hold the number {value}, directly or through another one?\n"

    def build(rng: np.random.Generator, n: int) -> Example:
        sample, chain = chains(rng, 1, size=3)[0], chains(rng, 1)[0]
        shown, _ = lines(rng, 20, sample.lines)
        text, depths = lines(rng, n, chain.lines)
        opening = "Follow the assignments of variables (VAR) in the text. A question about them comes after it."
        prefix = "The five variables that hold the number {} are"
        example = f"{shown}{ask(sample.value)}{prefix.format(sample.value)} {' '.join(sample.names)}"
        return Example(
            context=f"{opening}\n\nAn example:\n\n{example}\n\nThe text:\n\n{text}",
            question=ask(chain.value),
            prefix=prefix.format(chain.value),
            answers=chain.names,
            meta={"kind": "line", "depths": tuple(depths)},
        )

    return fit(build, rng, length, count, least=5, text=lambda example: example.prompt)


@task("ruler", new=120, score=string_match_all)
def cwe(rng: np.random.Generator, length: int, count: Count) -> Example:
    """Common words: the ten most repeated words of a shuffled list, with fewer repetitions below 4096 tokens."""
    repeats, shown, shown_repeats = ((30, 3), 40, (10, 3)) if length >= LONG else ((6, 1), 20, (3, 1))
    ask, prefix = "\n\nWhich ten words are most common in the list?\n", "The ten most common words are"

    def numbered(rng: np.random.Generator, words: Sequence[str], often: int, seldom: int) -> str:
        entries = [*words[:10]] * often + [*words[10:]] * seldom
        return " ".join(f"{i}. {entries[j]}" for i, j in enumerate(rng.permutation(len(entries)), 1))

    def build(rng: np.random.Generator, n: int) -> Example:
        words = vocabulary(rng, shown + 10 + n)
        sample, words = words[:shown], words[shown:]
        # Scores match substrings, so a common word must not be contained in another word.
        whole = "\n".join(words)
        common = list(islice((word for word in words if whole.count(word) == 1), 10))
        words = [*common, *(word for word in words if word not in common)]
        example = f"{numbered(rng, sample, *shown_repeats)}{ask}{prefix} {' '.join(sample[:10])}"
        opening = "Below is a numbered list of words, some of which occur more often than the others."
        return Example(
            context=f"{opening}\n\nAn example:\n\n{example}\n\nThe list:\n\n{numbered(rng, words, *repeats)}",
            question=ask,
            prefix=prefix,
            answers=tuple(common),
            meta={"kind": "words", "repeats": repeats},
        )

    return fit(build, rng, length, count, least=10, text=lambda example: example.prompt)


@task("ruler", new=50, score=string_match_all)
def fwe(rng: np.random.Generator, length: int, count: Count) -> Example:
    """Frequent words: ranks 2 to 4 of a Zeta(2) distribution over invented words; rank 1 is noise."""
    size = max(8, length // 50)
    least = 83  # ranks 2 to 5 then occur 12, 5, 3 and 2 times, so that the answer is unique

    def build(rng: np.random.Generator, n: int) -> Example:
        words = letters(rng, size, 6, "abcdefghijklmnopqrstuvwxyz")
        often = [int(n * rank**-2 * 6 / math.pi**2) for rank in range(1, size + 1)]
        entries = np.repeat(["...", *words[1:]], often)
        return Example(
            context=(
                "Below is a text in code words. Do not mind the dots (...); count the words.\n\n"
                + " ".join(rng.permutation(entries))
            ),
            question="\n\nWhich three code words occur most often in the text?\n",
            prefix="The three most frequent code words are",
            answers=tuple(words[1:4]),
            meta={"kind": "words"},
        )

    return fit(build, rng, length, count, least=least, text=lambda example: example.prompt)


def _documents(rng: np.random.Generator, length: int, count: Count, hops: int) -> Example:
    attribute = str(rng.choice(list(ASKED)))

    def build(rng: np.random.Generator, n: int) -> Example:
        crowd = people(rng, n)
        named = {person.name: i for i, person in enumerate(crowd)}
        golden = [int(rng.integers(n))]
        while len(golden) < hops:
            golden.append(named[crowd[golden[-1]].mentor])
        who = f"{'the teacher of ' * (hops - 1)}{crowd[golden[0]].name}"
        numbered = "\n\n".join(f"Document {i}: {person.document}" for i, person in enumerate(crowd, 1))
        meta: dict[str, Any] = {"kind": attribute, "depths": tuple(i / max(1, n - 1) for i in golden)}
        return Example(
            context=f"Answer from the documents below. The question comes after them.\n\n{numbered}",
            question=f"\n\n{ASKED[attribute].format(who=who)} Give the name only.\n",
            prefix="The answer is",
            answers=(getattr(crowd[golden[-1]], attribute),),
            meta=meta,
        )

    return fit(build, rng, length, count, least=3, text=lambda example: example.prompt)


@task("ruler", new=32, score=string_match_part)
def qa_1(rng: np.random.Generator, length: int, count: Count) -> Example:
    """A fact of one document among documents about other people, some of them relatives; invented, not SQuAD."""
    return _documents(rng, length, count, hops=1)


@task("ruler", new=32, score=string_match_part)
def qa_2(rng: np.random.Generator, length: int, count: Count) -> Example:
    """A fact about someone's teacher: one document names the teacher, another has the fact; invented, not HotpotQA."""
    return _documents(rng, length, count, hops=2)
