"""A drafter that was distilled from the model that it drafts for: a few blocks over some of that model's words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace

import jax.numpy as jnp
import numpy as np
from jax import Array

from jkv.generation.drafters import Guess, Verifier
from jkv.generation.through import Through
from jkv.io import learned
from jkv.models import Params
from jkv.models.coding import MATRICES, int8
from jkv.models.weights import decoded, rows

METHOD = "drafter"
STEP = ".step"  # after the name of a matrix in codes: what they are multiplied by


@dataclass(frozen=True)
class Words:
    """A drafter's words: `of` i32[n], the model's token of each; `read` i32[V], the word that a token is read as."""

    of: np.ndarray
    read: np.ndarray

    def reading(self, rows: Sequence[Sequence[int]]) -> list[list[int]]:
        """Rows of the model's tokens as the drafter reads them.

        >>> Words(of=np.array([4, 6]), read=np.array([0, 0, 0, 0, 0, 1, 1])).reading([[4, 5], [6]])
        [[0, 1], [1]]
        """
        return [self.read[np.asarray(row, np.int32)].tolist() for row in rows]


def thinned(params: Params, of: np.ndarray, at: Sequence[int]) -> Params:
    """The model of the words `of` alone, which it reads and says as they are there, with its blocks `at`.

    Raises ValueError for a model with blocks that recur, or with experts.

    >>> from jkv import models
    >>> thinned(models.random(models.TINY), np.arange(10), [1]).head.shape
    (10, 32)
    """
    c = params.config
    if c.mixers is not None or c.experts is not None:
        raise ValueError(f"a drafter has blocks that attend, without experts, and this {c.family} model has others")
    ropes, windows = tuple(c.ropes[i] for i in at), tuple(c.windows[i] for i in at)
    return replace(
        params,
        embed=rows(params.embed, jnp.asarray(of)),
        head=None if params.head is None else rows(params.head, jnp.asarray(of)),
        layers=tuple({name: decoded(x) for name, x in params.layers[i].items()} for i in at),
        config=replace(c, layers=len(at), ropes=ropes, windows=windows, vocab=len(of)),
        tokenizer=None,
    )


def packed(small: Params, words: Words, at: Sequence[int]) -> dict[str, np.ndarray]:
    """What a folder holds of a drafter: matrices in 8 bits with a step for each output, words, the blocks' places.

    The embedding and the output are the model's, and are not in it.
    """
    kind = np.uint16 if len(words.of) <= 1 << 16 else np.int32
    arrays = {"words": words.of.astype(np.int32), "read": words.read.astype(kind), "blocks": np.asarray(at, np.int32)}
    arrays["norm"] = np.asarray(small.norm, np.float32)
    for i, layer in enumerate(small.layers):
        for name, x in layer.items():
            wide = np.asarray(x, np.float32)
            if name not in MATRICES:
                arrays[f"{i}.{name}"] = wide
            else:
                coded = int8(wide, np.dtype(np.float32))
                arrays[f"{i}.{name}"] = np.asarray(coded.codes)
                arrays[f"{i}.{name}{STEP}"] = np.asarray(coded.step.values)
    return arrays


def unpacked(arrays: Mapping[str, np.ndarray], params: Params, folder: str) -> tuple[Params, Words]:
    """The drafter that `packed` made for a model, in that model's type; FormatError for other arrays."""
    wrong = learned.unlike(folder, arrays, METHOD)
    try:
        words, blocks, c = Words(of=arrays["words"], read=arrays["read"]), arrays["blocks"], params.config
    except KeyError as error:
        raise wrong from error
    whole = _indices(words.of, c.vocab) and _indices(words.read, len(words.of)) and _indices(blocks, c.layers)
    if not whole or words.read.shape != (c.vocab,):
        raise wrong
    at = blocks.tolist()
    first = thinned(params, words.of, at)
    forms = [{name: (x.shape, x.dtype.kind) for name, x in some.items()} for some in (arrays, packed(first, words, at))]
    if forms[0] != forms[1]:
        raise wrong

    def own(name: str, like: Array) -> Array:
        return jnp.asarray(arrays[name] * arrays.get(name + STEP, np.float32(1)), like.dtype)

    layers = tuple({name: own(f"{i}.{name}", x) for name, x in layer.items()} for i, layer in enumerate(first.layers))
    small = replace(first, layers=layers, norm=own("norm", first.norm))
    return small, words


def _indices(x: np.ndarray, n: int) -> bool:
    """Whether x is a line of integers from 0 to n - 1, one at least."""
    return x.ndim == 1 and x.size > 0 and x.dtype.kind in "iu" and x.min() >= 0 and x.max() < n


def read(folder: str) -> tuple[str, dict[str, np.ndarray], tuple[str, ...]]:
    """A folder of `jkv train drafter`, its arrays, and the fingerprints of the models that it is for."""
    arrays, card = learned.read(folder, METHOD)
    return folder, arrays, tuple(card["model"])


@dataclass
class Distilled:
    """Guesses by a small model that learned what the one that verifies would say (2310.08461), through a cache.

    folder: of `jkv train drafter`; None: the one that comes with jkv for this model. It says the model's commonest
    words only, and reads each other token as the word whose embedding is nearest; both are rows of the model's own
    embedding.

    Raises ValueError for weights that were made for another model, or where none come with jkv, and FormatError for a
    folder of something else.
    """

    params: Params
    folder: str | None = None
    top: int = field(default=0, init=False)
    rows_change: bool = field(default=False, init=False, repr=False)
    words: Words = field(init=False, repr=False)
    model: Through = field(init=False, repr=False)

    def __post_init__(self) -> None:
        folder, arrays, models = (
            learned.shipped(METHOD, self.params, read) if self.folder is None else read(self.folder)
        )
        learned.check(models, self.params)
        small, self.words = unpacked(arrays, self.params, folder)
        self.model = Through(small)

    @property
    def nbytes(self) -> int:
        return self.model.nbytes

    def begin(self, rows: list[list[int]], new: int, verifier: Verifier | None = None) -> None:
        self.model.begin(self.words.reading(rows), new)

    def propose(self, rows: list[list[int]], most: int, verifier: Verifier | None = None) -> list[Guess]:
        return [self._said(guess) for guess in self.model.propose(self.words.reading(rows), most, verifier)]

    def learn(self, ids: np.ndarray, top: np.ndarray | None) -> None:
        """Nothing: it reads what was taken before it guesses again."""

    def branch(self, rows: list[list[int]]) -> Distilled:
        branch = copy(self)
        branch.model = self.model.branch(self.words.reading(rows))
        return branch

    def end(self, rows: list[list[int]]) -> None:
        self.model.end(self.words.reading(rows))

    def _said(self, guess: Guess) -> Guess:
        return replace(guess, ids=self.words.of[np.asarray(guess.ids, np.int32)].tolist())
