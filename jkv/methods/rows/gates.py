"""Eviction by trained gates."""

from __future__ import annotations

from jkv.io import trained_weights
from jkv.methods.budgets.layers import Split, Weighted, Won
from jkv.methods.budgets.sizes import Size, at_most
from jkv.methods.config import RELATIVE
from jkv.methods.eviction import attention_gate
from jkv.methods.eviction import dms as dms_score
from jkv.methods.eviction.author_gates import Distilled, FullHeads, Repeated, read_heads
from jkv.methods.eviction.heads import Lasting
from jkv.methods.eviction.position import Protect
from jkv.methods.eviction.trained_gates import Foreseen, Outlook, Retention
from jkv.methods.eviction.utility import Utility
from jkv.methods.prefill.deferred import Deferred
from jkv.methods.registry import Axes, method
from jkv.protocols import Score


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


def _contest(name: str, size: Size, score: Score, window: int, sinks: int, step: int | None) -> Axes:
    """The tokens of a prompt, of all layers and heads, compete for one budget beside the first and the newest."""
    window = at_most(window, size.tokens, 4)
    if step is not None and step < 1:
        raise ValueError(f"{name}: step={step}: slots, 1 or more")
    size = size.above(name, window + sinks, "its first and newest tokens")
    return _among(size, Protect(score=score, sinks=sinks, newest=window), step)


def _among(size: Size, score: Score, step: int | None) -> Axes:
    """The tokens of a prompt, of all layers and heads, compete for one budget."""
    return dict(
        score=score,
        budget=Won(size=size, window=0, step=step),
        prefill=Deferred(),
        pooled=0.0,
        recent=0,
    )


@method(
    "-", "jkv's own: makeeach, whose gates know nothing of what a later question looks for, with compresskv's heads"
)
def retrieval(
    size: Size,
    *,
    window: int = 32,
    sinks: int = 4,
    step: int | None = None,
    gate: str | None = None,
    heads: str | None = None,
) -> Axes:
    """Retrieving heads forget more slowly: TRIM-KV's gates, and the tokens of all layers and heads compete.

    gate: a folder of `jkv train trimkv`; heads: one of `jkv calibrate compresskv`; the first `sinks` and
    the newest `window` stay; slots come in steps of `step` tokens (None: a quarter of the budget).
    """
    score = Lasting(score=trained_weights.trained(gate, Retention()))
    return _contest("retrieval", size, score if heads is None else score.of(heads), window, sinks, step)


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


@method(
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
    score = trained_weights.trained(gate, dms_score.Delayed(window=window))
    budget = budget if gate is None else budget.from_folder(gate)
    return dict(score=score, budget=budget, pooled=0.0)


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
    score = trained_weights.trained(gate, attention_gate.Gated(threshold=float(threshold)))
    return dict(score=score, budget=size, recent=0, pooled=0.0)


@method(
    "2601.07891",
    "exact for weights of its authors; a budget, not a threshold, of a whole prompt; jkv's own foresee attention alone",
    "2x to 4x smaller at the accuracy of the full cache, Qwen3-8B, Llama-3.1-8B and Qwen3-32B",
)
def kvzap(size: Size, *, window: int = 128, sinks: int = 0, step: int | None = None, gate: str | None = None) -> Axes:
    """KVzap: a small model foresees KVzip's scores when a token is made; tokens of all layers and heads compete.

    gate: a folder of `jkv train kvzap`, or one as the authors publish it, of one layer or two; the first `sinks` and
    the newest `window` stay; slots come in steps of `step` tokens (None: a quarter of the budget).
    """
    score = Repeated() if gate is None else Repeated().of(gate)
    return _contest("kvzap", size, score, window, sinks, step)


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
    return _contest("utility", size, trained_weights.trained(gate, Utility()), window, sinks, step)


@method(
    "2601.17668",
    "exact for gates of its authors, of a prompt in one piece; what is generated is ranked with it at a flush",
    "up to 70% of the tokens go with hardly a loss, Qwen2.5-1M, Qwen3 and Gemma 3",
)
def fastkvzip(
    size: Size,
    *,
    window: int = 4096,
    portion: float = 0.02,
    short: int = 16_000,
    sinks: int = 4,
    step: int | None = None,
    gate: str | None = None,
) -> Axes:
    """Fast KVzip: a small gate foresees KVzip's scores when a token is made; tokens of all layers and heads compete.

    gate: a file of safetensors with a gate of the authors, who publish pickles (docs/training.md converts one). The
    first `sinks` and the newest `window` stay, but with a prompt of less than `short` tokens only a `portion` of the
    text, and at most a quarter of `budget`; slots come in steps of `step` tokens (None: a quarter of the budget).
    """
    if min(window, sinks, short) < 0 or not 0 <= portion < 1 or (step is not None and step < 1):
        raise ValueError(
            f"fastkvzip: window={window}, portion={portion}, short={short}, sinks={sinks}, step={step}: newest tokens, "
            "0 or more, a share of the text from 0 to below 1, tokens, 0 or more, first ones too, and slots, 1 or more"
        )
    score = Distilled() if gate is None else Distilled().of(gate)
    newest = at_most(window, size.tokens, 4)
    size = size.above("fastkvzip", sinks, "its first tokens")
    score = Protect(score=score, sinks=sinks, newest=newest, portion=float(portion), short=short)
    return _among(size, score, step)


@method(
    "2410.10819",
    "exact for the authors' heads; lagged by block - 1",
    "up to 2.55x less memory, decoding up to 2.18x as fast (MHA), or 1.67x and 1.50x (GQA), with hardly a loss",
)
def duoattention(
    *, share: float = 0.5, sinks: int | None = None, local: int | None = None, heads: str | None = None
) -> Axes:
    """DuoAttention: retrieval heads keep all, a `share` of all heads only the first `sinks` and the newest `local`.

    heads: a folder of the authors' attn_patterns, which says how much each head needs, and its sinks and newest tokens.
    """
    if not 0 <= share <= 1 or (sinks or 0) < 0 or (local is not None and local < 1):
        raise ValueError(
            f"duoattention: share={share}, sinks={sinks}, local={local}: a fraction of the heads from 0 to 1, 0 tokens "
            "or more, and 1 or more"
        )
    score, whole, first, newest = (FullHeads(), None, 64, 256) if heads is None else read_heads(heads, float(share))
    first, newest = first if sinks is None else sinks, newest if local is None else local
    budget = Split(local=newest, share=0.0, first=first, induction=0.0, echo=0.0, whole=whole)
    return dict(score=Protect(score=score, sinks=first), budget=budget, pooled=0.0)
