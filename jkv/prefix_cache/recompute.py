"""Policies for recomputing tokens of cached passages, by name, as proposed in papers on KV reuse."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

from jkv.core.chunk_recompute import Again, Moved, Relayed
from jkv.utils.call_syntax import read_one_of
from jkv.utils.validation import count, numbers, short


@dataclass(frozen=True)
class Renewal:
    """Which tokens of cached passages are recomputed in a prompt.

    Attributes:
        again: the selection among cached tokens, at one layer.
        alpha: factor on a passage's dependence on earlier passages; passages are then prefilled within prompts and kept
            in variants. None: a passage is prefilled once, alone.
        variants: maximum variants per passage.
        whole: share of tokens to recompute from which on a passage is prefilled whole, as a new variant.
    """

    again: Again = Again()
    alpha: float | None = None
    variants: int = 1
    whole: float = 1.0


def pie() -> Renewal:
    """Recompute nothing: rotate keys to their new positions, prefill only uncached tokens (PIE, 2407.03157).

    k' = Rot(p' - p) k. An edited text consists of the passages before and after the edit. Exact for a model of one
    layer, whose keys and values depend on the token alone.
    """
    return Renewal()


def cacheblend(ratio: float = 0.16, check: int = 1) -> Renewal:
    """Recompute the share of tokens whose values change most at layer `check` (CacheBlend, 2405.16444).

    All tokens are computed up to layer `check`. d_i = sum over heads and channels of (v_i - cached v_i)^2. There is one
    check, whereas the paper narrows the set layer by layer. Queries are masked by position, whereas in the authors'
    code selected rows also see later tokens.

    Args:
        ratio: share of cached tokens, 0 to 1.
        check: layer at which values are compared.
    """
    return Renewal(Again(_share("ratio", ratio), _layer("check", check)))


def kvshare(kappa: float = 1.0, most: float = 0.15, check: int = 1) -> Renewal:
    """Recompute tokens whose values change by more than mean + kappa standard deviations (KVShare, 2503.16525).

    A reconstruction of the first stage, from the abstract: tokens are not recomputed during decoding.

    Args:
        kappa: standard deviations above the mean.
        most: maximum share of cached tokens.
        check: layer at which values are compared.
    """
    beyond = _number("kappa", kappa, "a number of standard deviations", -1e9, 1e9)
    return Renewal(Again(_share("most", most), _layer("check", check), choice=Moved(beyond)))


def cachecraft(alpha: float = 1.0, variants: int = 5, whole: float = 0.5) -> Renewal:
    """Recompute a share of each passage, by how much its earlier context has changed (Cache-Craft, 2502.15734).

    CFO = alpha CCI (1 - beta') of a passage's tokens are recomputed in all layers: those with the most attention to
    earlier passages. A passage is prefilled within the first prompt that contains it. CCI lies in [0.5, 1). So at
    alpha=1, a share of 0.5 is always reached if no earlier passage is present again, and a share of 1 never.

    Follows equations in re-implementations; `whole` and the choice of variants to keep are reconstructions. Tokens are
    recomputed in every layer, whereas the paper stops early if the question attends elsewhere.

    Args:
        alpha: factor on CCI.
        variants: maximum variants per passage; the newest and the most useful are kept.
        whole: if even the best variant needs this share, the passage is prefilled whole, as a new variant.
    """
    return Renewal(
        alpha=_number("alpha", alpha, "a factor, 0 or more", 0, 1e9),
        variants=count("variants", variants, "how many of a passage stay, 1 or more", 1),
        whole=_number("whole", whole, "a share above 0, up to 1", 1e-9, 1),
    )


def relaycaching(
    diff: float = 1.5,
    down: float = 1.45,
    last: int = 10,
    check: int = 1,
    until: int | None = None,
    most: float = 0.5,
) -> Renewal:
    """Recompute tokens with rotated values or attention from the newest tokens (RelayCaching, 2603.13289).

    Selected at layer `check`, up to which all tokens are computed: 1 - cos(v, cached v) > diff times its mean, or
    attention of the `last` computed tokens > down times its mean. At most a share `most`, the farthest beyond.

    Constants are from a port that cites the paper, which recomputes a band of layers. Here all layers from the first up
    to `check` are computed; hidden states kept from decoding would save those below the band. `jkv eval reuse` shows by
    layer how far a model's values rotate.

    Args:
        diff: multiple of the mean value rotation.
        down: multiple of the mean attention.
        last: newest computed tokens whose attention counts.
        check: layer at which tokens are selected.
        until: last layer that recomputes them; above it the cached entries are used. None: the last layer.
        most: maximum share of cached tokens.
    """
    diff, down = (_number(n, x, "so many times the mean", 0, 1e9) for n, x in (("diff", diff), ("down", down)))
    check, last = _layer("check", check), count("last", last, "newest tokens, 1 or more", 1)
    if until is not None and _layer("until", until) < check:
        raise ValueError(f"until={until}: tokens are chosen at layer check={check}; give that one or a later one")
    return Renewal(Again(_share("most", most), check, until, Relayed(diff, down, last)))


RENEWALS = {f.__name__: f for f in (pie, cacheblend, kvshare, cachecraft, relaycaching)}


def renewal(text: str) -> Renewal:
    """Parse a recomputation policy; ValueError if it is unknown.

    >>> renewal("cacheblend(ratio=0.3)").again.share
    0.3
    """
    name, arguments = read_one_of(RENEWALS, text, "renewal")
    known = inspect.signature(RENEWALS[name]).parameters
    if unknown := [x for x in arguments if x not in known]:
        raise ValueError(f"renew={text!r}: {unknown[0]}=; {name} takes {', '.join(known) or 'no arguments'}")
    return RENEWALS[name](**arguments)


def _share(name: str, x: Any) -> float:
    """Validate a share."""
    return _number(name, x, "a share from 0 to 1", 0, 1)


def _layer(name: str, x: Any) -> int:
    """Validate a layer number."""
    return count(name, x, "a layer, from 0")


def _number(name: str, x: Any, want: str, least: float, most: float) -> float:
    """Validate a number."""
    got = numbers(name, x, want, whole=False, least=least, most=most)
    if got.ndim:
        raise ValueError(f"{name}={short(x)}: give {want}")
    return float(got)
