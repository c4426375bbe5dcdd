"""Selection: every token is kept, and a step reads a part of them."""

from __future__ import annotations

from jkv.core.evidence import QUERIES
from jkv.methods.budgets import Size
from jkv.methods.catalogue import Axes, Positive, row
from jkv.methods.rows.eviction import snapkv
from jkv.methods.selectors import forecast
from jkv.methods.selectors.forecast import LEAST_ROWS
from jkv.methods.selectors.heavy import Heavy
from jkv.methods.selectors.quest import PageBound


@row(
    "2406.10774",
    "approximation: reads the pages of highest bound",
    "self-attention up to 2.23x as fast, latency 7.03x lower, with little loss on long contexts",
)
def quest(*, pages: Positive = 64, page: Positive = 16, dense_layers: int = 2) -> Axes:
    """Quest: a step reads the `pages` with the highest bound on q . k; the first layers read all.

    It keeps every token and an index: it saves reads, not memory.
    """
    return dict(select=PageBound(unit=page, pages=pages, first=dense_layers))


@row(
    "2502.14051",
    "reconstruction: `snapkv | quest`; pages are picked by all channels, the paper picks channels too; one size a row",
    "up to 400x compression, 3.7x the speed and 32.6% less peak memory in decoding, with hardly a loss",
)
def rocketkv(
    size: Size,
    *,
    window: Positive = 32,
    pool: Positive = 63,
    pages: Positive = 64,
    page: Positive = 4,
    dense_layers: int = 0,
) -> Axes:
    """RocketKV: SnapKV with a wide maximum evicts once, then a step reads the `pages` of the highest bound of the rest.

    Generated tokens are kept on top of the budget.
    """
    coarse = snapkv(size, window=window, pool=pool, kind="max")
    return coarse | quest(pages=pages, page=page, dense_layers=dense_layers) | dict(append=1.0)


@row(
    "2502.04077",
    "approximation: reads the pages of highest forecast; rows between flushes know what was read",
    "13x compression, and 5.6x the speed when the cache is offloaded",
)
def attentionpredictor(
    *,
    pages: Positive = 64,
    page: Positive = 16,
    sinks: int = 64,
    rows: int = 64,
    dense_layers: int = 2,
    kind: str = "conv",
    predictor: str | None = None,
) -> Axes:
    """AttentionPredictor: pages by a trained forecast of their attention; `predictor` is a folder of `jkv train`.

    It keeps every token and an index: it saves reads, not memory.
    """
    if kind not in ("conv", "linear"):
        raise ValueError(f"attentionpredictor: kind={kind!r}: 'conv', or 'linear' for the baseline of three numbers")
    if not LEAST_ROWS <= rows <= QUERIES:
        raise ValueError(f"attentionpredictor: rows={rows}: steps of a history, from {LEAST_ROWS} to {QUERIES}")
    if min(pages, page) < 1 or sinks < 0:
        raise ValueError(f"attentionpredictor: pages={pages}, page={page}, sinks={sinks}: 1 or more, sinks 0 or more")
    net, models = (None, ()) if predictor is None else forecast.trained(predictor, kind)
    select = forecast.Forecast(
        unit=page, pages=pages, sinks=sinks, rows=rows, kind=kind, net=net, models=models, first=dense_layers
    )
    return dict(select=select, recent=64)


@row(
    "2403.17312",
    "approximation, from notes of the paper: chosen anew at a flush; a number of tokens, not a share",
    "up to 3x the throughput of FlexGen and 1.9x that of vLLM on one GPU and its host",
)
def alisa(*, tokens: int = 128, page: Positive = 1, window: int | None = None) -> Axes:
    """ALISA: a step reads the newest `tokens`, and as many others of the most attention from the last `window` queries.

    It keeps every token and an index: it saves reads, not memory.
    """
    window = min(tokens, QUERIES) if window is None else window
    if page < 1 or tokens < page or not 2 <= window <= QUERIES:
        raise ValueError(
            f"alisa: tokens={tokens}, page={page}, window={window}: a page or more, 1 or more, and 2 to {QUERIES}"
        )
    return dict(select=Heavy(unit=page, pages=tokens // page, queries=window), recent=tokens)
