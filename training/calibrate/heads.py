"""Calibration of attention heads by forward passes: attention to needles and to repetitions.

Needles are facts that an answer copies. Texts go through the model layer by layer, and only a number per head is kept
of each layer.
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
from jkv.methods.calibrated_heads import CHOICE, SPLIT
from jkv.models import Params, family
from jkv.models.llama import out

SEEDS = 1 << 41  # first seed of needles, above those of training texts and evaluations
HAY = "pydoc:train"  # corpus that needles are in
KEPT, WINDOW, TOP = 32, 8, 4  # tokens and window of the cache that weighs layers; heads that choose its tokens
COPIES = 4  # repetitions of the random tokens

Say = Callable[[str], None]
Found = tuple[dict[str, np.ndarray], dict[str, Any]]  # arrays, and their entries in the card


@value
class Needle:
    """A question about a needle, with its answer.

    Attributes:
        ids: i32[1,T], token ids of prompt and answer, right-aligned.
        end: i32[], tokens of the prompt.
        first: i32[], first token of the needle.
        last: i32[], end of the needle (exclusive).
        answer: i32[n], the next token after each of the last n tokens, -1 where that is still the prompt.
    """

    ids: Array
    end: Array
    first: Array
    last: Array
    answer: Array

    @property
    def pos(self) -> Array:
        """i32[1,T]: positions, -1 for padding."""
        live = self.ids >= 0
        return jnp.where(live, jnp.cumsum(live, 1) - 1, -1).astype(jnp.int32)


def needles(params: Params, texts: int, length: int, seed: int) -> list[Needle]:
    """Build needles in prose with the right answers.

    Raises ValueError if the model has no tokenizer, or a number is out of range.
    """
    if texts < 1 or seed < 0 or length > params.config.context - 32:
        most = params.config.context - 32
        raise ValueError(f"texts={texts}, length={length}, seed={seed}: 1 or more, at most {most}, and 0 or more")
    niah, rows = partial(tasks.find(tasks.TASKS, "niah").make, source=HAY), []
    made = tasks.draw("niah", niah, length, texts, SEEDS + seed, count(params))
    for example in made:
        text, (needle,) = quality.conversation_prompt(params, [example]), example.meta["needles"]
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
    """Run the only layer on x f[1,T,E]; also return read(q, k, v) of its rotated f32 projections.

    Args:
        kind: A layer with the same rope and window.
    """
    c = params.config

    def attend(i: int, a: Any) -> tuple[Array, Any]:
        rope = c.ropes[kind]
        q, k = rope.rotate(a.q, pos[:, None, None]), rope.rotate(a.k, pos[:, None])
        o = with_sinks(attend_window(q, k, a.v, causal(pos, c.windows[kind]), pos, c.scale), a.sinks).finish()
        return o, read(*(y.astype(jnp.float32) for y in (q, k, a.v)))

    return family(c).layer(params, 0, x, pos, attend)


def paid(params: Params, q: Array, k: Array, q_pos: Array, pos: Array, kind: int) -> Array:
    """Compute the attention f32[1,H,G,n,T] of rotated queries [1,H,G,n,D] at i32[1,n] to rotated keys [1,H,T,D]."""
    see = visible(q_pos, pos[:, None], params.config.windows[kind])[:, :, None]
    logits, sinks = jnp.einsum("bhgtd,bhsd->bhgts", q, k) * params.config.scale, params.layers[0].get("sinks")
    return jnp.where(see, softmax(jnp.where(see, logits, -1e30), sinks), 0)


@partial(jax.jit, static_argnames=("kind",))
def looks(params: Params, x: Array, one: Needle, kind: int) -> tuple[Array, Array]:
    """Run a layer; also return the attention f32[H,G,n] of the answer's queries to the needle."""
    pos, n = one.pos, one.answer.shape[0]

    def read(q: Array, k: Array, v: Array) -> Array:
        p = paid(params, q[:, :, :, -n:], k, pos[:, -n:], pos, kind)
        inside = (pos >= one.first) & (pos < one.last)
        return jnp.where(inside[:, None, None, None], p, 0).sum(-1)[0]

    return _through(params, x, pos, kind, read)


@partial(jax.jit, static_argnames=("kind",))
def misses(params: Params, x: Array, one: Needle, chosen: Array, kind: int) -> tuple[Array, Array]:
    """Run a layer; also return the error f32[n] of its attention output if the answer sees KEPT prompt tokens only.

    The error is |o' - o| / (|o| + 1e-5) after the output projection. The tokens are the last WINDOW of the prompt, and
    those that have the most attention from them.

    Args:
        chosen: f32[H,G], weights of the heads whose attention chooses the tokens, with sum 1.
    """
    pos, n = one.pos, one.answer.shape[0]

    def read(q: Array, k: Array, v: Array) -> tuple[Array, Array]:
        # Attention of the prompt's last WINDOW queries, summed over the chosen heads and pooled.
        start = pos.shape[1] - 1 - pos[0, -1] + one.end - WINDOW
        late, at = (jax.lax.dynamic_slice_in_dim(y, start, WINDOW, axis) for y, axis in ((q, 3), (pos, 1)))
        mass = (paid(params, late, k, at, pos, kind) * chosen[None, :, :, None, None]).sum((1, 2, 3))
        old = (pos >= 0) & (pos < one.end - WINDOW)
        padded = jnp.pad(jnp.where(old, mass, 0), ((0, 0), (2, 2)))
        pooled = jnp.stack([padded[:, i : i + pos.shape[1]] for i in range(5)]).sum(0)
        best = jax.lax.top_k(jnp.where(old, pooled, -jnp.inf), KEPT - WINDOW)[1]
        held = (pos >= one.end - WINDOW).at[0, best[0]].set(True)
        # Outputs over all tokens, and over the kept ones with the weights renormalized.
        p = paid(params, q[:, :, :, -n:], k, pos[:, -n:], pos, kind)
        cut = jnp.where(held[:, None, None, None], p, 0)
        cut = cut / jnp.maximum(cut.sum(-1, keepdims=True), 1e-30)
        full, less = (jnp.einsum("bhgts,bhsd->bhgtd", w, v) for w in (p, cut))
        return full, less

    x, both = _through(params, x, pos, kind, read)
    full, less = (out(params.layers[0], o)[0] for o in both)
    return x, jnp.linalg.norm(less - full, axis=-1) / (jnp.linalg.norm(full, axis=-1) + 1e-5)


def layers(params: Params) -> Iterator[tuple[int, Params, int]]:
    """Yield each layer's number, the model of that layer alone, and the first layer with the same rope and window."""
    c = params.config
    kinds = list(zip(c.ropes, c.windows, strict=True))
    for i in range(c.layers):
        yield i, replace(params, layers=(params.layers[i],)), kinds.index(kinds[i])


def choice(params: Params, given: list[Needle], say: Say) -> Found:
    """Calibrate CompressKV's tables: query heads' attention to needles f32[L,H,G], and each layer's loss f32[L].

    Only queries whose next token the model predicts itself count, in texts where it predicts more than half. The
    answers are given, while the paper generates them; a layer is weighed with the others uncompressed. Source:
    2508.02401.

    Raises ValueError if the model answers no question.
    """
    net, heads, asked = family(params.config), 0.0, []
    # Attention of each query head to the needle.
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
    # Error of each layer if its best heads choose the tokens.
    lost = np.zeros(len(heads))
    for one in asked:
        x = net.embed(params, jnp.maximum(one.ids, 0))
        for i, single, kind in layers(params):
            x, off = misses(single, x, one, jnp.asarray(share_of(heads[i])), kind)
            lost[i] += float(jnp.where(one.answer >= 0, off, 0).sum())
        say("layers weighed")
    return {"heads": heads / heads.max(), "layers": lost / lost.sum()}, {"answered": f"{len(asked)} of {len(given)}"}


def share_of(heads: np.ndarray) -> np.ndarray:
    """Return f32[H,G]: equal weights with sum 1 for the TOP highest entries of f[H,G], 0 for the others."""
    chosen = np.zeros(heads.size, np.float32)
    chosen[np.argsort(-heads, axis=None, kind="stable")[:TOP]] = 1 / min(TOP, heads.size)
    return chosen.reshape(heads.shape)


@partial(jax.jit, static_argnames=("kind", "size"))
def repeats(params: Params, x: Array, pos: Array, kind: int, size: int) -> tuple[Array, Array]:
    """Run a layer; also return its kv heads' attention f32[2,H] to a token's earlier copies and their successors.

    The text is one token, then `size` tokens repeated. Attention is averaged over all queries after the first copy, and
    the largest of a kv head's G counts.
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
    """Calibrate RazorAttention's tables, f32[L,H]: attention to a token's copies, and to the tokens after them.

    Each text is the begin token and random tokens repeated COPIES times. Source: 2407.15891.
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
