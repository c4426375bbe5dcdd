"""Scores by trained gates: TRIM-KV, Make Each Token Count, Locret."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import jax.numpy as jnp
from jax import Array

from jkv.arrays.pytree import leaf, part
from jkv.io import trained_weights
from jkv.methods.base import Protect
from jkv.methods.budgets.layers import Won
from jkv.methods.budgets.sizes import Size, at_most
from jkv.methods.config import RELATIVE
from jkv.methods.prefill.deferred import Deferred
from jkv.methods.registry import Axes, method
from jkv.protocols import Born, Columns, Evidence, Score

if TYPE_CHECKING:
    from jkv.nn.network import Kind, Network


@part
class Trained(trained_weights.Bearer, Score):
    """Base of scores that a trained gate computes when a token is born and stores in a column.

    Attributes:
        gate: Weights, or None: shipped with jkv for the model.
        models: Fingerprints of the model that the weights were trained for, in each dtype.
    """

    gate: Network | None = leaf(default=None)
    models: tuple[str, ...] = ()

    column: ClassVar[str] = ""

    def birth(self, new: Born) -> Columns:
        return {self.column: self.weights(new.x)}


@part
class Retention(Trained):
    """TRIM-KV: a score at birth that fades with age, rank = (seen + 1 - pos) log beta, in float32.

    Tokens whose beta rounds to 1 rank by age, the oldest last. Source: TRIM-KV (2512.03324).
    """

    methods, column = ("trimkv",), "log_beta"

    @staticmethod
    def kind() -> Kind:
        from jkv.nn.gates import RetentionGate

        return RetentionGate

    def rank(self, ev: Evidence) -> Array:
        age = (ev.seen[:, None, None] + 1 - ev.pos).astype(jnp.float32)
        return age * ev.columns[self.column]


@part
class Outlook(Retention):
    """Make Each Token Count: worth over the next n = `ahead` queries, rank = log sum over m < n of beta^(a+m).

    That is a log beta + log(1 - beta^n) - log(1 - beta) at age a = seen + 1 - pos; n = 1 is `Retention`. Source: Make
    Each Token Count (2605.09649).
    """

    ahead: int = 1

    methods = ("makeeach", "trimkv")

    def rank(self, ev: Evidence) -> Array:
        log_beta = ev.columns[self.column]
        later = jnp.log(jnp.expm1(self.ahead * log_beta) / jnp.expm1(log_beta))
        return super().rank(ev) + later


@part
class Foreseen(Trained):
    """Locret: predicted largest logit that an answer gives a token; it does not fade. Source: 2410.01805."""

    methods, column = ("locret",), "foreseen"

    @staticmethod
    def kind() -> Kind:
        from jkv.nn.gates import Estimate

        return Estimate

    def rank(self, ev: Evidence) -> Array:
        return ev.columns[self.column]


def contest(size: Size, score: Score, step: int | None) -> Axes:
    """The tokens of a prompt, of all layers and heads, compete for one budget."""
    return dict(
        score=score,
        budget=Won(size=size, window=0, step=step),
        prefill=Deferred(),
        pooled=0.0,
        recent=0,
    )


def protected_contest(name: str, size: Size, score: Score, window: int, sinks: int, step: int | None) -> Axes:
    """The tokens of a prompt, of all layers and heads, compete for one budget beside the first and the newest."""
    window = at_most(window, size.tokens, 4)
    if step is not None and step < 1:
        raise ValueError(f"{name}: step={step}: slots, 1 or more")
    size = size.above(name, window + sinks, "its first and newest tokens")
    return contest(size, Protect(score=score, sinks=sinks, newest=window), step)


@method(
    "2512.03324",
    "exact in one piece; while generating, decided every `block` tokens as in the paper",
    "above strong eviction on GSM8K, MATH-500, AIME24, LongProc, LongMemEval, LongBench and SCBench",
)
def trimkv(size: Size, *, gate: str | None = None) -> Axes:
    """TRIM-KV: a trained gate predicts how slowly a new token decays; `gate` is a folder of `jkv train trimkv`."""
    score = trained_weights.trained(gate, Retention())
    return dict(score=score, budget=size, recent=0)


@method(
    "2605.09649",
    "reconstruction: layers compete once, for a prompt that is whole until then; heads at every flush",
    "far less memory at the full cache's quality, or above it (no figure in the abstract)",
)
def makeeach(
    size: Size, *, gate: str | None = None, ahead: int = 1, floor: float = 0.0, step: int | None = None
) -> Axes:
    """Make Each Token Count: TRIM-KV's gates, and the tokens of all layers and heads of a request compete.

    `gate` is a folder of `jkv train makeeach` or `trimkv`; `ahead`: queries that a token is weighed for; `floor`: what
    a head is sure of, as a share of an equal part; slots come in steps of `step` tokens.
    """
    if ahead < 1 or (step is not None and step < 1):
        raise ValueError(f"makeeach: ahead={ahead}, step={step}: each 1 or more")
    score = Outlook(ahead=ahead)
    return dict(
        score=trained_weights.trained(gate, score),
        budget=Won(size=size, window=0, step=step),
        prefill=Deferred(),
        pooled=float(floor),
        recent=0,
    )


@method(
    "2410.01805",
    "reconstruction: heads read the block's input; generated tokens are kept on top",
    "over 20x on Phi-3-mini-128K and 8x on Llama-3.1-8B; 128K tokens on one 4090",
)
def locret(
    size: Size,
    *,
    gate: str | None = None,
    local: int = 100,
    stabilizers: float = 0.0,
) -> Axes:
    """Locret: trained heads say at birth how much an answer will look; `gate` is a folder of `jkv train locret`.

    The last `local` tokens of the prompt stay. In chunks (chunk=3072 in the paper) let the newest `stabilizers` of
    the budget stay at each flush, 0.4 there.
    """
    if not 0 <= stabilizers < 1:
        raise ValueError(f"locret: stabilizers={stabilizers}: the newest share of the budget, from 0 to below 1")
    score = trained_weights.trained(gate, Foreseen())
    return dict(
        score=Protect(score=score, share=float(stabilizers)),
        budget=size,
        tiers=RELATIVE,
        recent=local,
        append=1.0,
    )
