"""Recipe of Attention-Gate: a gate over the whole prompt decides which tokens later queries cannot see.

The last `answer` tokens of a text answer the rest, the prompt. A dropped prompt key is masked for every query but the
token's own. Dropping is drawn softly: z = `losses.drawn(u)`, and log sigmoid(z) is added to the logit. The counted flag
k is hard, 1 where z > 0, with the gradient of sigmoid(z). The loss covers the answer only, because a gate that sees
later tokens would leak the prompt's own next tokens. A layer trained alone, with the attention left as its loss, uses
all queries, because what prompts do not see of themselves is lost to later layers.

    loss = cross-entropy of the answer + weight |mean k - share|

Source: Attention-Gate (2410.12876), reconstructed from its abstract. The soft draws, instead of hard flags with a
straight-through gradient, are ours: a key that is dropped for certain gets no gradient that would restore it.
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
    """Recipe of a gate.

    A layer trained alone has no target share. It pays `price` nats if it keeps everything, and proportionally less for
    what it drops, so that the heads that need few tokens drop the others.

    Attributes:
        early: Peak learning rate of the layer-wise warm start.
        answer: Last tokens of a text, which the loss covers.
        share: Target share of the prompt's tokens that are kept.
        price: Penalty in nats for keeping all tokens in the layer-wise warm start.
    """

    early: float = 1e-2
    answer: int = 256
    share: float = 0.5
    price: float = 0.75

    def bias(self, score: Gated, batch: Batch, key: Array) -> Bias:
        return closing(score, batch, prompt(batch, self.answer), key)

    def counted(self, memos: tuple[Array, ...], batch: Batch, step: Array | int) -> tuple[Array, dict[str, Array]]:
        """Compute |mean k - share|, and the mean flag over all prompts."""
        kept = staying(memos, batch, self.answer)
        return jnp.abs(kept - self.share), {"kept": kept}

    def alone(self, memo: Array, batch: Batch) -> Array:
        return self.price * staying((memo,), batch, self.answer)

    def told(self, kl: Array, ce: Array) -> Array:
        return ce

    def judged(self, batch: Batch) -> Array:
        return ~prompt(batch, self.answer)


def prompt(batch: Batch, answer: int) -> Array:
    """Return bool[B,T], the tokens of each row except the last `answer`.

    >>> prompt(Batch(ids=jnp.array([[5, 6, 7, -1]]), pos=jnp.array([[0, 1, 2, -1]])), 1).tolist()
    [[True, True, False, False]]
    """
    live = batch.pos >= 0
    return live & (jnp.cumsum(live, 1) <= live.sum(1, keepdims=True) - answer)


def staying(memos: tuple[Array, ...], batch: Batch, answer: int) -> Array:
    """Compute the mean flag over all prompts, layers and heads."""
    asked = prompt(batch, answer)
    count = asked.sum().astype(jnp.float32) * len(memos) * memos[0].shape[1]
    return sum(jnp.where(asked[:, None], k, 0).sum() for k in memos) / jnp.maximum(count, 1)


def closing(score: Gated, batch: Batch, asked: Array, key: Array) -> Bias:
    """Return Attention-Gate's bias on the keys in asked bool[B,T]; the memo is k f32[B,H,T], 1 for other keys."""
    of = jnp.where(asked, batch.document, -1)

    def bias(i: int, a: Projected, age: Array) -> tuple[Array, Array]:
        z = drawn(score.weights.part(i)(a.x, of), jax.random.fold_in(key, i))
        shut = jnp.where(asked[:, None], jax.nn.log_sigmoid(z), 0)[:, :, None]
        return jnp.where((age > 0)[:, None], shut, 0), jnp.where(asked[:, None], flagged(z), 1)

    return bias
