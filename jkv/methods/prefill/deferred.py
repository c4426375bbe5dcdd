"""Quantized prefill, and deferred compression."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from jax import Array

from jkv.arrays.pytree import part
from jkv.methods.compatibility import refuse_first
from jkv.methods.config import CacheConfig
from jkv.protocols import Prefill, Probe, Reading

if TYPE_CHECKING:
    from jkv.models import ModelConfig


@part
class Coded(Prefill):
    """Quantized prefill in one pass: queries attend to decode(encode(k)), decode(encode(v)), as they will be stored.

    The newest tokens, which stay exact, are read exactly. So quantization error accumulates from layer to layer over a
    whole prompt, as papers measure it, and one forward pass of a text measures what a codec costs (`jkv eval codecs`).
    """

    splits: ClassVar[bool] = False
    coded: ClassVar[bool] = True

    def check(self, config: CacheConfig, model: ModelConfig, chunk: int) -> None:
        several = len(config.tiers) > 1 and config.pupils != [0]  # the fitted tier holds all of a prompt
        others = {
            "several tiers, of which it is not known where a token will be": several,
            "a merge, which changes what is stored": config.merge is not None and config.merge.changes != "none",
            "a codec that the last queries of the prompt teach": any(x.needs.queries for x in config.all_codecs),
        }
        refuse_first(config, "a prompt that attends to what will be stored (coded) does", others)


@part
class Deferred(Prefill):
    """Deferred compression: keep the whole prompt until probe and layer statistics are read, then flush once.

    A budget that needs a statistic of the layers is divided by it. This holds one dense prompt in memory.
    """

    probe: Probe | None = None

    splits: ClassVar[bool] = False
    defers: ClassVar[bool] = True

    @property
    def beside(self) -> str:
        return "reads texts after the prompt" if self.probe else "asks every layer about the prompt"

    def check(self, config: CacheConfig, model: ModelConfig, chunk: int) -> None:
        if self.probe:
            self.probe.check(config, model)
        needs = config.needs
        if needs.new or needs.prompt:
            raise ValueError(
                f"{config}: a prompt that stays whole is ranked by texts that are read after it and by its last "
                "queries, and this score wants all of them; take one such as snapkv's"
            )
        if chunk:
            raise ValueError(
                f"{config} {self.beside}, which stays whole until then, and chunk={chunk} would cut it; prefill in one "
                "piece (chunk=0)"
            )

    def __call__(self, reading: Reading) -> tuple[Any, Array]:
        texts = reading.texts(self.probe) if self.probe else []  # raises before the prompt is read
        empty = reading.empty()
        dense, logits = reading.dense()
        if self.probe:
            dense = reading.probe(dense, self.probe, texts)
        return reading.compress(empty, dense), logits
