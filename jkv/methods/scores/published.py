"""Scores by weights that their authors publish (KVzap, DuoAttention)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jkv.arrays.tree import leaf, part, value
from jkv.io import learned, published
from jkv.methods.scores.learned import Trained
from jkv.models import linear
from jkv.protocols import Evidence, Score

if TYPE_CHECKING:
    from jkv.models import ModelConfig, Params


def of_another(name: str, found: tuple[int, ...], model: ModelConfig, own: tuple[int, ...]) -> ValueError:
    """The error for weights of other sizes than the model's."""
    return ValueError(
        f"{name}: the weights are of {list(found)}, and this {model.family} model is of {list(own)}: give those that "
        "were published for it"
    )


@value
class Linear:
    """out x + offset of a block's normed input, for each kv head.

    out f[L,H,E], offset f[L,H]; in a layer's own score without L.
    """

    out: Array
    offset: Array

    axes: ClassVar = dict(out="LHE", offset="LH")

    @property
    def width(self) -> int:
        """Numbers of the input."""
        return self.out.shape[-1]

    def __call__(self, x: Array) -> Array:
        """f32[B,H,T] of x f[B,T,E]."""
        return (linear(self.out, x.astype(jnp.float32)) + self.offset[None, None]).transpose(0, 2, 1)


@value
class Surrogate:
    """out gelu(into x + bias) + offset of a block's normed input, for each kv head.

    into f[L,W,E], bias f[L,W], out f[L,H,W], offset f[L,H]; in a layer's own score without L.
    """

    into: Array
    bias: Array
    out: Array
    offset: Array

    axes: ClassVar = dict(into="LWE", bias="LW", out="LHW", offset="LH")

    @property
    def width(self) -> int:
        """Numbers of the input."""
        return self.into.shape[-1]

    def __call__(self, x: Array) -> Array:
        """f32[B,H,T] of x f[B,T,E]."""
        hidden = jax.nn.gelu(linear(self.into, x.astype(jnp.float32)) + self.bias[None, None], approximate=False)
        return (linear(self.out, hidden) + self.offset[None, None]).transpose(0, 2, 1)


@part
class Repeated(Trained):
    """rank = log of the most attention that a repetition of the text would pay a token, as a surrogate model foresees.

    Of what the surrogate was trained to foresee: KVzap's authors (2601.07891) weigh attention by what a value adds.
    """

    methods, column, kinds = ("kvzap",), "repeated", (Surrogate, Linear)

    def of(self, folder: str) -> Repeated:
        """This score with the weights of a folder: of `jkv train kvzap`, or as `io.published.kvzap` reads it."""
        if (Path(folder).expanduser() / learned.CARD).exists():
            return learned.trained(folder, self)
        arrays = {name: jnp.asarray(x) for name, x in published.kvzap(folder).items()}
        return replace(self, gate=(Surrogate if "into" in arrays else Linear)(**arrays))

    def for_layer(self, model: ModelConfig, layer: int) -> Score:
        if self.gate is not None:
            found, own = (self.gate.out.shape[0], self.gate.width), (model.heads, model.width)
            if found != own:
                raise of_another("kvzap (kv heads, width)", found, model, own)
        return self

    def rank(self, ev: Evidence) -> Array:
        return ev.columns[self.column]


@part
class Whole(Score):
    """Some heads keep everything, the others the newest: rank = +inf, or the position.

    heads f32[L,H]: 1 for a head that keeps everything; None: it has none yet. Source: DuoAttention (2410.10819).
    """

    heads: Array | None = leaf(default=None)

    def bound(self, params: Params) -> Whole:
        self.known  # noqa: B018 - or its error
        return self

    @property
    def known(self) -> Array:
        """Its heads; ValueError with what to give, where there are none."""
        if self.heads is None:
            raise ValueError("duoattention knows no heads yet: give heads='FOLDER', one of its authors' attn_patterns")
        return self.heads

    def for_layer(self, model: ModelConfig, layer: int) -> Score:
        if self.heads is not None and self.heads.shape != (model.heads,):
            raise of_another("duoattention (kv heads)", self.heads.shape, model, (model.heads,))
        return self

    def rank(self, ev: Evidence) -> Array:
        return jnp.where(self.known[None, :, None] > 0, jnp.inf, ev.pos.astype(jnp.float32))


def retrieval(scores: np.ndarray, share: float) -> np.ndarray:
    """bool[L,H]: the heads that keep everything, all but round(share L H) of those that need it least.

    >>> retrieval(np.array([[0.9, 0.1], [0.4, 0.2]]), 0.5).tolist()
    [[True, False], [True, False]]
    """
    out = np.ones(scores.size, bool)
    out[np.argsort(scores, axis=None, kind="stable")[: round(share * scores.size)]] = False
    return out.reshape(scores.shape)


def read_heads(folder: str, share: float) -> tuple[Any, tuple[int, ...], int, int]:
    """`Whole`, how many heads of each layer keep everything, sinks and newest tokens, of a published folder."""
    scores, sinks, recent = published.duoattention(folder)
    whole = retrieval(scores, share)
    return Whole(heads=jnp.asarray(whole, jnp.float32)), tuple(whole.sum(1).tolist()), sinks, recent
