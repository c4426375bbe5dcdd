"""FastKV: token pruning between layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from jkv.arrays.pytree import part
from jkv.cache.spec import Pruning
from jkv.methods.base import Pool, rank_by, window_attention
from jkv.methods.budgets.sizes import Size
from jkv.methods.compatibility import refuse_first
from jkv.methods.config import CacheConfig
from jkv.methods.registry import Axes, Positive, method
from jkv.protocols import Prefill, PrefillTraits

if TYPE_CHECKING:
    from jkv.models import ModelConfig


@part
class TokenPruning(Prefill):
    """FastKV: token pruning between layers; only the `size` best tokens by rank go on to the layers above `layer`.

    Text after the prompt goes through all layers whole. Source: FastKV (2502.01068).

    Attributes:
        size: Tokens of a row (int), or a share of them (float).
        layer: Layer whose score ranks them; None: the last layer of the lower half.
    """

    size: int | float
    layer: int | None = None

    traits: ClassVar = PrefillTraits(splits=False, chunks=False)

    def after(self, model: ModelConfig) -> int:
        """Index of the layer after which tokens are pruned."""
        return max(model.layers // 2 - 1, 0) if self.layer is None else self.layer

    def pruning(self, model: ModelConfig, layer: int) -> Pruning | None:
        return Pruning(size=self.size) if layer == self.after(model) else None

    def check(self, config: CacheConfig, model: ModelConfig, chunk: int) -> None:
        if not 0 <= self.after(model) < model.layers:
            raise ValueError(f"{config}: layer={self.layer}, and the model has layers 0 to {model.layers - 1}")
        others = {
            f"chunk={chunk}": bool(chunk),
            "positions within the cache": config.relative,
            "blocks that recur, which read every token": model.mixers is not None,
        }
        refuse_first(config, "a prompt that goes on with fewer of its tokens (token pruning) does", others)


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
        score=Pool(score=rank_by(window_attention, queries=window), width=pool),
        budget=size,
        recent=window,
        prefill=TokenPruning(size=on, layer=layer),
        append=1.0,
    )
