"""The engine thread: steps running batches in turn, one batch per cache config."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jkv.cache.cache import tree_bytes
from jkv.core.compilation import use_disk_cache
from jkv.engine.continuous_batch import Running
from jkv.engine.scheduler import single_row
from jkv.generation import nan_check
from jkv.generation.api import prefill
from jkv.generation.teacher_forcing import Follow
from jkv.methods.config import CacheConfig
from jkv.models import Params
from jkv.prefix_cache.store import PrefixCache
from jkv.serve.batches import Limits, Maker, Watch
from jkv.serve.request_state import TOP, Echo, End, Fault, Kept, RowReceipt, Ticket, Token, tokens_of
from jkv.utils.errors import error_message, survivable


class Full(Exception):
    """The queue has no capacity for more rows."""


@dataclass(kw_only=True)
class Seats:
    """A running batch with its tickets.

    Attributes:
        running: the batch.
        tickets: tickets of its rows, by `Request.line`.
        used: time of its last step, by `time.monotonic`.
    """

    running: Running
    tickets: dict[int, Ticket] = field(default_factory=dict)
    used: float = field(default_factory=time.monotonic)


@jax.jit
def best(logits: Array, tokens: Array) -> tuple[Array, Array, Array]:
    """Compute log-probabilities of given tokens and of the most probable ones.

    Args:
        logits: f32[B,N,V].
        tokens: i32[B,N].

    Returns:
        Log-probabilities f32[B,N], and the TOP most probable tokens: log-probabilities f32[B,N,k] and ids i32[B,N,k].
    """
    logs = jax.nn.log_softmax(logits)
    top, ids = jax.lax.top_k(logs, min(TOP, logits.shape[-1]))
    return jnp.take_along_axis(logs, jnp.maximum(tokens, 0)[..., None], -1)[..., 0], top, ids


@jax.jit
def kept_counts(cache: Any) -> Array:
    """Return the tokens kept per layer, row and kv head, i32[L,B,H] (`Cache.kept`)."""
    return cache.kept()


class Engine:
    """The serving engine: tickets in, events out.

    Other threads may call `start`, `stop`, `line`, `submit` and `cancel`; all model work runs on the engine's own
    thread. A row waits until its cache config has a running batch with a free slot between two blocks. A batch for
    another config is compiled in the background while the others run. At most `limits.caches` batches exist, and
    idle ones are dropped for new ones.

    Attributes:
        seats: running batches by the text of their cache config.
        making: batches that are being compiled, by the same text.
        waiting: queue of tickets that need a slot.
        scoring: tickets whose prompts are scored, with the generators that do it.
        over: the engine has stopped or is stopping.
    """

    def __init__(
        self,
        params: Params,
        limits: Limits,
        watch: Watch | None = None,
        prefix_cache: PrefixCache | None = None,
        drafter: str | None = None,
    ) -> None:
        """Prepare an engine that has not started.

        Args:
            limits: capacity of the batches and of the queue.
            watch: callbacks for metrics.
            prefix_cache: prefix cache, or None.
            drafter: name of the drafter of all batches, or None; see `Maker`.
        """
        use_disk_cache()
        self.params, self.limits, self.watch, self.prefix_cache = params, limits, watch or Watch(), prefix_cache
        self.maker = Maker(params=params, limits=limits, watch=self.watch, prefix_cache=prefix_cache, drafter=drafter)
        self.seats: dict[str, Seats] = {}
        self.making: dict[str, Future[Running]] = {}
        self.waiting: deque[Ticket] = deque()
        self.scoring: deque[tuple[Ticket, Iterator[Echo | None]]] = deque()
        self.change = threading.Condition()
        self.over = False
        self.beside = ThreadPoolExecutor(1, "prepare")
        self.lines = 0
        self.thread = threading.Thread(target=self._work, name="engine", daemon=True)

    # ------------------------------------------------------------------------------------------- for other threads

    def start(self, config: CacheConfig) -> None:
        """Compile the batch of a cache config, then start the thread. Raises what `Maker.make` raises."""
        self.seats[str(config)] = Seats(running=self.maker.make(config))
        self.thread.start()

    def stop(self) -> None:
        """Stop the thread. Unfinished rows get a Fault."""
        with self.change:
            self.over = True
            self.change.notify_all()
        if self.thread.ident is not None:
            self.thread.join()
        self.beside.shutdown(wait=False, cancel_futures=True)

    @property
    def well(self) -> bool:
        """Whether the thread runs and takes requests."""
        return self.thread.is_alive() and not self.over

    def line(self) -> int:
        """Return a number that no other request has."""
        with self.change:
            self.lines += 1
            return self.lines

    def submit(self, tickets: Sequence[Ticket]) -> None:
        """Queue tickets, all or none.

        Raises:
            Full: the queue has no capacity, or the engine has stopped.
        """
        with self.change:
            if self.over or len(self.waiting) + len(tickets) > self.limits.queue:
                raise Full
            self.waiting.extend(tickets)
            self.change.notify_all()

    def cancel(self, tickets: Sequence[Ticket]) -> None:
        """Drop tickets whose clients are gone. Their slots are freed before the next stride."""
        with self.change:
            for ticket in tickets:
                ticket.gone = True
            self.change.notify_all()

    @property
    def running(self) -> dict[str, int]:
        """Number of rows in each running batch, by cache config."""
        return {name: len(x.tickets) for name, x in list(self.seats.items())}

    # ---------------------------------------------------------------------------------------------- the engine's own

    def _work(self) -> None:
        """Run until stopped, then fail every pending request."""
        try:
            self._rounds()
        finally:
            with self.change:
                self.over = True
            left = [t for x in self.seats.values() for t in x.tickets.values()]
            left += [*(t for t, _ in self.scoring), *self._waiting()]
            self._fail(left, 503, "the server stops; ask again later")

    def _rounds(self) -> None:
        """Loop: admit rows, run one stride of each batch, score one slice of a prompt."""
        while True:
            with self.change:
                self.change.wait_for(lambda: self.over or self._busy(), timeout=1.0)
                if self.over:
                    break
            self._sweep()
            self._settle()
            for name, seats in list(self.seats.items()):
                try:
                    self._turn(seats)
                except BaseException as error:
                    if not survivable(error):
                        self.over = True
                    self._fail(list(seats.tickets.values()), 500, error_message(error))
                    del self.seats[name]
            self._score()
            with self.change:
                if not self.scoring and not any(x.tickets for x in self.seats.values()):
                    self.change.wait(0.01)  # wait for a batch that is being compiled

    def _busy(self) -> bool:
        """Return whether work is left: rows, prompts to score, or batches to compile or to start."""
        # Compiled batches wait to start; tickets wait for a config that is not being compiled.
        done = any(f.done() for f in self.making.values())
        new = any(str(t.config) not in self.making for t in self.waiting)
        return bool(done or new or self.scoring or any(x.tickets for x in self.seats.values()))

    def _sweep(self) -> None:
        """Free what rows whose clients are gone occupy: queue entries, slots, scoring."""
        with self.change:
            self.waiting = deque(t for t in self.waiting if not t.gone)
        self.scoring = deque((t, x) for t, x in self.scoring if not t.gone)
        for seats in self.seats.values():
            for slot, row in enumerate(seats.running.slots):
                if row is not None and seats.tickets[row[0].line].gone:
                    seats.running.slots[slot] = None
                    del seats.tickets[row[0].line]

    def _settle(self) -> None:
        """Move tickets and batches on.

        Batches that finished compiling start, tickets to be scored leave the queue, and batches that tickets need are
        compiled.
        """
        # Start compiled batches; if compilation failed, fail their tickets.
        for name, future in list(self.making.items()):
            if future.done():
                del self.making[name]
                if (error := future.exception()) is None:
                    self.seats[name] = Seats(running=future.result())
                else:
                    mine = [t for t in self._waiting() if str(t.config) == name]
                    self._fail(mine, 400 if isinstance(error, ValueError) else 503, error_message(error))
        # Sort tickets: nothing to do, to be scored, or in need of a batch.
        for ticket in self._waiting():
            if not (ticket.scores or ticket.generates):
                self._leave([ticket])
                ticket.tell(End(why="length", tokens=0, receipt=None))
            elif ticket.scores:
                ticket.scores = False
                self._leave([ticket])
                self.scoring.append((ticket, self._scored(ticket)))
            elif (name := str(ticket.config)) not in self.seats and name not in self.making and self._room():
                self.making[name] = self.beside.submit(self.maker.make, ticket.config)
                self.making[name].add_done_callback(lambda _: self._notify())

    def _notify(self) -> None:
        """Wake the engine thread."""
        with self.change:
            self.change.notify_all()

    def _waiting(self) -> list[Ticket]:
        """Return a copy of the queue."""
        with self.change:
            return list(self.waiting)

    def _leave(self, tickets: Sequence[Ticket]) -> None:
        """Remove tickets from the queue."""
        with self.change:
            self.waiting = deque(t for t in self.waiting if t not in tickets)

    def _room(self) -> bool:
        """Return whether another batch may exist, dropping the least recently used idle one if necessary."""
        if len(self.seats) + len(self.making) < self.limits.caches:
            return True
        wanted = {str(t.config) for t in self._waiting()}
        idle = [name for name, x in self.seats.items() if not x.tickets and name not in wanted]
        if idle:
            del self.seats[min(idle, key=lambda name: self.seats[name].used)]
        return bool(idle)

    def _fail(self, tickets: Sequence[Ticket], status: int, error: str) -> None:
        """Remove tickets from the queue and send each a Fault."""
        self._leave(tickets)
        for ticket in tickets:
            ticket.tell(Fault(status=status, error=error))

    def _turn(self, seats: Seats) -> None:
        """Admit waiting rows if slots are open, run one stride, and send the events of each row."""
        running = seats.running
        # Admit waiting rows of this cache config.
        if running.open:
            name = str(running.shapes.config)
            mine = [t for t in self._waiting() if str(t.config) == name and t.generates and not t.scores]
            for ticket in mine[: running.slots.count(None)]:
                self._leave([ticket])
                self._enter(seats, ticket)
        if not any(running.slots):
            return
        seats.used, before = time.monotonic(), Counter(running.drafted)
        # Run a stride; fail the rows whose logits are NaN.
        fresh = []
        for slot, request, tokens, new in running.advance():
            ticket = seats.tickets[request.line]
            if why := nan_check.nan_message(running.params, tokens):
                self._free(seats, slot, ticket)
                ticket.tell(Fault(status=500, error=why))
            else:
                fresh.append((slot, ticket, tokens, new))
        self._drafted(running, [ticket for _, ticket, *_ in fresh], running.drafted - before)
        # Compute log-probabilities if a row wants them.
        logs = None
        if any(ticket.top is not None for _, ticket, *_ in fresh):
            assert running.state.trace is not None
            logs = jax.device_get(best(running.state.trace, running.state.out))
        # Send text, and find the rows that ended or want receipts.
        ended, followed = {}, {}
        for slot, ticket, tokens, new in fresh:
            told = [] if logs is None else tokens_of(new, [x[slot] for x in logs], ticket.top)
            before = ticket.count
            why = ticket.take(new, told)
            del tokens[ticket.count :]  # drop tokens after a stop string
            self._time(ticket, before)
            if why is not None:
                ended[slot] = ticket, why
            elif ticket.follows:
                followed[slot] = ticket
        # Send receipts and last events.
        if ended or followed:
            receipts = self._receipts(running, followed | {slot: ticket for slot, (ticket, _) in ended.items()})
            for slot, ticket in followed.items():
                ticket.tell(Kept(receipt=receipts[slot]))
            self._end(seats, ended, receipts)

    def _enter(self, seats: Seats, ticket: Ticket) -> None:
        """Prefill a row into a free slot.

        An error fails that row only, unless it is fatal or the state of the batch was lost; then it is raised again.
        """
        running, request = seats.running, ticket.request
        before = 0 if self.prefix_cache is None else self.prefix_cache.reused
        try:
            running.admit(single_row(running.shapes.bucket, request))
        except BaseException as error:
            self._fail([ticket], 500, error_message(error))
            if not survivable(error) or any(x.is_deleted() for x in jax.tree.leaves(running.state)):
                raise
            return
        if self.prefix_cache is not None and self.prefix_cache.reused > before:
            ticket.reused, ticket.store_codec = self.prefix_cache.reused - before, self.prefix_cache.codec.name
        seats.tickets[request.line] = ticket
        ticket.begin(self.params, running.stop_ids)
        self.watch.read(len(request.tokens), ticket.reused)

    def _drafted(self, running: Running, tickets: Sequence[Ticket], made: Counter[str]) -> None:
        """Count a stride's draft tokens, and remove a drafter that has failed."""
        if running.drafter is None:
            return
        self.watch.drafted(made["drafted"], made["taken"])
        for ticket in tickets:
            ticket.drafted = (ticket.drafted or Counter()) + made
        if running.trial.failure:
            running.drafter = None
            self.watch.undrafted(str(running.shapes.config), running.trial.failure)

    def _time(self, ticket: Ticket, before: int) -> None:
        """Report the latency of new tokens of a row that had `before` tokens."""
        now, new = time.monotonic(), ticket.count - before
        if before == 0:
            self.watch.first(now - ticket.asked, new)
        elif new:
            self.watch.later((now - ticket.last) / new, new)
        ticket.last = now

    def _receipts(self, running: Running, tickets: dict[int, Ticket]) -> dict[int, RowReceipt]:
        """Return receipts of rows, by slot, after the stride that they just ran."""
        cache = running.state.cache
        kept, seen, model = np.asarray(kept_counts(cache)), np.asarray(cache.seen), cache.model
        fixed = tree_bytes(cache.states) // cache.rows
        token = model.layers * model.heads * model.cached * cache.dtype.itemsize
        out = {}
        for slot, ticket in tickets.items():
            most = min(int(seen[slot]), len(ticket.request.tokens) + ticket.count)  # the stride may pass a stop string
            own = np.minimum(kept[:, slot], most).tolist()
            out[slot] = ticket.receipt(most, own, cache.nbytes // cache.rows, token, fixed)
        return out

    def _end(self, seats: Seats, ended: dict[int, tuple[Ticket, str]], receipts: dict[int, RowReceipt]) -> None:
        """Send the last event of each ended row and free its slot."""
        for slot, (ticket, why) in ended.items():
            self._free(seats, slot, ticket)
            ticket.tell(End(why=why, tokens=ticket.count, receipt=receipts[slot]))

    def _free(self, seats: Seats, slot: int, ticket: Ticket) -> None:
        """Free the slot of an ended row."""
        seats.running.free(slot, ticket.request)
        del seats.tickets[ticket.request.line]

    def _score(self) -> None:
        """Score one slice of the first prompt in line. A scored ticket that also generates joins the queue."""
        if not self.scoring:
            return
        ticket, slices = self.scoring[0]
        try:
            echo = next(slices)
        except BaseException as error:
            self.scoring.popleft()
            self._fail([ticket], 500, error_message(error))
            if not survivable(error):
                raise
            return
        if echo is None:
            return
        self.scoring.popleft()
        ticket.tell(echo)
        if ticket.generates:
            with self.change:
                self.waiting.append(ticket)
        else:
            ticket.tell(End(why="length", tokens=0, receipt=None))

    def _scored(self, ticket: Ticket) -> Iterator[Echo | None]:
        """Score a prompt slice by slice.

        Yields None after each slice, then the log-probabilities of the prompt, as `jkv.score` computes them.
        """
        ids = ticket.request.tokens.tolist()
        out = [Token(id=ids[0], logprob=None)]
        if len(ids) > 1:
            reserve = self.limits.prompt
            cache, logits = prefill(self.params, ticket.config, [ids[:1]], reserve=reserve, chunk=0)
            yield None
            for part in Follow(self.params, cache, logits, np.asarray([ids[1:]])):
                here = ids[len(out) : len(out) + part.shape[1]]
                found = jax.device_get(best(part, jnp.asarray([here], jnp.int32)))
                nan_check.check_scores(self.params, found[0], len(out))
                out += tokens_of(here, [x[0] for x in found], ticket.top)
                yield None
        yield Echo(tokens=out)
