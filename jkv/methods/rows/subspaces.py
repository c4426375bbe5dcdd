"""Codes of several heads or layers together."""

from __future__ import annotations

from typing import Literal

from jkv.methods.config import TierSpec
from jkv.methods.eviction.keys import UnitOutlier
from jkv.methods.prefill.deferred import Deferred
from jkv.methods.quantization import Affine, Dense, LowRank, Merged, OfPrompt, Stretches
from jkv.methods.quantization.calibrated import Side, with_folder
from jkv.methods.quantization.groups import Widest
from jkv.methods.quantization.rotation import Rotated
from jkv.methods.registry import Axes, Positive, method
from jkv.methods.selection.landmark import Landmark
from jkv.protocols import Codec


@method(
    "2407.21118",
    "reconstruction: subspaces by the moments of keys and values; all layers have the same ranks, not Fisher's",
    "half of the bytes with accuracy intact; up to 1.89x the speed of attention with rotated keys",
)
def palu(
    *, keys: float = 0.5, values: float = 0.5, heads: int = 4, bits: Positive = 16, moments: str | None = None
) -> Axes:
    """Palu: un-rotated keys, and values, of `heads` kv heads at a time as latents: these shares of their channels.

    A key is made of its latent and rotated when it is read; values are summed as latents. heads: 0 for all; all, too,
    where there are fewer. bits: of a latent's number, 2, 3, 4 or 8 with one scale a token, turned by a Hadamard matrix;
    16 are the plain floats. moments: a folder of `jkv calibrate moments`.
    """
    inner = Dense() if bits == 16 else Rotated(inner=Affine(bits=bits), signs=None)

    def side(share: float, side: Side) -> Codec:
        return with_folder(moments, LowRank(inner=inner, share=float(share), heads=heads, side=side))

    return dict(tiers=(TierSpec(k=side(keys, "plain"), v=side(values, "values"), rope="read"),))


@method(
    "2406.07056",
    "reconstruction from an abstract and a summary: no weights are trained after it; queries are mapped too",
    "half or three quarters of the kv heads removed with comparable quality",
)
def kvheads(*, heads: int = 4, moments: str | None = None) -> Axes:
    """Effectively Compress KV Heads: `heads` kv heads become one, by the subspaces of their rotated keys and values.

    heads: 0 for all; all, too, where there are fewer. moments: a folder of `jkv calibrate moments`.
    """
    k, v = (
        with_folder(moments, LowRank(inner=Dense(), share=None, heads=heads, side=side)) for side in ("keys", "values")
    )
    return dict(tiers=(TierSpec(k=k, v=v),))


@method(
    "2409.10593",
    "reconstruction: the optimum of its loss in closed form, without training; quantised after, not during; "
    "latents are those of keys, not of inputs",
    "80% less memory with long contexts intact, 95% with 4-bit latents",
)
def cskv(
    *, keys: float = 0.5, values: float = 0.5, bits: Positive = 16, group: Positive = 32, moments: str | None = None
) -> Axes:
    """CSKV: un-rotated keys, and values, of all kv heads as one latent each; the newest `group` tokens are exact.

    keys, values: shares of the channels of all heads. bits: of a latent's number, for keys with a scale a channel and
    `group` tokens, for values one a token; 16 are the plain floats. moments: a folder of `jkv calibrate moments`.
    """
    coded = Dense(), Dense()
    if bits != 16:
        coded = Affine(bits=bits, axis="channel", group=group), Affine(bits=bits)
    k = LowRank(inner=coded[0], share=float(keys), side="plain")
    v = LowRank(inner=coded[1], share=float(values), side="values")
    tier = TierSpec(k=with_folder(moments, k), v=with_folder(moments, v), rope="read")
    return dict(tiers=(tier,), recent=0, block=group)


def after_prompt(k: Codec, values: int, rope: Literal["write", "read"]) -> Axes:
    """The tiers of a codec of keys that each prompt teaches, and of what follows the prompt, as it is."""
    prompt = TierSpec(k=k, v=Dense() if values == 16 else Affine(bits=values, group=Widest(32)), rope=rope)
    return dict(tiers=(prompt, TierSpec(k=Dense(), v=Dense())))


@method(
    "2502.15304",
    "reconstruction (no code was released): bits by stretch of channels are given; of all heads or of each",
    "keys at 1.25 bits with little loss on LongBench, up to 410x smaller keys together with sparsity",
)
def svdq(*, bits: tuple[int, ...] = (8, 4, 4, 2, 2, 0, 0, 0), heads: int = 0, values: int = 16) -> Axes:
    """SVDq: a prompt's keys in the basis of their own singular vectors, with fewer bits for smaller singular values.

    bits: of equal stretches of channels, the largest singular values first: 0 (they are dropped), 1, 2, 3, 4 or 8.
    heads: kv heads that have one basis, 0 for all. values: bits of values, 2, 3, 4 or 8; 16 are the plain floats.
    What follows the prompt stays as it is.
    """
    codec = OfPrompt(inner=Stretches(bits=tuple(bits)), heads=heads)
    return after_prompt(codec, values, "write")


@method(
    "2410.21465",
    "reconstruction: values stay on the device; outlier pages are the worst of all kv heads; generated ones are picked",
    "up to 6x larger batches and 3.04x the throughput on an A100, without a loss of accuracy",
)
def shadowkv(
    *,
    rank: int = 160,
    pages: Positive = 256,
    page: Positive = 8,
    outliers: int = 48,
    values: int = 16,
    recent: int = 32,
) -> Axes:
    """ShadowKV: a prompt's un-rotated keys, all kv heads together, as `rank` numbers in a subspace of its own.

    It keeps every token; a rank above the channels of all heads keeps all of each. A step reads the `pages` whose mean
    key has the most attention. The prompt's `outliers`, pages whose worst key is least like their mean, are plain
    floats and read in any case. values: bits of values, 2, 3, 4 or 8; 16 are the plain floats. What follows the prompt
    stays as it is.
    """
    apart = TierSpec(k=Dense(), v=Dense(), size=outliers * page, whole=True)
    prompt = after_prompt(OfPrompt(inner=Dense(), width=rank, centered=False), values, "read")["tiers"]
    select = Landmark(unit=page, pages=pages)
    return dict(score=UnitOutlier(unit=page), tiers=(apart, *prompt), select=select, recent=recent)


@method(
    "2503.18893",
    "approximation: low rank, by the Gram matrix; prompts attend to themselves exactly, as in the released code",
    "up to 6.8x smaller than other methods across layers with 2.7% more accuracy, Llama-3.1-8B and Qwen2.5",
)
def xkv(*, keys: float = 0.125, values: float = 0.1875, layers: int = 4) -> Axes:
    """xKV: a prompt's un-rotated keys, and values, of `layers` layers as one latent each, in subspaces of its own.

    keys, values: shares of the channels of all heads of these layers. Each layer reads the latents of all, so it saves
    memory, not reads. The prompt is held whole once. What follows it stays as it is.
    """
    if layers < 1:
        raise ValueError(f"xkv: layers={layers}: that are coded together, 1 or more")
    k, v = (OfPrompt(inner=Dense(), share=float(x), layers=layers, centered=False) for x in (keys, values))
    tiers = TierSpec(k=k, v=v, rope="read"), TierSpec(k=Dense(), v=Dense())
    return dict(tiers=tiers, prefill=Deferred())


@method(
    "2405.14366",
    "reconstruction: a prompt is merged once it is read, what follows it stays as it is; pairs begin at an even layer; "
    "a number of tokens stays apart in each head",
    "5.02x smaller with 4 bits, about 5x the throughput, 41% less memory, Llama-2-7B on ShareGPT",
)
def minicache(*, bits: int = 4, t: float = 0.6, kept: int = 64, first: int | None = None) -> Axes:
    """MiniCache: two layers have one direction for a token's key, and one for its value, and each layer its length.

    Layers `first` and the next, and so on (None: the upper half), share spherical means that lean to the upper one by
    `t`, in `bits`; 16 are the plain floats. The `kept` tokens of a head whose directions differ most stay as they are.
    The prompt is held whole once.
    """
    inner = Dense() if bits == 16 else Affine(bits=bits, group=Widest(32))
    codec = Merged(inner=inner, t=float(t), kept=kept, first=first)
    return dict(tiers=(TierSpec(k=codec, v=codec), TierSpec(k=Dense(), v=Dense())), prefill=Deferred())
