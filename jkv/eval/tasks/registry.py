"""The registry of tasks: a function that makes a prompt and knows the answer, and a decorator."""

from __future__ import annotations

import difflib
import inspect
import re
import string
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from jkv.eval.tasks.words import listed

Count = Callable[[str], int]  # text -> tokens, as the model's tokenizer counts them
Score = Callable[[str, Sequence[str]], float]  # prediction, answers -> 0..1
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Example:
    """One prompt: a long context that could be shared, a question about it, how the answer starts, what is right.

    The three texts are one after the other as they stand; `prefix` is put in the assistant's mouth.
    """

    context: str
    question: str
    prefix: str
    answers: tuple[str, ...]
    meta: dict[str, Any]

    @property
    def prompt(self) -> str:
        return self.context + self.question + self.prefix

    @property
    def gold(self) -> str:
        """What a perfect model says after the prompt."""
        return f" {listed(self.answers)}"


@dataclass(frozen=True, kw_only=True)
class Task:
    """One row: `make(rng, length, count)` gives an Example of at most `length` tokens, the answer not counted."""

    name: str
    suite: str  # "ruler" | "niah" | "shared"
    new: int  # tokens that an answer may take
    make: Callable[..., Example]
    score: Score
    about: str


TASKS: dict[str, Task] = {}


def task(suite: str, new: int, score: Score) -> Callable[[Callable[..., Example]], Callable[..., Example]]:
    """Adds the row of a function, under its name."""

    def add(make: Callable[..., Example]) -> Callable[..., Example]:
        about = (inspect.getdoc(make) or "").split("\n")[0]
        TASKS[make.__name__] = Task(name=make.__name__, suite=suite, new=new, make=make, score=score, about=about)
        return make

    return add


def find(table: dict[str, T], name: str) -> T:
    """The row of a name; ValueError with the nearest name if there is none."""
    if name not in table:
        near = difflib.get_close_matches(name, table, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(table)}"
        raise ValueError(f"unknown task {name!r}: {hint}")
    return table[name]


def draw(name: str, make: Callable[..., T], length: int, samples: int, seed: int, count: Count) -> list[T]:
    """`samples` results of `make`, each with a random stream of its own that (seed, name, index) determine."""
    if length < 1 or samples < 1 or seed < 0:
        raise ValueError(f"length={length}, samples={samples}, seed={seed}: 1 or more, 1 or more, and 0 or more")
    try:
        streams = (np.random.default_rng((seed, zlib.crc32(name.encode()), i)) for i in range(samples))
        return [make(rng, length, count) for rng in streams]
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def examples(name: str, length: int, samples: int, seed: int, count: Count) -> list[Example]:
    """`samples` prompts of a task, the same for the same arguments; more samples keep the first ones as they are.

    `meta` says seed, sample and length. Raises ValueError for an unknown task and for a length that it does not fit.

    >>> one, two = examples("niah_single_1", length=400, samples=2, seed=0, count=lambda text: len(text) // 4)
    >>> one.question.strip(), one.prefix, one.answers[0] in one.context, one.answers == two.answers
    ('Which magic number belongs to lean-puppet?', 'The magic number of lean-puppet is', True, False)
    """
    made = draw(name, find(TASKS, name).make, length, samples, seed, count)
    return [
        replace(example, meta={**example.meta, "seed": seed, "sample": i, "length": length})
        for i, example in enumerate(made)
    ]


def fit(
    build: Callable[[np.random.Generator, int], T],
    rng: np.random.Generator,
    length: int,
    count: Count,
    *,
    least: int,
    text: Callable[[T], str],
) -> T:
    """The largest `build(rng, n)`, n >= `least` units of filler, whose `text` has at most `length` tokens.

    It stops early within 1% of `length`. Every trial gets the same random stream. Units should be small and cost about
    the same: then three or four trials do. Raises ValueError if the least is too much.

    >>> rng = np.random.default_rng(0)
    >>> len(fit(lambda rng, n: "word " * n, rng, 1000, len, least=1, text=str))
    995
    """
    seed = int(rng.integers(2**63))

    def trial(n: int) -> tuple[T, int]:
        made = build(np.random.default_rng(seed), n)
        return made, count(text(made))

    best, used = trial(least)
    if used > length:
        raise ValueError(f"{length} tokens are too few, the smallest takes {used}: give a length of {used * 11 // 10}")
    low, high, tries = least, None, 0  # `low` units fit, `high` do not
    guess = least + 8
    while used < 0.99 * length and (high is None or high - low > 1):
        made, size = trial(guess)
        tries += 1
        # What a unit costs, by this trial and the best: the next one aims at the middle of the last percent.
        slope = max((size - used) / (guess - low), 1e-3)
        if size <= length:
            best, used, low = made, size, guess
        else:
            high = guess
        aim = low + int((0.995 * length - used) / slope)
        if high is None:
            guess = min(max(low + 1, aim), 32 * (low + 8))  # a few units may say little about the slope
        else:
            guess = min(max(low + 1, aim), high - 1) if tries < 8 else (low + high) // 2
    return best


def string_match_all(prediction: str, answers: Sequence[str]) -> float:
    """RULER's score: the share of answers that are within the prediction, in any case.

    >>> string_match_all("A, C.", ["a", "b", "c", "d"])
    0.5
    """
    return sum(answer.lower() in prediction.lower() for answer in answers) / len(answers)


def string_match_part(prediction: str, answers: Sequence[str]) -> float:
    """RULER's score for questions: 1 if any answer is within the prediction, in any case."""
    return float(any(answer.lower() in prediction.lower() for answer in answers))


def first_integer(prediction: str, answers: Sequence[str]) -> float:
    """1 if the first integer of the prediction is an answer.

    >>> first_integer("it is 12, not 13", ["12"]), first_integer("-12", ["12"])
    (1.0, 0.0)
    """
    found = re.search(r"-?\d+", prediction)
    return float(found is not None and found[0] in answers)


def first_word(prediction: str, answers: Sequence[str]) -> float:
    """1 if the first word of the prediction is an answer, whatever its case and the marks around it.

    >>> first_word(" 'Torabu', I think", ["torabu"])
    1.0
    """
    return float(_normal(prediction)[:1] in [_normal(answer) for answer in answers])


def token_f1(prediction: str, answers: Sequence[str]) -> float:
    """The best harmonic mean of precision and recall of words, without case, marks and articles.

    >>> token_f1("The red house", ["red barn"])
    0.5
    """
    return max(_f1(_normal(prediction), _normal(answer)) for answer in answers)


def none_named(prediction: str, answers: Sequence[str]) -> float:
    """For a question that has no answer: 1 if something is said and none of `answers`, which would be made up.

    >>> none_named("It is not there.", ["42"]), none_named("42", ["42"]), none_named("", ["42"])
    (1.0, 0.0, 0.0)
    """
    return float(bool(prediction.strip()) and not string_match_part(prediction, answers))


def _normal(text: str) -> list[str]:
    plain = text.lower().translate(str.maketrans("", "", string.punctuation))
    return re.sub(r"\b(a|an|the)\b", " ", plain).split()


def _f1(prediction: list[str], answer: list[str]) -> float:
    common = (Counter(prediction) & Counter(answer)).total()
    return 2 * common / (len(prediction) + len(answer)) if common else 0.0
