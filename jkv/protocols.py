"""The axes of a method. Read this first: a paper is a choice of these, and a row of `jkv.methods`.

B rows, T new tokens, H kv heads, Hs = H (a selection per head) or 1 (one for all heads), G query heads per kv head,
N queries, D channels of a query and a key, Dv of a value (D where nothing else is said), n slots of a tile, g grain,
W window entries, C slots of a tier, S tokens known at a flush: every slot of every tier, then the window, oldest first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

import jax.numpy as jnp
import numpy as np
from jax import Array

from jkv.arrays.tree import part, static, value

if TYPE_CHECKING:
    from jkv.arrays.partial import Partial
    from jkv.models import ModelConfig, Params

Columns = dict[str, Array]  # f32[B,H,S]: what a score remembers of a token; it travels with the token
Queries = int | Literal["new", "all"]  # the last n; those since the last flush; also every query of a prompt


@dataclass(frozen=True, kw_only=True)
class Needs:
    """Inputs that a method needs from the runtime; others are not computed."""

    queries: int = 0  # kept after a flush: the newest n
    recent: int = 0  # newest tokens that it cannot rank yet: the recent window holds so many
    new: bool = False  # the queries since the last flush
    prompt: bool = False  # those of a prompt or a piece of it, as new ones; of what is generated the newest n alone
    chunks: Literal["any", "own", "none"] = "any"  # of a prompt: as good as the whole, part of the method, or refused
    layer: int | None = None  # the lower layer whose cache it reads, by number; -1: the one directly below

    def __or__(self, other: Needs) -> Needs:
        """Of both; ValueError for two lower layers."""
        cuts, layers = (self.chunks, other.chunks), {x for x in (self.layer, other.layer) if x is not None}
        if len(layers) > 1:
            raise ValueError(f"one score reads one lower layer, and {sorted(layers)} are asked for: keep one of them")
        return Needs(
            queries=max(self.queries, other.queries),
            recent=max(self.recent, other.recent),
            new=self.new or other.new,
            prompt=self.prompt or other.prompt,
            chunks="none" if "none" in cuts else "own" if "own" in cuts else "any",
            layer=next(iter(layers), None),
        )


@value
class Born:
    """New tokens of one layer: its normed input x f[B,T,E], k (rotated) [B,H,T,D], v [B,H,T,Dv], pos i32[B,T], -1 dead.

    step: they are generated, one a row; else a prompt's.
    """

    x: Array
    k: Array
    v: Array
    pos: Array
    step: bool = static(default=False)


class Evidence(Protocol):
    """The view of one layer that a score has at a flush: S = all slots of the tiers, then the window, oldest first."""

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
        """f32[B,H,N,D or Dv]: sums of every key (rotated) or value, weighted by w f32[B,H,N,S]."""
        ...

    def fold(self, step: Callable[..., Any], queries: Any, join: Callable[[Any, Any], Any] = ...) -> Any:
        """Sums per key over the attention probabilities of queries, tile by tile; see `core.evidence`."""
        ...

    def over_keys(self, step: Callable[..., Array], queries: Any) -> Array:
        """Sums per query: f32[B,H,G,N]."""
        ...


class Score:
    """Who stays. Only `rank` must be written. Its arrays, if it has any, are [L,...]: a layer sees its own part."""

    needs: Needs = Needs()
    uniform: bool = False  # one set of tokens for all kv heads

    def bound(self, params: Params) -> Score:
        """This score with the weights that were trained for the model; ValueError if there are none."""
        return self

    def for_layer(self, model: ModelConfig, layer: int) -> Score:
        """This score in one layer of a model."""
        return self

    def statistic(self, ev: Evidence) -> Array:
        """f32[B,...]: what a layer says of an uncompressed prompt; f32[B] where a budget is divided by it."""
        raise NotImplementedError  # only of scores that prompt compression or a budget with a `statistic` reads

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

    def rank(self, ev: Evidence) -> Array:
        """f32[B,Hs,S]: the highest stay; +inf is protected, -inf leaves. Among equals the older stays."""
        raise NotImplementedError  # its own in every score, or in what `for_layer` makes of it

    def by_query_head(self, ev: Evidence) -> Array:
        """f32[B,Hs,G,S]: the rank that each query head gives, of which `rank` is the mean; or that one, G = 1."""
        return self.rank(ev)[:, :, None]


@dataclass(frozen=True, kw_only=True)
class ProbeTokens:
    """Tokens that are read after a prompt for their queries alone; nothing of them is kept.

    ids: those of each row; span: the positions of the prompt [first, end) that they ask about, for each row.
    """

    ids: list[list[int]]
    span: list[tuple[int, int]]


Say = Callable[[Any, list[list[int]], int], list[list[int]]]
PROBED = "probed"  # the column that a probe fills, of whatever score has it


class Probe:
    """Queries that a prompt does not have, and what they find out about its tokens."""

    def texts(self, params: Params, rows: list[list[int]], say: Say) -> list[ProbeTokens]:
        """Read one by one after the prompts of these token ids; one program serves those of one padded length.

        say(model, rows, n): the n tokens that a model generates greedily after each row.
        """
        raise NotImplementedError  # its own in every probe

    def observe(self, ev: Evidence, span: Array, old: Array) -> Array:
        """f32[B,H,S]: the column after these queries, ev.new, from the old one; span i32[B,2].

        ev.seen and ev.prompt count the tokens before the probe.
        """
        raise NotImplementedError  # its own in every probe


class Reading(Protocol):
    """The prompts of one call, and the programs that read them into caches."""

    @property
    def params(self) -> Params: ...

    @property
    def rows(self) -> list[list[int]]: ...  # token ids

    def of(self, rows: list[list[int]]) -> Reading:
        """The same of other prompts."""
        ...

    def draft(self, params: Params, config: Any) -> Reading:
        """The same by another model and config."""
        ...

    def empty(self) -> Any:
        """An empty cache of the config."""
        ...

    def absorb(self) -> tuple[Any, Array]:
        """Cache and logits; every layer compresses as soon as it has attended, after each chunk."""
        ...

    def dense(self) -> tuple[Any, Array]:
        """Cache and logits of the prompts in one piece, of which all stays in the recent windows."""
        ...

    def probe(self, dense: Any, probe: Probe) -> Any:
        """That cache after the probe has filled its column."""
        ...

    def statistic(self, dense: Any) -> np.ndarray:
        """f[L,B,...]: what every layer says of its prompt (`Score.statistic`)."""
        ...

    def compress(self, empty: Any, dense: Any) -> Any:
        """The empty cache, of the sizes of a statistic if its budget wants one, after one flush of the other."""
        ...


@part
class Prefill:
    """How a prompt gets into an empty cache. This one: in one pass, whole or in chunks."""

    splits: ClassVar[bool] = True  # a prompt in two pieces gives the same cache, if no token leaves in between
    defers: ClassVar[bool] = False  # all of a prompt stays until all is known, and then it is compressed once
    skips: ClassVar[bool] = False  # tokens of a prompt may never be read
    probe: ClassVar[Probe | None] = None  # queries that the prompt does not have: they fill the column `PROBED`
    beside: ClassVar[str] = ""  # what it does beside one pass, as the predicate of a sentence

    def pruning(self, model: ModelConfig, layer: int) -> Any:
        """The `core.layer.Pruning` of the tokens that go on after a layer, or None: all do."""
        return None

    def check(self, config: Any, model: ModelConfig, chunk: int) -> None:
        """Raise ValueError if it cannot work with the rest of a CacheConfig, or in chunks of `chunk` tokens."""

    def __call__(self, reading: Reading) -> tuple[Any, Array]:
        """The cache after the prompts, and the logits of what comes next."""
        return reading.absorb()


@value
class Counts:
    """Tokens i32[B] of each row: seen, of its prompt, and given after it (`extend`); the others are generated."""

    seen: Array
    prompt: Array
    later: Array

    @property
    def generated(self) -> Array:
        return self.seen - self.prompt - self.later

    def given(self, n: Array, later: bool) -> Counts:
        """After n i32[B] tokens more of the prompt, or of what is given after it."""
        more = {"later": self.later + n} if later else {"prompt": self.prompt + n}
        return replace(self, seen=self.seen + n, **more)


@dataclass(frozen=True, kw_only=True)
class Demand:
    """What a budget is to be divided for: rows of at most `longest` tokens, `new` of them after the prompt.

    recent: newest tokens that stay exact in any case. lengths: of the prompts, with a statistic f[L,B,...] of each
    layer, where the budget wants one and they have been read.
    """

    longest: int
    new: int = 0
    recent: int = 0
    lengths: Sequence[int] = ()
    statistic: np.ndarray | None = None


@part
class LayerSize:
    """What one layer gets of a budget: numbers of tokens of a kv head, recent window included.

    tokens: at most; beyond: so many more for what follows a prompt; points: (mean of all layers, tokens of this one),
    evenly spaced, where the mean follows the row; whole: kv heads that hold every token, and all; first: the most and
    the least that a row has in the first tier, or None: as the tier is configured.
    """

    tokens: int
    beyond: int = 0
    points: tuple[tuple[int, int], ...] = ()
    whole: tuple[int, int] = (0, 1)
    first: tuple[int, int] | None = None

    def within(self, most: int) -> LayerSize:
        """The same where no row has more than `most` tokens."""
        tokens, every = min(self.tokens, most), min(self.tokens + self.beyond, most)
        return replace(self, tokens=tokens, beyond=every - tokens)


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """A budget divided: what each layer gets, and what each row got of it, i[L,B], where a statistic decided."""

    layers: tuple[LayerSize, ...]
    rows: np.ndarray | None = None


class Layer(Protocol):
    """What a budget may know of a layer at a flush."""

    @property
    def size(self) -> LayerSize: ...

    @property
    def recent(self) -> int: ...  # newest tokens that stay exact

    @property
    def unit(self) -> int: ...  # tokens that enter and leave together


class Budget:
    """How many tokens. Shapes are host integers; how much of a shape is used may depend on the row."""

    bounded: bool = True  # fewer tokens than the model's context can be asked for
    statistic: Literal["layer", "ranks"] | None = None  # wanted of prompts: `Score.statistic`, or ranks of all tokens

    def bound(self, params: Params) -> Budget:
        """This budget with what was found out about the model; ValueError if there is nothing."""
        return self

    def of(self, change: Callable[[Any], Budget]) -> Budget:
        """This budget with another size: what `change` makes of the size that it has."""
        return self

    def sizes(self, model: ModelConfig, demand: Demand) -> Sizes:
        """What each layer of a model gets; without the statistic that it wants, what layers get that are all alike."""
        raise NotImplementedError  # its own in every budget

    def limit(self, layer: Layer, counts: Counts, share: Array | None) -> Array:
        """i32[B] tokens that each row of a layer may hold, recent window included; share i32[B]: of `Sizes.rows`."""
        return jnp.full_like(counts.seen, layer.size.tokens)

    def beyond(self, counts: Counts, recent: int) -> Array:
        """i32[B] of these tokens that are kept on top of what the prompt was given."""
        return jnp.zeros_like(counts.seen)


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

    Its arrays, if it has any, are [L,H,...], or [L,1,...] for all kv heads: one head of one layer sees its own part.

    Law: logits(q, c) == q . decode(c) and mix(w, c) == w @ decode(c). A codec that can contract codes without decoding
    them writes these two itself; what is decoded otherwise is one tile.
    """

    grain: int = 1  # tokens that are coded, moved and dropped together
    exact: bool = False  # codes are the numbers themselves: read without a decoded copy, and a merge may change them

    @property
    def label(self) -> str:
        """Its name for people, such as "4 bits"."""
        return type(self).__name__.lower()

    def bound(self, params: Params) -> Codec:
        """This codec with the arrays that were made for the model; ValueError if there are none."""
        return self

    def check(self, dim: int) -> None:
        """Raise ValueError for keys or values of `dim` channels that it cannot keep, naming what would work."""

    def encode(self, x: Array) -> Code:
        """x f[n,D], n a multiple of the grain; the shapes of what it makes are the byte formula."""
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

    def logits(self, q: Array, tile: Code) -> Array:
        """f32[N,n] of queries f32[N,D], unscaled."""
        parts = self.parts(tile)
        qs = jnp.split(q, len(parts), 1)
        return reduce(jnp.add, [jnp.einsum("qd,nd->qn", a, x) for a, x in zip(qs, parts, strict=True)])

    def mix(self, w: Array, tile: Code) -> Array:
        """w f32[N,n] -> f32[N,D]."""
        return jnp.concatenate([jnp.einsum("qn,nd->qd", w, x) for x in self.parts(tile)], 1)


@value
class Lost:
    """Evicted tokens: index i32[B,H,n] in S, S for none; k (rotated), v [B,H,n,D], in a pool [B,1,n,D]."""

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
    """What the evicted leave: kept entries change, or a state beside the tiers does. Its arrays, if any, are [L,...].

    changes: "none"; "some": newcomers before they are encoded, and slots of codecs that are exact; "all": every
    entry at each flush, only for codecs that are exact.
    """

    needs: Needs = Needs()
    changes: Literal["none", "some", "all"] = "some"

    def bound(self, params: Params) -> Merge:
        """This merge with the weights that were trained for the model; ValueError if there are none."""
        return self

    def into(self, ev: Evidence, kept: Array, lost: Lost, entries: Entries) -> tuple[Array, Array, Array]:
        """(i32[B,H,m], k, v f32[B,H,m,D]): which entries of S change, S for none, and into what; kept bool[B,H,S]."""
        raise NotImplementedError  # its own in every merge that changes entries

    def remember(self, ev: Evidence, kept: Array, lost: Lost, entries: Entries) -> Columns:
        """Columns f32[B,H,S] of the entries that stay, after the merge."""
        return ev.columns

    def empty(self, rows: int, model: ModelConfig) -> Any:
        """The state of a layer that has lost nothing: arrays [B,...] or [B,H,...]; None: it has no state."""
        return None

    def absorb(self, state: Any, ev: Evidence, lost: Lost) -> Any:
        """The state with what is evicted at this flush."""
        return state

    def attend(self, state: Any, q: Array, found: Partial, scale: float) -> Partial:
        """Attention of rotated q [B,H,G,T,D] over the state too, where `found` is over everything that is kept."""
        return found


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

    def for_layer(self, model: ModelConfig, layer: int) -> Selector | None:
        """This selector in one layer of a model; None: the layer reads everything."""
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
    """The needs of all parts that are not None."""
    return reduce(or_, (part.needs for part in parts if part is not None), Needs())
