"""Quantized prefill, and deferred compression."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from jkv.arrays.pytree import part
from jkv.methods.compatibility import refuse_first
from jkv.methods.config import CacheConfig
from jkv.protocols import Prefill, PrefillTraits, Probe

if TYPE_CHECKING:
    from jkv.models import ModelConfig


@part
class Coded(Prefill):
    """Quantized prefill in one pass: queries attend to decode(encode(k)), decode(encode(v)), as they will be stored.

    The newest tokens, which stay exact, are read exactly. So quantization error accumulates from layer to layer over a
    whole prompt, as papers measure it, and one forward pass of a text measures what a codec costs (`jkv eval codecs`).
    """

    traits: ClassVar = PrefillTraits(splits=False, coded=True)

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

    @property
    def traits(self) -> PrefillTraits:
        beside = "reads texts after the prompt" if self.probe else "asks every layer about the prompt"
        return PrefillTraits(splits=False, chunks=False, defers=True, beside=beside)

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
                f"{config} {self.traits.beside}, which stays whole until then, and chunk={chunk} would cut it; prefill "
                "in one piece (chunk=0)"
            )
