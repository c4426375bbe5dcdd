"""jkv's utility score: a lookup term that does not fade plus a term that fades with age."""

from __future__ import annotations

from typing import ClassVar

import jax.numpy as jnp
from jax import Array

from jkv.arrays.pytree import part, value
from jkv.io import trained_weights
from jkv.methods.budgets.sizes import Size
from jkv.methods.eviction.author_gates import Surrogate
from jkv.methods.eviction.trained_gates import Gate, Trained, protected_contest
from jkv.methods.registry import Axes, method
from jkv.protocols import Born, Columns, Evidence


@value
class Twofold:
    """A `Surrogate` that predicts lookups, a `Gate` that predicts how fast the rest fades, and the rest's level.

    into f[L,W,E], bias f[L,W], out f[L,H,W], offset f[L,H] of the surrogate; the fade_ arrays of the gate, with another
    W; level f[L,H], in nats. In a layer's own score the arrays have no axis L.
    """

    into: Array
    bias: Array
    out: Array
    offset: Array
    fade_into: Array
    fade_bias: Array
    fade_out: Array
    fade_offset: Array
    level: Array

    axes: ClassVar = dict(
        into="LWE",
        bias="LW",
        out="LHW",
        offset="LH",
        fade_into="LVE",
        fade_bias="LV",
        fade_out="LHV",
        fade_offset="LH",
        level="LH",
    )

    @property
    def foreseen(self) -> Surrogate:
        return Surrogate(into=self.into, bias=self.bias, out=self.out, offset=self.offset)

    @property
    def fading(self) -> Gate:
        return Gate(into=self.fade_into, bias=self.fade_bias, out=self.fade_out, offset=self.fade_offset)

    def worth(self, foreseen: Array, log_beta: Array, age: Array) -> Array:
        """f32[B,H,T]: log(exp(foreseen) + exp(level) beta^age) of one layer, for ages f32[B,1 or H,T]."""
        return jnp.logaddexp(foreseen, self.level[None, :, None] + age * log_beta)


def joined(foreseen: Surrogate, fading: Gate) -> Twofold:
    """Combine both, with a level of 0."""
    faded = {f"fade_{name}": x for name, x in vars(fading).items()}
    return Twofold(**vars(foreseen), **faded, level=jnp.zeros_like(foreseen.offset))


@part
class Utility(Trained):
    """rank = log(exp(r) + exp(level) beta^age), in nats: r does not fade, beta^age does; age = seen + 1 - pos."""

    methods, kinds = ("utility",), (Twofold,)

    def birth(self, new: Born) -> Columns:
        gate = self.weights
        return {"foreseen": gate.foreseen(new.x), "log_beta": gate.fading(new.x)}

    def rank(self, ev: Evidence) -> Array:
        age = (ev.seen[:, None, None] + 1 - ev.pos).astype(jnp.float32)
        return self.weights.worth(ev.columns["foreseen"], ev.columns["log_beta"], age)


@method("-", "jkv's own: the gates of kvzap and trimkv, weighed head by head, in the contest of makeeach")
def utility(
    size: Size,
    *,
    window: int = 32,
    sinks: int = 4,
    step: int | None = None,
    gate: str | None = None,
) -> Axes:
    """What a question may look up stays, what the next lines need fades: the tokens of all layers and heads compete.

    rank = log(exp(r) + exp(level) beta^age), r of KVzap's gate, beta of TRIM-KV's, weighed by `jkv train utility`:
    `gate` is a folder of it. The first `sinks` and the newest `window` stay; slots come in steps of `step` tokens
    (None: a quarter of the budget).
    """
    return protected_contest("utility", size, trained_weights.trained(gate, Utility()), window, sinks, step)
