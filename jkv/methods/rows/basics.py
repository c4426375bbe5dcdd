"""Rows of the catalogue: what is kept whole, the first methods of every axis, and what is added to others."""

from __future__ import annotations

from jkv.core.evidence import QUERIES
from jkv.io import learned
from jkv.methods.budgets import All, Size
from jkv.methods.catalogue import Axes, row
from jkv.methods.codecs import Affine, Dense, Separable, Sparse
from jkv.methods.config import TierSpec
from jkv.methods.divisions import Above, Pyramid
from jkv.methods.merges import Runs
from jkv.methods.scores.attention import Accumulated, WindowMass
from jkv.methods.scores.hybrid import Counted
from jkv.methods.scores.keys import Expected, KeyNorm, KeyOutlier
from jkv.methods.scores.learned import Retention
from jkv.methods.scores.mixed import Pivots, Salience, Sticky
from jkv.methods.scores.position import Newest, Pool, Protect
from jkv.methods.scores.wrappers import AcrossHeads
from jkv.methods.selectors import forecast
from jkv.methods.selectors.forecast import LEAST_ROWS
from jkv.methods.selectors.quest import PageBound


@row("-", "exact")
def full() -> Axes:
    """Every token, as it is."""
    return dict(score=Newest(), budget=All())


@row(
    "2309.17453",
    "lagged by block - 1",
    "stable over 4 million tokens; up to 22.2x the speed of a sliding window that is computed anew",
)
def streaming(size: Size, *, sinks: int = 4, relative: bool = True) -> Axes:
    """StreamingLLM: the first `sinks` tokens and the newest; positions within the cache, or the true ones."""
    first = TierSpec(k=Dense(), v=Dense(), size=sinks, at="rank")
    return dict(
        score=Protect(score=Newest(), sinks=sinks),
        budget=size,
        tiers=(first, TierSpec()) if relative and sinks else (TierSpec(),),
    )


@row(
    "2306.14048",
    "mass exact, decision lagged by block - 1",
    "with 20% heavy hitters up to 29x, 29x and 3x the throughput of DeepSpeed, Accelerate and FlexGen on OPT",
)
def h2o(size: Size, *, newest: float = 0.5) -> Axes:
    """H2O: heavy hitters of accumulated attention, and the newest `newest` share of the budget."""
    if not 0 <= newest < 1:
        raise ValueError(f"h2o: newest={newest}: the share of the budget for the newest tokens, from 0 to below 1")
    return dict(score=Protect(score=Accumulated(), share=float(newest)), budget=size)


@row(
    "2404.14469",
    "exact in one piece; while generating, the last queries at each flush decide",
    "like the full cache on 16 long-context sets; 3.6x the speed in 8.2x less memory at 16K tokens",
)
def snapkv(
    size: Size,
    *,
    window: int = 32,
    pool: int = 5,
    kind: str = "avg",
) -> Axes:
    """SnapKV: attention from the last `window` queries, pooled over neighbours."""
    return dict(
        score=Pool(score=WindowMass(queries=window), width=pool, kind=kind),
        budget=size,
        recent=window,
    )


@row(
    "2401.06104",
    "prefill exact; while generating, the last query of each block decides",
    "nearly on par with the full model, in some cases with an eighth of the cache and 4.8x the throughput",
)
def tova(size: Size) -> Axes:
    """TOVA: attention from the last query, one set of tokens for all heads."""
    return dict(score=AcrossHeads(score=WindowMass(queries=1)), budget=size, recent=0)


@row(
    "2504.15364",
    "exact for its block form, with chunk = block",
    "within 0.04% of the full cache on LongBench with 8K tokens, Llama-3.1-8B and 3.2-3B",
)
def keydiff(size: Size) -> Axes:
    """KeyDiff: keys unlike the mean direction of the kept keys."""
    return dict(score=KeyOutlier(), budget=size, recent=0)


@row(
    "2406.11430",
    "exact in one piece; decision lagged by block - 1",
    "half of the tokens in language modelling, a tenth for pass keys, without losing accuracy",
)
def knorm(size: Size, *, dense_layers: int = 0) -> Axes:
    """Keys of small norm stay; the first `dense_layers` keep every token, two in the authors' code."""
    if dense_layers < 0:
        raise ValueError(f"knorm: dense_layers={dense_layers}: layers that keep every token, 0 or more")
    return dict(score=KeyNorm(), budget=Above(size=size, layer=dense_layers) if dense_layers else size)


@row("2406.02069", "as snapkv", "like the full cache on LongBench with 12% of it; ahead of the others most at 0.7%")
def pyramidkv(size: Size, *, window: int = 32, pool: int = 5, beta: int = 20) -> Axes:
    """PyramidKV: SnapKV's score, more tokens in the lower layers; the size is their mean."""
    size = size.above("pyramidkv", window, "its observation window")
    return dict(
        score=Pool(score=WindowMass(queries=window), width=pool),
        budget=Pyramid(size=size, window=window, beta=beta),
        recent=window,
    )


@row(
    "2407.11550",
    "as snapkv",
    "better than equal heads on RULER and LongBench, question known or not (no figure in the abstract)",
)
def adakv(
    size: Size,
    *,
    window: int = 32,
    pool: int = 7,
    floor: float = 0.2,
) -> Axes:
    """Ada-KV: SnapKV's score with a maximum over neighbours; the heads of a layer compete for its slots."""
    return dict(
        score=Pool(score=WindowMass(queries=window), width=pool, kind="max"),
        budget=size,
        pooled=float(floor),
        recent=window,
    )


@row("kvpress", "exact in one piece; while generating, statistics of the last 64 queries", "none: what kvpress offers")
def expected_attention(size: Size, *, future: int = 512, sinks: int = 4) -> Axes:
    """ExpectedAttention: attention that the mean future query is expected to pay, times value norms."""
    return dict(score=Protect(score=Expected(future=future, sinks=sinks), sinks=sinks), budget=size)


@row(
    "2512.03324",
    "exact in one piece; while generating, decided every `block` tokens as in the paper",
    "above strong eviction on GSM8K, MATH-500, AIME24, LongProc, LongMemEval, LongBench and SCBench",
)
def trimkv(size: Size, *, gate: str | None = None) -> Axes:
    """TRIM-KV: a trained gate says at birth how slowly a token fades; `gate` is a folder of `jkv train trimkv`."""
    score = learned.trained(gate, Retention())
    return dict(score=score, budget=size, recent=0)


@row(
    "2402.02750",
    "approximation: integers; the tail is exact",
    "2 bits at almost the same quality; 2.6x less peak memory, 2.35x to 3.47x the throughput",
)
def kivi(*, bits: int = 2, group: int = 32, recent: int = 96) -> Axes:
    """KIVI: keys per channel in groups of tokens, values per token in groups of channels; one tail for both."""
    k, v = Affine(bits=bits, axis="channel", group=group), Affine(bits=bits, group=group)
    return dict(codec=(k, v), recent=recent, block=group)


def coded(bits: int, group: int, size: float | None = None) -> TierSpec:
    """A tier of keys by channel and values by token in so many bits; 16 are the plain floats."""
    if bits == 16:
        return TierSpec(k=Dense(), v=Dense(), size=size)
    return TierSpec(k=Affine(bits=bits, axis="channel", group=group), v=Separable(bits=bits, group=group), size=size)


@row(
    "2405.14256",
    "approximation: integers, scales of `group` tokens; nothing is evicted or coded twice",
    "4.98x smaller with 0.38% less on GSM8k, Mistral-7B",
)
def zipcache(
    *, high: int = 4, low: int = 2, share: float = 0.6, group: int = 20, recent: int = 0, block: int = 100
) -> Axes:
    """ZipCache: the salient `share` of the tokens in `high` bits, the others in `low`; 16 bits are the plain floats."""

    if not 0 < share <= 1:
        raise ValueError(f"zipcache: share={share}: the fraction of tokens in {high} bits, above 0 and at most 1")
    tiers = coded(high, group, float(share)), coded(low, group)
    return dict(score=Sticky(score=Salience()), tiers=tiers, recent=recent, block=block)


@row(
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
    """KVMerger (a reconstruction): runs of similar neighbouring keys melt into their most attended token.

    The most attended tokens, as many as a share `alone` of what is kept, are in no run; `width`: times the paper's.
    """
    if not 0 <= alone <= 1:
        raise ValueError(f"kvmerger: alone={alone}: the share of what is kept that is in no run, from 0 to 1")
    return dict(
        score=Counted(score=Pivots(sinks=sinks, threshold=threshold, alone=alone)),
        merge=Runs(width=float(width), sinks=sinks, threshold=threshold, alone=alone),
        budget=size,
    )


@row("-", "approximation: 8-bit integers; the tail is exact")
def int8() -> Axes:
    """Eight bits a number, one scale a token and head."""
    return dict(codec=(Affine(bits=8), Affine(bits=8)))


@row("-", "approximation: 4-bit integers; the tail is exact")
def int4(*, group: int = 32) -> Axes:
    """Four bits a number, one scale a token and group of channels."""
    return dict(codec=(Affine(bits=4, group=group), Affine(bits=4, group=group)))


@row(
    "2505.22913",
    "approximation: the smallest numbers of a token are 0; the tail is exact",
    "70% sparse without loss; 45% of the dense bytes, up to 2.23x the tokens a second",
)
def mustafar(*, sparsity: float = 0.7, recent: int = 32) -> Axes:
    """MUSTAFAR: the largest channels of every key and value, and a bit for each channel."""
    codec = Sparse(sparsity=float(sparsity))
    return dict(codec=(codec, codec), recent=recent)


@row(
    "2406.10774",
    "approximation: reads the pages of highest bound",
    "self-attention up to 2.23x as fast, latency 7.03x lower, with little loss on long contexts",
)
def quest(*, pages: int = 64, page: int = 16, dense_layers: int = 2) -> Axes:
    """Quest: a step reads the pages whose key bounds promise most; the first layers read all.

    It holds every token, and an index: what it saves is reading.
    """
    return dict(select=PageBound(unit=page, pages=pages), dense_layers=tuple(range(dense_layers)))


@row(
    "2502.04077",
    "approximation: reads the pages of highest forecast; rows between flushes know what was read",
    "13x compression, and 5.6x the speed when the cache is offloaded",
)
def attentionpredictor(
    *,
    pages: int = 64,
    page: int = 16,
    sinks: int = 64,
    rows: int = 64,
    dense_layers: int = 2,
    kind: str = "conv",
    predictor: str | None = None,
) -> Axes:
    """AttentionPredictor: pages by a trained forecast of their attention; `predictor` is a folder of `jkv train`.

    It holds every token, and an index: what it saves is reading.
    """
    if kind not in ("conv", "linear"):
        raise ValueError(f"attentionpredictor: kind={kind!r}: 'conv', or 'linear' for the baseline of three numbers")
    if not LEAST_ROWS <= rows <= QUERIES:
        raise ValueError(f"attentionpredictor: rows={rows}: steps of a history, from {LEAST_ROWS} to {QUERIES}")
    if min(pages, page) < 1 or sinks < 0:
        raise ValueError(f"attentionpredictor: pages={pages}, page={page}, sinks={sinks}: 1 or more, sinks 0 or more")
    net, models = (None, ()) if predictor is None else forecast.trained(predictor, kind)
    select = forecast.Forecast(unit=page, pages=pages, sinks=sinks, rows=rows, kind=kind, net=net, models=models)
    return dict(select=select, dense_layers=tuple(range(dense_layers)), recent=64)


@row(
    "2407.11550",
    "changes only how the heads of a layer share its budget",
    "better than equal heads on RULER and LongBench, question known or not (no figure in the abstract)",
)
def pooled(*, floor: float = 0.2) -> Axes:
    """The heads of a layer compete for its slots, each sure of `floor` of an equal share; the bytes stay the same."""
    return dict(pooled=float(floor))


@row(
    "2407.15891",
    "changes only what the evicted leave",
    "over 70% less without noticeable loss, as a part of razorattention",
)
def rest() -> Axes:
    """What a kv head evicts becomes one token more, the mean of all of them, with the weight of all of them."""
    return dict(rest=True)


@row("-", "changes nothing but the budget")
def append() -> Axes:
    """Generated tokens are kept on top of the budget, as the papers that compress only a prompt do."""
    return dict(append=1.0)
