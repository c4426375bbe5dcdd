"""Multi-question sessions modeled on SCBench (2412.10319): several questions and an unanswerable probe."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jkv.eval.tasks import registry as tasks
from jkv.eval.tasks.registry import (
    TASKS,
    Count,
    Example,
    Score,
    Task,
    first_integer,
    first_word,
    fit,
    string_match_all,
    string_match_part,
    token_f1,
)
from jkv.eval.tasks.words import (
    ADJECTIVES,
    ASKED,
    NOUNS,
    chains,
    coined,
    hexes,
    keys,
    letters,
    lines,
    listed,
    numbers,
    people,
    prose,
)

TURNS = 5
RULE = "If something that is asked for is not there, say so."


@dataclass(frozen=True, kw_only=True)
class Session:
    """Questions about one context.

    Attributes:
        context: The context.
        turns: Questions that have an answer.
        probe: A question without an answer. Its `answers` are the context's values, which an invented answer would
            repeat; `tasks.none_named` scores it.
    """

    context: str
    turns: tuple[Example, ...]
    probe: Example

    @property
    def text(self) -> str:
        """The whole conversation with the right answers and the probe at the end."""
        said = [turn.question + turn.prefix + turn.gold for turn in self.turns]
        return "".join([self.context, *said, self.probe.question, self.probe.prefix])


@dataclass(frozen=True, kw_only=True)
class SessionTask:
    """A session task.

    Attributes:
        name: Name in `SESSIONS`.
        ability: The ability it tests.
        new: Most tokens of an answer.
        make: make(rng, length, count) builds a Session whose conversation has at most `length` tokens.
        score: Scores a prediction.
        about: One-line description.
    """

    name: str
    ability: str
    new: int  # tokens that an answer may take
    make: Callable[..., Session]
    score: Score
    about: str


SESSIONS: dict[str, SessionTask] = {}


def session(ability: str, new: int, score: Score, least: int) -> Callable[[Callable[..., Session]], Any]:
    """Register the decorated function of (rng, n) as a session task, and its first question as a task in TASKS.

    Args:
        ability: The ability it tests.
        new: Most tokens of an answer.
        score: Scores a prediction.
        least: Least units n of filler.
    """

    def add(build: Callable[..., Session]) -> Callable[..., Session]:
        name, about = build.__name__, (inspect.getdoc(build) or "").split("\n")[0]

        def make(rng: np.random.Generator, length: int, count: Count) -> Session:
            return fit(build, rng, length, count, least=least, text=lambda made: made.text)

        def single(rng: np.random.Generator, length: int, count: Count) -> Example:
            return fit(build, rng, length, count, least=least, text=lambda made: made.turns[0].prompt).turns[0]

        SESSIONS[name] = SessionTask(name=name, ability=ability, new=new, make=make, score=score, about=about)
        TASKS[name] = Task(name=name, suite="shared", new=new, make=single, score=score, about=about)
        return build

    return add


def sessions(name: str, length: int, samples: int, seed: int, count: Count) -> list[Session]:
    """Build `samples` sessions, deterministically; raises as `registry.examples` does.

    Each question's `meta` has seed, sample, length and turn (-1 for the probe).

    >>> made = sessions("kv", length=1200, samples=1, seed=0, count=lambda text: len(text) // 4)[0]
    >>> len(made.turns), made.turns[0].answers[0] in made.context, made.probe.prefix in made.context
    (5, True, False)
    """
    made = tasks.draw(name, tasks.find(SESSIONS, name).make, length, samples, seed, count)

    def mark(example: Example, sample: int, turn: int) -> Example:
        where = {"seed": seed, "sample": sample, "length": length, "turn": turn}
        return replace(example, meta={**example.meta, **where})

    return [
        replace(one, turns=tuple(mark(t, i, j) for j, t in enumerate(one.turns)), probe=mark(one.probe, i, -1))
        for i, one in enumerate(made)
    ]


def _session(
    opening: str, body: str, turns: Iterable[tuple[str, str, Sequence[str], str]], probe: tuple[str, str, Sequence[str]]
) -> Session:
    """Build a session.

    Args:
        opening: First sentence of the context.
        body: The rest of the context.
        turns: (question, prefix, answers, kind) per turn.
        probe: (question, prefix, values that an invented answer would repeat).
    """
    context = f"{opening} Questions about it come after it. {RULE}\n\n{body}"

    def example(question: str, prefix: str, answers: Sequence[str], kind: str) -> Example:
        return Example(
            context=context, question=f"\n\n{question}\n", prefix=prefix, answers=tuple(answers), meta={"kind": kind}
        )

    return Session(context=context, turns=tuple(example(*turn) for turn in turns), probe=example(*probe, "probe"))


@session("string retrieval", new=150, score=string_match_part, least=TURNS)
def kv(rng: np.random.Generator, n: int) -> Session:
    """The values of five keys of a JSON object of random 128-bit numbers."""
    strings = hexes(rng, 2 * n + 1)
    absent, pairs = strings[-1], list(zip(strings[:n], strings[n:-1], strict=True))
    body = ",\n".join(f'"{key}": "{value}"' for key, value in pairs)

    def ask(key: str) -> tuple[str, str]:
        return f'Which value does the key "{key}" have?', f'"{key}":'

    asked = rng.choice(n, TURNS, replace=False)
    return _session(
        "Below is a JSON object.",
        "{" + body + "}",
        [(*ask(pairs[i][0]), [pairs[i][1]], "key") for i in asked],
        (*ask(absent), [value for _, value in pairs]),
    )


@session("string retrieval", new=50, score=string_match_part, least=1)
def prefix_suffix(rng: np.random.Generator, n: int) -> Session:
    """The string with a given start and end, among others that share only one of them."""
    side, size, alphabet = 4, 16, "abcdefghijklmnopqrstuvwxyz"
    starts, ends = (letters(rng, TURNS + 1, side, alphabet) for _ in range(2))
    middles = letters(rng, TURNS + 1, size - 2 * side, alphabet)
    wanted = [start + middle + end for start, middle, end in zip(starts, middles, ends, strict=True)]
    others = [
        string
        for string in letters(rng, n + 2 * len(wanted), size, alphabet)
        if string[:side] not in starts and string[-side:] not in ends
    ]
    same_start = [string[:side] + other[side:] for string, other in zip(wanted, others, strict=False)]
    del others[: len(wanted)]
    same_end = [other[:-side] + string[-side:] for string, other in zip(wanted, others, strict=False)]
    del others[: len(wanted)]
    # The last wanted string is the probe's and left out: decoys have its start or its end, never both.
    listing = [*wanted[:-1], *same_start, *same_end, *others]
    body = "\n".join(listing[i] for i in rng.permutation(len(listing)))

    def ask(string: str) -> tuple[str, str]:
        question = f'Which string starts with "{string[:side]}" and ends with "{string[-side:]}"?'
        return question, "The string is"

    return _session(
        "Below is a list of strings.",
        body,
        [(*ask(string), [string], "string") for string in wanted[:-1]],
        (*ask(wanted[-1]), listing),
    )


@session("string retrieval", new=30, score=string_match_all, least=5)
def multi_hop(rng: np.random.Generator, n: int) -> Session:
    """Five chains of assigned variables, one asked per turn."""
    *told, absent = chains(rng, TURNS + 1)
    # Lines of different chains are mixed; within a chain they stay in order.
    turn = rng.permutation(np.repeat(np.arange(TURNS), 5))
    rest = [iter(chain.lines) for chain in told]
    body, _ = lines(rng, n, [next(rest[i]) for i in turn])

    def ask(value: str) -> tuple[str, str]:
        question = f"Which five variables hold the number {value}, directly or through another one?"
        return question, f"The five variables that hold the number {value} are"

    return _session(
        "Follow the assignments of variables (VAR) in the text.",
        body,
        [(*ask(chain.value), chain.names, "chain") for chain in told],
        (*ask(absent.value), [name for chain in told for name in chain.names]),
    )


def _number_of(name: str) -> tuple[str, str]:
    return f"Which magic number belongs to {name}?", f"The magic number of {name} is"


def _magic(names: Sequence[str], values: Sequence[str]) -> tuple[list[str], list[tuple[str, str, Sequence[str], str]]]:
    """Return a sentence per number and the turn that asks for it; names without a value have neither."""
    told = [f"Remember: a magic number of {name} is {value}." for name, value in zip(names, values, strict=False)]
    return told, [(*_number_of(name), [value], "needle") for name, value in zip(names, values, strict=False)]


@session("string retrieval", new=12, score=string_match_all, least=24)
def needles(rng: np.random.Generator, n: int) -> Session:
    """Five numbers hidden in prose, one asked per turn; easy enough for a small model."""
    names, values = keys(rng, TURNS + 1), numbers(rng, TURNS, 7)
    told, asked = _magic(names, values)
    return _session(
        "Below is a text that hides numbers.",
        prose(rng, n, [(float(rng.random()), line) for line in told]),
        asked,
        (*_number_of(names[-1]), values),
    )


@session("semantic retrieval", new=40, score=token_f1, least=TURNS + 3)
def fact_qa(rng: np.random.Generator, n: int) -> Session:
    """Facts of invented people; every other question goes through someone's teacher."""
    crowd = people(rng, n + 1)
    stranger, crowd = crowd[0], crowd[1:]
    named = {person.name: person for person in crowd}
    # A pupil of the stranger would lead to a document that does not exist.
    pupils = [person for person in crowd if person.mentor in named]
    asked = [pupils[i] for i in rng.choice(len(pupils), TURNS, replace=False)]
    attributes = [str(a) for a in rng.choice(list(ASKED), TURNS + 1)]

    def ask(attribute: str, who: str) -> tuple[str, str]:
        return f"{ASKED[attribute].format(who=who)} Give the name only.", "The answer is"

    def turn(i: int, person: Any) -> tuple[str, str, list[str], str]:
        if i % 2:
            return (
                *ask(attributes[i], f"the teacher of {person.name}"),
                [getattr(named[person.mentor], attributes[i])],
                "two hops",
            )
        return *ask(attributes[i], person.name), [getattr(person, attributes[i])], "one hop"

    return _session(
        "Below are notes about people.",
        "\n\n".join(person.document for person in crowd),
        [turn(i, person) for i, person in enumerate(asked)],
        (*ask(attributes[-1], stranger.name), [getattr(person, attributes[-1]) for person in crowd]),
    )


@session("semantic retrieval", new=60, score=string_match_all, least=TURNS)
def functions(rng: np.random.Generator, n: int) -> Session:
    """The name and body of a function, described by what it computes."""
    names = coined(rng, n)
    # Three numbers per function; (factor, term) is unique.
    picks = rng.choice(900**2, n + 1, replace=False)
    factor, term, modulus = 100 + picks // 900, 100 + picks % 900, rng.integers(1000, 10000, n + 1)
    bodies = [f"return ({f} * x + {t}) % {m}" for f, t, m in zip(factor, term, modulus, strict=True)]
    body = "\n\n".join(f"def {name}(x):\n    {code}" for name, code in zip(names, bodies[:-1], strict=True))

    def ask(i: int) -> tuple[str, str]:
        return (
            f"Which function multiplies its argument by {factor[i]}, adds {term[i]} and takes the remainder by "
            f"{modulus[i]}? Repeat it.",
            "def",
        )

    return _session(
        "Below is a Python module.",
        body,
        [(*ask(int(i)), [names[i], bodies[i]], "function") for i in rng.choice(n, TURNS, replace=False)],
        (*ask(n), names),
    )


@session("global information", new=10, score=first_integer, least=TURNS)
def math_find(rng: np.random.Generator, n: int) -> Session:
    """The largest, second and third largest, smallest and median number of an array of distinct integers."""
    array = numbers(rng, 2 * n + 1, 5)  # an odd count has one median
    ranked = sorted(array, key=int)
    wanted = {
        "largest": ranked[-1],
        "second largest": ranked[-2],
        "third largest": ranked[-3],
        "smallest": ranked[0],
        "median": ranked[len(ranked) // 2],
    }
    order = [list(wanted)[i] for i in rng.permutation(len(wanted))]
    limit = int(rng.integers(100000, 1000000))
    return _session(
        "Below is an array of integers.",
        f"[{', '.join(array)}]",
        [(f"Which is the {w} number of the array?", f"The {w} number is", [wanted[w]], w) for w in order],
        (f"Which number of the array is above {limit}?", f"The number above {limit} is", array),
    )


@session("global information", new=10, score=first_word, least=32)
def many_shot(rng: np.random.Generator, n: int) -> Session:
    """Labels by a rule shown in labelled examples: only the first of a thing's two words decides."""
    labels = coined(rng, 4)
    words = [str(a) for a in rng.choice(ADJECTIVES, 17, replace=False)]
    nouns = rng.permutation(NOUNS)
    rule = {word: labels[i % 4] for i, word in enumerate(words[:16])}
    # Every adjective is shown at least twice; nouns do not affect the label.
    shown = [words[i % 16] for i in rng.permutation(n)]
    things = [f"{word} {noun}" for word, noun in zip(shown, rng.choice(nouns[TURNS + 1 :], n), strict=True)]
    asked = [f"{words[i]} {noun}" for i, noun in zip(rng.choice(16, TURNS, replace=False), nouns, strict=False)]

    def ask(thing: str) -> tuple[str, str]:
        return f"What is the label of: {thing}", "Label:"

    return _session(
        f"Below are things with their labels. There are four labels: {listed(labels)}.",
        "\n\n".join(f"Thing: {thing}\nLabel: {rule[thing.split()[0]]}" for thing in things),
        [(*ask(thing), [rule[thing.split()[0]]], "label") for thing in asked],
        (*ask(f"{words[16]} {nouns[TURNS]}"), labels),
    )


@session("multi-tasking", new=200, score=string_match_all, least=24)
def sum_niah(rng: np.random.Generator, n: int) -> Session:
    """A summary, scored by its share of the reports' key facts, and needles between the reports' sentences."""
    reports = 6
    titles = [word.capitalize() for word in coined(rng, reports)]
    figures = numbers(rng, reports, 5)
    names, values = keys(rng, TURNS), numbers(rng, TURNS - 1, 7)
    told, asked = _magic(names, values)
    homes = rng.integers(0, reports, len(told))
    parts = []
    for i, (title, figure) in enumerate(zip(titles, figures, strict=True)):
        fact = f"The main result of the report on {title} is a figure of {figure}."
        inserts = [(float(rng.random()), line) for line, home in zip(told, homes, strict=True) if home == i]
        size = n * (i + 1) // reports - n * i // reports
        parts.append(f"Report on {title}\n\n{prose(rng, size, [(float(rng.random()), fact), *inserts])}")

    summary = (
        f"Summarise the {reports} reports: give the title of each, and the figure that is its main result.",
        "The main results are",
        figures,
        "summary",
    )
    return _session(
        "Below are reports.",
        "\n\n".join(parts),
        [*asked[:1], summary, *asked[1:]],
        (*_number_of(names[-1]), [*values, *figures]),
    )
