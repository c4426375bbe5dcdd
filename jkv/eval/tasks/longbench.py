"""Metrics of LongBench's English tasks (2308.14508), as computed by kvpress 0.5.5."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from difflib import SequenceMatcher

from jkv.eval.tasks.registry import token_f1

Metric = Callable[[str, str, Sequence[str]], float]  # prediction, one answer, classes -> 0..1


def _f1(prediction: str, answer: str, classes: Sequence[str]) -> float:
    return token_f1(prediction, [answer])


def rouge_l(prediction: str, answer: str, classes: Sequence[str] = ()) -> float:
    """Compute ROUGE-L, 2PR / (P + R + 1e-8), over the distinct words in common subsequences.

    A common word is in a longest common subsequence of any sentence of each text. P is their share of the prediction's
    words, R of the answer's; sentences end at full stops. Source: Lin (2004), as in the package rouge 1.0.1.

    >>> round(rouge_l("the cat sat. it slept", "the dog sat"), 3)
    0.5
    """
    said, right = ([" ".join(x.split()).split(" ") for x in t.split(".") if x] for t in (prediction, answer))
    if not said or not right:
        return 0.0
    common = {word for a in right for b in said for word in _subsequence(a, b)}
    p, r = (len(common) / len({word for words in text for word in words}) for text in (said, right))
    return 2 * p * r / (p + r + 1e-8)


def _subsequence(a: Sequence[str], b: Sequence[str]) -> list[str]:
    """Return a longest common subsequence; ties are resolved from the ends, dropping words of b first."""
    size = [[0] * (len(b) + 1) for _ in range(len(a) + 1)]
    for i, x in enumerate(a):
        for j, y in enumerate(b):
            size[i + 1][j + 1] = size[i][j] + 1 if x == y else max(size[i][j + 1], size[i + 1][j])
    out, i, j = [], len(a), len(b)
    while i and j:
        if a[i - 1] == b[j - 1]:
            out.append(a[i - 1])
            i, j = i - 1, j - 1
        elif size[i - 1][j] > size[i][j - 1]:
            i -= 1
        else:
            j -= 1
    return out[::-1]


def _class(prediction: str, answer: str, classes: Sequence[str]) -> float:
    """Return one over the number of classes named, if the answer is among them.

    A class whose name is contained in the answer's name does not count. As in the authors' code, the class after a
    dropped one is not checked.
    """
    named, i = [c for c in classes if c in prediction], 0
    while i < len(named):
        if named[i] in answer and named[i] != answer:
            named.pop(i)
        i += 1
    return 1 / len(named) if answer in named else 0.0


def _number(prediction: str, answer: str, classes: Sequence[str]) -> float:
    """Return the share of the prediction's numbers that equal the answer's number."""
    said = re.findall(r"\d+", prediction)
    right = re.search(r"\d+", answer)
    return said.count(right[0]) / len(said) if said and right else 0.0


def _code(prediction: str, answer: str, classes: Sequence[str]) -> float:
    """Return the similarity of the answer and the prediction's first non-comment line, rounded to hundredths."""
    lines = prediction.lstrip("\n").split("\n")
    line = next((x for x in lines if not any(mark in x for mark in ("`", "#", "//"))), "")
    return round(100 * SequenceMatcher(None, line, answer).ratio()) / 100 if line and answer else float(line == answer)


QUESTIONS = ("narrativeqa", "qasper", "multifieldqa_en", "hotpotqa", "2wikimqa", "musique", "triviaqa")
METRICS: dict[str, Metric] = {
    **dict.fromkeys(QUESTIONS, _f1),
    **dict.fromkeys(("gov_report", "qmsum", "multi_news", "samsum"), rouge_l),
    "trec": _class,
    **dict.fromkeys(("passage_count", "passage_retrieval_en"), _number),
    **dict.fromkeys(("lcc", "repobench-p"), _code),
}
LINE = ("trec", "triviaqa", "samsum")  # tasks that score the first line only


def score(task: str, prediction: str, answers: Sequence[str], classes: Sequence[str]) -> float:
    """Score a prediction from 0 to 1 against its best matching answer.

    Args:
        task: Name of the task.
        prediction: The generated text.
        answers: Right answers.
        classes: Class names of a classification task.

    >>> score("trec", "Location\\nType: Human", ["Location"], ["Location", "Human"])
    1.0
    """
    said = prediction.lstrip()
    if task in LINE:
        said = said.split("\n")[0]
    return max((METRICS[task](said, answer, classes) for answer in answers), default=0.0)
