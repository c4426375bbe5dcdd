"""jkv's utility score: a lookup term that does not fade plus a term that fades with age."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp
from jax import Array

from jkv.arrays.pytree import part
from jkv.io import trained_weights
from jkv.methods.budgets.sizes import Size
from jkv.methods.eviction.trained_gates import Trained, protected_contest
from jkv.methods.registry import Axes, method
from jkv.protocols import Born, Columns, Evidence

if TYPE_CHECKING:
    from jkv.nn.network import Kind


@part
class Utility(Trained):
    """rank = log(exp(r) + exp(level) beta^age), in nats: r does not fade, beta^age does; age = seen + 1 - pos."""

    methods = ("utility",)

    @staticmethod
    def kind() -> Kind:
        from jkv.nn.gates import UtilityGate

        return UtilityGate

    def birth(self, new: Born) -> Columns:
        gate = self.weights.module
        return {"foreseen": gate.foreseen(new.x), "log_beta": gate.fading(new.x)}

    def rank(self, ev: Evidence) -> Array:
        age = (ev.seen[:, None, None] + 1 - ev.pos).astype(jnp.float32)
        return self.weights.module.worth(ev.columns["foreseen"], ev.columns["log_beta"], age)


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
