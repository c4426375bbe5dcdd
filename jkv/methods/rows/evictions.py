"""Rows of the catalogue: training-free eviction."""

from __future__ import annotations

from jkv.core.layer import Narrow
from jkv.io import learned
from jkv.methods.budgets import Keep, Size
from jkv.methods.catalogue import Axes, row
from jkv.methods.config import TierSpec
from jkv.methods.divisions import Pyramid, Weighted, Won
from jkv.methods.merges import Nearest
from jkv.methods.mixtures import Mixtures
from jkv.methods.scores import delayed
from jkv.methods.scores.attention import Accumulated, Latest, PathMass, Persistence, Recurrence, WindowMass
from jkv.methods.scores.hybrid import ByPhase, Counted, Entropy, Gradient, Normalised, Plus
from jkv.methods.scores.ladder import Contest, Ladder
from jkv.methods.scores.learned import Foreseen
from jkv.methods.scores.position import Oldest, Pool, Protect
from jkv.methods.scores.probes import Pseudo, Rebuilt
from jkv.methods.scores.wrappers import AcrossHeads, Groups, PerQuery, Representatives, Units

RELATIVE = (TierSpec(at="rank"),)  # keys act at their rank among the kept
MOST = Keep(keep=0.7)


@row(
    "2407.20485",
    "exact in one piece; decision lagged by block - 1",
    "up to 7.8% and 5.1% more accuracy than plain sums, LLaMA 2, one and no example",
)
def a2sf(size: Size, *, decay: float = 0.95, sinks: int = 0) -> Axes:
    """A2SF: accumulated attention that forgets, by the factor `decay` a query."""
    if not 0 <= decay < 1:
        raise ValueError(f"a2sf: decay={decay}: from 0 (the last query decides) to below 1 (h2o never forgets)")
    return dict(score=Protect(score=Accumulated(decay=float(decay)), sinks=sinks), budget=size)


@row(
    "2305.17118",
    "reconstruction; drops 64 tokens at a time at most, the paper half of its cache",
    "up to 5x less memory without loss, 20x with 4 bits",
)
def scissorhands(
    size: Size,
    *,
    history: int = 400,
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


@row(
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
    """LaCache: each layer keeps other tokens of the past, a ladder of `span` layers (default: half of them)."""
    score = Protect(score=Ladder(span=span, overlap=overlap, sinks=sinks), sinks=sinks)
    return dict(score=score, budget=size, tiers=RELATIVE)


@row(
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


@row(
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


@row(
    "2503.00022",
    "as the window score it is made of",
    "4x smaller on LongBench with less than 1% lost, at under 0.5% of the latency",
)
def kvcrush(
    size: Size,
    *,
    share: float = 0.25,
    page: int = 16,
    window: int = 16,
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


@row(
    "2503.17922",
    "as snapkv; the layers of a group differ by one token at most",
    "like the full cache on LongBench with 12% of it",
)
def windowkv(size: Size, *, window: int = 32, unit: int = 8, group: int = 8, beta: int = 14, task: str = "qa") -> Axes:
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
    return dict(score=score, budget=budget if gate is None else budget.from_folder(gate), pooled=0.0)


def at_most(most: int, budget: int | None, part: int) -> int:
    """A paper's number of tokens, or that part of a budget in tokens where it is small."""
    return most if budget is None else min(most, max(budget // part, 1))


@row(
    "2502.01068",
    "as snapkv; upper layers see fewer tokens of the prompt; generated tokens are kept on top",
    "prefill 1.82x and decode 2.87x as fast, as accurate as what only decodes faster",
)
def fastkv(
    size: Size,
    *,
    window: int = 8,
    pool: int = 7,
    layer: int | None = None,
    tokens: int | None = None,
    share: float | None = None,
) -> Axes:
    """FastKV: a prompt goes on with its best `tokens`, or `share` (default: 0.2), after `layer` (default: half way)."""
    if tokens is not None and share is not None:
        raise ValueError("fastkv: give tokens= or share= of a prompt that go on, not both")
    narrow = tokens if tokens is not None else 0.2 if share is None else float(share)
    if not (narrow > window if isinstance(narrow, int) else 0 < narrow <= 1):
        raise ValueError(f"fastkv: tokens={tokens}, share={share}: more than window={window}; above 0 and at most 1")
    return dict(
        score=Pool(score=WindowMass(queries=window), width=pool),
        budget=size,
        recent=window,
        narrow=Narrow(size=narrow, layer=layer),
        append=1.0,
    )


@row("2603.11564", "from notes of the paper; generated tokens are kept on top", "99.5% of needles with 3% of the cache")
def dapq(size: Size, *, tokens: int = 32, pool: int = 5) -> Axes:
    """DapQ: attention from pseudo tokens where the answer will stand."""
    if tokens < 1:
        raise ValueError(f"dapq: tokens={tokens}: pseudo tokens read after the prompt, 1 or more")
    score = Pool(score=Pseudo(tokens=tokens), width=pool)
    return dict(score=score, budget=size, recent=0, append=1.0)


@row(
    "2505.23416",
    "all layers and heads compete; what follows the prompt is kept on top; the request to repeat is our own",
    "3x to 4x smaller and decode about twice as fast with hardly a loss, whatever is asked later",
)
def kvzip(
    size: Size,
    *,
    piece: int = 2048,
    sinks: int = 4,
    floor: float | None = 0.0,
    step: int | None = None,
) -> Axes:
    """KVzip: tokens that the model looks at when it repeats the prompt; the tokens of all layers and heads compete.

    floor: what a head is sure of, as a share of an equal part, or None: layers and heads have equal shares; slots come
    in steps of `step` tokens (None: a quarter of the budget).
    """
    if piece < 1 or (step is not None and step < 1):
        raise ValueError(
            f"kvzip: piece={piece}, step={step}: tokens that are repeated at a time, and of slots, 1 or more"
        )
    return dict(
        score=Protect(score=Rebuilt(piece=piece, sinks=sinks), sinks=sinks),
        budget=size if floor is None else Won(size=size, window=0, step=step),
        pooled=floor,
        recent=0,
        append=1.0,
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
    "2406.05317",
    "reconstruction: trained layer by layer; scores of a group are summed; decode every block of steps",
    "3,482 tokens in 128 slots, up to 0.2791 more accuracy than others of that size",
)
def lococo(size: Size, *, gate: str | None = None, chunk: int = 512, local: int = 0) -> Axes:
    """LoCoCo: what the last piece looked at least melts into trained mixtures; `gate` is of `jkv train lococo`.

    Of the size, as many tokens are mixtures as were trained, half of it there; the others stay as they are, and
    so do the newest `local`. A prompt is read in pieces of `chunk` tokens (0: in one).
    """
    merge = learned.trained(gate, Mixtures())
    if gate is not None and merge.weights.conv.shape[1] % 2 == 0:
        raise learned.broken(gate, "its convolution has no entry in the middle")
    size = size.above("lococo", local + merge.count, "its newest tokens and its mixtures")
    return dict(score=Latest(), merge=merge, budget=size, recent=local, chunk=chunk)


@row(
    "2505.13866",
    "lagged as the paper is; events come `recent` tokens early",
    "1.60x the throughput of QwQ-32B for 1.2% less on AIME 2024",
)
def rpc(*, share: float = 0.25, period: int = 1024, window: int = 32, pool: int = 7) -> Axes:
    """RPC: the prompt stays, and of what is generated the `share` that the last `window` tokens look at."""
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


@row(
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


@row(
    "2407.18121",
    "exact in one piece for the prompt; while generating lagged by block - 1",
    "better generation than pruning at any rate of acceleration (no figure in the abstract)",
)
def elasticcache(size: Size, *, sinks: int = 4, newest: int = 25) -> Axes:
    """Elastic Cache: a prompt melts into its most attended tokens; then what is just older than `newest` leaves."""
    size = size.above("elasticcache", newest, "its newest tokens")
    prompt = Protect(score=AcrossHeads(score=Accumulated()), sinks=sinks, newest=1)
    return dict(
        score=Counted(score=ByPhase(score=prompt, path=Oldest(newest=newest), once=True)),
        merge=Nearest(sinks=sinks),
        budget=size,
        recent=1,
    )
