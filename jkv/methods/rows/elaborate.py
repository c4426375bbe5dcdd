"""Rows of the catalogue: eviction that knows more: a model's heads, all layers, what is said next, who is alike."""

from __future__ import annotations

from jkv.core.evidence import QUERIES
from jkv.io import learned
from jkv.methods.budgets import All, Size
from jkv.methods.catalogue import Axes, row
from jkv.methods.codecs import Affine
from jkv.methods.config import TierSpec
from jkv.methods.divisions import Above, Asked, Inside, Split, Weighted, Won
from jkv.methods.merges import ZeroClass
from jkv.methods.rows.basics import coded
from jkv.methods.scores import gated
from jkv.methods.scores.assisted import Assisted
from jkv.methods.scores.attention import Accumulated, WindowMass
from jkv.methods.scores.dispersion import Dispersed, Tailed
from jkv.methods.scores.heads import CHOICE, Keepers, Retrievers
from jkv.methods.scores.hybrid import ByPhase, Counted, Even, Plus, Remembered
from jkv.methods.scores.learned import Outlook
from jkv.methods.scores.mixed import Sticky
from jkv.methods.scores.position import Pool, Protect
from jkv.methods.scores.probes import Drafted
from jkv.methods.scores.wrappers import AcrossHeads, PerQuery, Reaching
from jkv.methods.selectors.heavy import Heavy
from jkv.methods.shorten import Shorten


@row(
    "2508.02401",
    "as snapkv; needles are answered for the model, which must agree; generated tokens are kept on top",
    "better than earlier eviction on LongBench and with needles (no figure in the abstract)",
)
def compresskv(
    size: Size,
    *,
    window: int = 8,
    pool: int = 5,
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


@row(
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
    return dict(score=Protect(score=score, sinks=sinks), budget=size, pooled=0.0, rest=True)


@row(
    "2503.12491",
    "final shares: a prompt is whole until all layers are asked; decode lagged by block - 1",
    "the same performance with 3.2% of the cache; decode over 10x as fast at 128K tokens",
)
def cake(
    size: Size,
    *,
    window: int = 32,
    pool: int = 5,
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
        budget=Asked(size=size, window=window, step=step),
        recent=window,
    )


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
        pooled=float(floor),
        recent=0,
    )


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
    """Attention-Gate: a look at the whole prompt says what each head forgets; `gate`: of `jkv train attentiongate`.

    What stays differs from head to head, so the heads of a layer share its budget.
    """
    if not 0 <= threshold < 1:
        raise ValueError(f"attentiongate: threshold={threshold}: of the chance that a token stays, from 0 to below 1")
    score = learned.trained(gate, gated.Gated(threshold=float(threshold)))
    return dict(score=score, budget=size, recent=0, pooled=0.0)


@row(
    "2506.08373",
    "reconstruction: the draft is the model's own first layers; generated tokens are kept on top",
    "more accurate than others in the same memory and time (no figure in the abstract)",
)
def speckv(
    size: Size,
    *,
    tokens: int = 32,
    layers: int | None = None,
    window: int = 33,
    pool: int = 7,
) -> Axes:
    """SpecKV: the highest attention from the next `tokens` as the first `layers` (default: half) draft them."""
    size = size.above("speckv", window, "its observation window")
    if tokens < 0 or (layers is not None and layers < 1):
        raise ValueError(f"speckv: tokens={tokens}, layers={layers}: 0 or more, and 1 or more of the model's layers")
    score = Drafted(tokens=tokens, layers=layers, queries=window)
    return dict(score=Pool(score=score, width=pool, kind="max"), budget=size, recent=window, append=1.0)


@row(
    "2506.08373",
    "reconstruction: the draft is the model's own first layers; the others are never read",
    "more accurate than others in the same memory and time (no figure in the abstract)",
)
def specpc(
    *,
    tokens: int = 2048,
    drafted: int = 1,
    layers: int | None = None,
    first: int | None = None,
    window: int = 64,
    around: int = 32,
) -> Axes:
    """SpecPC: of a longer prompt the `tokens` are read that the model's first `layers` (default: half) look at.

    As in the paper only prompts longer than 2048 tokens are cut by default.
    """
    if tokens <= window:
        raise ValueError(f"specpc: tokens={tokens} must exceed its newest tokens of {window}")
    least = {"drafted": drafted, "around": around, "window": window, "layers": layers or 0, "first": first or 0}
    if min(least.values()) < 0 or layers == 0:
        raise ValueError(f"specpc: {least}: 0 or more, and layers 1 or more")
    shorten = Shorten(tokens=tokens, drafted=drafted, window=window, around=around, layers=layers, first=first)
    return dict(shorten=shorten)


@row(
    "2508.02751",
    "reconstruction: the draft is the model's own first layers; marginal tokens are one mean value",
    "1.75x to 2.56x the throughput of others",
)
def smallkv(size: Size, *, layers: int | None = None, window: int = 32, compensate: bool = True) -> Axes:
    """SmallKV: the first `layers` (default: half) hold all, the others what these look at, and a mean of the rest.

    The mean weighs what the rest got when it was lost; compensate=False: it is gone without a trace.
    """
    size = size.above("smallkv", window, "its newest queries")
    if layers is not None and layers < 1:
        raise ValueError(f"smallkv: layers={layers}: the model's first layers, which hold every token; 1 or more")
    return dict(
        score=Assisted(queries=window, draft=layers),
        budget=Above(size=size, layer=layers),
        rest=bool(compensate),
        recent=window,
    )


@row(
    "2403.17312",
    "approximation, from notes of the paper: chosen anew at a flush; a number of tokens, not a share",
    "up to 3x the throughput of FlexGen and 1.9x that of vLLM on one GPU and its host",
)
def alisa(*, tokens: int = 128, page: int = 1, window: int | None = None) -> Axes:
    """ALISA: a step reads the newest `tokens`, and as many others that the last `window` queries looked at most.

    It holds every token, and an index: what it saves is reading.
    """
    window = min(tokens, QUERIES) if window is None else window
    if page < 1 or tokens < page or not 2 <= window <= QUERIES:
        raise ValueError(
            f"alisa: tokens={tokens}, page={page}, window={window}: a page or more, 1 or more, and 2 to {QUERIES}"
        )
    return dict(select=Heavy(unit=page, pages=tokens // page, queries=window), recent=tokens)


@row(
    "2402.18096",
    "reconstruction: no balancer of keys; demoted at a flush, coded once; nothing is evicted",
    "of lines to retrieve 99.8% with half of the entries at 3 bits, 43% with that half gone, Llama-2-7B",
)
def mikv(*, keep: float = 0.25, bits: int = 4, group: int = 32, recent: int = 32) -> Axes:
    """MiKV: what H2O would evict stays at `bits` bits; the heavy `keep` of all tokens is exact, or in another codec."""
    if not 0 < keep <= 1:
        raise ValueError(f"mikv: keep={keep}: the fraction of tokens that stays as it is, above 0 and at most 1")
    low = Affine(bits=bits, group=group)
    tiers = (TierSpec(size=float(keep)), TierSpec(k=low, v=low))
    return dict(score=Accumulated(), tiers=tiers, recent=recent)


@row(
    "-",
    "reconstruction: demoted as soon as a prompt is read, and once; 8-bit integers for its fp8",
    "about 97% of the accuracy in a quarter of the memory",
)
def arkv(
    size: Size,
    *,
    share: float | None = None,
    window: int = 32,
    pool: int = 5,
    gamma: float = 263.81,
    step: int | None = None,
) -> Axes:
    """ARKV: a layer's best tokens stay as they are, as many as it asks for (or a `share`); the others get 8 bits."""
    size = size.above("arkv", window, "its observation window")
    if share is not None and not 0 < share <= 1:
        raise ValueError(f"arkv: share={share}: the fraction of the budget that stays as it is, above 0 and at most 1")
    if step is not None and step < 1:
        raise ValueError(f"arkv: step={step}: tokens by which the exact tiers of layers differ, 1 or more")
    low = Affine(bits=8)
    score = ByPhase(score=Tailed(queries=window, gamma=float(gamma)), path=WindowMass(queries=1))
    return dict(
        score=Pool(score=score, width=pool),
        budget=Inside(size=size, window=window, step=step) if share is None else size,
        tiers=(TierSpec(size=1.0 if share is None else float(share)), TierSpec(k=low, v=low)),
        recent=window,
        block=max(((size.tokens or 512) - window) // 3, 1),
    )


@row(
    "2410.08584",
    "reconstruction, for text: a prompt attends to all of itself; what is generated gets the lower bits",
    "prefill 2.6x as fast in half of the memory, 0.2% less on Video-MME, LongVA-7B",
)
def zipvl(
    *, mass: float = 0.95, high: int = 4, low: int = 2, group: int = 20, window: int = 64, step: int = 240
) -> Axes:
    """ZipVL: in each layer the fewest tokens that have `mass` of the attention get `high` bits, the others `low`."""
    if not 0 < mass <= 1 or step < 1:
        raise ValueError(f"zipvl: mass={mass}, step={step}: above 0 and at most 1; 1 token or more")
    score = Reaching(score=AcrossHeads(score=WindowMass(queries=window)), share=float(mass), newest=window)
    return dict(
        score=Sticky(score=score),
        budget=Inside(size=All(), window=window, step=step),
        tiers=(coded(high, group, 1.0), coded(low, group)),
        recent=window,
    )


@row(
    "2412.08521",
    "reconstruction; none go into the recent window; lagged by block - 1; into int tiers only newcomers",
    "1.28 points more on LongBench with 256 tokens; 95% of needles with less than 2% of the context",
)
def ems(
    size: Size,
    *,
    window: int = 32,
    candidates: int = 64,
    threshold: float = 0.6,
) -> Axes:
    """EMS: of what leaves, the best `candidates` melt into the kept token whose key is most like theirs, or vanish."""
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
