"""Task registry: examples, tasks, scores, and fitting a prompt to a length."""

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
    """A prompt: a long context that could be shared, a question about it, and the start of the answer.

    The three texts are concatenated as they are; in a chat, `prefix` begins the assistant's turn.

    Attributes:
        context: The context.
        question: The question.
        prefix: Start of the answer.
        answers: Right answers.
        meta: Properties of the example, such as depths and needles.
    """

    context: str
    question: str
    prefix: str
    answers: tuple[str, ...]
    meta: dict[str, Any]

    @property
    def prompt(self) -> str:
        """The whole prompt as plain text."""
        return self.context + self.question + self.prefix

    @property
    def gold(self) -> str:
        """The right continuation of the prompt."""
        return f" {listed(self.answers)}"


@dataclass(frozen=True, kw_only=True)
class Task:
    """A task.

    Attributes:
        name: Name in `TASKS`.
        suite: "ruler", "niah" or "shared".
        new: Most tokens of an answer.
        make: make(rng, length, count) builds an Example of at most `length` tokens, without the answer.
        score: Scores a prediction.
        about: One-line description.
    """

    name: str
    suite: str  # "ruler" | "niah" | "shared"
    new: int  # tokens that an answer may take
    make: Callable[..., Example]
    score: Score
    about: str


TASKS: dict[str, Task] = {}


def task(suite: str, new: int, score: Score) -> Callable[[Callable[..., Example]], Callable[..., Example]]:
    """Register the decorated function as a task under its name, described by the first line of its docstring.

    Args:
        suite: Suite of the task.
        new: Most tokens of an answer.
        score: Scores a prediction.
    """

    def add(make: Callable[..., Example]) -> Callable[..., Example]:
        about = (inspect.getdoc(make) or "").split("\n")[0]
        TASKS[make.__name__] = Task(name=make.__name__, suite=suite, new=new, make=make, score=score, about=about)
        return make

    return add


def find(table: dict[str, T], name: str) -> T:
    """Return the entry of a name; raises ValueError with the closest name if it does not exist."""
    if name not in table:
        near = difflib.get_close_matches(name, table, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(table)}"
        raise ValueError(f"unknown task {name!r}: {hint}")
    return table[name]


def draw(name: str, make: Callable[..., T], length: int, samples: int, seed: int, count: Count) -> list[T]:
    """Call `make` for each of `samples` samples, with a random stream that depends on (seed, name, index) only."""
    if length < 1 or samples < 1 or seed < 0:
        raise ValueError(f"length={length}, samples={samples}, seed={seed}: 1 or more, 1 or more, and 0 or more")
    try:
        streams = (np.random.default_rng((seed, zlib.crc32(name.encode()), i)) for i in range(samples))
        return [make(rng, length, count) for rng in streams]
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def examples(name: str, length: int, samples: int, seed: int, count: Count) -> list[Example]:
    """Build `samples` prompts of a task, deterministically; more samples extend the list without changing it.

    `meta` has seed, sample and length. Raises ValueError for an unknown task or a length that is too short for it.

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
    """Find the largest `build(rng, n)` whose text has at most `length` tokens.

    The search stops within 1% of `length`. All trials use the same random stream. With small units of similar cost it
    takes three or four trials.

    Args:
        build: Builds a text with n units of filler.
        rng: Random generator.
        length: Most tokens.
        count: Counts tokens.
        least: Least n.
        text: Returns the text that is counted.

    Raises:
        ValueError: The smallest text is too long.

    >>> rng = np.random.default_rng(0)
    >>> len(fit(lambda rng, n: "word " * n, rng, 1000, len, least=1, text=str))
    995
    """
    seed = int(rng.integers(2**63))

    def trial(n: int) -> tuple[T, int]:
        made = build(np.random.default_rng(seed), n)
        return made, count(text(made))

    # Interpolate between the largest size that fits and the smallest that does not.
    best, used = trial(least)
    if used > length:
        raise ValueError(f"{length} tokens are too few, the smallest takes {used}: give a length of {used * 11 // 10}")
    low, high, tries = least, None, 0  # `low` units fit, `high` units do not
    guess = least + 8
    while used < 0.99 * length and (high is None or high - low > 1):
        made, size = trial(guess)
        tries += 1
        # Tokens per unit from this trial and the best one; aim at the middle of the last percent.
        slope = max((size - used) / (guess - low), 1e-3)
        if size <= length:
            best, used, low = made, size, guess
        else:
            high = guess
        aim = low + int((0.995 * length - used) / slope)
        if high is None:
            guess = min(max(low + 1, aim), 32 * (low + 8))  # bounded, as few units estimate the slope poorly
        else:
            guess = min(max(low + 1, aim), high - 1) if tries < 8 else (low + high) // 2
    return best


def string_match_all(prediction: str, answers: Sequence[str]) -> float:
    """Return RULER's score: the share of answers contained in the prediction, case-insensitive.

    >>> string_match_all("A, C.", ["a", "b", "c", "d"])
    0.5
    """
    return sum(answer.lower() in prediction.lower() for answer in answers) / len(answers)


def string_match_part(prediction: str, answers: Sequence[str]) -> float:
    """Return RULER's score for questions: 1 if any answer is contained in the prediction, case-insensitive."""
    return float(any(answer.lower() in prediction.lower() for answer in answers))


def first_integer(prediction: str, answers: Sequence[str]) -> float:
    """Return 1 if the first integer of the prediction is an answer.

    >>> first_integer("it is 12, not 13", ["12"]), first_integer("-12", ["12"])
    (1.0, 0.0)
    """
    found = re.search(r"-?\d+", prediction)
    return float(found is not None and found[0] in answers)


def first_word(prediction: str, answers: Sequence[str]) -> float:
    """Return 1 if the first word of the prediction is an answer, ignoring case and punctuation.

    >>> first_word(" 'Torabu', I think", ["torabu"])
    1.0
    """
    return float(_normal(prediction)[:1] in [_normal(answer) for answer in answers])


def token_f1(prediction: str, answers: Sequence[str]) -> float:
    """Return the best F1 of words over the answers, ignoring case, punctuation and articles.

    >>> token_f1("The red house", ["red barn"])
    0.5
    """
    return max(_f1(_normal(prediction), _normal(answer)) for answer in answers)


def none_named(prediction: str, answers: Sequence[str]) -> float:
    """Return 1 if the prediction is not empty and contains none of `answers`, for a question without an answer.

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
