"""SentenceKV: tokens by the mean keys of their sentences, whose boundaries are tracked beside any score."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jkv.arrays.gather import take_along
from jkv.arrays.pytree import leaf, part, value
from jkv.methods.base import Wrapper
from jkv.methods.budgets.sizes import Size
from jkv.methods.eviction.snapkv import snapkv
from jkv.methods.registry import Axes, Positive, method
from jkv.methods.selection.base import Ranked, Vote, logits
from jkv.protocols import Born, Columns, Entered, Evidence, Look

if TYPE_CHECKING:
    from jkv.models import Params

START, ENDS = "sentence", "ends"  # columns: position of the sentence's first token; 1 for its last token
MARKS = re.compile(r"""\s*(?:[.!?…。！？]+["'”’)\]」』]*|\n\s*\n)\s*""")


@value
class Spoken:
    """Memo of sentence means.

    Attributes:
        keys: [B,H,N,D], sums of the keys of sentences.
        tokens: f32[B,H,N], tokens of the sentences.
        asked: f32[B,H,G,D], sum of the queries since the last sentence end.
    """

    keys: Array
    tokens: Array
    asked: Array


@part
class SentenceMeans(Ranked):
    """SentenceKV: read the tokens whose sentence has the highest q . m.

    m is the mean of the sentence's keys and q the sum of the queries since the last sentence end. Within a sentence the
    oldest tokens come first, until `pages` are read. Needs the score `Sentences`. Sentences whose first tokens came
    among the same `least` tokens share a mean, which makes one mean for every `least` slots; where tokens leave, later
    sentences share the means of earlier ones. Summary: the index of the mean, f32 per token. Source: SentenceKV
    (2504.00970), where the first query of a sentence reads everything.
    """

    unit: int = 1
    pages: int = 1024
    sinks: int = 32
    vote: Vote = Vote(join="sum")
    least: int = 8

    remembers = True

    def remember(self, look: Look) -> Spoken:
        b, h, slots = look.pos.shape
        n, d = -(-slots // self.least), look.q.shape[-1]
        return Spoken(
            keys=jnp.zeros((b, h, n, d), look.q.dtype),
            tokens=jnp.zeros((b, h, n)),
            asked=jnp.zeros(look.q.shape, jnp.float32),
        )

    def renew(self, new: Entered) -> Spoken:
        memo, n = new.memo, new.memo.tokens.shape[2]
        of = self._means(new, memo.tokens.sum(-1), n)
        live = jnp.broadcast_to(new.pos[..., 0] >= 0, of.shape)
        add = jax.vmap(jax.vmap(lambda x, at: jax.ops.segment_sum(x, at, n)))
        keys = add(jnp.where(live[..., None], new.k[:, :, :, 0].astype(jnp.float32), 0), of)
        return replace(
            memo,
            keys=(memo.keys.astype(jnp.float32) + keys).astype(memo.keys.dtype),
            tokens=memo.tokens + add(live.astype(jnp.float32), of),
        )

    def summarize(self, new: Entered) -> Array:
        if START not in new.columns:
            raise ValueError(
                "sentences are known by where they begin, which the score Sentences remembers: take that score, and "
                "measure it in a cache (jkv eval attention), not by picks alone"
            )
        came = (new.pos[..., 0] >= 0).sum(-1).astype(jnp.float32)
        return self._means(new, new.memo.tokens.sum(-1) - came, new.memo.tokens.shape[2]).astype(jnp.float32)

    def _means(self, new: Entered, before: Array, n: int) -> Array:
        """i32[B,H,n]: index of the mean, of n, of each newcomer, after f32[B,H] earlier tokens."""
        start = new.columns[START][..., 0]
        begins = jnp.concatenate([jnp.ones_like(start[:, :, :1]), start[:, :, 1:] - start[:, :, :-1]], 2) > 0
        place = before.astype(jnp.int32)[..., None] + jnp.arange(start.shape[2])[None, None]
        return jax.lax.cummax(jnp.where(begins, place, 0), 2) // self.least % n

    def score(self, look: Look) -> Array:
        memo = look.memo
        mean = memo.keys.astype(jnp.float32) / jnp.maximum(memo.tokens, 1)[..., None]
        return take_along(logits(memo.asked, mean), look.summary.astype(jnp.int32)[:, :, None], -1)

    def pick(self, look: Look) -> tuple[Array, Spoken]:
        old, alive = look.memo.asked, look.alive[:, None, None, None]
        asked = old + look.q.astype(jnp.float32)
        units, _ = super().pick(replace(look, memo=replace(look.memo, asked=asked)))
        asked = jnp.where(look.columns[ENDS][:, :, None, None] > 0, 0, asked)
        return units, replace(look.memo, asked=jnp.where(alive, asked, old))


@part
class Sentences(Wrapper):
    """SentenceKV: store the position of each token's sentence start in the column `sentence`, beside any score.

    A sentence ends with a token of `ends` bool[L,V], after `longest` tokens, and where a flush ends. A model without a
    tokenizer has no tokens that end a sentence. Source: SentenceKV (2504.00970), where only these tokens count.
    """

    longest: int = 64
    ends: Array | None = leaf(default=None)

    def bound(self, params: Params) -> Self:
        own = replace(self, score=self.score.bound(params))
        if params.tokenizer is None:
            return own
        table = jnp.asarray(ending(params.tokenizer, params.config.vocab))
        return replace(own, ends=jnp.broadcast_to(table, (params.config.layers, *table.shape)))

    def birth(self, new: Born) -> Columns:
        shape = new.k.shape[:3]
        ends = jnp.zeros(new.ids.shape, bool) if self.ends is None else self.ends[new.ids]
        own = {START: jnp.zeros(shape), ENDS: jnp.broadcast_to(ends[:, None].astype(jnp.float32), shape)}
        return self.score.birth(new) | own

    def observe(self, ev: Evidence) -> Columns:
        columns = ev.columns | self.score.observe(ev)
        pos, ends = ev.window.pos[:, None].astype(jnp.float32), columns[ENDS][:, :, ev.slots :]
        after_gap = (pos[:, :, 1:] != pos[:, :, :-1] + 1) | (ends[:, :, :-1] > 0)
        begins = jnp.pad(after_gap, ((0, 0), (0, 0), (1, 0)), constant_values=True)
        start = jax.lax.cummax(jnp.where(begins, pos, -1), 2)
        start += (pos - start) // self.longest * self.longest
        return columns | {START: jnp.concatenate([columns[START][:, :, : ev.slots], start], 2)}

    def rank(self, ev: Evidence) -> Array:
        return self.score.rank(ev)


@lru_cache(4)
def ending(tokenizer: Any, vocab: int) -> np.ndarray:
    """bool[vocab]: tokens whose whole text is a sentence-ending mark, or a blank line."""
    known = min(tokenizer.vocab_size, vocab)
    return np.array([i < known and bool(MARKS.fullmatch(tokenizer.decode([i]))) for i in range(vocab)])


@method(
    "2504.00970",
    "approximation: the first step of a sentence picks too, where the paper's reads everything; generated tokens come "
    "into means at a flush",
    "better than its rivals on PG-19, LongBench and needles, in less memory at a steady latency (no figure)",
)
def sentencekv(
    size: Size,
    *,
    tokens: Positive = 1024,
    window: Positive = 32,
    pool: Positive = 7,
    sinks: int = 32,
    longest: Positive = 64,
    least: Positive = 8,
    dense_layers: int = 0,
) -> Axes:
    """SentenceKV: SnapKV with a maximum evicts once, then a step reads the sentences whose mean keys fit a query best.

    The query is the sum of those since the last end of a sentence. tokens: that a step reads, the first `sinks` and the
    newest `window` among them; the paper's budget is three times as many. longest: tokens of a sentence, at most;
    least: there is a mean key for every so many tokens kept. Generated tokens are kept on top of the budget.
    """
    if tokens <= sinks + window:
        raise ValueError(f"sentencekv: tokens={tokens}: that a step reads, more than sinks={sinks} and window={window}")
    coarse = snapkv(size, window=window, pool=pool, kind="max")
    select = SentenceMeans(pages=tokens - window, sinks=sinks, first=dense_layers, least=least)
    return coarse | dict(score=Sentences(score=coarse["score"], longest=longest), select=select, append=1.0)
