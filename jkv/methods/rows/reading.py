"""Selection: every token is kept, and a step reads a part of them."""

from __future__ import annotations

from dataclasses import replace

from jkv.attention.evidence import QUERIES
from jkv.methods.budgets.sizes import All, Size, at_most
from jkv.methods.config import TierSpec
from jkv.methods.eviction.attention import Accumulated, Foremost
from jkv.methods.eviction.sentences import Sentences
from jkv.methods.registry import Axes, Positive, method
from jkv.methods.rows.eviction import snapkv
from jkv.methods.selection import attention_predictor
from jkv.methods.selection.attention_predictor import LEAST_ROWS
from jkv.methods.selection.base import Vote
from jkv.methods.selection.clusters import Clusters
from jkv.methods.selection.icecache import Alike
from jkv.methods.selection.last_attention import Heavy
from jkv.methods.selection.lrqk import Factors
from jkv.methods.selection.oracle import Exact, PageMean
from jkv.methods.selection.proxy_keys import Proxies, calibrated
from jkv.methods.selection.quest import PageBound
from jkv.methods.selection.representative import Representative
from jkv.methods.selection.sentences import SentenceMeans
from jkv.methods.selection.wrappers import Similar


@method(
    "2406.10774",
    "approximation: reads the pages of highest bound",
    "self-attention up to 2.23x as fast, latency 7.03x lower, with little loss on long contexts",
)
def quest(*, pages: Positive = 64, page: Positive = 16, sinks: int = 1, dense_layers: int = 2) -> Axes:
    """Quest: a step reads the `pages` with the highest bound on q . k; the first layers read all.

    The pages of the first `sinks` tokens are among them in any case. It keeps every token and an index: it saves reads,
    not memory.
    """
    return dict(select=PageBound(unit=page, pages=pages, sinks=sinks, first=dense_layers))


@method(
    "2502.14051",
    "reconstruction: `snapkv | quest`, by `channels` too; generated tokens are dense; one size a row",
    "up to 400x compression, 3.7x the speed and 32.6% less peak memory in decoding, with hardly a loss",
)
def rocketkv(
    size: Size,
    *,
    window: Positive = 32,
    pool: Positive = 63,
    pages: Positive = 64,
    page: Positive = 4,
    channels: int = 0,
    dense_layers: int = 0,
) -> Axes:
    """RocketKV: SnapKV with a wide maximum evicts once, then a step reads the `pages` of the highest bound of the rest.

    channels: the bound is of so many of a kv head's channels, those of the largest |q|; 0: all. Generated tokens are
    kept on top of the budget.
    """
    coarse = snapkv(size, window=window, pool=pool, kind="max")
    fine = PageBound(unit=page, pages=pages, channels=channels, first=dense_layers)
    return coarse | dict(select=fine, append=1.0)


@method(
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
    net, models = (None, ()) if predictor is None else attention_predictor.trained(predictor, kind)
    select = attention_predictor.Forecast(
        unit=page, pages=pages, sinks=sinks, rows=rows, kind=kind, net=net, models=models, first=dense_layers
    )
    return dict(select=select, recent=64)


@method(
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


@method(
    "2411.02886",
    "approximation: keys act where they are, not at places within what is read; prompts read everything",
    "up to 23.84x the speed of attention and 2.28x end to end, with better quality than its rivals",
)
def tokenselect(
    *, tokens: int = 2048, sinks: int = 128, local: int = 512, similar: float = 0.9, far: bool = False
) -> Axes:
    """TokenSelect: a step reads the `tokens` that all heads of a layer vote for, each with a softmax of q . k.

    The first `sinks` and the newest `local` tokens are read beside them. As long as queries have a cosine of `similar`
    to those of the last vote, its tokens serve; a number above 1: never. far: keys are kept un-rotated, and the vote is
    as if all were `local` tokens away. It keeps every token: it saves reads, not memory.
    """
    if tokens < 1:
        raise ValueError(f"tokens={tokens}: that a step reads, 1 or more")
    if far and local < 1:
        raise ValueError(f"tokenselect: local={local}: the distance of the vote with far=True, 1 or more")
    exact = Exact(pages=tokens + sinks, sinks=sinks, apart=local * far)
    select = exact if similar > 1 else Similar(select=exact, threshold=float(similar))
    tiers = dict(tiers=(TierSpec(rope="read"),)) if far else {}
    return dict(select=select, recent=local) | tiers


def paged(name: str, tokens: int, page: int) -> int:
    """So many tokens in pages; ValueError for less than one."""
    if tokens < page:
        raise ValueError(f"{name}: tokens={tokens}, page={page}: that are read together; a page or more")
    return tokens // page


def proxies(own: Proxies, channels: str | None) -> Proxies:
    """With what a folder of `jkv calibrate channels` knows, if one is given."""
    if channels is None:
        return own
    known, models = calibrated(channels)
    return replace(own, known=known, models=models)


@method(
    "2602.03152",
    "approximation: pairs are of a kv head, by the mean agreement of its query heads; some sinks are always read",
    "nearly the full cache with 256 tokens; 2.56x the speed with 18.9% of it on AIME24",
)
def fasa(
    *,
    tokens: Positive = 256,
    page: Positive = 1,
    pairs: Positive = 16,
    sinks: int = 4,
    dense_layers: int = 1,
    channels: str | None = None,
) -> Axes:
    """FASA: a step reads the `tokens` of the highest logit of the few `pairs` of channels that find most alone.

    page: tokens that are read together, by the best of them. channels: a folder of `jkv calibrate channels`.
    It keeps every token and an index: it saves reads, not memory.
    """
    select = Proxies(unit=page, pages=paged("fasa", tokens, page), sinks=sinks, width=pairs, first=dense_layers)
    return dict(select=proxies(select, channels))


@method(
    "2404.11912",
    "pages are picked anew at each flush, not once; heads that share keys by the sum of dots; made for drafts",
    "as a draft of the model itself 2.31x as fast at 128K tokens, and 7.78x where the full cache is in the host",
)
def triforce(*, tokens: Positive = 4096, page: Positive = 8, newest: Positive = 32) -> Axes:
    """TriForce: a step reads the first page, others of the best mean keys, `tokens` in all, and the `newest`.

    The first query after a flush picks them, and steps read them until the next. It keeps every token: it saves reads,
    not memory. `draft="triforce(tokens=512)"` copies them out of the cache that verifies, whatever that is, and guesses
    through the copy with the model's own weights.
    """
    pages = PageMean(unit=page, pages=paged("triforce", tokens, page), sinks=page)
    return dict(select=Similar(select=pages, threshold=-2.0), recent=newest)  # whatever later queries are


@method(
    "2406.19707",
    "approximation: directions by calibration, not by the prompt; a layer's own queries, as nothing is fetched ahead",
    "up to 3.00x the speed of other managers of a cache on the host",
)
def infinigen(
    *,
    tokens: Positive = 400,
    page: Positive = 1,
    directions: Positive = 13,
    gap: float = 8.0,
    dense_layers: int = 2,
    channels: str | None = None,
) -> Axes:
    """InfiniGen: a step reads the tokens whose logit, of a few skewed `directions`, is less than `gap` below the best.

    At most `tokens`; gap: 0 for as many in any case. The authors take 4 for OPT, whose keys are not rotated, and 5 to 9
    for Llama. page: tokens that are read together, by the best of them.
    channels: a folder of `jkv calibrate channels`, of a quarter of the directions. It keeps every token and an index:
    it saves reads, not memory.
    """
    if gap < 0:
        raise ValueError(f"infinigen: gap={gap}: below the best logit, 0 or more")
    pages = paged("infinigen", tokens, page)
    select = Proxies(unit=page, pages=pages, kind="skew", width=directions, gap=float(gap), first=dense_layers)
    return dict(select=proxies(select, channels))


@method(
    "2510.23649",
    "approximation: steps take the prompt's maps, of its last queries; a kv head's queries share theirs",
    "only what is missing crosses from host to device, and what is read is exact (no figure in the abstract)",
)
def lrqk(
    *,
    tokens: Positive = 512,
    page: Positive = 1,
    rank: Positive = 16,
    window: Positive = 64,
    sinks: int = 0,
    dense_layers: int = 0,
) -> Axes:
    """LRQK: a step reads the `tokens` of the largest products of proxies, `rank` numbers of a query and of a key each.

    The maps that make them are learned of each prompt: of its keys and its last `window` queries; of one that is read
    in chunks, or given bit by bit, of those of its beginning. page: tokens that are read together, by the best of them.
    It keeps every token and an index: it saves reads, not memory.
    """
    if window > QUERIES:
        raise ValueError(f"lrqk: window={window}: queries that the maps are learned of, from 1 to {QUERIES}")
    pages = paged("lrqk", tokens, page)
    select = Factors(unit=page, pages=pages, sinks=sinks, rank=rank, queries=window, first=dense_layers)
    return dict(select=select)


@method(
    "2604.10539",
    "reconstruction: cut along principal directions at each flush, not by a tree of neighbours; each layer its own",
    "99% of the full cache's accuracy with 256 tokens, a quarter of what other managers of a cache on the host take",
)
def icecache(*, pages: Positive = 14, page: Positive = 16, sinks: int = 32, dense_layers: int = 0) -> Axes:
    """IceCache: a page is of tokens whose keys are alike, wherever they stand; a step reads the `pages` of the mean key
    that its queries ask for most.

    The pages of the first `sinks` tokens are among them in any case. It keeps every token and an index: it saves reads,
    not memory.
    """
    return dict(select=Alike(unit=page, pages=pages, sinks=sinks, first=dense_layers), recent=32)


@method(
    "2402.04617",
    "approximation: keys act where they are, not at one distance; attention of all queries makes representatives",
    "texts of 1,024K tokens with models that were trained on a few thousand (no figure in the abstract)",
)
def infllm(
    *, blocks: Positive = 16, block_size: Positive = 128, tokens: Positive = 4, sinks: int = 128, local: int = 4096
) -> Axes:
    """InfLLM: a step reads the `blocks` whose representatives all heads together ask for most, and the newest `local`.

    The representative of a block is the mean key of its `tokens` of the most attention. The first `sinks` tokens are
    read in any case. It keeps every token and an index: it saves reads, not memory.
    """
    held = -(-sinks // block_size)
    select = Representative(unit=block_size, pages=blocks + held, sinks=sinks, tokens=tokens)
    return dict(score=Accumulated(), budget=All(), select=select, recent=local)


@method(
    "2501.06807",
    "reconstruction: fixed numbers instead of a threshold and shares; no index for several layers, no secret sharing",
    "1.8 to 2.01x less latency and 3.39 to 8.37x less communication in private inference",
)
def mpcache(
    size: Size,
    *,
    window: Positive = 64,
    pages: Positive = 13,
    page: Positive = 16,
    alpha: float = 0.6,
    wide: float = 2.5,
    sinks: int = 1,
    dense_layers: int = 0,
) -> Axes:
    """MPCache: one eviction after a prompt, by the highest attention of its last `window` queries; then two levels.

    A step ranks clusters of two pages by a linear score, and reads the best `pages` of the best `wide` times as many.
    The pages of the first `sinks` tokens are among them in any case. Generated tokens are kept on top of the budget.
    """
    if not 0 <= alpha <= 1 or wide < 1:
        raise ValueError(f"mpcache: alpha={alpha}, wide={wide}: a share from 0 to 1, and 1 or more")
    window = at_most(min(window, QUERIES), size.tokens, 2)
    select = Clusters(unit=page, pages=pages, sinks=sinks, alpha=float(alpha), wide=float(wide), first=dense_layers)
    return dict(score=Foremost(queries=window), budget=size, select=select, recent=window, append=1.0)


@method(
    "2504.00970",
    "approximation: the first step of a sentence picks too, where the paper's reads everything; generated tokens come "
    "into means at a flush",
    "better than its rivals on PG-19, LongBench and needles, in less memory at a steady latency (no figure)",
)
def sentencekv(
    size: Size,
    *,
    tokens: Positive = 1024,
    window: Positive = 32,
    pool: Positive = 7,
    sinks: int = 32,
    longest: Positive = 64,
    least: Positive = 8,
    dense_layers: int = 0,
) -> Axes:
    """SentenceKV: SnapKV with a maximum evicts once, then a step reads the sentences whose mean keys fit a query best.

    The query is the sum of those since the last end of a sentence. tokens: that a step reads, the first `sinks` and the
    newest `window` among them; the paper's budget is three times as many. longest: tokens of a sentence, at most;
    least: there is a mean key for every so many tokens kept. Generated tokens are kept on top of the budget.
    """
    if tokens <= sinks + window:
        raise ValueError(f"sentencekv: tokens={tokens}: that a step reads, more than sinks={sinks} and window={window}")
    coarse = snapkv(size, window=window, pool=pool, kind="max")
    select = SentenceMeans(pages=tokens - window, sinks=sinks, first=dense_layers, least=least)
    return coarse | dict(score=Sentences(score=coarse["score"], longest=longest), select=select, append=1.0)


@method(
    "2507.13681",
    "reconstruction from an abstract and reviews: its decoding; prompts read everything",
    "more than its baselines on 11 sets of several turns (no figure in the abstract)",
)
def loopserve(*, tokens: Positive = 1024, outputs: Positive = 16) -> Axes:
    """LoopServe: a step reads the `tokens` of the most attention from the last `outputs` queries, anew after these.

    It keeps every token and an index: it saves reads, not memory.
    """
    if not 2 <= outputs <= QUERIES:
        raise ValueError(f"loopserve: outputs={outputs}: queries that a choice is by, from 2 to {QUERIES}")
    return dict(select=Heavy(pages=tokens, queries=outputs), recent=outputs, block=outputs)


@method(
    "2603.12201", "changes only which layers pick", "75% less work of an indexer; up to 1.82x prefill, 1.48x decoding"
)
def indexcache(*, every: Positive = 4, pattern: str = "") -> Axes:
    """IndexCache: of a selector's layers some pick, and the others read what the nearest below picked.

    every: layers 0, 1, 1 + every, 1 + 2 every ... pick; pattern: or those with an F, of a letter F or S for each layer.
    """
    return dict(layers=(every, pattern))


@method("2411.02886", "changes only when a selector picks", "part of tokenselect")
def similar(*, threshold: float = 0.9) -> Axes:
    """What a selector picked serves steps whose queries have this cosine to those that it was picked for."""
    return dict(steps=float(threshold))


@method("-", "changes only how the query heads of a selector agree")
def vote(*, soft: bool = True, join: str = "max", layer: bool = False) -> Axes:
    """The query heads of a kv head, or of a layer, agree by the "max" or "sum" of their scores, or `soft`maxes.

    A softmax is as warm as that of attention, but for tokenselect, whose authors do not scale its scores.
    """
    if join not in ("max", "sum"):
        raise ValueError(f"vote: join={join!r}: 'max' or 'sum'")
    return dict(vote=Vote(soft=soft, join="max" if join == "max" else "sum", layer=layer))
