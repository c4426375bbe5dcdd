"""The catalogue: a paper is a row, a row fills some axes of a CacheConfig, rows compose by `|`."""

from __future__ import annotations

import ast
import difflib
import inspect
from typing import TYPE_CHECKING, Any

from jkv.budgets import All, Pyramid
from jkv.catalogue import ARGUMENTS, CATALOGUE, SCHEDULE, Axes, Row, row, size
from jkv.checks import check
from jkv.codecs import Affine, Dense, Separable
from jkv.config import CacheConfig, TierSpec
from jkv.merges import Runs
from jkv.protocols import Score
from jkv.scores.attention import Accumulated, WindowMass
from jkv.scores.keys import Expected, KeyNorm, KeyOutlier
from jkv.scores.learned import Retention, trained
from jkv.scores.mixed import Pivots, Salience, Sticky
from jkv.scores.position import Newest, Pool, Protect
from jkv.scores.wrappers import AcrossHeads
from jkv.selectors.quest import PageBound

if TYPE_CHECKING:
    from jkv.models import ModelConfig


@row("-", "exact")
def full() -> Axes:
    """Every token, as it is."""
    return dict(score=Newest(), budget=All())


@row("2309.17453", "lagged by block - 1")
def streaming(
    *, budget: int | None = None, keep: float | None = None, bytes: Any = None, sinks: int = 4, relative: bool = True
) -> Axes:
    """StreamingLLM: the first `sinks` tokens and the newest; positions within the cache, or the true ones."""
    first = TierSpec(k=Dense(rope="after"), v=Dense(), size=sinks, at="rank")
    return dict(
        score=Protect(score=Newest(), sinks=sinks),
        budget=size(budget, keep, bytes),
        tiers=(first, TierSpec()) if relative and sinks else (TierSpec(),),
    )


@row("2306.14048", "mass exact, decision lagged by block - 1")
def h2o(*, budget: int | None = None, keep: float | None = None, bytes: Any = None, newest: float = 0.5) -> Axes:
    """H2O: heavy hitters of accumulated attention, and the newest `newest` share of the budget."""
    if not 0 <= newest < 1:
        raise ValueError(f"h2o: newest={newest}: the share of the budget for the newest tokens, from 0 to below 1")
    return dict(score=Protect(score=Accumulated(), share=float(newest)), budget=size(budget, keep, bytes))


@row("2404.14469", "exact in one piece; while generating, the last queries at each flush decide")
def snapkv(
    *,
    budget: int | None = None,
    keep: float | None = None,
    bytes: Any = None,
    window: int = 32,
    pool: int = 5,
    kind: str = "avg",
) -> Axes:
    """SnapKV: attention from the last `window` queries, pooled over neighbours."""
    return dict(
        score=Pool(score=WindowMass(queries=window), width=pool, kind=kind),
        budget=size(budget, keep, bytes),
        recent=window,
    )


@row("2401.06104", "prefill exact; while generating, the last query of each block decides")
def tova(*, budget: int | None = None, keep: float | None = None, bytes: Any = None) -> Axes:
    """TOVA: attention from the last query, one set of tokens for all heads."""
    return dict(score=AcrossHeads(score=WindowMass(queries=1)), budget=size(budget, keep, bytes), recent=0)


@row("2504.15364", "exact for its block form, with chunk = block")
def keydiff(*, budget: int | None = None, keep: float | None = None, bytes: Any = None) -> Axes:
    """KeyDiff: keys unlike the mean direction of the kept keys."""
    return dict(score=KeyOutlier(), budget=size(budget, keep, bytes), recent=0)


@row("2406.11430", "exact in one piece; decision lagged by block - 1")
def knorm(*, budget: int | None = None, keep: float | None = None, bytes: Any = None) -> Axes:
    """Keys of small norm stay."""
    return dict(score=KeyNorm(), budget=size(budget, keep, bytes))


@row("2406.02069", "as snapkv")
def pyramidkv(*, budget: int, window: int = 32, pool: int = 5, beta: int = 20) -> Axes:
    """PyramidKV: SnapKV's score, more tokens in the lower layers; `budget` is the mean."""
    size(budget, None, None)
    if budget <= window:
        raise ValueError(f"pyramidkv: budget={budget} must exceed its observation window of {window} tokens")
    return dict(
        score=Pool(score=WindowMass(queries=window), width=pool),
        budget=Pyramid(tokens=budget, window=window, beta=beta),
        recent=window,
    )


@row("2407.11550", "as snapkv")
def adakv(
    *,
    budget: int | None = None,
    keep: float | None = None,
    bytes: Any = None,
    window: int = 32,
    pool: int = 7,
    floor: float = 0.2,
) -> Axes:
    """Ada-KV: SnapKV's score with a maximum over neighbours; the heads of a layer compete for its slots."""
    return dict(
        score=Pool(score=WindowMass(queries=window), width=pool, kind="max"),
        budget=size(budget, keep, bytes),
        pooled=float(floor),
        recent=window,
    )


@row("kvpress", "exact in one piece; while generating, statistics of the last 64 queries")
def expected_attention(
    *, budget: int | None = None, keep: float | None = None, bytes: Any = None, future: int = 512, sinks: int = 4
) -> Axes:
    """ExpectedAttention: attention that the mean future query is expected to pay, times value norms."""
    return dict(
        score=Protect(score=Expected(future=future, sinks=sinks), sinks=sinks), budget=size(budget, keep, bytes)
    )


@row("2512.03324", "exact in one piece; while generating, decided every `block` tokens as in the paper")
def trimkv(*, budget: int | None = None, keep: float | None = None, bytes: Any = None, gate: str | None = None) -> Axes:
    """TRIM-KV: a trained gate says at birth how slowly a token fades; `gate` is a folder of `jkv train trimkv`."""
    score = Retention() if gate is None else trained(gate)
    return dict(score=score, budget=size(budget, keep, bytes), recent=0)


@row("2402.02750", "approximation: integers; the tail is exact")
def kivi(*, bits: int = 2, group: int = 32, recent: int = 96) -> Axes:
    """KIVI: keys per channel in groups of tokens, values per token in groups of channels; one tail for both."""
    k, v = Affine(bits=bits, axis="channel", group=group), Affine(bits=bits, group=group)
    return dict(codec=(k, v), recent=recent, block=group)


@row("2405.14256", "approximation: integers, scales of `group` tokens; nothing is evicted or coded twice")
def zipcache(
    *, high: int = 4, low: int = 2, share: float = 0.6, group: int = 20, recent: int = 0, block: int = 100
) -> Axes:
    """ZipCache: the salient `share` of the tokens in `high` bits, the others in `low`; 16 bits are the plain floats."""

    def tier(bits: int, size: float | None) -> TierSpec:
        if bits == 16:
            return TierSpec(k=Dense(), v=Dense(), size=size)
        return TierSpec(
            k=Affine(bits=bits, axis="channel", group=group), v=Separable(bits=bits, group=group), size=size
        )

    if not 0 < share <= 1:
        raise ValueError(f"zipcache: share={share}: the fraction of tokens in {high} bits, above 0 and at most 1")
    return dict(
        score=Sticky(score=Salience()), tiers=(tier(high, float(share)), tier(low, None)), recent=recent, block=block
    )


@row("2407.08454", "reconstruction; lagged by block - 1; into int tiers only newcomers merge")
def kvmerger(
    *,
    budget: int | None = None,
    keep: float | None = None,
    bytes: Any = None,
    sinks: int = 4,
    width: float = 1.0,
    threshold: float | None = None,
) -> Axes:
    """KVMerger (a reconstruction): runs of similar neighbouring keys melt into their most attended token."""
    return dict(
        score=Pivots(sinks=sinks, threshold=threshold),
        merge=Runs(width=width, sinks=sinks, threshold=threshold),
        budget=size(budget, keep, bytes),
    )


@row("-", "approximation: 8-bit integers; the tail is exact")
def int8() -> Axes:
    """Eight bits a number, one scale a token and head."""
    return dict(codec=(Affine(bits=8), Affine(bits=8)))


@row("-", "approximation: 4-bit integers; the tail is exact")
def int4(*, group: int = 32) -> Axes:
    """Four bits a number, one scale a token and group of channels."""
    return dict(codec=(Affine(bits=4, group=group), Affine(bits=4, group=group)))


@row("2406.10774", "approximation: reads the pages of highest bound")
def quest(*, pages: int = 64, page: int = 16, dense_layers: int = 2) -> Axes:
    """Quest: a step reads the pages whose key bounds promise most; the first layers read all."""
    return dict(select=PageBound(unit=page, pages=pages), dense_layers=tuple(range(dense_layers)))


@row("2407.11550", "changes only how the heads of a layer share its budget")
def pooled(*, floor: float = 0.2) -> Axes:
    """The heads of a layer compete for its slots, each sure of `floor` of an equal share; the bytes stay the same."""
    return dict(pooled=float(floor))


@row("-", "changes nothing but the budget")
def append() -> Axes:
    """Generated tokens are kept on top of the budget, as the papers that compress only a prompt do."""
    return dict(append=1.0)


from jkv import evictions  # noqa: E402, F401 - more rows, listed after these


def parse(text: str) -> CacheConfig:
    """CacheConfig of a composition such as "snapkv(budget=512) | int4"; `str` of it is a normal form of the text.

    Raises ValueError for an unknown method or argument (with the nearest known one), for arguments that are not
    literals, and for two methods that fill the same axis.

    >>> str(parse("snapkv( budget=512 )|int4"))
    'snapkv(budget=512) | int4'
    """
    axes: Axes = {}
    owner: dict[str, str] = {}
    names, claims = [], []
    for stage in text.split("|"):
        name, arguments = _read(stage.strip(), text)
        entry = CATALOGUE[name]
        own = inspect.signature(entry.make).parameters
        schedule = {k: v for k, v in arguments.items() if k in ARGUMENTS and k not in own}
        try:
            filled = entry.make(**{k: v for k, v in arguments.items() if k not in schedule}) | schedule
        except TypeError as e:
            raise ValueError(_argument_error(entry, arguments, str(e))) from None
        for axis, value in filled.items():
            if axis in owner and axis not in ARGUMENTS and name != "full":
                if owner[axis] != "full":
                    raise ValueError(f"{owner[axis]} and {name} both fill the axis {axis!r}: keep one of them")
            owner[axis] = name
            axes[axis] = max(axes.get(axis, 0), value) if axis in SCHEDULE and axis not in schedule else value
        names.append(name + (f"({', '.join(f'{k}={v!r}' for k, v in arguments.items())})" if arguments else ""))
        claims.append(entry.claim)
    return CacheConfig(**axes, claim="; ".join(dict.fromkeys(claims)), name=" | ".join(names))


def _read(stage: str, text: str) -> tuple[str, dict[str, Any]]:
    """Name and literal keyword arguments of one stage."""
    try:
        node = ast.parse(stage, mode="eval").body
    except SyntaxError:
        raise ValueError(f"cannot read {stage!r} in {text!r}: write name or name(argument=value)") from None
    call = node if isinstance(node, ast.Call) else ast.Call(func=node, args=[], keywords=[])
    if not isinstance(call.func, ast.Name) or call.args or any(k.arg is None for k in call.keywords):
        raise ValueError(f"cannot read {stage!r} in {text!r}: write name or name(argument=value)")
    if call.func.id not in CATALOGUE:
        near = difflib.get_close_matches(call.func.id, CATALOGUE, 1)
        raise ValueError(
            f"unknown method {call.func.id!r}" + (f": did you mean {near[0]!r}?" if near else "; see `jkv methods`")
        )
    try:
        return call.func.id, {str(k.arg): ast.literal_eval(k.value) for k in call.keywords}
    except ValueError:
        raise ValueError(f"arguments in {stage!r} must be plain numbers, strings or True/False") from None


def _argument_error(entry: Row, arguments: dict[str, Any], fallback: str) -> str:
    known = [*inspect.signature(entry.make).parameters, *ARGUMENTS]
    for name in arguments:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"it takes {', '.join(known) or 'no arguments'}"
            return f"{entry.name} has no argument {name!r}: {hint}"
    return f"{entry.name}: {fallback}"


def pairs(model: ModelConfig, budget: int = 256) -> dict[tuple[str, str], str]:
    """Every method that scores tokens with every one that codes or selects them: why it is refused, or ""."""
    out = {}
    for first in (r for r in CATALOGUE.values() if {"score", "budget"} <= {*r.axes}):
        takes = "budget" in inspect.signature(first.make).parameters
        text = f"{first.name}(budget={budget})" if takes else first.name
        for second in (r for r in CATALOGUE.values() if {"codec", "select"} & {*r.axes} and "score" not in r.axes):
            try:
                check(parse(f"{text} | {second.name}"), model)
                out[first.name, second.name] = ""
            except ValueError as error:
                out[first.name, second.name] = str(error)
    return out


def config(what: str | CacheConfig | Score | None) -> CacheConfig:
    """A CacheConfig from text, from a CacheConfig, or from nothing: the full cache."""
    if what is None:
        return parse("full")
    return parse(what) if isinstance(what, str) else what  # type: ignore[return-value]
