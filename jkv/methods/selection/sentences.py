"""SentenceKV: tokens by the mean keys of their sentences."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import Array

from jkv.arrays.gather import take_along
from jkv.arrays.pytree import part, value
from jkv.methods.eviction.sentences import ENDS, START
from jkv.methods.selection.base import Ranked, Vote, logits
from jkv.protocols import Entered, Look


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
