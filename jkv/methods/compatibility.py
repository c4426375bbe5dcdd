"""Compatibility checks of a config and a model. Errors name both parts and an alternative."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import ceil
from typing import TYPE_CHECKING

import jax

from jkv import kernels
from jkv.attention.head_pool import HEADS
from jkv.cache import codec_map
from jkv.cache.offload_memory import reachable
from jkv.cache.resident_pages import RANKS
from jkv.methods.config import MOST, CacheConfig, expiring, follows
from jkv.methods.own_parts import check_own
from jkv.protocols import Demand, Selector

if TYPE_CHECKING:
    from jkv.models import ModelConfig


def check(config: CacheConfig, model: ModelConfig, chunk: int = 0) -> None:
    """Raise ValueError if the config cannot work with the model, or with a prefill in chunks of `chunk` tokens."""
    check_own(config, model)
    kernels.check(config.kernels)
    if not model.layers:
        _check_idle(config, model)
    # Check the numbers by themselves.
    if not 1 <= config.block < MOST:
        raise ValueError(f"block={config.block}: a flush every so many steps; 1 or more, and below 2**31")
    if not 0 <= config.recent < MOST:
        raise ValueError(f"recent={config.recent}: the newest tokens that stay exact; 0 or more, and below 2**31")
    if config.relative and config.num_sinks:
        raise ValueError(
            f"{config}: positions within the cache move keys, and those of sinks= stay where they were written; leave "
            "out sinks=, or use true positions (streaming(relative=False))"
        )
    if chunk < 0:
        raise ValueError(f"chunk={chunk}: prompt tokens prefilled at a time; 0 (all at once) or more")
    # Check the exact layers.
    spared = config.exact_layers
    if not isinstance(spared, tuple) or any(x not in range(model.layers) for x in spared):
        raise ValueError(f"exact_layers={spared}: numbers of layers that stay exact, of 0 to {model.layers - 1}")
    if spared and any(codec.layers > 1 for codec in config.all_codecs):
        raise ValueError(
            f"{config}: layers that are coded together do not stay exact one by one; leave out exact_layers="
        )
    # Check the schedule against the score's and budget's needs.
    needs = config.needs
    if config.recent < needs.recent:
        raise ValueError(
            f"{config}: recent={config.recent}: what comes after a token decides whether it leaves, so the newest must "
            f"wait in the recent window; {needs.recent} or more"
        )
    if config.budget.statistic and not config.prefill.traits.defers:
        raise ValueError(
            f"{config}: layers divide its budget by a prompt that stays whole until then; take the prefill Deferred"
        )
    config.prefill.check(config, model, chunk)
    if chunk and needs.chunks == "none":
        raise ValueError(
            f"{config} scores with every query of the prompt, which chunk={chunk} does not keep; prefill in one piece "
            "(chunk=0), or take a score of the last queries such as snapkv"
        )
    # Check the parts pair by pair.
    _check_codecs(config, model)
    if config.select:
        _check_select(config, config.select, model)
    _check_taught(config, model, chunk)
    _check_host(config, model)
    _check_residual(config, model)
    _check_merge(config)
    _check_budget(config, model)


def _check_select(config: CacheConfig, select: Selector, model: ModelConfig) -> None:
    if config.relative:
        raise ValueError(
            f"{config}: relative positions move keys, and {type(select).__name__} knows them where they were "
            "written; leave out the selector, or use true positions (streaming(relative=False))"
        )
    if select.follows:
        others = {
            "a budget": config.budget.bounded or config.budget.statistic is not None,
            "several tiers, in which layers may put tokens in other places": len(config.tiers) > 1,
            "layers that see a window of the newest tokens": any(model.windows),
            "a score whose tokens leave before their slots are needed": expiring(config, model),
            "a prefill that leaves tokens out of upper layers": config.prefill.pruning(model, model.layers - 1)
            is not None,
        }
        refuse_first(config, "layers that read what another picked hold the same tokens as it, and do", others)
    if select.arranges:
        others = {
            "layers that read what another picked, as each has units of its own": select.follows,
            "a codec that codes several heads together": config.joins,
            "a merge": config.merge is not None,
            "a score that reads what another layer keeps": follows(config, model),
            "layers that see a window of the newest tokens, from which whole units would leave": any(model.windows),
        }
        refuse_first(config, "units of tokens that are alike, in each head its own, do", others)
    if config.devices > 1 and select.stateful:
        raise ValueError(
            f"{config}: its selector remembers what every step attended to, which devices that divide the slots of a "
            "tier (context in a mesh) do not know of each other; give them to data or model, or take quest"
        )


def _check_codecs(config: CacheConfig, model: ModelConfig) -> None:
    learned = config.score, config.merge, config.codec, config.tiers
    if any(x.shape[0] != model.layers for x in jax.tree.leaves(learned)):
        raise ValueError(f"{config}: its weights were trained for another number of layers than {model.layers}")
    chosen = jax.tree.structure(config.codec) != jax.tree.structure(CacheConfig().codec)
    if chosen and all(tier.k and tier.v for tier in config.tiers):
        raise ValueError(f"{config}: every tier of this method has its own codecs; leave out the other codec")
    _check_pool(config, model)
    made = any(codec.by_head for codec in config.all_codecs)
    if (made and config.pooled is not None) or any(
        x.ndim < 2 or x.shape[1] not in _heads(config, model) for x in jax.tree.leaves((config.codec, config.tiers))
    ):
        raise ValueError(
            f"{config}: a codec's arrays are [layers, heads, ...], of {model.heads} kv heads, or of 1 for all of "
            "them, as heads that compete for one pool of slots (pooled) need it"
        )
    for tier, layer in product(config.tiers, range(model.layers)):
        keys, values = (codec.for_layer(model, layer) for codec in config.codecs(tier))
        _check_together(config, model, max(keys.heads, values.heads))
        keys.check(model.head_dim * keys.heads)
        values.check(model.value_dim * values.heads)
        if model.capped and codec_map.shifts(keys, model.heads, model.head_dim):
            raise ValueError(
                f"{config}: logits of this {model.family} model saturate, so what its keys have in common cannot be "
                "taken off them; use the codec without a center"
            )


def _heads(config: CacheConfig, model: ModelConfig) -> set[int]:
    """Allowed lengths of the head axis of a codec's arrays."""
    if config.pooled is not None:
        return {1}
    together = {codec.for_layer(model, 0).heads for codec in config.all_codecs}
    return {1, model.heads, *(model.heads // g for g in together)}


def _check_together(config: CacheConfig, model: ModelConfig, heads: int) -> None:
    if model.heads % heads:
        fit = [g for g in range(1, model.heads + 1) if model.heads % g == 0]
        raise ValueError(f"{config}: heads={heads} at a time do not divide {model.heads} kv heads; take one of {fit}")
    if heads > 1 and not config.score.uniform:
        raise ValueError(
            f"{config}: {heads} kv heads are coded together, so they keep the same tokens, and "
            f"{type(config.score).__name__} ranks them for each head: take a score of all heads, such as that of "
            "tova, or a codec that codes each head alone"
        )


def _check_taught(config: CacheConfig, model: ModelConfig, chunk: int) -> None:
    if not config.taught:
        return
    if chunk:
        raise ValueError(
            f"{config}: a codec learns of the whole prompt when that is first encoded, which chunk={chunk} does not "
            "keep; prefill in one piece (chunk=0)"
        )
    pupils, last = config.pupils, len(config.tiers) - 1
    group = max(codec.layers for codec in config.codecs(config.tiers[pupils[0]]))
    if group > 1 and not config.prefill.traits.defers:
        raise ValueError(f"{config}: {group} layers are coded together, once all of them are there: take Deferred")
    if group > 1 and len(set(model.ropes)) > 1:
        raise ValueError(f"{config}: {group} layers are coded together, and those of this model turn keys differently")
    others = {
        "a budget, as it holds its whole prompt": config.budget.bounded or config.budget.statistic is not None,
        "a merge": config.merge is not None,
        "layers that see a window of the newest tokens": any(model.windows),
        "the selection of pages, as all layers of a code read it": group > 1 and config.select is not None,
        "one tier alone, as what follows the prompt needs another": len(pupils) > 1 or pupils[0] == last,
    }
    refuse_first(config, "a codec that learns of each prompt does", others)


def _check_host(config: CacheConfig, model: ModelConfig) -> None:
    if config.host not in ("none", "values", "all", "auto"):
        raise ValueError(f"host={config.host!r}: which codes lie in the memory of the host: none, values, all or auto")
    most = config.device_bytes
    if most is not None and (type(most) is not int or most < 1):
        raise ValueError(f"device_bytes={most!r}: bytes of a device that a cache may take, 1 or more")
    if config.hot_by not in RANKS:
        raise ValueError(f"hot_by={config.hot_by!r}: which pages stay on the device: {', '.join(RANKS)}")
    if type(config.hot) is not int or config.hot < 0:
        raise ValueError(f"hot={config.hot!r}: pages of a head that stay on the device; 0 or more")
    if config.hot and (config.select is None or config.host == "none"):
        raise ValueError(f"{config}: hot={config.hot} pages stay where a selector picks those of the host: give host=")
    if type(config.disk) is not str or (config.disk and config.host == "none"):
        raise ValueError(f"{config}: disk={config.disk!r} is a folder for the codes that host= takes off the device")
    if config.host == "none":
        return
    if config.host == "auto" and most is None:
        raise ValueError(f"{config}: host='auto' moves codes to the host until a cache fits: give device_bytes=")
    if config.host != "auto" and not (config.disk or reachable()):
        raise ValueError(
            f"{config}: programs of this backend reach no memory of the host (pinned_host); take host='auto', which "
            "then keeps codes on the device, or disk=, a folder"
        )
    if config.select is not None and config.select.unit != config.unit:
        raise ValueError(
            f"{config}: codes come from the host in units of {config.unit} tokens, which its codec shares numbers "
            f"among, and a step picks {config.select.unit}; take page={config.unit}"
        )
    others = {
        "a budget of tokens: a tier that evicts writes anywhere in it": config.budget.bounded or len(config.tiers) > 1,
        "layers that divide a budget": config.budget.statistic is not None,
        "tokens that expire": expiring(config, model),
        "layers that see a window of the newest tokens": any(model.windows),
        "heads that compete for one pool of slots (pooled)": config.pooled is not None,
        "a codec that codes several heads together": config.joins,
        "a codec that learns of each prompt": config.taught,
        "a merge": config.merge is not None,
        "positions within the cache": config.relative,
        "devices that divide the slots of tiers": config.devices > 1,
    }
    refuse_first(config, "codes in the memory of the host do", others)


def _check_merge(config: CacheConfig) -> None:
    if config.merge is None or config.merge.changes != "all":
        return
    coded = [c for tier in config.tiers for c in config.codecs(tier) if not c.exact or tier.rope != "write"]
    others = {f"the codec {type(c).__name__}, which codes a token once or un-rotated": True for c in coded}
    others["the selection of pages"] = config.select is not None
    refuse_first(config, "mixtures of entries that are mixed again at each flush do", others)


def _check_residual(config: CacheConfig, model: ModelConfig) -> None:
    if config.merge is None or config.merge.empty(1, model) is None:
        return
    others = {
        "positions within the cache": config.relative,
        "a score whose tokens leave before their slots are needed": expiring(config, model),
        "layers that see a window of the newest tokens": any(model.windows),
    }
    refuse_first(
        config, "the evicted in a state beside the tiers, such as one token more of their head (rest), do", others
    )


def _check_idle(config: CacheConfig, model: ModelConfig) -> None:
    same = ("block", "kernels", "devices", "exactness", "name")
    plain = replace(CacheConfig(), **{field: getattr(config, field) for field in same})
    if jax.tree.structure(config) != jax.tree.structure(plain):
        raise ValueError(
            f"{config}: no block of this {model.family} model attends, so it has no keys and values to compress; its "
            "states have a fixed size: use full"
        )


def check_prefill(config: CacheConfig, what: str) -> None:
    """Raise ValueError if the config's prefill needs more than the one program that `what` runs.

    Args:
        what: Name of the caller, the subject of the message.
    """
    if beside := config.prefill.traits.beside:
        raise ValueError(
            f"{config} {beside}, and {what} prefills in one program; jkv.generate, jkv.prefill and jkv eval take it"
        )


def _check_pool(config: CacheConfig, model: ModelConfig) -> None:
    if config.pooled is None:
        return
    if not 0 <= config.pooled <= 1:
        raise ValueError(f"floor={config.pooled}: the share of an equal part that a head is sure of, from 0 to 1")
    grains = [codec.grain for codec in config.all_codecs]
    others = {
        "a codec that codes several heads together": config.joins,
        "a score that keeps the same tokens for all heads": config.score.uniform,
        "a merge": config.merge is not None and config.merge.changes != "none",
        "the selection of pages": config.select is not None,
        "several tiers": len(config.tiers) > 1,
        "positions within the cache": config.relative,
        f"a codec that codes {max(grains)} tokens together": max(grains) > 1,
        f"{model.heads} kv heads, more than {HEADS}": model.heads > HEADS,
    }
    refuse_first(config, "heads that compete for one pool of slots (pooled) do", others)


def refuse_first(config: CacheConfig, what: str, others: dict[str, bool]) -> None:
    """Raise ValueError naming the first of `others` that is true.

    Args:
        what: Subject of the message, ending in its verb "do" or "does".
        others: Name of each excluded part, and whether the config has it.
    """
    for other in (name for name, there in others.items() if there):
        raise ValueError(f"{config}: {what} not go with {other}; leave out one")


def _check_budget(config: CacheConfig, model: ModelConfig) -> None:
    least, demand = config.least, Demand(longest=model.context, recent=config.recent)
    for layer, size in enumerate(config.budget.sizes(model, demand).layers):
        room = size.tokens
        if config.budget.bounded and room < least:
            needed, most = config.smallest(model, model.context), model.context
            number = f" to budget={needed} or keep={ceil(1e6 * needed / most) / 1e6}, or more," if needed < most else ""
            raise ValueError(
                f"{config}: layer {layer} would hold {room} tokens, fewer than the {least} that "
                f"recent={config.recent}, sinks={config.num_sinks} and the fixed tiers need; raise the budget{number} "
                "or lower recent="
            )
        if room > model.context:
            raise ValueError(
                f"{config}: layer {layer} would hold {room} tokens, more than the model's context of {model.context}; "
                "lower the budget, or use full"
            )
