"""Synthetic look-ups: facts told in a text or in a list of similar facts, and questions about them.

Wording and values differ from all tasks of `jkv.eval`, so that evaluation measures whether a gate has learned to find
facts, not how a needle is worded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from jkv.eval.tasks.words import ADJECTIVES, FIRST_NAMES, NOUNS, ROLES, hexes, numbers

MONTHS = "January February March April May June July August September October November December".split()
MOST = 8  # most facts in a text that is no list


@dataclass(frozen=True)
class Fact:
    """A fact with a question about it.

    Attributes:
        told: Sentence or line that tells it.
        asked: The question.
        opening: Start of the answer.
        answer: The answer.
    """

    told: str
    asked: str
    opening: str
    answer: str


Kind = Callable[[np.random.Generator], Fact]


def _one(rng: np.random.Generator, words: Sequence[str]) -> str:
    return words[int(rng.integers(len(words)))]


def _number(rng: np.random.Generator) -> str:
    return numbers(rng, 1, int(rng.integers(3, 9)))[0]


def _locker(rng: np.random.Generator) -> Fact:
    thing, number = f"{_one(rng, ADJECTIVES)} {_one(rng, NOUNS)}", _number(rng)
    return Fact(
        f"To get into the {thing} one has to dial {number}.",
        f"What has to be dialled for the {thing}?",
        f"For the {thing} one dials",
        number,
    )


def _phrase(rng: np.random.Generator) -> Fact:
    who, words = _one(rng, FIRST_NAMES), " ".join(_one(rng, NOUNS) for _ in range(int(rng.integers(3, 8))))
    return Fact(
        f"{who}'s passphrase consists of these words: {words}.",
        f"Say {who}'s passphrase.",
        f"{who}'s passphrase:",
        words,
    )


def _birthday(rng: np.random.Generator) -> Fact:
    who, role = _one(rng, FIRST_NAMES), _one(rng, ROLES)
    date = f"{int(rng.integers(1, 29))} {_one(rng, MONTHS)} {int(rng.integers(1700, 2030))}"
    return Fact(
        f"The {role} {who} was born on {date}.", f"When was {who} born?", f"{who}, the {role}, was born on", date
    )


def _hoard(rng: np.random.Generator) -> Fact:
    who, place = _one(rng, FIRST_NAMES), f"{_one(rng, ADJECTIVES)} {_one(rng, NOUNS)}"
    what = f"{int(rng.integers(2, 90))} {_one(rng, ADJECTIVES)} {_one(rng, NOUNS)}s"
    return Fact(f"Behind the {place}, {who} hid {what}.", f"What did {who} hide?", f"{who} hid", what)


def _setting(rng: np.random.Generator) -> Fact:
    name, number = f"{_one(rng, NOUNS)}_{_one(rng, NOUNS)}", _number(rng)
    return Fact(f"{name} = {number}", f"To which value is {name} set?", f"{name} =", number)


def _entry(rng: np.random.Generator) -> Fact:
    name, text = f"{_one(rng, ADJECTIVES)}_{_one(rng, NOUNS)}", hexes(rng, 1)[0][: int(rng.integers(6, 13))]
    return Fact(f'"{name}": "{text}",', f"Which entry stands at {name}?", f'"{name}": "', text)


def _contact(rng: np.random.Generator) -> Fact:
    who, role, number = _one(rng, FIRST_NAMES), _one(rng, ROLES), _number(rng)
    return Fact(
        f"| {who} | {role} | {number} |", f"Give the last column for {who}, the {role}.", f"| {who} | {role} |", number
    )


def _event(rng: np.random.Generator) -> Fact:
    day = f"{int(rng.integers(1990, 2040))}-{int(rng.integers(1, 13)):02}-{int(rng.integers(1, 29)):02}"
    unit, text = f"{_one(rng, NOUNS)}.{_one(rng, NOUNS)}", hexes(rng, 1)[0][: int(rng.integers(4, 9))]
    return Fact(f"[{day}] {unit} came up as {text}", f"As what did {unit} come up?", f"{unit} came up as", text)


SENTENCES: tuple[Kind, ...] = (_locker, _phrase, _birthday, _hoard)
LINES: tuple[Kind, ...] = (_setting, _entry, _contact, _event)


def with_facts(rng: np.random.Generator, pieces: Sequence[str], code: bool) -> tuple[str, list[Fact]]:
    """Insert 1 to MOST facts between the pieces of a text, and return the text and the facts.

    One in four texts is a list: as many facts as there are pieces, all of one kind, and nothing else.

    Args:
        rng: Random generator.
        pieces: Sentences of prose or lines of code.
        code: Whether the pieces are lines of code.
    """
    kinds = LINES if code else SENTENCES
    if not int(rng.integers(4)):
        kind = (*LINES, *SENTENCES)[int(rng.integers(len(LINES) + len(SENTENCES)))]
        facts = _distinct(rng, (kind,), len(pieces))
        return "\n".join(fact.told for fact in facts), facts
    facts = _distinct(rng, kinds, int(rng.integers(1, MOST + 1)))
    out = list(pieces)
    for fact in facts:
        out.insert(int(rng.integers(len(out) + 1)), fact.told)
    return ("\n" if code else " ").join(out), facts


def _distinct(rng: np.random.Generator, kinds: Sequence[Kind], n: int) -> list[Fact]:
    """Draw at most `n` facts, no two with the same question."""
    made = (_drawn(rng, kinds) for _ in range(n))
    return list({fact.asked: fact for fact in made}.values())


def _drawn(rng: np.random.Generator, kinds: Sequence[Kind]) -> Fact:
    return kinds[int(rng.integers(len(kinds)))](rng)


def every(rng: np.random.Generator, n: int) -> Iterator[Fact]:
    """Yield `n` facts of each kind, for tests that compare them with the evaluation tasks."""
    for kind in (*SENTENCES, *LINES):
        for _ in range(n):
            yield kind(rng)
