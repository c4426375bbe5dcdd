"""Budgets divided among layers and heads."""

from __future__ import annotations

from jkv.methods.budgets.layers import Above, Proportional, Pyramid, Split, Weighted
from jkv.methods.budgets.simlayerkv import Lazy
from jkv.methods.budgets.sizes import Size
from jkv.methods.eviction.attention import WindowMass
from jkv.methods.eviction.cake import Dispersed
from jkv.methods.eviction.critic import ByPhase
from jkv.methods.eviction.heads import CHOICE, Keepers, Retrievers
from jkv.methods.eviction.position import Newest, Pool, Protect
from jkv.methods.eviction.smallkv import Assisted
from jkv.methods.eviction.wrappers import AcrossHeads, Anchored, Groups, Units
from jkv.methods.merging.residual import MeanToken, MeanValue
from jkv.methods.prefill.deferred import Deferred
from jkv.methods.registry import Axes, Positive, method


@method("2406.02069", "as snapkv", "like the full cache on LongBench with 12% of it; ahead of the others most at 0.7%")
def pyramidkv(size: Size, *, window: Positive = 32, pool: Positive = 5, beta: Positive = 20) -> Axes:
    """PyramidKV: SnapKV's score, more tokens in the lower layers; the size is their mean."""
    size = size.above("pyramidkv", window, "its observation window")
    return dict(
        score=Pool(score=WindowMass(queries=window), width=pool),
        budget=Pyramid(size=size, window=window, beta=beta),
        recent=window,
    )


@method(
    "2407.11550",
    "as snapkv",
    "better than equal heads on RULER and LongBench, question known or not (no figure in the abstract)",
)
def adakv(
    size: Size,
    *,
    window: Positive = 32,
    pool: Positive = 7,
    floor: float = 0.2,
) -> Axes:
    """Ada-KV: SnapKV's score with a maximum over neighbours; the heads of a layer compete for its slots."""
    return dict(
        score=Pool(score=WindowMass(queries=window), width=pool, kind="max"),
        budget=size,
        pooled=float(floor),
        recent=window,
    )


@method(
    "2503.17922",
    "as snapkv; the layers of a group differ by one token at most",
    "like the full cache on LongBench with 12% of it",
)
def windowkv(
    size: Size, *, window: Positive = 32, unit: int = 8, group: int = 8, beta: Positive = 14, task: str = "qa"
) -> Axes:
    """WindowKV: whole units of neighbours, one choice for all heads, more of them in the lower groups of layers."""
    kinds = {"qa": "half", "summary": "mean"}
    if task not in kinds:
        raise ValueError(f"windowkv: task={task!r}: 'qa' looks for a place in the text, 'summary' for all of it")
    size = size.above("windowkv", window, "its observation window")
    if min(group, unit) < 1:
        raise ValueError(f"windowkv: group={group}, unit={unit}: layers that share a choice, and tokens; 1 or more")
    units = Units(score=WindowMass(queries=window), width=unit, kind=kinds[task])
    return dict(
        score=Groups(score=AcrossHeads(score=units), width=group),
        budget=Pyramid(size=size, window=window, beta=beta, group=group),
        recent=window,
    )


@method(
    "2502.00299",
    "as snapkv, not pooled; the paper's chunks of 10, the one at the border of the budget cut, not dropped",
    "up to 8.7% more precise than token by token at the same compression; 26.5% more throughput with reuse",
)
def chunkkv(size: Size, *, window: Positive = 32, unit: int = 10, reuse: int = 1) -> Axes:
    """ChunkKV: whole chunks of `unit` tokens by their mean attention, one choice for all heads and `reuse` layers."""
    if min(unit, reuse) < 1:
        raise ValueError(f"chunkkv: unit={unit}, reuse={reuse}: tokens, and layers that share a choice; 1 or more")
    chunks = AcrossHeads(score=Units(score=WindowMass(queries=window), width=unit))
    return dict(score=Groups(score=chunks, width=reuse), budget=size, recent=window)


@method(
    "2503.12491",
    "final shares: a prompt is whole until all layers are asked; decode lagged by block - 1",
    "the same performance with 3.2% of the cache; decode over 10x as fast at 128K tokens",
)
def cake(
    size: Size,
    *,
    window: int = 32,
    pool: Positive = 5,
    gamma: float = 200.0,
    tempers: tuple[float, float] = (1.0, 1.0),
    step: int | None = None,
) -> Axes:
    """CAKE: layers whose attention is spread and moves get more of the budget; slots come in steps of `step` tokens."""
    size = size.above("cake", window, "its observation window")
    if len(tempers) != 2 or min(*tempers) <= 0 or (step is not None and step < 1) or gamma < 0:
        raise ValueError(f"cake: tempers={tempers}, step={step}, gamma={gamma}: two above 0, 1 or more, and 0 or more")
    prompt = Dispersed(queries=window, gamma=float(gamma), tempers=(float(tempers[0]), float(tempers[1])))
    return dict(
        score=Pool(score=ByPhase(score=prompt, path=WindowMass(queries=1)), width=pool),
        budget=Proportional(size=size, window=window, step=step),
        prefill=Deferred(),
        recent=window,
    )


@method(
    "2508.02401",
    "as snapkv; needles are answered for the model, which must agree; generated tokens are kept on top",
    "better than earlier eviction on LongBench and with needles (no figure in the abstract)",
)
def compresskv(
    size: Size,
    *,
    window: Positive = 8,
    pool: Positive = 5,
    top: int = 4,
    least: int | None = None,
    heads: str | None = None,
) -> Axes:
    """CompressKV: a layer's `top` retrieval heads choose for all; `heads` is a folder of `jkv calibrate compresskv`."""
    if (least or 0) < 0 or top < 1:
        raise ValueError(f"compresskv: least={least}, top={top}: 0 tokens or more of every layer, and 1 head or more")
    size = size.above("compresskv", window, "its observation window")
    if least:
        size = size.above("compresskv", least, f"least={least}, the part of every layer,")
    score = Retrievers(queries=window, top=top)
    budget = Weighted(size=size, window=window, least=least, method=CHOICE)
    if heads is not None:
        score, budget = score.of(heads), budget.from_folder(heads)
    return dict(score=Pool(score=score, width=pool), budget=budget, recent=window, append=1.0)


@method(
    "2407.15891",
    "reconstruction; heads by repeated random tokens; lagged by block - 1; the paper's local=4000",
    "over 70% less without noticeable loss and without training",
)
def razorattention(
    *,
    local: int = 256,
    share: float = 0.2,
    sinks: int = 4,
    induction: float = 0.14,
    echo: float = 0.01,
    heads: str | None = None,
) -> Axes:
    """RazorAttention: retrieval heads keep all, the others the newest `local` or `share`, and the mean of the rest."""
    if local < 1 or not 0 <= share <= 1 or min(induction, echo) < 0 or max(induction, echo) > 1:
        raise ValueError(
            f"razorattention: local={local}, share={share}, induction={induction}, echo={echo}: 1 token or more, and "
            "fractions from 0 to 1"
        )
    score = Keepers(induction=float(induction), echo=float(echo))
    size = Split(local=local, share=float(share), first=sinks, induction=float(induction), echo=float(echo))
    if heads is not None:
        score, size = score.of(heads), size.from_folder(heads)
    return dict(score=Protect(score=score, sinks=sinks), budget=size, pooled=0.0, merge=MeanToken())


@method(
    "2410.13846",
    "asks the prompt's last token, its code the first answer token; lazy layers go on sliding, there they grow",
    "5x smaller for 1.2% less on average of three models, with 4 bits",
)
def simlayerkv(*, threshold: float = 0.9, local: int = 1024, sinks: int = 4, queries: int = 1) -> Axes:
    """SimLayerKV: lazy layers keep their first `sinks` and newest `local` tokens, the others every token.

    A layer is lazy if the prompt's last `queries` give these tokens more than `threshold` of their attention, which
    the authors set for each model, from 0.65 to 0.9.
    """
    if not 0 < threshold <= 1 or min(local, queries) < 1 or sinks < 0:
        raise ValueError(
            f"simlayerkv: threshold={threshold}, local={local}, queries={queries}, sinks={sinks}: a share of attention "
            "above 0 and at most 1, 1 or more, 1 or more, and 0 or more"
        )
    ends = Protect(score=Newest(), sinks=sinks)
    return dict(
        score=Anchored(score=ends, queries=queries, sinks=sinks, local=local),
        budget=Lazy(tokens=sinks + local, threshold=float(threshold)),
        prefill=Deferred(),
    )


@method(
    "2508.02751",
    "reconstruction: the draft is the model's own first layers; marginal tokens are one mean value",
    "1.75x to 2.56x the throughput of others",
)
def smallkv(size: Size, *, layers: int | None = None, window: Positive = 32, compensate: bool = True) -> Axes:
    """SmallKV: the first `layers` (default: half) keep all; the others what these attend to, and a mean of the evicted.

    The mean weighs what the rest got when it was lost; compensate=False: it is gone without a trace.
    """
    size = size.above("smallkv", window, "its newest queries")
    if layers is not None and layers < 1:
        raise ValueError(f"smallkv: layers={layers}: the model's first layers, which hold every token; 1 or more")
    return dict(
        score=Assisted(queries=window, draft=layers),
        budget=Above(size=size, layer=layers),
        merge=MeanValue(queries=window) if compensate else None,
        recent=window,
    )
