"""Prompt compression: by probes, drafts or token pruning."""

from __future__ import annotations

from jkv.io.trained_weights import trained
from jkv.methods.budgets.layers import Won
from jkv.methods.budgets.sizes import Size
from jkv.methods.eviction.attention import WindowMass
from jkv.methods.eviction.position import Pool, Protect
from jkv.methods.eviction.probes import LateOrProbed, Probed
from jkv.methods.prefill.deferred import Attended, Deferred, Recalled, TokenPruning
from jkv.methods.prefill.probes import Drafted, Graded, Pseudo, Rebuilt
from jkv.methods.prefill.s3attention import Featured
from jkv.methods.registry import Axes, Positive, method


@method(
    "2502.01068",
    "as snapkv; upper layers see fewer tokens of the prompt; generated tokens are kept on top",
    "prefill 1.82x and decode 2.87x as fast, as accurate as what only decodes faster",
)
def fastkv(
    size: Size,
    *,
    window: Positive = 8,
    pool: Positive = 7,
    layer: int | None = None,
    tokens: int | None = None,
    share: float | None = None,
) -> Axes:
    """FastKV: a prompt goes on with its best `tokens`, or `share` (default: 0.2), after `layer` (default: half way)."""
    if tokens is not None and share is not None:
        raise ValueError("fastkv: give tokens= or share= of a prompt that go on, not both")
    on = tokens if tokens is not None else 0.2 if share is None else float(share)
    if not (on > window if isinstance(on, int) else 0 < on <= 1):
        raise ValueError(f"fastkv: tokens={tokens}, share={share}: more than window={window}; above 0 and at most 1")
    return dict(
        score=Pool(score=WindowMass(queries=window), width=pool),
        budget=size,
        recent=window,
        prefill=TokenPruning(size=on, layer=layer),
        append=1.0,
    )


@method(
    "2603.11564", "from notes of the paper; generated tokens are kept on top", "99.5% of needles with 3% of the cache"
)
def dapq(size: Size, *, tokens: int = 32, pool: Positive = 5) -> Axes:
    """DapQ: attention from pseudo tokens at the place of the answer."""
    if tokens < 1:
        raise ValueError(f"dapq: tokens={tokens}: pseudo tokens read after the prompt, 1 or more")
    score, prefill = Pool(score=Probed(), width=pool), Deferred(probe=Pseudo(tokens=tokens))
    return dict(score=score, budget=size, recent=0, append=1.0, prefill=prefill)


@method(
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
    return _repeated("kvzip", size, Rebuilt(piece=piece, sinks=sinks), floor, step)


def _repeated(name: str, size: Size, probe: Rebuilt, floor: float | None, step: int | None) -> Axes:
    """What a repetition of the prompt looks at stays, beside the first tokens."""
    if probe.piece < 1 or (step is not None and step < 1):
        raise ValueError(
            f"{name}: piece={probe.piece}, step={step}: tokens that are repeated at a time, and of slots, 1 or more"
        )
    return dict(
        score=Protect(score=Probed(), sinks=probe.sinks),
        budget=size if floor is None else Won(size=size, window=0, step=step),
        pooled=floor,
        recent=0,
        append=1.0,
        prefill=Deferred(probe=probe),
    )


@method(
    "OpenReview: cg1wTCJjjk",
    "scores of its authors' press, from its code; the paper was not read; the request to repeat is our own, as kvzip's",
    "none: the paper was not read",
)
def kvgrad(
    size: Size,
    *,
    piece: int = 256,  # of their press since after kvpress 0.5.5, which has 512
    sinks: int = 4,
    floor: float | None = 0.0,
    step: int | None = None,
) -> Axes:
    """KVgrad: kvzip, where attention counts as much as the model's last hidden states depend on what it adds.

    That takes a pass back through the model for each piece of the prompt. The arguments are those of kvzip.
    """
    return _repeated("kvgrad", size, Graded(piece=piece, sinks=sinks), floor, step)


@method(
    "2506.08373",
    "reconstruction: the draft is the model's own first layers; generated tokens are kept on top",
    "more accurate than others in the same memory and time (no figure in the abstract)",
)
def speckv(
    size: Size,
    *,
    tokens: int = 32,
    layers: int | None = None,
    window: Positive = 33,
    pool: Positive = 7,
) -> Axes:
    """SpecKV: the highest attention from the next `tokens` as the first `layers` (default: half) draft them."""
    size = size.above("speckv", window, "its observation window")
    if tokens < 0 or (layers is not None and layers < 1):
        raise ValueError(f"speckv: tokens={tokens}, layers={layers}: 0 or more, and 1 or more of the model's layers")
    score = Pool(score=LateOrProbed(queries=window), width=pool, kind="max")
    prefill = Deferred(probe=Drafted(tokens=tokens, layers=layers))
    return dict(score=score, budget=size, recent=window, append=1.0, prefill=prefill)


@method(
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
    window: Positive = 64,
    around: int = 32,
) -> Axes:
    """SpecPC: only `tokens` of a longer prompt are read, those that the first `layers` (default: half) attend to.

    As in the paper only prompts longer than 2048 tokens are cut by default.
    """
    if tokens <= window:
        raise ValueError(f"specpc: tokens={tokens} must exceed its newest tokens of {window}")
    least = {"drafted": drafted, "around": around, "layers": layers or 0, "first": first or 0}
    if min(least.values()) < 0 or layers == 0:
        raise ValueError(f"specpc: {least}: 0 or more, and layers 1 or more")
    return dict(
        compression=Attended(tokens=tokens, drafted=drafted, window=window, around=around, layers=layers, first=first)
    )


@method(
    "2506.01215",
    "reconstruction from notes of the paper: the draft keeps all it reads; states are keys or values, not queries",
    "52% better on RULER and 34% on BABILong at 1M tokens than others, with 30% less time and 5% less memory",
)
def reform(
    *,
    tokens: int = 8192,
    window: Positive = 64,
    pool: Positive = 129,
    ends: int = 256,
    layers: int | None = None,
    states: tuple[tuple[int, int, str], ...] = (),
) -> Axes:
    """REFORM: only `tokens` of a longer prompt are read, those whose states are most like those of its last `window`.

    As in the paper only prompts longer than 8192 tokens are cut by default. The first and the last `ends` tokens are
    read in any case, and `pool` tokens about one that is alike. states: a layer, a kv head and "k" or "v" each; by
    default the values of all heads of the last of the first `layers` (default: a sixth).
    """
    if tokens <= 2 * ends or layers == 0:
        raise ValueError(f"reform: tokens={tokens}, ends={ends}, layers={layers}: more than both ends, and 1 or more")
    if layers is not None and states:
        raise ValueError(
            f"reform: layers={layers}, states={states}: the draft ends with the last of its states; give one"
        )
    if any(not isinstance(x, tuple | list) or len(x) != 3 for x in states):
        raise ValueError(
            f"reform: states={states}: a layer, a kv head and 'k' or 'v' each, as ((3, 0, 'v'), (5, 1, 'k'))"
        )
    given = tuple((layer, head, of) for layer, head, of in states)
    return dict(compression=Recalled(tokens=tokens, window=window, pool=pool, ends=ends, layers=layers, states=given))


@method(
    "2601.17702",
    "reconstruction from the abstract: one dictionary of features for keys and queries; a prompt is asked once",
    "close to the full context on LongBench in several model families",
)
def s3attention(
    *,
    tokens: int = 2048,
    window: Positive = 64,
    span: Positive = 32,
    lexical: float = 0.25,
    gate: str | None = None,
) -> Axes:
    """S3-Attention: only `tokens` of a longer prompt are read, spans with the sparse features of its last `window`.

    Only prompts longer than 2048 tokens are cut by default. `span`: tokens of a span. lexical: the weight of BM25
    beside the features, from 0 to 1. `gate` is a folder of `jkv train s3attention`; the draft ends with the last layer
    that it has features of.
    """
    if tokens < window + span or not 0 <= lexical <= 1:
        raise ValueError(
            f"s3attention: tokens={tokens}, window={window}, span={span}, lexical={lexical}: room for the window and a "
            "span, and a weight from 0 to 1"
        )
    compression = Featured(tokens=tokens, window=window, span=span, lexical=float(lexical))
    return dict(compression=trained(gate, compression))
