"""Merging: evicted tokens go into tokens that stay."""

from __future__ import annotations

from jkv.io import trained_weights
from jkv.methods.budgets.sizes import Size
from jkv.methods.eviction.attention import Accumulated, Latest, WindowMass
from jkv.methods.eviction.critic import ByPhase, Counted, Even, Plus, Remembered
from jkv.methods.eviction.position import Oldest, Protect
from jkv.methods.eviction.salience import Pivots
from jkv.methods.eviction.wrappers import AcrossHeads, PerQuery
from jkv.methods.merging.lococo import Mixtures
from jkv.methods.merging.weighted import Nearest, Runs, ZeroClass
from jkv.methods.registry import Axes, Positive, method


@method(
    "2407.08454",
    "reconstruction; lagged by block - 1; into int tiers only newcomers merge",
    "better than H2O and CaM on LongBench and ZeroScrolls with half and 35% of the cache",
)
def kvmerger(
    size: Size,
    *,
    sinks: int = 4,
    width: float = 1.0,
    threshold: float | None = None,
    alone: float = 0.5,
) -> Axes:
    """KVMerger (a reconstruction): runs of similar neighbouring keys merge into their most attended token.

    The most attended tokens, as many as a share `alone` of what is kept, are in no run; `width`: times the paper's.
    """
    if not 0 <= alone <= 1:
        raise ValueError(f"kvmerger: alone={alone}: the share of what is kept that is in no run, from 0 to 1")
    return dict(
        score=Counted(score=Pivots(sinks=sinks, threshold=threshold, alone=alone)),
        merge=Runs(width=float(width), sinks=sinks, threshold=threshold, alone=alone),
        budget=size,
    )


@method(
    "2407.18121",
    "exact in one piece for the prompt; while generating lagged by block - 1",
    "better generation than pruning at any rate of acceleration (no figure in the abstract)",
)
def elasticcache(size: Size, *, sinks: int = 4, newest: int = 25) -> Axes:
    """Elastic Cache: a prompt merges into its most attended tokens; then tokens just older than `newest` leave."""
    size = size.above("elasticcache", newest, "its newest tokens")
    prompt = Protect(score=AcrossHeads(score=Accumulated()), sinks=sinks, newest=1)
    return dict(
        score=Counted(score=ByPhase(score=prompt, path=Oldest(newest=newest), once=True)),
        merge=Nearest(sinks=sinks),
        budget=size,
        recent=1,
    )


@method(
    "2412.08521",
    "reconstruction; none go into the recent window; lagged by block - 1; into int tiers only newcomers",
    "1.28 points more on LongBench with 256 tokens; 95% of needles with less than 2% of the context",
)
def ems(
    size: Size,
    *,
    window: Positive = 32,
    candidates: int = 64,
    threshold: float = 0.6,
) -> Axes:
    """EMS: the best `candidates` of the evicted merge into the kept token of the most similar key, or are dropped."""
    size = size.above("ems", window, "its window")
    if candidates < 1:
        raise ValueError(f"ems: candidates={candidates}: evicted tokens that may be merged at a time, 1 or more")
    parts = PerQuery(score=Accumulated()), WindowMass(queries=window)
    score = Plus(scores=tuple(Even(score=x) for x in parts), weights=(1.0, 1.0))
    return dict(
        score=Counted(score=Remembered(score=score)),
        merge=ZeroClass(candidates=candidates, threshold=float(threshold)),
        budget=size,
        recent=window,
    )


@method(
    "2406.05317",
    "reconstruction: trained layer by layer; scores of a group are summed; decode every block of steps",
    "3,482 tokens in 128 slots, up to 0.2791 more accuracy than others of that size",
)
def lococo(size: Size, *, gate: str | None = None, chunk: int = 512, local: int = 0) -> Axes:
    """LoCoCo: tokens of the least attention merge into trained mixtures; `gate` is of `jkv train lococo`.

    Of the size, as many tokens are mixtures as were trained, half of it there; the others stay as they are, and
    so do the newest `local`. A prompt is read in pieces of `chunk` tokens (0: in one).
    """
    merge = trained_weights.trained(gate, Mixtures())
    if gate is not None and merge.weights.conv.shape[1] % 2 == 0:
        raise trained_weights.broken(gate, "its convolution has no entry in the middle")
    size = size.above("lococo", local + merge.count, "its newest tokens and its mixtures")
    return dict(score=Latest(), merge=merge, budget=size, recent=local, chunk=chunk)
