"""Eviction by trained gates."""

from __future__ import annotations

from jkv.io import learned
from jkv.methods.budgets import Size, at_most
from jkv.methods.catalogue import Axes, row
from jkv.methods.config import RELATIVE
from jkv.methods.divisions import Weighted, Won
from jkv.methods.prefills import Deferred
from jkv.methods.scores import delayed, gated
from jkv.methods.scores.learned import Foreseen, Outlook, Retention
from jkv.methods.scores.position import Protect


@row(
    "2512.03324",
    "exact in one piece; while generating, decided every `block` tokens as in the paper",
    "above strong eviction on GSM8K, MATH-500, AIME24, LongProc, LongMemEval, LongBench and SCBench",
)
def trimkv(size: Size, *, gate: str | None = None) -> Axes:
    """TRIM-KV: a trained gate predicts how slowly a new token decays; `gate` is a folder of `jkv train trimkv`."""
    score = learned.trained(gate, Retention())
    return dict(score=score, budget=size, recent=0)


@row(
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
        score=learned.trained(gate, score),
        budget=Won(size=size, window=0, step=step),
        prefill=Deferred(),
        pooled=float(floor),
        recent=0,
    )


@row(
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
    score = learned.trained(gate, Foreseen())
    return dict(
        score=Protect(score=score, share=float(stabilizers)),
        budget=size,
        tiers=RELATIVE,
        recent=local,
        append=1.0,
    )


@row(
    "2506.05345",
    "reconstruction, its adapter form; a prompt in one piece exact; then marked tokens leave at a flush",
    "8x in a thousand steps of training, more accurate than training-free sparse attention",
)
def dms(
    size: Size,
    *,
    window: int | None = None,
    gate: str | None = None,
) -> Axes:
    """DMS: a trained switch marks tokens at birth; those leave once `window` tokens old. `gate`: of `jkv train dms`.

    What stays differs by layers and heads: the size is divided among layers by what stayed of the texts that the
    switch was trained on, and the heads of a layer share its part.
    """
    window = at_most(128, size.tokens, 2) if window is None else window
    if window < 0:
        raise ValueError(f"dms: window={window}: tokens that a marked one still lives, 0 or more")
    size = size.above("dms", window, "its window")
    # some layers want only a few tokens beyond the window: with coarser steps they had none
    budget = Weighted(size=size, least=window, method="dms", steps=20)
    score = learned.trained(gate, delayed.Delayed(window=window))
    budget = budget if gate is None else budget.from_folder(gate)
    return dict(score=score, budget=budget, pooled=0.0)


@row(
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
    score = learned.trained(gate, gated.Gated(threshold=float(threshold)))
    return dict(score=score, budget=size, recent=0, pooled=0.0)
