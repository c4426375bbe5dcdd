"""What decodes: slots that rows enter between two blocks, wherever they were prefilled, and leave one by one."""

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
from jkv.engine.request import Refused, Request, Settings, failed
from jkv.engine.spec import Shapes
from jkv.generation import nan_check
from jkv.generation.stop_strings import StopChecker, cut
from jkv.models import Params
from jkv.prompts.tokenization import stop_ids_of
from jkv.speculative.decoding import Drafting
from jkv.speculative.draft_length import Pace
from jkv.speculative.guard import Trial
from jkv.speculative.proposer import Drafter
from jkv.utils.errors import said, survivable


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A finished row: its tokens, its text up to a stop text (None: no tokenizer), and what ended it."""

    request: Request
    tokens: list[int]
    text: str | None
    end: str  # "stop" or "length"


class Slots:
    """The rows of one bucket that decode together."""

    def __init__(
        self, params: Params, shapes: Shapes, cost: Cost, drafter: Drafter | None = None, trial: Trial | None = None
    ) -> None:
        """drafter: guesses the next tokens of all rows, which advance together, by the fewest that one of them takes;
        told of each row that ends. trial: of the drafter, which other batches may have too."""
        self.shapes, self.params, self.cost = shapes, replace(params, config=shapes.model), cost
        self.stop_ids = stop_ids_of(params)
        self.slots: list[tuple[Request, list[int]] | None] = [None] * shapes.rows  # a row and its tokens so far
        self.state = maker(shapes.state, cost)()
        self.checkers: list[StopChecker | None] = [None] * shapes.rows
        self.of = [-1] * shapes.rows  # the beginning that each row shares, of those that are held
        self.newest = -1
        self.drafter, self.pace, self.drafted = drafter, Pace(), Counter[str]()
        self.trial = trial or Trial()

    @property
    def nbytes(self) -> int:
        """Of the caches of the rows."""
        return self.state.cache.nbytes

    @property
    def under_way(self) -> list[Request]:
        """The rows that have begun, and have not ended."""
        return [x[0] for x in self.slots if x]

    @property
    def open(self) -> bool:
        """Whether rows can be seated: all that run have finished a block, as one `fill` serves all rows."""
        return not any(self.slots) or int(self.state.cache.fill) >= self.state.cache.room

    @property
    def place(self) -> int | None:
        """Which of the beginnings that are held no row needs any more."""
        used = {at for at, x in zip(self.of, self.slots, strict=True) if x}
        return next((i for i in range(self.shapes.beginnings) if i not in used), None)

    def hold(self, tiers: tuple[tuple[Tier, ...], ...]) -> None:
        """Another beginning, in the place of one that no row needs."""
        common, at = self.state.cache.common, self.place
        assert common is not None and at is not None
        held = tuple(tiers if i == at else old for i, old in enumerate(common.held))
        cache = replace(self.state.cache, common=replace(common, held=held))
        self.state, self.newest = replace(self.state, cache=cache), at

    def seat(self, filled: Filled) -> None:
        """Give rows free slots."""
        shapes, several, rows = self.shapes, filled.cache.rows, filled.cache
        drawn = filled.drawn or [[] for _ in filled.rows]
        free = [i for i, x in enumerate(self.slots) if x is None][: len(filled.rows)]
        if rows.common is not None:
            of = jnp.full(several, self.newest, jnp.int32)
            rows = replace(rows, common=replace(rows.common, of=of))
        used = None
        if shapes.penalised:
            table = np.zeros((several, shapes.model.vocab), bool)
            for i, (row, tokens) in enumerate(zip(filled.rows, drawn, strict=True)):
                table[i, [*row.tokens, *tokens]] = True
            used = jnp.asarray(table)
        slots = jnp.asarray([*free, *[shapes.rows] * (several - len(free))], jnp.int32)
        self.state = self.cost.run(admit, self.state, rows, filled.logits, used, slots)
        for slot, row, tokens in zip(free, filled.rows, drawn, strict=True):
            self.slots[slot], self.of[slot] = (row, tokens), self.newest
            self.checkers[slot] = StopChecker(self.params.tokenizer, row.settings.stop, self.stop_ids, row.new)
        nobody = Settings()
        requests = [x[0] if x else None for x in self.slots]
        self.sampling = shapes.sampling(
            [r.settings if r else nobody for r in requests], [r.seed if r else 0 for r in requests], self.stop_ids
        )

    def block(self) -> list[Answer | Refused]:
        """A stride of tokens for every row, or fewer if all rows end within it; the rows that ended."""
        ended = []
        for slot, request, *_ in self.advance():
            answer = self.ended(slot, request)
            if answer is not None:
                ended.append(answer)
                self.free(slot, request)
        return ended

    def free(self, slot: int, request: Request) -> None:
        """The slot of a row that has ended."""
        self.tell(slot, request)
        self.slots[slot] = None

    @property
    def texts(self) -> list[list[int]]:
        """Of each slot the prompt and the tokens so far; one token of a slot that is free."""
        return [[*x[0].tokens, *(t for t in x[1] if t != LOST)] if x else [0] for x in self.slots]

    def tell(self, slot: int, request: Request) -> None:
        """The drafter has all of a row that ended, and of the others what it had."""
        if self.drafter is None or self.trial.failure:
            return
        rows = self.texts
        with self.trial:
            self.drafter.begin([*rows[:slot], [*request.tokens], *rows[slot + 1 :]], 0)
            self.drafter.end(rows)

    def advance(self) -> list[tuple[int, Request, list[int], list[int]]]:
        """The same, whoever ends: of each row its slot, what was asked, its tokens so far, and the new ones of them.

        One whose logits are NaN ends with LOST.
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

    def ended(self, slot: int, request: Request) -> Answer | Refused | None:
        """The answer of a row, if its tokens end it, or the error of one whose tokens make no text."""
        try:
            return self.answer(slot)
        except BaseException as error:
            if not survivable(error):
                raise
            return failed(request, said(error))

    def answer(self, slot: int) -> Answer | None:
        row, checker = self.slots[slot], self.checkers[slot]
        assert row is not None and checker is not None
        request, tokens = row
        if why := nan_check.said(self.params, tokens):
            raise ValueError(why)
        tokenizer, stop = self.params.tokenizer, request.settings.stop
        tokens[:] = checker.cut(tokens)
        if checker.finish_reason is None:
            return None
        text = None if tokenizer is None else cut(tokenizer.decode(tokens, stop), stop)
        return Answer(request=request, tokens=tokens, text=text, end=checker.finish_reason)
