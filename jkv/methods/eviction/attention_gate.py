"""Attention-Gate: eviction by a gate that reads the whole prompt."""

from __future__ import annotations

from math import inf, log
from typing import TYPE_CHECKING

import jax.numpy as jnp
from jax import Array

from jkv.arrays.pytree import leaf, part
from jkv.io import trained_weights
from jkv.methods.budgets.sizes import Size
from jkv.methods.registry import Axes, method
from jkv.protocols import Born, Columns, Evidence, Needs, Score

if TYPE_CHECKING:
    from jkv.nn.network import Kind, Network

OPEN = 1e4  # column of generated tokens, above anything that a gate returns


@part
class Gated(trained_weights.Bearer, Score):
    """Attention-Gate: drop the prompt tokens whose gate is closed, sigmoid(u) <= threshold.

    `nn.gates.AttentionGate` computes u for each token and kv head from the whole prompt, before the layer attends. A
    dropped token is masked for every query but its own. rank = u, so with a small budget the least certain tokens
    leave; generated tokens stay. Source: Attention-Gate (2410.12876), a reconstruction from its abstract.

    Attributes:
        threshold: Gate value up to which a token is dropped.
        gate: Weights, or None: shipped with jkv for the model.
        models: Fingerprints of the models that the weights were trained for.
    """

    threshold: float = 0.5
    gate: Network | None = leaf(default=None)
    models: tuple[str, ...] = ()

    needs = Needs(chunks="none")
    methods = ("attentiongate",)

    @staticmethod
    def kind() -> Kind:
        from jkv.nn.gates import AttentionGate

        return AttentionGate

    def birth(self, new: Born) -> Columns:
        gate = self.weights
        if new.step:
            return {"open": jnp.full(new.k.shape[:3], OPEN, jnp.float32)}
        return {"open": gate(new.x, jnp.where(new.pos >= 0, 0, -1))}

    def stays(self, u: Array) -> Array:
        """bool: whether the gate of u f32 is open."""
        return u > (log(self.threshold / (1 - self.threshold)) if self.threshold else -inf)

    def expires(self, columns: Columns, pos: Array, slots: int = 0) -> Array:
        return jnp.where(self.stays(columns["open"]), jnp.iinfo(jnp.int32).max, pos)

    def rank(self, ev: Evidence) -> Array:
        return ev.columns["open"]


@method(
    "2410.12876",
    "reconstruction from the abstract; a prompt in one piece; what is generated stays",
    "13.9% more accuracy while 62.8% of the tokens leave, tuned on RTE",
)
def attentiongate(
    size: Size,
    *,
    threshold: float = 0.5,
    gate: str | None = None,
) -> Axes:
    """Attention-Gate: a gate over the whole prompt decides what each head evicts; `gate`: of `jkv train attentiongate`.

    What stays differs from head to head, so the heads of a layer share its budget.
    """
    if not 0 <= threshold < 1:
        raise ValueError(f"attentiongate: threshold={threshold}: of the chance that a token stays, from 0 to below 1")
    score = trained_weights.trained(gate, Gated(threshold=float(threshold)))
    return dict(score=score, budget=size, recent=0, pooled=0.0)
