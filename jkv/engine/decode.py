"""Batched decode: slots that take prefilled rows between blocks and free them one by one."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import jax.numpy as jnp
import numpy as np

from jkv.cache.cache import Decoding, Tier
from jkv.core.compilation import Cost
from jkv.core.decode_loop import admit, run_blocks
from jkv.core.sampling import LOST
from jkv.engine.prefill import Filled, maker
from jkv.engine.request import Refused, Request, failed
from jkv.engine.spec import Shapes
from jkv.generation import nan_check
from jkv.generation.sampling_params import SamplingParams
from jkv.generation.stop_strings import StopChecker, cut
from jkv.models import Params
from jkv.prompts.tokenization import stop_ids_of
from jkv.speculative.decoding import Drafting
from jkv.speculative.draft_length import Pace
from jkv.speculative.guard import Trial
from jkv.speculative.proposer import Drafter
from jkv.utils.errors import error_message, survivable


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A finished row.

    Attributes:
        request: the request that the row answers.
        tokens: generated token ids.
        text: generated text up to a stop string, or None without a tokenizer.
        end: the finish reason.
    """

    request: Request
    tokens: list[int]
    text: str | None
    end: str  # "stop" or "length"


class Slots:
    """The decoding rows of one bucket, in a fixed number of slots.

    Attributes:
        slots: request and generated tokens of each slot, None where the slot is free.
        checkers: stop checker of each slot.
        of: shared prefix of each slot, an index into `Common.held`; -1 for none.
        newest: shared prefix that was held last, which the next seated rows use.
        pace: draft length, chosen from measured acceptance and cost.
        drafted: counts of verify passes, draft tokens and accepted draft tokens.
    """

    def __init__(
        self, params: Params, shapes: Shapes, cost: Cost, drafter: Drafter | None = None, trial: Trial | None = None
    ) -> None:
        """Allocate empty slots.

        Args:
            shapes: cache, rows and sampling settings of the batch.
            cost: runs and times the programs.
            drafter: proposes draft tokens for all rows. All rows advance together, by the fewest tokens that one of
                them accepts. The drafter gets the answer of each row that ends.
            trial: catches the drafter's errors; several batches may share it.
        """
        self.shapes, self.params, self.cost = shapes, replace(params, config=shapes.model), cost
        self.stop_ids = stop_ids_of(params)
        self.slots: list[tuple[Request, list[int]] | None] = [None] * shapes.rows  # a request and its tokens so far
        self.state = maker(shapes.state, cost)()
        self.checkers: list[StopChecker | None] = [None] * shapes.rows
        self.of = [-1] * shapes.rows  # index of the held prefix of each row
        self.newest = -1
        self.drafter, self.pace, self.drafted = drafter, Pace(), Counter[str]()
        self.trial = trial or Trial()

    @property
    def nbytes(self) -> int:
        """Bytes of the rows' caches."""
        return self.state.cache.nbytes

    @property
    def under_way(self) -> list[Request]:
        """Requests that occupy a slot."""
        return [x[0] for x in self.slots if x]

    @property
    def open(self) -> bool:
        """Whether rows may be seated now.

        All slots are free or all rows stand at the end of a block, because one `fill` serves all rows.
        """
        return not any(self.slots) or int(self.state.cache.fill) >= self.state.cache.recent_size

    @property
    def place(self) -> int | None:
        """Index of a held prefix that no row uses any more, or None."""
        used = {at for at, x in zip(self.of, self.slots, strict=True) if x}
        return next((i for i in range(self.shapes.beginnings) if i not in used), None)

    def hold(self, tiers: tuple[tuple[Tier, ...], ...]) -> None:
        """Hold one more shared prefix, in place of one that no row uses.

        Args:
            tiers: the tiers of every layer, of one row.
        """
        common, at = self.state.cache.common, self.place
        assert common is not None and at is not None
        held = tuple(tiers if i == at else old for i, old in enumerate(common.held))
        cache = replace(self.state.cache, common=replace(common, held=held))
        self.state, self.newest = replace(self.state, cache=cache), at

    def seat(self, filled: Filled) -> None:
        """Put prefilled rows into free slots, and rebuild the sampling settings of all rows."""
        shapes, several, rows = self.shapes, filled.cache.rows, filled.cache
        drawn = filled.drawn or [[] for _ in filled.rows]
        free = [i for i, x in enumerate(self.slots) if x is None][: len(filled.rows)]
        # Point the new rows to the shared prefix that was held last.
        if rows.common is not None:
            of = jnp.full(several, self.newest, jnp.int32)
            rows = replace(rows, common=replace(rows.common, of=of))
        # Mark the tokens of each row for the repetition penalty.
        used = None
        if shapes.penalised:
            table = np.zeros((several, shapes.model.vocab), bool)
            for i, (row, tokens) in enumerate(zip(filled.rows, drawn, strict=True)):
                table[i, [*row.tokens, *tokens]] = True
            used = jnp.asarray(table)
        # Unused rows of the wave go to slot `rows`, which `admit` drops.
        slots = jnp.asarray([*free, *[shapes.rows] * (several - len(free))], jnp.int32)
        self.state = self.cost.run(admit, self.state, rows, filled.logits, used, slots)
        for slot, row, tokens in zip(free, filled.rows, drawn, strict=True):
            self.slots[slot], self.of[slot] = (row, tokens), self.newest
            stop = row.settings.stop
            tokenizer = self.params.tokenizer if stop else None  # without stop strings no token is decoded on its own
            self.checkers[slot] = StopChecker(tokenizer, stop, self.stop_ids, row.new)
        # Free slots sample with default settings.
        nobody = SamplingParams()
        requests = [x[0] if x else None for x in self.slots]
        self.sampling = shapes.sampling(
            [r.settings if r else nobody for r in requests], [r.seed if r else 0 for r in requests], self.stop_ids
        )

    def block(self) -> list[Answer | Refused]:
        """Decode one stride and free the slots of rows that ended.

        A stride is shorter if all rows end within it.

        Returns:
            An `Answer` for each row that ended, or a `Refused` for each that failed.
        """
        ended = []
        for slot, request, *_ in self.advance():
            answer = self.ended(slot, request)
            if answer is not None:
                ended.append(answer)
                self.free(slot, request)
        return ended

    def free(self, slot: int, request: Request) -> None:
        """Free the slot of a row that has ended."""
        self.tell(slot, request)
        self.slots[slot] = None

    @property
    def texts(self) -> list[list[int]]:
        """Prompt and generated tokens of each slot, without LOST; a free slot has the single token 0."""
        return [[*x[0].tokens, *(t for t in x[1] if t != LOST)] if x else [0] for x in self.slots]

    def tell(self, slot: int, request: Request) -> None:
        """Give the drafter the answer of a row that ended.

        The other rows are passed too, unchanged, because the drafter expects all rows at once.
        """
        if self.drafter is None or self.trial.failure:
            return
        rows = self.texts
        with self.trial:
            self.drafter.begin([*rows[:slot], [*request.tokens], *rows[slot + 1 :]], 0)
            self.drafter.end(rows)

    def advance(self) -> list[tuple[int, Request, list[int], list[int]]]:
        """Decode one stride, and leave rows that ended in their slots.

        Returns:
            (slot, request, all generated tokens, new tokens) of each occupied slot. The last token of a row whose
            logits are NaN is LOST.
        """
        left = [x[0].new - len(x[1]) if x else 0 for x in self.slots]
        stop = min(max(left), self.state.out.shape[1])
        alive = jnp.asarray([n > 0 for n in left])
        state = replace(self.state, alive=alive, count=jnp.int32(0))
        self.state = self.ran(state, stop)
        out = np.asarray(self.state.out)[:, : int(self.state.count)]
        rows = []
        for slot, x in enumerate(self.slots):
            if x is not None:
                new = [int(t) for t in out[slot][: left[slot]] if t != -1]
                x[1].extend(new)
                rows.append((slot, *x, new))
        return rows

    def ran(self, state: Decoding, stop: int) -> Decoding:
        """Decode up to `stop` tokens per row, with drafts if a drafter works, and return the new state.

        Stops early once all rows have ended.
        """
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

    def ended(self, slot: int, request: Request) -> Answer | Refused | None:
        """Return the answer of a row that has ended, its error if it failed, or None if it continues."""
        try:
            return self.answer(slot)
        except BaseException as error:
            if not survivable(error):
                raise
            return failed(request, error_message(error))

    def answer(self, slot: int) -> Answer | None:
        """Return the answer of the row in a slot, or None if it continues.

        Raises:
            ValueError: the logits of the row were NaN.
        """
        row, checker = self.slots[slot], self.checkers[slot]
        assert row is not None and checker is not None
        request, tokens = row
        if why := nan_check.nan_message(self.params, tokens):
            raise ValueError(why)
        tokenizer, stop = self.params.tokenizer, request.settings.stop
        tokens[:] = checker.cut(tokens)
        if checker.finish_reason is None:
            return None
        text = None if tokenizer is None else cut(tokenizer.decode(tokens, stop), stop)
        return Answer(request=request, tokens=tokens, text=text, end=checker.finish_reason)
