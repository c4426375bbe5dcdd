"""Training Attention-Gate: a gate over a whole prompt decides which of its tokens later queries do not see.

The last `answer` tokens of a text answer the others. A key of the prompt that is not kept is out of everybody's sight
but its own. Whether it is kept is drawn, softly: z = `losses.drawn(u)`, and a logit has log sigmoid(z) on it; the flag
k that is counted is hard, 1 where z > 0, with the gradient of sigmoid(z). Only the answer's tokens are learned from: a
look that sees later tokens would tell the prompt's own ones. Of a layer alone, whose loss is what is left of attention,
all queries are: what prompts do not see of themselves is lost to all layers.

    loss = cross-entropy of the answer + weight |mean k - share|

Source: Attention-Gate (2410.12876), a reconstruction from its abstract; the draws, in place of hard flags with a
straight-through gradient, are ours: what is shut for good never learns that it is missed.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from jkv.arrays.pytree import part
from jkv.methods.eviction.attention_gate import Gated
from jkv.models import Projected
from jkv.training.distillation import layerwise
from jkv.training.losses import Batch, drawn, flagged
from jkv.training.soft_cache_model import Bias


@part
class Recipe(layerwise.Recipe):
    """How flags are trained: the last `answer` tokens of a text are learned from; `share` of the others are to stay.

    A layer alone is asked for no share: it pays `price` nats for all of its tokens, and as much less as it shuts. So
    the heads that can spare tokens shut them.
    """

    early: float = 1e-2
    answer: int = 256
    share: float = 0.5
    price: float = 0.75

    def bias(self, score: Gated, batch: Batch, key: Array) -> Bias:
        return closing(score, batch, prompt(batch, self.answer), key)

    def counted(self, memos: tuple[Array, ...], batch: Batch, step: Array | int) -> tuple[Array, dict[str, Array]]:
        """|mean k - share|, and the mean of the flags of all prompts."""
        kept = staying(memos, batch, self.answer)
        return jnp.abs(kept - self.share), {"kept": kept}

    def alone(self, memo: Array, batch: Batch) -> Array:
        return self.price * staying((memo,), batch, self.answer)

    def told(self, kl: Array, ce: Array) -> Array:
        return ce

    def judged(self, batch: Batch) -> Array:
        return ~prompt(batch, self.answer)


def prompt(batch: Batch, answer: int) -> Array:
    """bool[B,T]: the tokens of each row but its last `answer`.

    >>> prompt(Batch(ids=jnp.array([[5, 6, 7, -1]]), pos=jnp.array([[0, 1, 2, -1]])), 1).tolist()
    [[True, True, False, False]]
    """
    live = batch.pos >= 0
    return live & (jnp.cumsum(live, 1) <= live.sum(1, keepdims=True) - answer)


def staying(memos: tuple[Array, ...], batch: Batch, answer: int) -> Array:
    """The mean of the flags of all prompts, layers and heads."""
    asked = prompt(batch, answer)
    count = asked.sum().astype(jnp.float32) * len(memos) * memos[0].shape[1]
    return sum(jnp.where(asked[:, None], k, 0).sum() for k in memos) / jnp.maximum(count, 1)


def closing(score: Gated, batch: Batch, asked: Array, key: Array) -> Bias:
    """The bias of Attention-Gate on the keys asked bool[B,T]; the memo is k f32[B,H,T], 1 for the others."""
    of = jnp.where(asked, batch.document, -1)

    def bias(i: int, a: Projected, age: Array) -> tuple[Array, Array]:
        z = drawn(jax.tree.map(lambda x: x[i], score.gate)(a.x, of), jax.random.fold_in(key, i))
        shut = jnp.where(asked[:, None], jax.nn.log_sigmoid(z), 0)[:, :, None]
        return jnp.where((age > 0)[:, None], shut, 0), jnp.where(asked[:, None], flagged(z), 1)

    return bias
