"""Eviction and coding by what a model's queries are like."""

from __future__ import annotations

from jkv.methods.budgets.sizes import Size, at_most
from jkv.methods.config import TierSpec
from jkv.methods.eviction.queries import Filtered, Phased, with_folder
from jkv.methods.quantization import Dense
from jkv.methods.quantization.think import Thinned
from jkv.methods.registry import Axes, method


@method(
    "2503.02812",
    "exact; decision lagged by block - 1",
    "99% of needles at 32x, as methods with attention; up to 65% less loss of perplexity than StreamingLLM",
)
def qfilters(size: Size, *, window: int = 64, queries: str | None = None) -> Axes:
    """Q-Filters: keys along the direction of most queries; `queries` is a folder of `jkv calibrate queries`."""
    window = at_most(window, size.tokens, 2)
    score = Filtered() if queries is None else with_folder(queries, Filtered())
    return dict(score=score, budget=size, recent=window)


@method(
    "2604.04921",
    "its code's per_layer_perhead_pruning, not its default, one choice for all layers; lagged as there; cuts prompts",
    "the accuracy of the full cache on AIME25 at 2.5x the throughput, or in 10.7x less memory",
)
def triattention(size: Size, *, block: int = 128, queries: str | None = None) -> Axes:
    """TriAttention: what the mean query of each head, turned to positions to come, pays to a key, and its spread.

    `queries`: a folder of `jkv calibrate queries`; tokens leave every `block` steps.
    """
    score = Phased() if queries is None else with_folder(queries, Phased())
    return dict(score=score, budget=size, block=at_most(block, size.tokens, 1))


@method(
    "2407.21018",
    "its rule, of a prompt in one piece; one choice for the queries of a kv head; what follows the prompt stays whole",
    "over 20% less memory beside what evicts and quantizes, with equal or better accuracy; 2.8x less peak with KIVI",
)
def think(*, share: float = 0.4, recent: int = 32, window: int = 32, queries: str | None = None) -> Axes:
    """ThinK: a `share` of the key channels, those of the least E q^2 E k^2 in each head, is never stored.

    They are found for each prompt, of its keys and its last `window` queries. window=0: they are the model's, of `jkv
    calibrate queries`, as that wrote them to the folder `queries`, and keys that follow lose them too; for a budget.
    """
    if not 0 <= share < 1 or window < 0:
        raise ValueError(
            f"think: share={share}, window={window}: the part of the key channels that is dropped, from 0 to below 1, "
            "and queries, 0 or more"
        )
    keys = Thinned(share=float(share), window=window if queries is None else 0)
    if keys.taught:
        return dict(tiers=(TierSpec(k=keys, v=Dense()), TierSpec(k=Dense(), v=Dense())), recent=recent)
    return dict(codec=(keys if queries is None else with_folder(queries, keys), Dense()), recent=recent)
