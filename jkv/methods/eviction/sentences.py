"""Sentence boundaries, tracked beside any score."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jkv.arrays.pytree import leaf, part
from jkv.methods.eviction.position import Wrapper
from jkv.protocols import Born, Columns, Evidence

if TYPE_CHECKING:
    from jkv.models import Params

START, ENDS = "sentence", "ends"  # columns: position of the sentence's first token; 1 for its last token
MARKS = re.compile(r"""\s*(?:[.!?…。！？]+["'”’)\]」』]*|\n\s*\n)\s*""")


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
