"""Pages by the mean of their keys."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from jkv.arrays.tree import part
from jkv.methods.selectors.ranked import Ranked, Vote
from jkv.protocols import Entered, Look


@part
class Landmark(Ranked):
    """m_j, the mean of the rotated keys of page j, stands for the page: the `pages` of the largest weight are read.

    Weight: softmax_j(q . m_j / sqrt(D)) of each query head, the maximum over G. The `outliers` whose worst key has the
    lowest cosine to its mean, which the mean does not stand for, are read too, and have no weight. Summary: m f32[D],
    that cosine f32 a page. Source: ShadowKV (2410.21465).
    """

    unit: int = 8
    pages: int = 256
    vote: Vote = Vote(soft=True)
    outliers: int = 0

    @property
    def most(self) -> int:
        return self.pages + self.outliers

    def summarize(self, new: Entered) -> tuple[Array, Array]:
        mean = new.k.mean(3)
        size = jnp.linalg.norm(new.k, axis=-1) * jnp.linalg.norm(mean, axis=-1)[..., None]
        return mean, (jnp.einsum("bhnud,bhnd->bhnu", new.k, mean) / jnp.maximum(size, 1e-30)).min(3)

    def score(self, look: Look) -> Array:
        mean, _ = look.summary
        return jnp.einsum("bhgd,bhud->bhgu", look.q.astype(jnp.float32), mean) * look.q.shape[-1] ** -0.5

    def always(self, look: Look) -> Array:
        cosine = jnp.where(look.pos >= 0, look.summary[1], jnp.inf)
        rank = jnp.argsort(jnp.argsort(cosine, -1, stable=True), -1)
        return super().always(look) | (rank < self.outliers)
