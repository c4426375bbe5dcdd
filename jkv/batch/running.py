"""Continuous batching: rows are prefilled in waves, admitted between two blocks, and answered one by one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jkv.batch.arrange import Bucket, Wave, waves
from jkv.batch.requests import DRAWS, Refused, Request, Settings, failed
from jkv.core import sampling
from jkv.core.compiled import Cost
from jkv.core.loop import admit, prefill_after, prefill_own, run_blocks
from jkv.generation.api import cut
from jkv.generation.begun import doubling, tail
from jkv.generation.drafters import Drafter
from jkv.generation.drafting import Drafting
from jkv.generation.pace import Pace
from jkv.generation.prompts import stop_ids_of
from jkv.generation.sizes import empty, sized
from jkv.generation.stored import Beginnings
from jkv.generation.trial import Trial
from jkv.host.failures import said, survivable
from jkv.io.store import Store
from jkv.memory.cache import Cache, Decoding, tree_bytes
from jkv.memory.positions import pad
from jkv.methods.config import CacheConfig
from jkv.models import ModelConfig, Params


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A finished row: its tokens, its text up to a stop text (None: no tokenizer), and what ended it."""

    request: Request
    tokens: list[int]
    text: str | None
    end: str  # "stop" or "length"


@dataclass(frozen=True, kw_only=True)
class Shapes:
    """The values of a running batch of one bucket: `rows` at once, `several` prefilled together, settings a row.

    greedy, penalised: of every row of the job, so that its programs are the same whoever runs together. stride: tokens
    that are generated before somebody looks, at most a block; 0: a block. traced: the logits that they were drawn from
    are kept until then. top: of how many of the likeliest tokens after each draft the drafter is told; None: no drafts.
    """

    config: CacheConfig
    model: ModelConfig
    bucket: Bucket
    rows: int
    several: int
    dtype: Any
    greedy: bool
    penalised: bool
    stride: int = 0
    traced: bool = False
    top: int | None = None

    def cache(self, rows: int) -> Cache:
        """An empty cache. A budget in bytes is that of one row: what a row keeps does not depend on the batch."""
        longest, new = self.bucket.length + self.bucket.new, self.bucket.new
        sizes = sized(self.config, self.model, 1, longest, new, self.dtype)
        return empty(self.config, self.model, rows, longest, new, self.dtype, sizes)

    def heads(self) -> Cache:
        """An empty cache for common beginnings."""
        return empty(
            self.config.uncompressed(self.bucket.first), self.model, self.several, self.bucket.first, 0, self.dtype
        )

    def state(self) -> Decoding:
        """No row is alive yet."""
        cache, vocab = self.cache(self.rows), self.model.vocab
        used = jnp.zeros((self.rows, vocab), bool) if self.penalised else None
        logits = jnp.zeros((self.rows, vocab), jnp.float32)
        block = cache.room - cache.stay
        state = Decoding.start(cache, logits, min(self.stride or block, block), used, traced=self.traced)
        return replace(state, alive=jnp.zeros(self.rows, bool))

    def sampling(self, settings: list[Settings], seeds: list[int], stop_ids: tuple[int, ...]) -> sampling.Sampling:
        """The draws of all rows."""
        draws = {name: [getattr(s, name) for s in settings] for name in DRAWS}
        out = sampling.make(self.rows, self.model.vocab, seeds=seeds, stop_ids=stop_ids, **draws)
        return replace(out, greedy=self.greedy)


class Running:
    """One bucket's batch. `answers` is the loop; between two of its yields a job may stop, and nothing is lost."""

    def __init__(
        self,
        params: Params,
        shapes: Shapes,
        cost: Cost,
        store: Store | None = None,
        drafter: Drafter | None = None,
        trial: Trial | None = None,
    ) -> None:
        """store: where prompts begin, if that is of use for the cache and they are read whole; then `shapes.several`
        is 1. drafter: guesses the next tokens of all rows, which advance together, by the fewest that one of them
        takes; told of each row that ends. trial: of the drafter, which other batches may have too."""
        begins = None if store is None or shapes.bucket.chunk else Beginnings(store, params, shapes.config)
        self.reads = None if begins is None or begins.refusal else begins
        self.shapes, self.params, self.cost = shapes, replace(params, config=shapes.model), cost
        self.stop_ids = stop_ids_of(params)
        self.slots: list[tuple[Request, list[int]] | None] = [None] * shapes.rows  # a row and its tokens so far
        self.entering: tuple[Request, ...] = ()
        self.empty_rows = self.maker(partial(shapes.cache, shapes.several))
        self.empty_heads = self.maker(shapes.heads)
        self.state, self.heads = self.maker(shapes.state)(), None
        self.prefilled = self.saved = 0  # prompt tokens
        self.drafter, self.pace, self.drafted = drafter, Pace(), Counter[str]()
        self.trial = trial or Trial()

    def maker(self, make: Callable[[], Any]) -> Callable[[], Any]:
        """`make`, whose value is made where it will lie."""
        over = self.cost.over
        return jax.jit(make, out_shardings=None if over is None else over.shardings(jax.eval_shape(make)))

    @property
    def nbytes(self) -> int:
        """Of the caches of the rows, and of the common beginnings."""
        return self.state.cache.nbytes + (tree_bytes(self.heads.layers) if self.heads is not None else 0)

    @property
    def under_way(self) -> list[Request]:
        """The rows that have begun, and have not ended."""
        return [*(x[0] for x in self.slots if x), *self.entering]

    def answers(self, done: Container[tuple[int, int]]) -> Iterator[list[Answer | Refused]]:
        """The rows that ended, block by block; those that are done (`Request.part`) are left out."""
        waiting = waves(self.shapes.bucket, self.shapes.several, done)
        wave = next(waiting, None)
        while wave is not None or any(self.slots):
            while wave is not None and len(wave.rows) <= self.slots.count(None):
                self.admit(wave)
                wave = next(waiting, None)
            yield self.block()

    def admit(self, wave: Wave) -> None:
        """Prefill the rows of a wave, and give them free slots."""
        shapes, several = self.shapes, self.shapes.several
        self.entering = wave.rows
        if wave.heads:
            ids = _padded(wave.heads, several, shapes.bucket.first)
            self.heads, _ = self.cost.run(prefill_own, self.params, self.empty_heads(), ids, fresh=True)
        ran = sum(map(len, (*wave.heads, *wave.tails)))
        if self.reads is not None:
            cache, logits, stored = self.begun(self.reads, wave)
            ran -= stored
        elif wave.at:
            cache, ids = self.empty_rows(), _padded(wave.tails, several, wave.length)
            index = jnp.asarray([*wave.at, *[0] * (several - len(wave.at))], jnp.int32)
            cache, logits = self.cost.run(prefill_after, self.params, cache, self.heads, index, ids)
        else:
            cache, logits = self.read(self.empty_rows(), _padded(wave.tails, several, wave.length))
        self.prefilled += ran
        self.saved += sum(len(r.tokens) for r in wave.rows) - ran
        free = [i for i, x in enumerate(self.slots) if x is None][: len(wave.rows)]
        used = None
        if shapes.penalised:
            table = np.zeros((several, shapes.model.vocab), bool)
            for i, row in enumerate(wave.rows):
                table[i, row.tokens] = True
            used = jnp.asarray(table)
        slots = jnp.asarray([*free, *[shapes.rows] * (several - len(free))], jnp.int32)
        self.state = self.cost.run(admit, self.state, cache, logits, used, slots)
        for slot, row in zip(free, wave.rows, strict=True):
            self.slots[slot] = row, []
        self.entering = ()
        nobody = Settings()
        requests = [x[0] if x else None for x in self.slots]
        self.sampling = shapes.sampling(
            [r.settings if r else nobody for r in requests], [r.seed if r else 0 for r in requests], self.stop_ids
        )

    def read(self, cache: Cache, ids: Any) -> tuple[Cache, Any]:
        """The cache after prompts, whole or in chunks, and the logits of what comes next."""
        chunk, logits = self.shapes.bucket.chunk, None
        if not 0 < chunk < ids.shape[1]:
            return self.cost.run(prefill_own, self.params, cache, ids, fresh=True)
        ids = np.pad(np.asarray(ids), ((0, 0), (-ids.shape[1] % chunk, 0)), constant_values=-1)
        for i in range(0, ids.shape[1], chunk):
            cache, logits = self.cost.run(prefill_own, self.params, cache, jnp.asarray(ids[:, i : i + chunk]))
        return cache, logits

    def begun(self, begins: Beginnings, wave: Wave) -> tuple[Cache, Array, int]:
        """The cache and logits of a wave of one row that begins in the store, and how many tokens that had."""
        ids = wave.tails[0].tolist()
        head, n, stored = begins.read(self.params, ids, self.cost, doubling(max(begins.whole(len(ids)), 1)))
        rest = pad([ids[n:]], tail(len(ids) - n))
        cache, logits = self.cost.run(prefill_after, self.params, self.empty_rows(), head, None, rest)
        return cache, logits, stored

    @property
    def open(self) -> bool:
        """Whether rows can be admitted: all that run have finished a block, as one `fill` serves all rows."""
        return not any(self.slots) or int(self.state.cache.fill) >= self.state.cache.room

    def block(self) -> list[Answer | Refused]:
        """A stride of tokens for every row, or fewer if all rows end within it; the rows that ended."""
        ended = []
        for slot, request, tokens, _ in self.advance():
            answer = self.ended(request, tokens)
            if answer is not None:
                ended.append(answer)
                self.tell(slot, request)
                self.slots[slot] = None
        return ended

    @property
    def texts(self) -> list[list[int]]:
        """Of each slot the prompt and the tokens so far; one token of a slot that is free."""
        return [[*x[0].tokens, *x[1]] if x else [0] for x in self.slots]

    def tell(self, slot: int, request: Request) -> None:
        """The drafter has all of a row that ended, and of the others what it had."""
        if self.drafter is None or self.trial.failure:
            return
        rows = self.texts
        with self.trial:
            self.drafter.begin([*rows[:slot], [*request.tokens], *rows[slot + 1 :]], 0)
            self.drafter.end(rows)

    def advance(self) -> list[tuple[int, Request, list[int], list[int]]]:
        """The same, whoever ends: of each row its slot, what was asked, its tokens so far, and the new ones of them."""
        left = [x[0].new - len(x[1]) if x else 0 for x in self.slots]
        stop = min(max(left), self.state.out.shape[1])
        alive = jnp.asarray([n > 0 for n in left])
        state = replace(self.state, alive=alive, count=jnp.int32(0))
        self.state = self.ran(state, stop)
        out = np.asarray(self.state.out)[:, : int(self.state.count)]
        rows = []
        for slot, x in enumerate(self.slots):
            if x is not None:
                new = [int(t) for t in out[slot][: left[slot]] if t >= 0]
                x[1].extend(new)
                rows.append((slot, *x, new))
        return rows

    def ran(self, state: Decoding, stop: int) -> Decoding:
        """The state after `stop` tokens, or fewer if all rows end before."""
        if self.drafter is None or self.trial.failure:
            return self.cost.run(run_blocks, self.params, state, self.sampling, jnp.int32(stop))
        rows = self.texts
        with self.trial:
            self.drafter.begin(rows, 0)
        run = Drafting(self.params, state, self.sampling, self.drafter, self.cost, rows, self.pace, trial=self.trial)
        for _ in run.rounds(stop, [[] for _ in self.slots]):
            pass
        self.drafted.update(passes=run.passes + run.steps, drafted=run.drafted, taken=run.taken)
        return run.state

    def ended(self, request: Request, tokens: list[int]) -> Answer | Refused | None:
        """The answer of a row, if these tokens end it, or the error of one whose tokens make no text."""
        try:
            return self.answer(request, tokens)
        except BaseException as error:
            if not survivable(error):
                raise
            return failed(request, said(error))

    def answer(self, request: Request, tokens: list[int]) -> Answer | None:
        tokenizer, stop = self.params.tokenizer, request.settings.stop
        over = tokens[-1] in self.stop_ids
        if stop and not over:
            text = tokenizer.decode(tokens)
            over = any(s in text for s in stop)
        if not over and len(tokens) < request.new:
            return None
        text = None if tokenizer is None else cut(tokenizer.decode(tokens), stop)
        return Answer(request=request, tokens=tokens, text=text, end="stop" if over else "length")


def _padded(rows: tuple[np.ndarray, ...], several: int, length: int) -> Any:
    """i32[several,length]; the rows that are too few have no tokens."""
    return pad([*(r.tolist() for r in rows), *[[]] * (several - len(rows))], length)
