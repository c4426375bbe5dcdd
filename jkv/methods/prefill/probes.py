"""Probes: texts that are read after a prompt, whose attention ranks its tokens; DapQ, KVzip, KVgrad, SpecKV."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle, islice
from typing import TYPE_CHECKING, Any, ClassVar

import jax.numpy as jnp
from jax import Array

from jkv.arrays.pytree import part
from jkv.methods.base import Pool, Protect, mass, peak_attention
from jkv.methods.budgets.layers import Won
from jkv.methods.budgets.sizes import Size
from jkv.methods.compatibility import refuse_first
from jkv.methods.prefill.deferred import Deferred
from jkv.methods.registry import Axes, Positive, method
from jkv.protocols import PROBED, AttentionGradient, Born, Columns, Evidence, Needs, Probe, ProbeTokens, Say, Score

if TYPE_CHECKING:
    from jkv.methods.config import CacheConfig
    from jkv.models import ModelConfig, Params

AGAIN = "\n\nRepeat the text above exactly, word for word.\n\n"
GO_ON = "\n\nRepeat the text above exactly, word for word, from here on:"


@part
class Pseudo(Probe):
    """DapQ: attention from `tokens` pseudo tokens at the positions of the answer's start.

    s_j = sum_i p[i,j], averaged over G. The pseudo tokens are the prompt's first and last tokens, half of each: their
    positions matter much, their content little. The softmax is over the prompt and the earlier pseudo tokens. Source:
    DapQ (2603.11564), from notes of the paper.
    """

    tokens: int = 32

    def texts(self, params: Params, rows: list[list[int]], say: Say) -> list[ProbeTokens]:
        half = self.tokens // 2
        ids = [[*islice(cycle(r), half), *islice(cycle(r[half - self.tokens :]), self.tokens - half)] for r in rows]
        reach(params, rows, ids, "dapq: fewer tokens=")
        return [ProbeTokens(ids=ids, span=[(0, len(r)) for r in rows])]

    def observe(self, ev: Evidence, span: Array, old: Array, worth: AttentionGradient | None) -> Array:
        assert ev.new is not None
        return mass(ev, ev.new, "mean")


@part
class Rebuilt(Probe):
    """KVzip: the highest attention that a token gets while the model repeats the prompt, `piece` tokens at a time.

    A probe is a request to repeat, the last `lead` tokens before the piece, and the piece, as an answer in a chat
    template if the model has one. Over its queries, s_j = max over i and G of softmax_j(q_i . k_j scale) over the first
    `sinks` tokens, the piece and the probe itself. A model without a tokenizer gets no request in words. Source: KVzip
    (2505.23416).
    """

    piece: int = 2048
    lead: int = 8
    sinks: int = 4

    def texts(self, params: Params, rows: list[list[int]], say: Say) -> list[ProbeTokens]:
        again, go_on, turn = (within(params, text) for text in (AGAIN, GO_ON, answering(params)))
        out = []
        for start in range(0, max(map(len, rows)), self.piece):
            pieces = [r[start : start + self.piece] for r in rows]
            lead = [[*go_on, *r[max(start - self.lead, 0) : start]] if start else again for r in rows]
            ids = [[*a, *turn, *b] if b else [] for a, b in zip(lead, pieces, strict=True)]
            reach(params, rows, ids, "a smaller piece=")
            out.append(ProbeTokens(ids=ids, span=[(start, start + len(b)) for b in pieces]))
        return out

    def observe(self, ev: Evidence, span: Array, old: Array, worth: AttentionGradient | None) -> Array:
        assert ev.new is not None
        first, end, seen = span[:, 0], span[:, 1], ev.seen

        def among(p: Array, pos: Array) -> Array:
            inside = (pos >= first[:, None, None]) & (pos < end[:, None, None])
            there = inside | (pos < self.sinks) | (pos >= seen[:, None, None])
            return jnp.where(there[:, :, None, None], p, 0)

        # Renormalise the softmax over the sinks, the piece and the probe.
        total = ev.over_keys(lambda p, q_pos, pos, index: among(p, pos).sum(-1), ev.new)
        lse = ev.new.lse + jnp.log(jnp.maximum(total, 1e-30))
        if worth is not None:  # weight a query through its log-sum-exp
            lse = lse - jnp.log(worth.query)[:, None, None]

        def paid(p: Array, q_pos: Array, pos: Array, index: Array) -> Array:
            weight = 1.0 if worth is None else jnp.take(worth.key, index, 3)[..., None, :]
            return (among(p, pos) * weight).max((2, 3))

        best = ev.fold(paid, replace(ev.new, lse=lse), jnp.maximum)
        inside = (ev.pos >= first[:, None, None]) & (ev.pos < end[:, None, None])
        return jnp.where(inside, best, old)


@part
class Graded(Rebuilt):
    """KVgrad: as `Rebuilt`, weighted by its worth: max of p[i,j] |W_hg v_j| |d sum_t |y_t|^2 / d a_i| (`Worth`).

    So a token counts as much as the model's last hidden states y depend on what it adds to its layer's output a_i.
    Source: KVgrad (OpenReview: cg1wTCJjjk), as its authors gave it to the field's reference library.
    """

    graded: ClassVar[bool] = True

    def check(self, config: CacheConfig, model: ModelConfig) -> None:
        others = {
            "values that are latents, as what they add to the output is not one product": model.latent is not None,
            "blocks that recur, through which it does not go back": model.mixers is not None,
            "experts, through which it does not go back": model.experts is not None,
        }
        refuse_first(config, "a probe that goes back through the model (graded) does", others)


@part
class Drafted(Probe):
    """SpecKV: the highest attention that a token gets from draft tokens, s_j = max over i and G of p[i,j].

    i are `tokens` tokens after the prompt that the model's first `layers` layers (None: half of them) generate
    greedily. Source: SpecKV (2506.08373), where the draft is a smaller model of its own.
    """

    tokens: int = 32
    layers: int | None = None

    def texts(self, params: Params, rows: list[list[int]], say: Say) -> list[ProbeTokens]:
        if not self.tokens:
            return []
        layers = max(params.config.layers // 2, 1) if self.layers is None else self.layers
        if layers > params.config.layers:
            raise ValueError(f"a draft of layers={layers}, and the model has {params.config.layers}")
        reach(params, rows, [[0] * self.tokens] * len(rows), "fewer tokens of a draft")
        said = iter(say(params.first(layers), [r for r in rows if r], self.tokens))
        ids: list[Any] = [next(said) if r else [] for r in rows]  # a row of a batch may have no token
        return [ProbeTokens(ids=ids, span=[(0, len(r)) for r in rows])]

    def observe(self, ev: Evidence, span: Array, old: Array, worth: AttentionGradient | None) -> Array:
        assert ev.new is not None
        return peak_attention(ev, ev.new)


def within(params: Params, text: str) -> list[int]:
    """Token ids of a text that follows a prompt; none without a tokenizer."""
    return params.tokenizer.within(text) if params.tokenizer else []


def answering(params: Params) -> str:
    """Text that a chat template puts between the user's message and the answer; "" without a template."""
    if params.tokenizer is None or params.tokenizer.template is None:
        return ""
    return params.tokenizer.chat([{"role": "user", "content": AGAIN}]).rpartition(AGAIN.strip())[2]


def reach(params: Params, rows: list[list[int]], probes: list[list[int]], way_out: str) -> None:
    """Raise ValueError if a prompt and its probe exceed the model's context.

    Args:
        way_out: Remedy to suggest.
    """
    longest, context = max(len(a) + len(b) for a, b in zip(rows, probes, strict=True)), params.config.context
    if longest > context:
        raise ValueError(
            f"the prompt and what is read after it are {longest} tokens, and the model's context is {context}: take "
            f"{way_out}, or a shorter prompt"
        )


@part
class Probed(Score):
    """rank_j = the probe's column of token j, f32; 0 for generated tokens."""

    def birth(self, new: Born) -> Columns:
        return {PROBED: jnp.zeros(new.k.shape[:3], jnp.float32)}

    def rank(self, ev: Evidence) -> Array:
        return ev.columns[PROBED]


@part
class LateOrProbed(Probed):
    """SpecKV: the larger of the probe's column and a token's highest attention from the last `queries` queries.

    rank_j = max(probed_j, max over i and G of p[i,j]). Source: SpecKV (2506.08373).
    """

    queries: int = 33

    @property
    def needs(self) -> Needs:
        return Needs(queries=self.queries)

    def rank(self, ev: Evidence) -> Array:
        assert ev.kept is not None
        return jnp.maximum(ev.columns[PROBED], peak_attention(ev, ev.kept))

    def statistic(self, ev: Evidence) -> Array:
        """f32[B,S]: the rank, largest over heads, where the i-th of the last n queries counts i / (n - 1).

        Source: SpecPC (2506.08373).
        """
        assert ev.kept is not None
        age = (ev.seen[:, None] - 1 - ev.kept.pos).astype(jnp.float32)
        weight = jnp.maximum(1 - age / max(self.queries - 1, 1), 0)
        late = replace(ev.kept, lse=ev.kept.lse - jnp.log(weight)[:, None, None])
        return jnp.maximum(ev.columns[PROBED], peak_attention(ev, late)).max(1)


@method(
    "2603.11564", "from notes of the paper; generated tokens are kept on top", "99.5% of needles with 3% of the cache"
)
def dapq(size: Size, *, tokens: int = 32, pool: Positive = 5) -> Axes:
    """DapQ: attention from pseudo tokens at the place of the answer."""
    if tokens < 1:
        raise ValueError(f"dapq: tokens={tokens}: pseudo tokens read after the prompt, 1 or more")
    score, prefill = Pool(score=Probed(), width=pool), Deferred(probe=Pseudo(tokens=tokens))
    return dict(score=score, budget=size, recent=0, append=1.0, prefill=prefill)


@method(
    "2505.23416",
    "all layers and heads compete; what follows the prompt is kept on top; the request to repeat is our own",
    "3x to 4x smaller and decode about twice as fast with hardly a loss, whatever is asked later",
)
def kvzip(
    size: Size,
    *,
    piece: int = 2048,
    sinks: int = 4,
    floor: float | None = 0.0,
    step: int | None = None,
) -> Axes:
    """KVzip: tokens that the model looks at when it repeats the prompt; the tokens of all layers and heads compete.

    floor: what a head is sure of, as a share of an equal part, or None: layers and heads have equal shares; slots come
    in steps of `step` tokens (None: a quarter of the budget).
    """
    return _repeated("kvzip", size, Rebuilt(piece=piece, sinks=sinks), floor, step)


def _repeated(name: str, size: Size, probe: Rebuilt, floor: float | None, step: int | None) -> Axes:
    """What a repetition of the prompt looks at stays, beside the first tokens."""
    if probe.piece < 1 or (step is not None and step < 1):
        raise ValueError(
            f"{name}: piece={probe.piece}, step={step}: tokens that are repeated at a time, and of slots, 1 or more"
        )
    return dict(
        score=Protect(score=Probed(), sinks=probe.sinks),
        budget=size if floor is None else Won(size=size, window=0, step=step),
        pooled=floor,
        recent=0,
        append=1.0,
        prefill=Deferred(probe=probe),
    )


@method(
    "OpenReview: cg1wTCJjjk",
    "scores of its authors' press, from its code; the paper was not read; the request to repeat is our own, as kvzip's",
    "none: the paper was not read",
)
def kvgrad(
    size: Size,
    *,
    piece: int = 256,  # of their press since after kvpress 0.5.5, which has 512
    sinks: int = 4,
    floor: float | None = 0.0,
    step: int | None = None,
) -> Axes:
    """KVgrad: kvzip, where attention counts as much as the model's last hidden states depend on what it adds.

    That takes a pass back through the model for each piece of the prompt. The arguments are those of kvzip.
    """
    return _repeated("kvgrad", size, Graded(piece=piece, sinks=sinks), floor, step)


@method(
    "2506.08373",
    "reconstruction: the draft is the model's own first layers; generated tokens are kept on top",
    "more accurate than others in the same memory and time (no figure in the abstract)",
)
def speckv(
    size: Size,
    *,
    tokens: int = 32,
    layers: int | None = None,
    window: Positive = 33,
    pool: Positive = 7,
) -> Axes:
    """SpecKV: the highest attention from the next `tokens` as the first `layers` (default: half) draft them."""
    size = size.above("speckv", window, "its observation window")
    if tokens < 0 or (layers is not None and layers < 1):
        raise ValueError(f"speckv: tokens={tokens}, layers={layers}: 0 or more, and 1 or more of the model's layers")
    score = Pool(score=LateOrProbed(queries=window), width=pool, kind="max")
    prefill = Deferred(probe=Drafted(tokens=tokens, layers=layers))
    return dict(score=score, budget=size, recent=window, append=1.0, prefill=prefill)
