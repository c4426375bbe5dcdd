"""Which tokens of passages are read again in a prompt, by name: what papers on reuse chose."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

from jkv.core.chunk_recompute import Again, Moved, Relayed
from jkv.utils.call_syntax import read_one_of
from jkv.utils.validation import count, numbers, short


@dataclass(frozen=True)
class Renewal:
    """What is read again of the tokens that are held; alpha: by how much passages depend on those before them, whose
    variants, at most so many of each, are read as prompts hold them, where the best one would be read again by a share
    `whole` or more; None: a passage is read once, by itself."""

    again: Again = Again()
    alpha: float | None = None
    variants: int = 1
    whole: float = 1.0


def pie() -> Renewal:
    """None: keys are turned to their new place, only what no passage has is read (PIE, 2407.03157).

    k' = Rot(p' - p) k. An edited text is the passage in front of the edit and the one behind it. Exact for a model of
    one layer, whose keys and values depend on the token alone.
    """
    return Renewal()


def cacheblend(ratio: float = 0.16, check: int = 1) -> Renewal:
    """The share of tokens whose values moved most at layer `check`, up to which all are read (CacheBlend, 2405.16444).

    d_i = sum over heads and channels of (v_i - v_i as stored)^2. One check, where the paper narrows the set layer by
    layer; a query sees keys by position, where the authors' code lets chosen rows see later ones.
    """
    return Renewal(Again(_share("ratio", ratio), _layer("check", check)))


def kvshare(kappa: float = 1.0, most: float = 0.15, check: int = 1) -> Renewal:
    """Those whose value moved by more than mean + kappa deviations, at most a share `most` (KVShare, 2503.16525).

    A reconstruction from the abstract, of its first stage: tokens are not renewed while decoding.
    """
    beyond = _number("kappa", kappa, "a number of standard deviations", -1e9, 1e9)
    return Renewal(Again(_share("most", most), _layer("check", check), choice=Moved(beyond)))


def cachecraft(alpha: float = 1.0, variants: int = 5, whole: float = 0.5) -> Renewal:
    """Of each passage a share that says how much what it read stands before it again (Cache-Craft, 2502.15734).

    CFO = alpha CCI (1 - beta'), of its tokens those that paid most to what stood before, in all layers. A passage is
    read as the first prompt that has it holds it. Where the variant that needs least needs a share `whole` or more, all
    of the passage is read, one variant more: of each at most `variants` stay, the newest and those of most use. CCI
    lies in [0.5, 1): at alpha=1 a half is reached wherever nothing of what a passage read stands before it, 1 never.
    After equations in re-implementations; `whole`, and which variants are kept, are reconstructions. What is read again
    is so in every layer: the paper stops early where the question looks elsewhere.
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
    """Those whose value turned, or to which the newest tokens pay, beyond the mean (RelayCaching, 2603.13289).

    1 - cos(v, v as stored) > diff times its mean, or what the `last` tokens read pay > down times its mean, at layer
    `check`, up to which all are read; those are read up to layer `until` (None: the last), above it what is held
    stands. At most a share `most`, those farthest beyond. Constants from a port that cites the paper, which has a band
    of layers; here all from the first up to `check` are read, where states that were kept while decoding would spare
    those below the band. `jkv eval reuse` shows how far the values of a model turn, layer by layer.
    """
    diff, down = (_number(n, x, "so many times the mean", 0, 1e9) for n, x in (("diff", diff), ("down", down)))
    check, last = _layer("check", check), count("last", last, "newest tokens, 1 or more", 1)
    if until is not None and _layer("until", until) < check:
        raise ValueError(f"until={until}: tokens are chosen at layer check={check}; give that one or a later one")
    return Renewal(Again(_share("most", most), check, until, Relayed(diff, down, last)))


RENEWALS = {f.__name__: f for f in (pie, cacheblend, kvshare, cachecraft, relaycaching)}


def renewal(text: str) -> Renewal:
    """The renewal of a text; ValueError for one that is none.

    >>> renewal("cacheblend(ratio=0.3)").again.share
    0.3
    """
    name, arguments = read_one_of(RENEWALS, text, "renewal")
    known = inspect.signature(RENEWALS[name]).parameters
    if unknown := [x for x in arguments if x not in known]:
        raise ValueError(f"renew={text!r}: {unknown[0]}=; {name} takes {', '.join(known) or 'no arguments'}")
    return RENEWALS[name](**arguments)


def _share(name: str, x: Any) -> float:
    return _number(name, x, "a share from 0 to 1", 0, 1)


def _layer(name: str, x: Any) -> int:
    return count(name, x, "a layer, from 0")


def _number(name: str, x: Any, want: str, least: float, most: float) -> float:
    got = numbers(name, x, want, whole=False, least=least, most=most)
    if got.ndim:
        raise ValueError(f"{name}={short(x)}: give {want}")
    return float(got)
