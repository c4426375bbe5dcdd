"""Attention of each head of a model, by forward passes alone: to needles that an answer copies, and to repetitions.

Texts go through the model layer by layer, and of a layer nothing is kept but a number for each head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jkv.arrays.online_softmax import softmax, with_sinks
from jkv.arrays.pytree import value
from jkv.attention.dense import attend_window
from jkv.attention.mask import causal, visible
from jkv.cache.padding import pad
from jkv.eval import quality, tasks
from jkv.eval.experiments import count
from jkv.methods.eviction.heads import CHOICE, SPLIT
from jkv.models import Params, family
from jkv.models.llama import out

SEEDS = 1 << 41  # of needles; those of training texts and of evaluations are smaller
HAY = "pydoc:train"  # what needles are in
KEPT, WINDOW, TOP = 32, 8, 4  # tokens and window of the cache that layers are weighed by, and the heads that choose
COPIES = 4  # of the random tokens

Say = Callable[[str], None]
Found = tuple[dict[str, np.ndarray], dict[str, Any]]  # arrays, and what the card says of them


@value
class Needle:
    """One question and its answer: ids i32[1,T] right-aligned; the prompt has `end` tokens, of which those of the
    needle are [first, last); answer i32[n]: what should follow the last n tokens, -1 where they are still the prompt.
    """

    ids: Array
    end: Array
    first: Array
    last: Array
    answer: Array

    @property
    def pos(self) -> Array:
        live = self.ids >= 0
        return jnp.where(live, jnp.cumsum(live, 1) - 1, -1).astype(jnp.int32)


def needles(params: Params, texts: int, length: int, seed: int) -> list[Needle]:
    """Needles in prose with the right answers; ValueError for a model without a tokenizer or lengths that are none."""
    if texts < 1 or seed < 0 or length > params.config.context - 32:
        most = params.config.context - 32
        raise ValueError(f"texts={texts}, length={length}, seed={seed}: 1 or more, at most {most}, and 0 or more")
    niah, rows = partial(tasks.find(tasks.TASKS, "niah").make, source=HAY), []
    made = tasks.draw("niah", niah, length, texts, SEEDS + seed, count(params))
    for example in made:
        text, (needle,) = quality.said(params, [example]), example.meta["needles"]
        start = text.index(needle)
        ids, answer = params.tokenizer.encode(text), quality.added(params, example.gold)
        first, last = (len(params.tokenizer.encode(x)) for x in (text[:start].rstrip(), text[: start + len(needle)]))
        rows.append((ids, answer, first, last))
    most, n = max(len(ids) + len(a) - 1 for ids, a, *_ in rows), max(len(a) for _, a, *_ in rows)
    return [
        Needle(
            ids=pad([[*ids, *answer[:-1]]], most),
            end=jnp.int32(len(ids)),
            first=jnp.int32(first),
            last=jnp.int32(last),
            answer=jnp.asarray([-1] * (n - len(answer)) + answer, jnp.int32),
        )
        for ids, answer, first, last in rows
    ]


def _through(params: Params, x: Array, pos: Array, kind: int, read: Callable[..., Any]) -> tuple[Array, Any]:
    """x f[1,T,E] after the only layer in `params`, and read(q, k, v), f32 and rotated; kind: a layer with its rope."""
    c = params.config

    def attend(i: int, a: Any) -> tuple[Array, Any]:
        rope = c.ropes[kind]
        q, k = rope.rotate(a.q, pos[:, None, None]), rope.rotate(a.k, pos[:, None])
        o = with_sinks(attend_window(q, k, a.v, causal(pos, c.windows[kind]), pos, c.scale), a.sinks).finish()
        return o, read(*(y.astype(jnp.float32) for y in (q, k, a.v)))

    return family(c).layer(params, 0, x, pos, attend)


def paid(params: Params, q: Array, k: Array, q_pos: Array, pos: Array, kind: int) -> Array:
    """p f32[1,H,G,n,T] of rotated queries [1,H,G,n,D] at i32[1,n]."""
    see = visible(q_pos, pos[:, None], params.config.windows[kind])[:, :, None]
    logits, sinks = jnp.einsum("bhgtd,bhsd->bhgts", q, k) * params.config.scale, params.layers[0].get("sinks")
    return jnp.where(see, softmax(jnp.where(see, logits, -1e30), sinks), 0)


@partial(jax.jit, static_argnames=("kind",))
def looks(params: Params, x: Array, one: Needle, kind: int) -> tuple[Array, Array]:
    """x after a layer, and what the queries of the answer pay to the needle, f32[H,G,n]."""
    pos, n = one.pos, one.answer.shape[0]

    def read(q: Array, k: Array, v: Array) -> Array:
        p = paid(params, q[:, :, :, -n:], k, pos[:, -n:], pos, kind)
        inside = (pos >= one.first) & (pos < one.last)
        return jnp.where(inside[:, None, None, None], p, 0).sum(-1)[0]

    return _through(params, x, pos, kind, read)


@partial(jax.jit, static_argnames=("kind",))
def misses(params: Params, x: Array, one: Needle, chosen: Array, kind: int) -> tuple[Array, Array]:
    """x after a layer, and how far its attention block is off for each query of the answer, f32[n], if it sees KEPT
    tokens of the prompt alone: |o' - o| / (|o| + 1e-5) after the output projection.

    They are those that the heads chosen, f32[H,G] which sum to 1, choose by the last WINDOW queries of the prompt.
    """
    pos, n = one.pos, one.answer.shape[0]

    def read(q: Array, k: Array, v: Array) -> tuple[Array, Array]:
        start = pos.shape[1] - 1 - pos[0, -1] + one.end - WINDOW
        late, at = (jax.lax.dynamic_slice_in_dim(y, start, WINDOW, axis) for y, axis in ((q, 3), (pos, 1)))
        mass = (paid(params, late, k, at, pos, kind) * chosen[None, :, :, None, None]).sum((1, 2, 3))
        old = (pos >= 0) & (pos < one.end - WINDOW)
        padded = jnp.pad(jnp.where(old, mass, 0), ((0, 0), (2, 2)))
        pooled = jnp.stack([padded[:, i : i + pos.shape[1]] for i in range(5)]).sum(0)
        best = jax.lax.top_k(jnp.where(old, pooled, -jnp.inf), KEPT - WINDOW)[1]
        held = (pos >= one.end - WINDOW).at[0, best[0]].set(True)
        p = paid(params, q[:, :, :, -n:], k, pos[:, -n:], pos, kind)
        cut = jnp.where(held[:, None, None, None], p, 0)
        cut = cut / jnp.maximum(cut.sum(-1, keepdims=True), 1e-30)
        full, less = (jnp.einsum("bhgts,bhsd->bhgtd", w, v) for w in (p, cut))
        return full, less

    x, both = _through(params, x, pos, kind, read)
    full, less = (out(params.layers[0], o)[0] for o in both)
    return x, jnp.linalg.norm(less - full, axis=-1) / (jnp.linalg.norm(full, axis=-1) + 1e-5)


def layers(params: Params) -> Iterator[tuple[int, Params, int]]:
    """Each layer's number, the model of that layer alone, and the first layer with the same rope and window."""
    c = params.config
    kinds = list(zip(c.ropes, c.windows, strict=True))
    for i in range(c.layers):
        yield i, replace(params, layers=(params.layers[i],)), kinds.index(kinds[i])


def choice(params: Params, given: list[Needle], say: Say) -> Found:
    """CompressKV's two tables: what each query head pays to needles, f32[L,H,G], and what each layer loses, f32[L].

    Queries count whose answer's next token the model itself would say, in texts where those are more than half. Answers
    are given, where the paper generates them; layers are weighed with the others whole. Source: 2508.02401.
    """
    net, heads, asked = family(params.config), 0.0, []
    for one in given:
        x, paid = net.embed(params, jnp.maximum(one.ids, 0)), []
        for _, single, kind in layers(params):
            x, found = looks(single, x, one, kind)
            paid.append(found)
        said = (net.head(params, x[:, -one.answer.shape[0] :])[0].argmax(-1) == one.answer).astype(jnp.float32)
        share = float(said.sum()) / int((one.answer >= 0).sum())
        say(f"needle: {share:.0%} of the answer")
        if share > 0.5:
            heads = heads + np.asarray((jnp.stack(paid) * said[None, None, None]).sum(-1)) / float(said.sum())
            asked.append(one)
    if not asked:
        raise ValueError(
            f"the model answers none of {len(given)} questions, so its heads tell nothing: give more texts or a "
            "shorter length, or a model that follows instructions"
        )
    heads = np.asarray(heads) / len(asked)
    lost = np.zeros(len(heads))
    for one in asked:
        x = net.embed(params, jnp.maximum(one.ids, 0))
        for i, single, kind in layers(params):
            x, off = misses(single, x, one, jnp.asarray(share_of(heads[i])), kind)
            lost[i] += float(jnp.where(one.answer >= 0, off, 0).sum())
        say("layers weighed")
    return {"heads": heads / heads.max(), "layers": lost / lost.sum()}, {"answered": f"{len(asked)} of {len(given)}"}


def share_of(heads: np.ndarray) -> np.ndarray:
    """f32[H,G]: equal parts for the TOP highest of f[H,G], 0 for the others."""
    chosen = np.zeros(heads.size, np.float32)
    chosen[np.argsort(-heads, axis=None, kind="stable")[:TOP]] = 1 / min(TOP, heads.size)
    return chosen.reshape(heads.shape)


@partial(jax.jit, static_argnames=("kind", "size"))
def repeats(params: Params, x: Array, pos: Array, kind: int, size: int) -> tuple[Array, Array]:
    """x after a layer, and what its kv heads pay to earlier copies of a token and to what followed them, f32[2,H].

    The text is one token, then `size` others again and again; means over all queries but those of the first copy, the
    larger of a kv head's G.
    """

    def read(q: Array, k: Array, v: Array) -> Array:
        def row(at: tuple[Array, Array]) -> Array:
            asked, i = at
            p = paid(params, asked[None, :, :, None], k, i[None, None], pos, kind)[0, :, :, 0]
            gap = i - pos[0]
            copies, after = (gap > 0) & (pos[0] > 0) & (gap % size == 0), (pos[0] > 1) & ((gap + 1) % size == 0)
            return jnp.stack([jnp.where(x, p, 0).sum(-1) for x in (copies, after)])

        late = size + 1
        found = jax.lax.map(row, (jnp.moveaxis(q[0], 2, 0)[late:], pos[0, late:]), batch_size=64)
        return found.mean(0).max(-1)

    return _through(params, x, pos, kind, read)


def split(params: Params, texts: int, length: int, seed: int, say: Say) -> Found:
    """RazorAttention's two tables, f32[L,H]: how much a kv head looks at a token's copies, and at what came after them.

    Each text is the begin token and random tokens, COPIES times the same. Source: 2407.15891.
    """
    c, size = params.config, (length - 1) // COPIES
    if texts < 1 or size < 2 or length > c.context or seed < 0:
        raise ValueError(
            f"texts={texts}, length={length}, seed={seed}: 1 or more, {2 * COPIES + 1} to {c.context}, and 0 or more"
        )
    rng, pos = np.random.default_rng(seed), jnp.arange(1 + COPIES * size, dtype=jnp.int32)[None]
    total = np.zeros((2, c.layers, c.heads))
    for _ in range(texts):
        one = rng.integers(0, c.vocab, size)
        first = 0 if params.tokenizer is None or params.tokenizer.bos_id is None else params.tokenizer.bos_id
        x = family(c).embed(params, jnp.asarray([[first, *np.tile(one, COPIES)]], jnp.int32))
        for i, single, kind in layers(params):
            x, found = repeats(single, x, pos, kind, size)
            total[:, i] += np.asarray(found)
        say("a text that repeats")
    return {"echo": total[0] / texts, "induction": total[1] / texts}, {}


def _choice(params: Params, texts: int, length: int, seed: int, say: Say) -> Found:
    return choice(params, needles(params, texts, length, seed), say)


METHODS: dict[str, Callable[[Params, int, int, int, Say], Found]] = {CHOICE: _choice, SPLIT: split}
