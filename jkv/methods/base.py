"""Parts that several families build on: scores by position and window attention, their wrappers, plain codecs."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jax import Array

from jkv.arrays.gather import take_along
from jkv.arrays.matmul import products
from jkv.arrays.pytree import leaf, part
from jkv.protocols import Born, Code, Codec, Columns, Evidence, KernelCodes, Needs, Score

if TYPE_CHECKING:
    from jkv.cache.cache import Queries
    from jkv.models import ModelConfig, Params


@part
class Newest(Score):
    """Keep the newest tokens: rank = position."""

    uniform = True

    def rank(self, ev: Evidence) -> Array:
        return ev.pos[:, :1].astype(jnp.float32)


def mass(ev: Evidence, queries: Queries, group: str) -> Array:
    """f32[B,H,S]: attention that each key gets from `queries`, summed over them.

    Over G it is summed if `group` is "sum", else averaged.
    """
    total = ev.sums(queries)
    return total if group == "sum" else total / queries.q.shape[2]


def peak_attention(ev: Evidence, queries: Queries) -> Array:
    """f32[B,H,S]: the highest probability that each key gets from one of `queries`."""
    return ev.fold(lambda p, q_pos, pos, index: p.max((2, 3)), queries, jnp.maximum)


def window_attention(ev: Evidence) -> Array:
    """SnapKV, TOVA: attention from the newest queries, s_j = sum_i p[i,j], averaged over G.

    Sources: SnapKV (2404.14469), TOVA (2401.06104: one query).
    """
    assert ev.kept is not None
    return mass(ev, ev.kept, "mean")


@part
class RankBy(Score):
    """A score that is one function of the evidence; `rank_by` makes it. Equal settings share compiled programs.

    Attributes:
        fn: Function (evidence, **options) -> f32[B,Hs,S], defined in a module; the tokens of the highest ranks stay.
        queries: Newest queries that it reads, as `ev.kept`.
        uniform: It ranks alike for all kv heads (Hs = 1).
        options: Its other arguments, by name.
    """

    fn: Callable[..., Array]
    queries: int = 0
    uniform: bool = False
    options: tuple[tuple[str, Any], ...] = ()

    def __repr__(self) -> str:  # without the function's address, which differs from process to process
        given = {"queries": self.queries, "uniform": self.uniform, **dict(self.options)}
        fn = f"{self.fn.__module__}.{self.fn.__qualname__}"
        return f"rank_by({fn}, {', '.join(f'{name}={x!r}' for name, x in given.items())})"

    @property
    def needs(self) -> Needs:
        return Needs(queries=self.queries)

    def rank(self, ev: Evidence) -> Array:
        own = replace(ev, kept=ev.kept.newest(self.queries)) if ev.kept is not None and self.queries else ev
        return self.fn(own, **dict(self.options))


def rank_by(fn: Callable[..., Array], queries: int = 0, uniform: bool = False, **options: Any) -> RankBy:
    """Return the score that ranks tokens by a function.

    Args:
        fn: Function (evidence, **options) -> f32[B,Hs,S] at the top level of a module.
        queries: Newest queries that it reads, as `ev.kept`.
        uniform: It ranks alike for all kv heads (Hs = 1).
        options: Its other arguments: numbers and texts.

    Raises:
        ValueError: The function is a lambda or a closure, or an option is an array or a list.

    >>> rank_by(window_attention, queries=32)
    rank_by(jkv.methods.base.window_attention, queries=32, uniform=False)
    """
    name = getattr(fn, "__qualname__", "<locals>")
    if "<locals>" in name or "<lambda>" in name:
        raise ValueError(
            f"rank_by({fn!r}): programs are compiled anew for each function, and this one is made anew at each call; "
            "define it at the top level of a module, and give what it closes over as keyword arguments of rank_by"
        )
    if wrong := [option for option, x in options.items() if not isinstance(x, Hashable)]:
        raise ValueError(
            f"rank_by({name}): {', '.join(wrong)}: options are numbers and texts, part of a program's key; a score "
            "with arrays is a class of its own, which holds them as leaves"
        )
    return RankBy(fn=fn, queries=queries, uniform=uniform, options=tuple(sorted(options.items())))


@part
class Wrapper(Score):
    """Base of scores that wrap another one; everything but the rank is delegated to it.

    A wrapper that combines the ranks of several tokens leaves out the ranks +inf (protected) and -inf.
    """

    score: Score = leaf()

    @property
    def needs(self) -> Needs:
        return self.score.needs

    @property
    def uniform(self) -> bool:
        return self.score.uniform

    def bound(self, params: Params) -> Score:
        return replace(self, score=self.score.bound(params))

    def for_layer(self, model: ModelConfig, layer: int) -> Score:
        return replace(self, score=self.score.for_layer(model, layer))

    def statistic(self, ev: Evidence) -> Array:
        return self.score.statistic(ev)

    def birth(self, new: Born) -> Columns:
        return self.score.birth(new)

    def expires(self, columns: Columns, pos: Array, slots: int = 0) -> Array | None:
        return self.score.expires(columns, pos, slots)

    def observe(self, ev: Evidence) -> Columns:
        return self.score.observe(ev)


def across(rank: Array) -> Array:
    """f32[B,1,S]: mean rank over heads f32[B,H,S]. +inf in one head protects; -inf needs all heads.

    >>> across(jnp.array([[[1.0, 1.0, -jnp.inf]], [[3.0, jnp.inf, -jnp.inf]]]).reshape(1, 2, 3)).tolist()
    [[[2.0, inf, -inf]]]
    """
    if rank.shape[1] == 1:
        return rank
    finite = jnp.isfinite(rank)
    count = jnp.maximum(finite.sum(1, keepdims=True), 1).astype(jnp.float32)
    mean = jnp.where(finite, rank, 0).sum(1, keepdims=True) / count
    mean = jnp.where((rank == -jnp.inf).all(1, keepdims=True), -jnp.inf, mean)
    return jnp.where((rank == jnp.inf).any(1, keepdims=True), jnp.inf, mean)


@part
class Protect(Wrapper):
    """Never evict the first `sinks` tokens and the newest; rank the rest by `score`.

    Attributes:
        newest: Newest tokens to protect.
        portion: Share of the text that bounds `newest` for prompts of less than `short` tokens.
        short: Prompt length below which `portion` applies; 0: never.
        share: Newest tokens to protect in addition, as a share of what the row may hold. In all no more are protected
            than it may hold.
        prompt: Protect prompt tokens too, of this turn and earlier ones, by the column of `prompt_column`.
    """

    sinks: int = 0
    newest: int = 0
    portion: float = 1.0
    short: int = 0
    share: float = 0.0
    prompt: bool = False

    def birth(self, new: Born) -> Columns:
        if not self.prompt:
            return self.score.birth(new)
        return self.score.birth(new) | prompt_column(new)

    def rank(self, ev: Evidence) -> Array:
        rank = self.score.rank(ev)
        pos = ev.pos[:, : rank.shape[1]]
        newest, whole = jnp.full_like(ev.seen, self.newest), ev.limit + ev.plan.exact
        if self.short:
            few = jnp.floor(self.portion * ev.seen.astype(jnp.float32)).astype(jnp.int32)
            newest = jnp.where(ev.prompt < self.short, jnp.minimum(newest, few), newest)
        if self.share:
            newest = newest + jnp.floor(self.share * whole.astype(jnp.float32)).astype(jnp.int32)
        first = ev.seen - jnp.minimum(newest, whole - self.sinks)
        safe = (pos < self.sinks) | (pos >= first[:, None, None])
        if self.prompt:
            safe = safe | (ev.columns["given"][:, : rank.shape[1]] > 0)
        return jnp.where(safe, jnp.inf, rank)


@part
class Pool(Wrapper):
    """SnapKV's pooling: a sliding mean ("avg") or maximum of odd `width` over the evictable tokens by age.

    The mean divides by `width` at the borders too, as the reference implementations do. Source: SnapKV (2404.14469).
    """

    width: int = 5
    kind: str = "avg"

    def rank(self, ev: Evidence) -> Array:
        rank = self.score.rank(ev)
        heads = rank.shape[1]
        order = ev.chronological(heads)
        may_go = (ev.may_go & ev.live)[:, :heads] & jnp.isfinite(rank)
        empty = 0.0 if self.kind == "avg" else -jnp.inf
        x = take_along(jnp.where(may_go, rank, empty), order, -1)
        half, n = self.width // 2, x.shape[-1]
        padded = jnp.pad(x, ((0, 0), (0, 0), (half, half)), constant_values=empty)
        shifted = jnp.stack([padded[..., i : i + n] for i in range(self.width)])
        pooled = shifted.sum(0) / self.width if self.kind == "avg" else shifted.max(0)
        back = jnp.argsort(order, -1)
        return jnp.where(may_go, take_along(pooled, back, -1), rank)


def prompt_column(new: Born) -> Columns:
    """The column "given": 1 for prompt tokens of any turn, 0 for generated tokens."""
    return {"given": jnp.full(new.k.shape[:3], 0.0 if new.step else 1.0, jnp.float32)}


@part
class Dense(Codec):
    """Floats of the cache's own dtype, exact."""

    exact = True

    def encode(self, x: Array) -> Code:
        return Code(slots=x)

    def decode(self, code: Code) -> Array:
        return code.slots.astype(jnp.float32)

    def kernel_codes(self, code: Code) -> KernelCodes:
        return KernelCodes(codes=code.slots)

    def logits(self, q: Array, tile: Code) -> Array:
        return products(q.astype(tile.slots.dtype), tile.slots)

    def mix(self, w: Array, tile: Code) -> Array:
        x: Any = tile.slots
        return jnp.einsum("qn,nd->qd", w.astype(x.dtype), x, preferred_element_type=jnp.float32)


@part
class Within(Codec):
    """Values that are the last channels of their keys, from `first` on, without a code of their own."""

    within = True

    keys: Codec = leaf()
    first: int

    @property
    def label(self) -> str:
        return "within keys"

    @property
    def grain(self) -> int:
        return self.keys.grain

    @property
    def exact(self) -> bool:
        return self.keys.exact

    def encode(self, x: Array) -> Code:
        return Code(slots=())

    def decode(self, code: Code) -> Array:
        return self.keys.decode(code)[:, self.first :]

    def mix(self, w: Array, tile: Code) -> Array:
        return self.keys.mix(w, tile)

    def output(self, acc: Array, l: Array) -> Array:  # noqa: E741
        return self.keys.output(acc, l)[:, self.first :]
