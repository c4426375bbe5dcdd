"""What a method is made of. Read this first: a paper is a choice of these, and a row of `jkv.methods`.

B rows, T new tokens, H kv heads, Hs = H (a selection per head) or 1 (one for all heads), G query heads per kv head,
N queries, D head dim, n slots of a tile, g grain, W window entries, C slots of a tier,
S tokens known at a flush: every slot of every tier, then the window, oldest first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Any, Literal, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jkv.arrays.tree import static, value

if TYPE_CHECKING:
    from jkv.models import ModelConfig, Params

Columns = dict[str, Array]  # f32[B,H,S]: what a score remembers of a token; it travels with the token
Say = Callable[[Any, list[list[int]], int], list[list[int]]]
Queries = int | Literal["new", "all"]  # the last n; those since the last flush; also every query of a prompt


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What a method asks of the runtime; what nobody asks for is not computed."""

    queries: int = 0  # kept after a flush: the newest n
    new: bool = False  # the queries since the last flush
    prompt: bool = False  # those of a prompt or a piece of it, as new ones; of what is generated the newest n alone
    chunks: Literal["any", "own", "none"] = "any"  # of a prompt: as good as the whole, part of the method, or refused
    probes: bool = False  # wants queries of texts that are read after a prompt, which stays whole until then
    layer: int | None = None  # the lower layer whose cache it reads, by number; -1: the one directly below

    def __or__(self, other: Needs) -> Needs:
        """Of both; ValueError for two lower layers."""
        layers = {self.layer, other.layer} - {None}
        if len(layers) > 1:
            raise ValueError(f"one score reads one lower layer, and {sorted(layers)} are asked for: keep one of them")
        return Needs(
            queries=max(self.queries, other.queries),
            new=self.new or other.new,
            prompt=self.prompt or other.prompt,
            chunks=max(self.chunks, other.chunks, key=("any", "own", "none").index),
            probes=self.probes or other.probes,
            layer=next(iter(layers), None),
        )


@dataclass(frozen=True, kw_only=True)
class Probe:
    """Tokens that are read after a prompt for their queries alone; nothing of them is kept.

    ids: those of each row; about: the positions of the prompt [first, end) that they ask about, for each row.
    """

    ids: list[list[int]]
    about: list[tuple[int, int]]


@value
class Born:
    """New tokens of one layer: its normed input x f[B,T,E], keys (rotated) and values [B,H,T,D], pos i32[B,T], -1 dead.

    step: they are generated, one a row; else a prompt's.
    """

    x: Array
    k: Array
    v: Array
    pos: Array
    step: bool = static(default=False)


class Evidence(Protocol):
    """What a score may see of one layer at a flush: S = all slots of the tiers, then the window, oldest first."""

    @property
    def pos(self) -> Array: ...  # i32[B,H,S], -1 dead

    @property
    def may_go(self) -> Array: ...  # bool[B,H,S]: slots and newcomers; the rest of the window stays in any case

    @property
    def columns(self) -> Columns: ...

    @property
    def kept(self) -> Any: ...  # the newest queries that the score needs, or None

    @property
    def new(self) -> Any: ...  # the queries since the last flush, or None

    @property
    def seen(self) -> Array: ...  # i32[B] tokens in all

    @property
    def prompt(self) -> Array: ...  # i32[B] tokens that were given

    @property
    def limit(self) -> Array: ...  # i32[B] tokens that the tiers may hold

    def chronological(self, heads: int | None = None) -> Array:
        """i32[B,H,S]: indices by position, those that may go first, then the rest."""
        ...

    def dot(self, x: Array, of: str = "k") -> Array:
        """f32[B,H,N,S]: inner products of x f[B,H,N,D] with every key (rotated) or value."""
        ...

    def mix(self, w: Array, of: str = "v") -> Array:
        """f32[B,H,N,D]: sums of every key (rotated) or value, weighted by w f32[B,H,N,S]."""
        ...

    def fold(self, step: Callable[..., Any], queries: Any, join: Callable[[Any, Any], Any] = ...) -> Any:
        """What every key gets of the attention probabilities of queries, tile by tile; see `core.evidence`."""
        ...

    def over_keys(self, step: Callable[..., Array], queries: Any) -> Array:
        """What every query gets: f32[B,H,G,N]."""
        ...


class Score:
    """Who stays. Only `rank` must be written. Its arrays, if it has any, are [L,...]: a layer sees its own part."""

    needs: Needs = Needs()
    uniform: bool = False  # one set of tokens for all kv heads
    compensates: bool = False  # knows what is lost: a `rest` gets the attention that `outside` leaves to it

    def bound(self, params: Params) -> Score:
        """This score with the weights that were trained for the model; ValueError if there are none."""
        return self

    def for_layer(self, model: ModelConfig, layer: int) -> Score:
        """This score in one layer of a model."""
        return self

    def ask(self, ev: Evidence) -> Array:
        """f32[B,...]: what a layer says of a prompt that is whole; f32[B]: what it asks of a budget that `measures`."""
        raise NotImplementedError  # only of scores that `shorten` or a budget that `measures` asks

    def probes(self, params: Params, rows: list[list[int]], say: Say) -> list[Probe]:
        """What is read after the prompts of these token ids; one program serves probes of one padded length.

        say(model, rows, n): the n tokens that a model generates greedily after each row.
        """
        return []

    def probed(self, ev: Evidence, about: Array) -> Columns:
        """Columns f32[B,H,S] after a probe; ev.new are its queries, ev.seen and ev.prompt the tokens before it."""
        return ev.columns

    def birth(self, new: Born) -> Columns:
        """Columns of new tokens."""
        return {}

    def expires(self, columns: Columns, pos: Array, slots: int = 0) -> Array | None:
        """i32[B,H,S]: the last position whose query may see each token at pos i32[B,1 or H,S]; None: all later ones.

        The first `slots` are tokens of tiers, the others a window, oldest first. It masks a prompt; a flush frees the
        slots of what has expired, whether they are needed or not.
        """
        return None

    def observe(self, ev: Evidence) -> Columns:
        """Columns f32[B,H,S] after the new queries; every query is observed once."""
        return ev.columns

    def outside(self, ev: Evidence) -> tuple[Array, Array]:
        """Attention f32[B,H,S] that each token gets, and f32[B] that all get, those included that are lost."""
        raise NotImplementedError  # only of scores that say `compensates`

    def rank(self, ev: Evidence) -> Array:
        """f32[B,Hs,S]: the highest stay; +inf is protected, -inf leaves. Among equals the older stays."""
        raise NotImplementedError  # its own in every score, or in what `for_layer` makes of it

    def by_query_head(self, ev: Evidence) -> Array:
        """f32[B,Hs,G,S]: the rank that each query head gives, of which `rank` is the mean; or that one, G = 1."""
        return self.rank(ev)[:, :, None]


class Budget:
    """How many tokens. Shapes are host integers; how much of a shape is used may depend on the row."""

    bounded: bool = True  # fewer tokens than the model's context can be asked for
    measures: bool = False  # layers divide it by what they ask for a prompt, which stays whole until then
    ranks: bool = False  # what they ask are the ranks of their tokens, which compete for all layers
    parts: tuple[tuple[int, int, int], ...] | None = None  # of each layer, once it was: its slots, and its `inner`

    def bound(self, params: Params) -> Budget:
        """This budget with what was found out about the model; ValueError if there is nothing."""
        return self

    def of(self, size: Budget) -> Budget:
        """This budget of another size."""
        return self

    def fit(self, cost: Callable[[Budget], int], least: Callable[[], int], longest: int) -> Budget:
        """This budget in tokens, `least` of them or more, once `cost` of one in bytes can be asked; ValueError if not.

        Of a cache of rows of at most `longest` tokens.
        """
        return self

    def for_layer(self, model: ModelConfig, layer: int, longest: int) -> Budget:
        """What one layer of a model gets of it; of such a budget are the capacity, the limit and the inner sizes."""
        return self

    def capacity(self, longest: int) -> int:
        """Tokens that the layer may hold, recent window included, for rows of at most `longest` tokens."""
        raise NotImplementedError  # its own in every budget

    def limit(self, capacity: int, seen: Array, prompt: Array, share: Array | None) -> Array:
        """i32[B] of that capacity in use, for rows that have seen i32[B] tokens, of which i32[B] are a prompt's.

        share i32[B]: what `divided` gave the layer.
        """
        return jnp.full_like(seen, capacity)

    def divided(self, asked: np.ndarray, lengths: Sequence[int], longest: int) -> tuple[Budget, np.ndarray]:
        """This budget with its `parts`, and i[L,B]: tokens of each layer beyond its window, or of its first tier.

        By what the layers ask, f[L,B,...], for prompts of these lengths.
        """
        raise NotImplementedError  # only of budgets that say `measures`

    def with_parts(self, parts: Sequence[Sequence[int]]) -> Budget:
        """This budget with these `parts`."""
        raise NotImplementedError  # only of budgets that say `measures`

    @property
    def inner(self) -> tuple[int, int] | None:
        """Slots of the layer's first tier, and how many of them every row uses; None: as the config has it."""
        return None


@value
class Code:
    """Encoded keys or values. Every leaf starts (rows, heads, slots) or (rows, heads, slots / grain)."""

    slots: Any
    grains: Any = ()


@value
class Linear:
    """Codes as the kernels read them: x[t,d] = code[t,d] * step[t // a, d // c] + low[t // a, d // c].

    codes: floats [B,H,C,D], or uint8[B,H,C,D*bits/8]: byte r holds channels r, r + D*bits/8, ..., low bits first.
    step, low f[B,H,C/a,D/c]: shared by a tokens and c channels; None for floats.
    kept uint8[B,H,C,D/8], or None: all channels are. Channel d is if bit d % 8 of byte d // 8 says so; codes are then
    the floats [B,H,C,K] of the K kept channels of each token, in their order, and the others are 0.
    """

    codes: Array
    step: Array | None = None
    low: Array | None = None
    kept: Array | None = None
    bits: int = static(default=0)  # of a code; 0: floats


class Codec:
    """How bytes are kept, for one row and one head: the runtime maps over both.

    Law: logits(query(q), c) == q . decode(c) and mix(w, c) == w @ decode(c). A codec that can contract codes without
    decoding them writes these three itself; what is decoded otherwise is one tile.
    """

    grain: int = 1  # tokens that are coded, moved and dropped together
    rope: Literal["before", "after"] = "before"  # keys stored rotated, or un-rotated and rotated at read
    rewritable: bool = False  # a merge may change a stored slot
    tiled: bool = True  # logits and mix decode a tile

    def unrotated(self) -> Codec:
        """The same of keys that are stored un-rotated; itself if it cannot, or does."""
        return self

    def check(self, model: ModelConfig) -> None:
        """Raise ValueError naming the two parts that cannot work together, and what would."""

    def empty(self, n: int, dim: int, dtype: Any) -> Code:
        """Storage for n slots; its shapes are the byte formula."""
        x = jax.ShapeDtypeStruct((n, dim), dtype)
        return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(self.encode, x))

    def encode(self, x: Array) -> Code:
        """x f[n,D], n a multiple of the grain."""
        raise NotImplementedError  # its own in every codec

    def decode(self, code: Code) -> Array:
        """f32[n,D]."""
        raise NotImplementedError  # its own in every codec

    def parts(self, code: Code) -> Sequence[Array]:
        """f32[n,D/p] of p stretches of channels: what is decoded, before it is put together.

        Numbers that share bytes come apart without being moved; XLA for CPUs joins them ten times as slowly.
        """
        return (self.decode(code),)

    def linear(self, code: Code) -> Linear | None:
        """The same codes as kernels read them (without the axes of rows and heads), or None: no kernel reads them."""
        return None

    def query(self, q: Array) -> Any:
        """q f32[N,D]; once per step, whatever does not depend on a tile."""
        return q

    def logits(self, ask: Any, tile: Code) -> Array:
        """f32[N,n], unscaled."""
        parts = self.parts(tile)
        asks = jnp.split(ask, len(parts), 1)
        return reduce(jnp.add, [jnp.einsum("qd,nd->qn", q, x) for q, x in zip(asks, parts, strict=True)])

    def mix(self, w: Array, tile: Code) -> Array:
        """w f32[N,n] -> f32[N,D]."""
        return jnp.concatenate([jnp.einsum("qn,nd->qd", w, x) for x in self.parts(tile)], 1)


@value
class Lost:
    """Tokens that find no place: index i32[B,H,n] in S, S for none; k, v [B,H,n,D]."""

    index: Array
    k: Array
    v: Array


class Entries(Protocol):
    """The tokens of S as a merge reads them: of tiers only those that it may change."""

    def open(self, index: Array) -> Array:
        """bool[B,H,m]: which of entries i32[B,H,m] may change."""
        ...

    def read(self, index: Array) -> tuple[Array, Array]:
        """k, v f32[B,H,m,D] of entries that may change."""
        ...


class Merge:
    """What the evicted leave behind: entries that stay become other ones. Its arrays, if it has any, are [L,...]."""

    needs: Needs = Needs()
    rewrites: bool = False  # every entry may change at each flush: only for codecs that are rewritable

    def bound(self, params: Params) -> Merge:
        """This merge with the weights that were trained for the model; ValueError if there are none."""
        return self

    def into(self, ev: Evidence, kept: Array, lost: Lost, entries: Entries) -> tuple[Array, Array, Array]:
        """(i32[B,H,m], k, v f32[B,H,m,D]): which entries of S change, S for none, and into what; kept bool[B,H,S]."""
        raise NotImplementedError  # its own in every merge

    def remember(self, ev: Evidence, kept: Array, lost: Lost, entries: Entries) -> Columns:
        """Columns f32[B,H,S] of the entries that stay, after the merge."""
        return ev.columns


class Selector:
    """What a step reads of a tier, in units of `unit` slots that enter and leave the tier together.

    Its arrays, if it has any, serve all layers. A selector that `watches` is told what attention found, after every
    step and every flush, and picks by what it remembers of each unit.
    """

    unit: int = 1
    needs: Needs = Needs()
    watches: bool = False

    def bound(self, params: Params) -> Selector:
        """This selector with the weights that were trained for the model; ValueError if there are none."""
        return self

    def summarize(self, k: Array) -> Any:
        """Leaves [...] for one unit of rotated keys f32[unit,D]; written when the unit is written."""
        raise NotImplementedError  # its own in every selector

    def pick(self, q: Array, summary: Any, live: Array) -> Array:
        """Units i32[B,H,U] to read, -1 none, for rotated q f32[B,H,G,T,D] and live bool[B,H,units]."""
        raise NotImplementedError  # its own in every selector

    def observe(self, summary: Any, rows: Array, pos: Array) -> Any:
        """The summary after n queries: rows f32[B,H,units,n], oldest first: the most that each paid in a unit.

        After a step: what it read, 0 for other units. After a flush: the `needs.queries` newest, of all that is there.
        pos i32[B,H,units]: the newest token of a unit, -1 for none.
        """
        return summary


def needs_of(*parts: Score | Merge | Selector | None) -> Needs:
    """What the parts that are there ask of the runtime."""
    return reduce(or_, (part.needs for part in parts if part is not None), Needs())
