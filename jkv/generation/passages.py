"""Passages that were read apart, in prompts that hold them at any place: their keys are turned, some tokens read again.

Reuse is approximate but for a prompt's beginning: a passage was read without what stands before it here.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np

from jkv.core.blend import blended
from jkv.core.compiled import Cost
from jkv.core.loop import prefill_own
from jkv.generation.begun import Begins, BegunPrompts, Piece, Records, doubling, loaded
from jkv.generation.prefill import Prompts
from jkv.generation.prompts import encode_row
from jkv.generation.sizes import empty
from jkv.generation.stored import Beginnings
from jkv.host.arguments import count, numbers, short
from jkv.io.store import Record, Store
from jkv.memory.cache import Cache
from jkv.memory.positions import pad
from jkv.methods.config import CacheConfig
from jkv.methods.text import read_one_of
from jkv.models import Params

LEAST = 16  # tokens in a row that a passage and a prompt have alike, before they count


@dataclass(frozen=True)
class Renewal:
    """Which tokens of passages are read again among the others: as `core.blend.blended` says."""

    share: float = 0.0
    check: int | None = None
    deviations: float | None = None


def pie() -> Renewal:
    """None: keys are turned to their new place, only what no passage has is read (PIE, 2407.03157).

    k' = Rot(p' - p) k. An edited text is the passage in front of the edit and the one behind it. Exact for a model of
    one layer, whose keys and values depend on the token alone.
    """
    return Renewal()


def cacheblend(ratio: float = 0.16, check: int = 1) -> Renewal:
    """The share of tokens whose values moved most at layer `check`, up to which all are read (CacheBlend, 2405.16444).

    d_i = sum over heads and channels of (v_i - v_i as stored)^2. One check, where the paper narrows the set layer by
    layer; a query sees keys by position, where the authors' code lets chosen rows see later ones.
    """
    return Renewal(_share("ratio", ratio), count("check", check, "a layer, from 0"))


def kvshare(kappa: float = 1.0, most: float = 0.15, check: int = 1) -> Renewal:
    """Those whose value moved by more than mean + kappa deviations, at most a share `most` (KVShare, 2503.16525).

    A reconstruction from the abstract, of its first stage: tokens are not renewed while decoding.
    """
    beyond = _number("kappa", kappa, "a number of standard deviations", -1e9, 1e9)
    return Renewal(_share("most", most), count("check", check, "a layer, from 0"), beyond)


RENEWALS = {"pie": pie, "cacheblend": cacheblend, "kvshare": kvshare}


def renewal(text: str) -> Renewal:
    """The renewal of a text; ValueError for one that is none.

    >>> renewal("cacheblend(ratio=0.3)")
    Renewal(share=0.3, check=1, deviations=None)
    """
    name, arguments = read_one_of(RENEWALS, text, "renewal")
    known = inspect.signature(RENEWALS[name]).parameters
    if unknown := [x for x in arguments if x not in known]:
        raise ValueError(f"renew={text!r}: {unknown[0]}=; {name} takes {', '.join(known) or 'no arguments'}")
    return RENEWALS[name](**arguments)


def _share(name: str, x: Any) -> float:
    return _number(name, x, "a share from 0 to 1", 0, 1)


def _number(name: str, x: Any, want: str, least: float, most: float) -> float:
    got = numbers(name, x, want, whole=False, least=least, most=most)
    if got.ndim:
        raise ValueError(f"{name}={short(x)}: give {want}")
    return float(got)


@dataclass(frozen=True)
class Passage:
    """Token ids, and those in front of them when they are read, which no prompt takes."""

    ids: tuple[int, ...]
    lead: tuple[int, ...]


@dataclass(frozen=True)
class Found:
    """Tokens of a prompt from `place` on, which are those of a passage from `start` on."""

    place: int
    passage: int
    start: int
    length: int


class Passages:
    """Texts that prompts hold at any place and in any order; each is read once, by itself, and not again with a prompt.

    renew: which of their tokens are read again: "cacheblend(ratio=0.16)", "kvshare" or "pie". A prompt is compared
    token by token: text of a prompt may have other tokens at a passage's ends, and these are read. Give it as
    `store=` to `generate`, `stream` and `prefill`. Prompts are read whole, passages or not, on a mesh, in chunks, and
    for caches that score with queries of the whole prompt or note something of each token.
    Keys and values of passages stay in memory as they are, as many bytes a token as the full cache has.

    >>> from jkv import models
    >>> passages = Passages(renew="pie")
    >>> passages.add(models.random(models.TINY), list(range(40)))
    >>> [(x.place, x.start, x.length) for x in passages.match([7, 7, *range(20, 40), 9, *range(18)])]
    [(2, 20, 20), (23, 0, 18)]
    """

    def __init__(self, renew: str = "cacheblend") -> None:
        self.renew = renewal(renew)
        self.passages: list[Passage] = []
        self.reused = 0  # tokens of prompts that passages had
        self._at: dict[tuple[int, ...], list[tuple[int, int]]] = {}
        self._records: dict[tuple[str, int], Record] = {}

    def add(self, params: Params, text: Any, lead: Any = None) -> None:
        """A passage, text or token ids, which is read behind `lead`, token ids; None: the token that begins texts.

        Raises ValueError for one that is too short to be found, or longer than the model's context.
        """
        if isinstance(text, str) and params.tokenizer is not None:
            text = params.tokenizer.within(text)
        if lead is None:
            lead = [] if params.tokenizer is None else params.tokenizer.encode("")[:1]
        ids = tuple(encode_row(params, text, "the passage"))
        front = tuple(encode_row(params, lead, "the lead")) if len(lead) else ()
        if len(front) + len(ids) > params.config.context:
            raise ValueError(
                f"a passage of {len(front) + len(ids)} tokens: the model reads {params.config.context}; "
                "give it in parts"
            )
        if len(ids) < LEAST:
            raise ValueError(f"a passage of {len(ids)} tokens: give {LEAST} or more")
        number = len(self.passages)
        self.passages.append(Passage(ids, front))
        for i in range(len(ids) - LEAST + 1):
            self._at.setdefault(ids[i : i + LEAST], []).append((number, i))

    def match(self, ids: Sequence[int]) -> list[Found]:
        """Stretches of token ids that passages have, from the first on, each as long as there is one."""
        out, at, ids = [], 0, tuple(ids)
        while at + LEAST <= len(ids):
            there = self._at.get(ids[at : at + LEAST])
            if there is None:
                at += 1
                continue
            length, passage, start = max((self._length(ids, at, *x), *x) for x in there)
            out.append(Found(at, passage, start, length))
            at += length
        return out

    def _length(self, ids: tuple[int, ...], at: int, passage: int, start: int) -> int:
        """Tokens from `at` on which are those of a passage."""
        n = 0
        for x, y in zip(ids[at:], self.passages[passage].ids[start:], strict=False):
            if x != y:
                break
            n += 1
        return n

    def record(self, root: str, params: Params, config: CacheConfig, found: Found, cost: Cost) -> Record:
        """Keys and values of a stretch, for a config; a passage is read when it is first asked for."""
        key, passage = (root, found.passage), self.passages[found.passage]
        if key not in self._records:
            ids = [*passage.lead, *passage.ids]
            n = doubling(len(ids))
            blank = empty(config.uncompressed(n), params.config, 1, n, 0, params.embed.dtype)
            cache, _ = cost.run(prefill_own, params, blank, pad([ids], n), fresh=True)
            self._records[key] = Records(cache, len(ids))(len(passage.lead), len(ids))
        here = slice(found.start, found.start + found.length)
        return {name: x[:, :, here] if name in ("k", "v") else x[:, here] for name, x in self._records[key].items()}


class Joins(Begins):
    """What passages have of the prompts of one cache."""

    def __init__(self, passages: Passages, params: Params, config: CacheConfig) -> None:
        super().__init__(params, config)
        self.passages, check = passages, passages.renew.check
        if self.notes:
            self.refusal = "it notes something of each token, which its place among others changes"
        if not self.refusal and check is not None and check >= params.config.layers - 1:
            raise ValueError(
                f"check={check}: the model has {params.config.layers} layers; give one before the last, or pie"
            )

    def read(self, params: Params, ids: Sequence[int], cost: Cost, capacity: int) -> tuple[Cache, int, int]:
        n, renew = self.whole(len(ids)), self.passages.renew
        ids = [int(x) for x in ids[:n]]
        found = self.passages.match(ids)
        if not found:
            cache = loaded(params, self.config, capacity, 0, [])
            return cost.run(prefill_own, params, cache, pad([ids], capacity), fresh=True)[0] if n else cache, n, 0
        old, new = np.arange(n), np.ones(n, bool)
        pieces: list[Piece] = []
        for x in found:
            here = slice(x.place, x.place + x.length)
            first = len(self.passages.passages[x.passage].lead) + x.start
            old[here], new[here] = np.arange(first, first + x.length), False
            pieces.append((x.place, self.passages.record(self.root, params, self.config, x, cost)))
        held = n - int(new.sum())
        self.passages.reused += held
        most = int(renew.share * held)
        rows = min(doubling(max(n - held + most, 1)), capacity)
        front = capacity - n
        old, new = np.pad(old, (front, 0)).astype(np.int32)[None], np.pad(new, (front, 0))[None]
        given = pad([ids], capacity), jnp.asarray(old), jnp.asarray(new), jnp.int32(most)
        how = {"rows": rows, "check": renew.check, "deviations": renew.deviations}
        cache = loaded(params, self.config, capacity, n, pieces)
        return cost.run(blended, params, cache, *given, **how), n, held


BEGINS: dict[type, Any] = {Store: Beginnings, Passages: Joins}


def kind(store: Store | Passages | None) -> Any:
    """What makes the prompts of `prefilled`."""
    return Prompts if store is None else partial(BegunPrompts, begins=partial(BEGINS[type(store)], store))
