"""Eviction without training: by attention, keys or position."""

from __future__ import annotations

from jkv.methods.budgets.layers import Above
from jkv.methods.budgets.sizes import Keep, Size, at_most
from jkv.methods.config import RELATIVE, TierSpec
from jkv.methods.eviction.attention import Accumulated, EvenMass, PathMass, Persistence, Recurrence, WindowMass
from jkv.methods.eviction.critic import Entropy, Gradient, Normalised, Plus
from jkv.methods.eviction.keys import Expected, KeyNorm, KeyOutlier
from jkv.methods.eviction.layered import Contest, Ladder
from jkv.methods.eviction.position import Newest, Pool, Protect
from jkv.methods.eviction.random import Random
from jkv.methods.eviction.redundancy import PeakMass, Redundancy
from jkv.methods.eviction.wrappers import AcrossHeads, Critical, PerQuery, Representatives
from jkv.methods.quantization import Dense
from jkv.methods.registry import Axes, Positive, method

MOST = Keep(keep=0.7)


@method(
    "2309.17453",
    "lagged by block - 1",
    "stable over 4 million tokens; up to 22.2x the speed of a sliding window that is computed anew",
)
def streaming(size: Size, *, sinks: int = 4, relative: bool = True) -> Axes:
    """StreamingLLM: the first `sinks` tokens and the newest; positions within the cache, or the true ones."""
    first = TierSpec(k=Dense(), v=Dense(), size=sinks, rope="rank")
    return dict(
        score=Protect(score=Newest(), sinks=sinks),
        budget=size,
        tiers=(first, TierSpec()) if relative and sinks else (TierSpec(),),
    )


@method("-", "exact: a hash for its random numbers, the same in every batch")
def random(size: Size, *, seed: int = 0) -> Axes:
    """Tokens by chance, other ones in every head and layer: the baseline that every method must beat."""
    return dict(score=Random(seed=seed), budget=size)


@method(
    "2306.14048",
    "mass exact, decision lagged by block - 1",
    "with 20% heavy hitters up to 29x, 29x and 3x the throughput of DeepSpeed, Accelerate and FlexGen on OPT",
)
def h2o(size: Size, *, newest: float = 0.5) -> Axes:
    """H2O: heavy hitters of accumulated attention; a share `newest` of the budget is for the newest tokens."""
    if not 0 <= newest < 1:
        raise ValueError(f"h2o: newest={newest}: the share of the budget for the newest tokens, from 0 to below 1")
    return dict(score=Protect(score=Accumulated(), share=float(newest)), budget=size)


@method(
    "2404.14469",
    "exact in one piece; while generating, the last queries at each flush decide",
    "like the full cache on 16 long-context sets; 3.6x the speed in 8.2x less memory at 16K tokens",
)
def snapkv(
    size: Size,
    *,
    window: Positive = 32,
    pool: Positive = 5,
    kind: str = "avg",
) -> Axes:
    """SnapKV: attention from the last `window` queries, pooled over neighbours."""
    return dict(
        score=Pool(score=WindowMass(queries=window), width=pool, kind=kind),
        budget=size,
        recent=window,
    )


@method(
    "2408.00167",
    "exact in one piece, for a question of `window` tokens; in chunks it is read once, after all of them",
    "long inputs up to 93x smaller with their meaning kept, without fine-tuning",
)
def finch(size: Size, *, window: Positive = 32) -> Axes:
    """FINCH: attention from the question, a prompt's last `window` tokens, times how many tokens each of them sees.

    Positions within the cache; what is generated is kept on top.
    """
    return dict(score=EvenMass(queries=window), budget=size, tiers=RELATIVE, recent=window, append=1.0)


@method(
    "2502.03805",
    "as snapkv, which it wraps here; a pool of heads (pooled) ranks all of them so, not each by its part",
    "more than half of the loss of SnapKV and others gone on 29 sets (no figure of memory in the abstract)",
)
def criticalkv(
    size: Size, *, window: Positive = 32, pool: Positive = 5, share: float = 0.5, epsilon: float = 1e-4
) -> Axes:
    """CriticalKV: half of the budget by SnapKV's score, the rest by it times what a value adds to the layer's output.

    epsilon: added to the mean attention, so that a large value counts though nobody looked.
    """
    if not 0 <= share <= 1 or epsilon < 0:
        raise ValueError(f"criticalkv: share={share}, epsilon={epsilon}: a part of the budget, from 0 to 1; 0 or more")
    seen = Pool(score=WindowMass(queries=window), width=pool)
    score = Critical(score=seen, share=float(share), epsilon=float(epsilon) * window)  # the score is a sum of so many
    return dict(score=score, budget=size, recent=window)


@method(
    "2401.06104",
    "prefill exact; while generating, the last query of each block decides",
    "nearly on par with the full model, in some cases with an eighth of the cache and 4.8x the throughput",
)
def tova(size: Size) -> Axes:
    """TOVA: attention from the last query, one set of tokens for all heads."""
    return dict(score=AcrossHeads(score=WindowMass(queries=1)), budget=size, recent=0)


@method(
    "2504.15364",
    "exact for its block form, with chunk = block",
    "within 0.04% of the full cache on LongBench with 8K tokens, Llama-3.1-8B and 3.2-3B",
)
def keydiff(size: Size) -> Axes:
    """KeyDiff: keys unlike the mean direction of the kept keys."""
    return dict(score=KeyOutlier(), budget=size, recent=0)


@method(
    "2406.11430",
    "exact in one piece; decision lagged by block - 1",
    "half of the tokens in language modelling, a tenth for pass keys, without losing accuracy",
)
def knorm(size: Size, *, dense_layers: int = 0) -> Axes:
    """Keys of small norm stay; the first `dense_layers` keep every token, two in the authors' code."""
    if dense_layers < 0:
        raise ValueError(f"knorm: dense_layers={dense_layers}: layers that keep every token, 0 or more")
    return dict(score=KeyNorm(), budget=Above(size=size, layer=dense_layers) if dense_layers else size)


@method(
    "kvpress", "exact in one piece; while generating, statistics of the last 64 queries", "none: what kvpress offers"
)
def expected_attention(size: Size, *, future: int = 512, sinks: int = 4) -> Axes:
    """ExpectedAttention: attention that the mean future query is expected to pay, times value norms."""
    return dict(score=Protect(score=Expected(future=future, sinks=sinks), sinks=sinks), budget=size)


@method(
    "2407.20485",
    "exact in one piece; decision lagged by block - 1",
    "up to 7.8% and 5.1% more accuracy than plain sums, LLaMA 2, one and no example",
)
def a2sf(size: Size, *, decay: float = 0.95, sinks: int = 0) -> Axes:
    """A2SF: accumulated attention, decayed by the factor `decay` per query."""
    if not 0 <= decay < 1:
        raise ValueError(f"a2sf: decay={decay}: from 0 (the last query decides) to below 1 (h2o never forgets)")
    return dict(score=Protect(score=Accumulated(decay=float(decay)), sinks=sinks), budget=size)


@method(
    "2305.17118",
    "reconstruction; drops 64 tokens at a time at most, the paper half of its cache",
    "up to 5x less memory without loss, 20x with 4 bits",
)
def scissorhands(
    size: Size,
    *,
    history: Positive = 400,
    sinks: int = 1,
    recent: int = 10,
) -> Axes:
    """Scissorhands: tokens that fell below uniform attention in the fewest of the last `history` queries."""
    return dict(
        score=Protect(score=Persistence(queries=history), sinks=sinks),
        budget=size,
        recent=recent,
        block=at_most(64, size.tokens, 1),
    )


@method(
    "2507.14204",
    "compacted once a block; the budget is exact",
    "a longer span under the same budget, and endless generation (no figure in the abstract)",
)
def lacache(
    size: Size,
    *,
    span: int | None = None,
    overlap: int = 0,
    sinks: int = 4,
) -> Axes:
    """LaCache: each layer keeps another part of the past, in a ladder over `span` layers (default: half)."""
    score = Protect(score=Ladder(span=span, overlap=overlap, sinks=sinks), sinks=sinks)
    return dict(score=score, budget=size, tiers=RELATIVE)


@method(
    "2501.04987",
    "contests exact in number and place, with the scores of the flush",
    "lowest perplexity on PG19 and OpenWebText2 in a 16th of the cache; best on LongBench with 6%",
)
def treekv(size: Size, *, sinks: int = 4, share: float = 0.5) -> Axes:
    """TreeKV: neighbours compete by mean attention in a `share` of the budget; the past thins out as a tree."""
    if not 0 < share <= 1:
        raise ValueError(f"treekv: share={share}: the fraction of the budget where tokens compete, above 0, at most 1")
    contest = Contest(score=PerQuery(score=Accumulated()), sinks=sinks, share=float(share))
    return dict(score=Protect(score=contest, sinks=sinks), budget=size, tiers=RELATIVE)


@method(
    "2506.15969",
    "lagged as the paper is; per kv head, and prompts are cut",
    "half of the cache at like accuracy in mathematical reasoning",
)
def lazyeviction(
    size: Size,
    *,
    window: int | None = None,
    threshold: float = 1e-4,
) -> Axes:
    """LazyEviction: every `window` steps, tokens leave that have not come back within their recurrence interval."""
    window = at_most(175, size.tokens, 4) if window is None else window
    size = size.above("lazyeviction", window, "its window")
    return dict(
        score=Protect(score=Recurrence(threshold=float(threshold)), newest=window),
        budget=size,
        block=window,
    )


@method(
    "2503.00022",
    "as the window score it is made of",
    "4x smaller on LongBench with less than 1% lost, at under 0.5% of the latency",
)
def kvcrush(
    size: Size,
    *,
    share: float = 0.25,
    page: Positive = 16,
    window: Positive = 16,
    sinks: int | None = None,
    newest: int | None = None,
) -> Axes:
    """KVCrush: important pages, and a `share` of representatives by the binary signatures of the others."""
    sinks = at_most(32, size.tokens, 16) if sinks is None else sinks
    newest = at_most(128, size.tokens, 4) if newest is None else newest
    size = size.above("kvcrush", sinks + newest, "its sinks and newest tokens")
    if not 0 <= share <= 1:
        raise ValueError(f"kvcrush: share={share}: the fraction of the budget for representatives, from 0 to 1")
    score = Representatives(score=WindowMass(queries=window), page=page, share=float(share), sinks=sinks, newest=newest)
    return dict(score=score, budget=size)


@method(
    "2505.13866",
    "lagged as the paper is; events come `recent` tokens early",
    "1.60x the throughput of QwQ-32B for 1.2% less on AIME 2024",
)
def rpc(*, share: float = 0.25, period: Positive = 1024, window: Positive = 32, pool: Positive = 7) -> Axes:
    """RPC: the prompt stays, and a `share` of the generated tokens, by the attention of the last `window`."""
    if not 0 < share < 1:
        raise ValueError(f"rpc: share={share}: the fraction of generated tokens that is kept, above 0 and below 1")
    path = Pool(score=AcrossHeads(score=PathMass(queries=window)), width=pool)
    return dict(
        score=Protect(score=path, prompt=True),
        budget=Keep(keep=1.0),
        append=float(share),
        recent=window,
        block=period,
    )


@method(
    "2505.24133",
    "exact for its code but for keys like no other, which spare the first there; the prompt is cut too",
    "nearly the full cache's accuracy with 10% of it, 105% with 16%; 90% less memory, 6.6x the throughput",
)
def rkv(
    size: Size,
    *,
    weight: float = 0.07,
    window: Positive = 8,
    pool: Positive = 7,
    threshold: float = 0.5,
    block: Positive = 128,
) -> Axes:
    """R-KV: attention from the last `window`, `weight` of the score, and the rest of it for keys unlike the others.

    For long chains of thought, which repeat themselves.
    """
    if not 0 <= weight <= 1:
        raise ValueError(f"rkv: weight={weight}: of attention beside redundancy, from 0 to 1")
    attention = Pool(score=PeakMass(queries=window), width=pool, kind="max")
    return dict(
        score=Plus(
            scores=(attention, Redundancy(threshold=float(threshold))), weights=(float(weight), 1 - float(weight))
        ),
        budget=size,
        recent=window,
        block=at_most(block, size.tokens, 1),
    )


@method(
    "2504.01281",
    "reconstruction: weights and least= are jkv's; one piece; lagged by block - 1",
    "half of the latency for 2.92 points of HotpotQA's joint match (45.29 to 42.37)",
)
def critic(
    size: Size = MOST,
    *,
    least: int = 128,
    attention: float = 1.0,
    entropy: float = 1.0,
    gradient: float = 1.0,
) -> Axes:
    """CRITIC: attention, entropy and gradient, each scaled to [0, 1] and added; one set of tokens for all heads.

    A fraction keeps `least` tokens in any case.
    """
    weights, terms = (attention, entropy, gradient), (Accumulated(), Entropy(), Gradient())
    if min(weights) < 0 or not sum(weights):
        raise ValueError(f"critic: weights {weights} of attention, entropy and gradient: none below 0, one above 0")
    score = Plus(
        scores=tuple(Normalised(score=AcrossHeads(score=s)) for s in terms),
        weights=tuple(float(w) / sum(weights) for w in weights),
    )
    return dict(score=score, budget=size.at_least(least))
