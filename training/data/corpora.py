"""Training texts: windows of a corpus's training side, synthetic questions, look-ups and requests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jkv.eval import corpora, quality, tasks
from jkv.eval.experiments import count
from jkv.models import Params
from jkv.training.data import lookups, requests
from jkv.training.losses import Batch

TASKS = "tasks"  # the name of the synthetic questions
LOOKUPS = "lookups"  # name of facts in a text, with questions about them
ASKS = "asks"  # name of requests without answers
HAYS = {"pydoc": False, "stdlib": True}  # corpora that look-ups are told in, and whether they are code
TURNS = 3  # questions about one text
# RULER's tasks without prose: its prose is all of pydoc, a part of which is held back.
ASKED = ("niah_single_1", "niah_multikey_2", "niah_multikey_3", "vt", "cwe", "fwe", "qa_1", "qa_2")
RUN = 64  # length of a run of tokens that is not shared by chance
MOST = 0.25  # allowed share of such runs in held-back texts: Python sources share tables and licences
SEEDS = 1 << 40  # first seed of training; evaluations use small seeds


def texts(params: Params, names: Sequence[str], length: int, samples: int, seed: int) -> Batch:
    """Load `samples` texts of at most `length` tokens, divided evenly among the sources.

    Args:
        params: The model.
        names: Sources: a corpus of `corpora` (its training side; of a text file, all paragraphs of that side), "tasks",
            "lookups" or "asks".
        length: Most tokens per text.
        samples: Number of texts.
        seed: Random seed.

    Raises:
        ValueError: The model has no tokenizer, a corpus is too short, or a number is out of range.
    """
    if length < 2 or samples < len(names) or not names or seed < 0:
        raise ValueError(
            f"length={length}, texts={samples}, seed={seed}: 2 or more, at least one of each of the {len(names)} "
            "sources, and 0 or more"
        )
    if length > params.config.context:
        raise ValueError(f"length={length}: the model's context is {params.config.context}; give a shorter length")
    if params.tokenizer is None:
        raise ValueError("training needs a tokenizer: this model was built without one")
    shares = [samples * (i + 1) // len(names) - samples * i // len(names) for i in range(len(names))]
    rows = [
        row
        for name, n in zip(names, shares, strict=True)
        for row in SYNTHETIC.get(name, partial(_windows, name=name))(params, length=length, samples=n, seed=seed)
    ]
    ids = np.full((samples, length), -1, np.int32)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = row
    pos = np.where(ids >= 0, np.arange(length, dtype=np.int32), -1)
    return Batch(ids=jnp.asarray(ids), pos=jnp.asarray(pos))


def held_back(params: Params, name: str, length: int, samples: int, seed: int) -> tuple[np.ndarray, str]:
    """Load held-back token ids i32[samples, length] from the test side of a corpus, and the source's name.

    Synthetic sources use pydoc's test side. Raises ValueError if that side is too short.
    """
    source = f"{'pydoc' if name in SYNTHETIC else name}:test"
    try:
        return corpora.windows(params.tokenizer.encode(corpora.text(source)), length, samples, seed), source
    except ValueError as error:
        raise ValueError(f"{source}: {error}; or measure nothing, with --check 0") from None


def in_common(made: Batch, held: np.ndarray) -> float:
    """Return the share of the runs of RUN tokens in held-back texts i32[n,T] that also occur in training texts.

    >>> text = np.arange(96)
    >>> round(in_common(Batch(ids=jnp.asarray(text[None, :80]), pos=None), text[None]), 2)
    0.52
    """
    seen = {run.tobytes() for row in np.asarray(made.ids, np.int32) for run in _running(row)}
    runs = [run.tobytes() for row in held.astype(np.int32) for run in _running(row)]
    return sum(run in seen for run in runs) / max(len(runs), 1)


def _running(row: np.ndarray) -> np.ndarray:
    """Return i32[n,RUN], all runs of RUN tokens of a row without padding."""
    row = row[row >= 0]
    return np.lib.stride_tricks.sliding_window_view(row, RUN) if row.size >= RUN else np.zeros((0, RUN), np.int32)


def _windows(params: Params, length: int, samples: int, seed: int, name: str) -> np.ndarray:
    """Cut windows from enough random runs of the training side.

    A run is at least about 2 * length tokens of neighbouring documents, in order: a long document, or several short
    ones such as the paragraphs of a file.
    """
    runs = _runs(corpora.documents(f"{name}:train"), 8 * length)
    stream: list[int] = []
    for i in np.random.default_rng(seed).permutation(len(runs)):
        stream += params.tokenizer.encode(runs[i] + "\n\n")
        if len(stream) >= 2 * samples * length:
            break
    try:
        return corpora.windows(stream, length, samples, seed)
    except ValueError as error:
        raise ValueError(f"{name}: its training side is too short: {error}") from None


def _runs(documents: Sequence[str], size: int) -> list[str]:
    """Join neighbouring documents to runs of at least `size` characters; the last one may be shorter.

    >>> _runs(["ab", "cd", "efghi", "j"], 4)
    ['ab\\n\\ncd', 'efghi', 'j']
    """
    runs: list[list[str]] = [[]]
    for document in documents:
        if sum(map(len, runs[-1])) >= size:
            runs.append([])
        runs[-1].append(document)
    return ["\n\n".join(run) for run in runs if run]


def _asked(params: Params, length: int, samples: int, seed: int) -> Iterator[list[int]]:
    """Yield questions about long contexts with their answers, rendered by the model's chat template."""
    counted, room = count(params), length - 64
    for i in range(samples):
        name = ASKED[i % len(ASKED)]
        example = tasks.examples(name, room, 1, SEEDS + seed + i, counted)[0]
        yield params.tokenizer.encode(quality.conversation_prompt(params, [example]) + example.gold)[:length]


def _looked_up(params: Params, length: int, samples: int, seed: int) -> Iterator[list[int]]:
    """Yield facts told in prose and code of the training sides, with up to TURNS questions and answers, as a chat."""
    runs = {name: _runs(corpora.documents(f"{name}:train"), 4 * length) for name in HAYS}
    for i in range(samples):
        rng, name = np.random.default_rng((SEEDS, seed, i)), list(HAYS)[i % len(HAYS)]
        run = runs[name][int(rng.integers(len(runs[name])))]
        pieces = run.split("\n") if HAYS[name] else [part.strip() for part in corpora.sentences(run)]
        first, again = int(rng.integers(max(len(pieces) // 2, 1))), int(rng.integers(1 << 62))
        # Shrink the text around the facts until the chat fits.
        left = len(pieces) - first
        while True:
            drawn = np.random.default_rng(again)
            context, facts = lookups.with_facts(drawn, pieces[first : first + left], HAYS[name])
            order = drawn.permutation(len(facts))[:TURNS]
            ids = params.tokenizer.encode(_conversation(params, context, [facts[j] for j in order]))
            if len(ids) <= length or left == 0:
                break
            left = min(left - 1, int(left * 0.98 * length / len(ids)))  # the same facts, among fewer sentences
        yield ids[:length]


def _conversation(params: Params, context: str, facts: Sequence[lookups.Fact]) -> str:
    """Render a text followed by questions about its facts, each with its answer."""
    said = [(fact.asked, f"{fact.opening} {fact.answer}") for fact in facts]
    if params.tokenizer.template is None:
        return context + "".join(f"\n\n{question}\n{answer}" for question, answer in said)
    turns = [
        {"role": role, "content": text}
        for i, (question, answer) in enumerate(said)
        for role, text in (("user", f"{'' if i else context + chr(10) * 2}{question}"), ("assistant", answer))
    ]
    return params.tokenizer.chat(turns[:-1]) + turns[-1]["content"]


def _requested(params: Params, length: int, samples: int, seed: int) -> Iterator[list[int]]:
    """Yield requests, rendered by the model's chat template."""
    for i in range(samples):
        content = requests.request(np.random.default_rng((SEEDS, seed, i)))
        chat = params.tokenizer.template is not None
        text = params.tokenizer.chat([{"role": "user", "content": content}]) if chat else content + "\n"
        yield params.tokenizer.encode(text)[:length]


SYNTHETIC: dict[str, Any] = {TASKS: _asked, LOOKUPS: _looked_up, ASKS: _requested}


class Order:
    """The texts of each step: every text once in random order, then again in another order.

    The texts of a step depend on (seed, step) only, so that a resumed run continues the same sequence.

    >>> order = Order(texts=3, rows=2, seed=0)
    >>> sorted([*order(0), *order(1)[:1]])
    [0, 1, 2]
    """

    def __init__(self, texts: int, rows: int, seed: int) -> None:
        self.texts, self.rows, self.seed = texts, rows, seed

    def __call__(self, step: int) -> list[int]:
        return [self._at(i) for i in range(step * self.rows, (step + 1) * self.rows)]

    def _at(self, i: int) -> int:
        turn, place = divmod(i, self.texts)
        return int(np.random.default_rng((self.seed, turn)).permutation(self.texts)[place])


def rows(batch: Batch, index: Sequence[int]) -> Batch:
    """Return the rows of a batch at `index`."""
    return jax.tree.map(lambda x: x[np.asarray(index)], batch)
