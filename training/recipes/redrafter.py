"""Recipe of a ReDrafter-style drafter: a small recurrent network distilled from a frozen model's next tokens.

    loss = sum_k w_k (KL(p_{t+k} || q_k) + pull mean((u_k - u_{t+k})^2)) / sum_k w_k
    w_k = fall^(k - 1), k = 1 to `ahead`

u_{t+k} is the model's last hidden state after token t + k, which is learned directly too, as in EAGLE (2401.15077).
p_{t+k} is the model's distribution after token t + k, and q_k the drafter's, which has read u_t and the tokens up to
t + k (`jkv.speculative.redrafter.Net`), both over the drafter's n words only. The model's embedding and head are frozen
and not stored in the drafter's file. The texts are continued by the model itself, because the drafter predicts
generated text (DistillSpec, 2310.08461).

The file size decides the width: the largest whose matrices fit with 8 bits per weight and a scale per output.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jkv.arrays.pytree import part, value
from jkv.generation.api import generate
from jkv.models import Params, family
from jkv.speculative.redrafter import (
    NEWEST,
    Ends,
    Net,
    draft_logits,
    followed,
    foreseen,
    hidden_of,
    initial_state,
    like,
    packed,
)
from jkv.training.data.corpora import rows
from jkv.training.distillation.kl import Rising
from jkv.training.losses import Batch, Teacher, divergence, teach
from jkv.training.resumable_search import Measured
from jkv.training.soft_cache_model import hidden
from jkv.training.trainer import Told, Training

HEADER, ENTRY = 4096, 128  # most bytes of a file's header, and per array
TOGETHER = 32  # texts continued per batch


def drafter_bytes(width: int, inner: int, words: int) -> int:
    """Return the largest file size in bytes of a drafter of width `inner` for a model of width `width`."""
    arrays = packed(like(width, inner), np.arange(words))
    return HEADER + sum(x.nbytes + ENTRY for x in arrays.values())


def inner(width: int, bytes: int, words: int) -> int:
    """Return the largest width of a drafter that fits into `bytes`; raises ValueError if width 1 does not fit."""
    least, most = 0, 1
    while drafter_bytes(width, most, words) <= bytes:
        least, most = most, 2 * most
    while most - least > 1:
        middle = (least + most) // 2
        least, most = (middle, most) if drafter_bytes(width, middle, words) <= bytes else (least, middle)
    if not least:
        raise ValueError(
            f"bytes={bytes:,}: a drafter of one number that says {words:,} words takes "
            f"{drafter_bytes(width, 1, words):,}; give as many"
        )
    return least


def start(width: int, inner: int, seed: int) -> Net:
    """Initialize a drafter that repeats the state it read: O U = 1, or its best approximation.

    Other matrices are normal and preserve the size of their input; a third of that where several are summed.
    """
    rng, shapes = np.random.default_rng(seed), like(width, inner)

    def drawn(name: str) -> Array:
        x, size = getattr(shapes, name), 0.3 if name in ("newest", "down") else 1.0
        return jnp.asarray(rng.normal(size=x.shape) * size / np.sqrt(x.shape[-1]), jnp.float32)

    even = np.linalg.qr(rng.normal(size=(max(width, inner), min(width, inner))))[0]
    into = jnp.asarray(even if inner > width else even.T, jnp.float32)
    net = Net(**{f.name: drawn(f.name) for f in fields(Net)})
    return replace(net, hidden=into, out=into.T)


def commonest(texts: Batch, vocab: int, n: int) -> np.ndarray:
    """Return the n most frequent tokens of texts, i32[n] sorted by id; ties go to the lowest id; all if n is larger.

    >>> commonest(Batch(ids=jnp.array([[5, 6, 6, 1, -1]]), pos=None), 9, 3).tolist()
    [1, 5, 6]
    """
    ids = np.asarray(texts.ids)
    counts = np.bincount(ids[ids >= 0], minlength=vocab)
    return np.sort(np.argsort(-counts, kind="stable")[:n]).astype(np.int32)


def cut(texts: Batch, prompt: int) -> Batch:
    """Cut texts without padding to their first `prompt` tokens; 0 cuts nothing.

    >>> cut(Batch(ids=jnp.array([[5, 6, 7], [8, 9, -1]]), pos=jnp.array([[0, 1, 2], [0, 1, -1]])), 1).ids.tolist()
    [[5, -1, -1], [8, 9, -1]]
    """
    ids, pos = np.array(texts.ids), np.array(texts.pos)
    beyond = (ids[:, -1:] >= 0) & (np.arange(ids.shape[1]) >= (prompt or ids.shape[1]))
    return Batch(ids=jnp.asarray(np.where(beyond, -1, ids)), pos=jnp.asarray(np.where(beyond, -1, pos)))


def pieces(texts: Batch) -> list[list[int]]:
    """Return the indices of the texts that end early, in batches."""
    short = np.flatnonzero(np.asarray(texts.ids)[:, -1] < 0).tolist()
    return [short[i : i + TOGETHER] for i in range(0, len(short), TOGETHER)]


def _after(params: Params, some: list[list[int]], new: int, heat: float, seed: int) -> np.ndarray:
    """Generate i[n,new] tokens after each row, -1 after its end."""
    made = generate(params, None, [*some], max_new_tokens=new, temperature=heat, seed=seed).tokens
    return np.array([[*row, *[-1] * (new - len(row))] for row in made if isinstance(row, list)])


def continued(
    params: Params, texts: Batch, heat: float, seed: int, kept: Measured, say: Callable[[str], None]
) -> Batch:
    """Continue the texts that end early with the model.

    Args:
        params: The model.
        texts: The texts.
        heat: Sampling temperature.
        seed: Random seed.
        kept: Continuations generated so far, for resuming.
        say: Progress callback.
    """
    ids = np.array(texts.ids)
    length = ids.shape[1]
    for at in pieces(texts):
        some: list[list[int]] = [row[row >= 0].tolist() for row in ids[at]]
        new = length - max(map(len, some))

        more = partial(_after, params, some, new, heat, seed + at[0])
        for i, row, after in zip(at, some, kept(str(at[0]), more).astype(np.int32), strict=True):
            ids[i, len(row) : len(row) + new] = after
        say(f"{at[-1] + 1} texts continued")
    pos = np.where(ids >= 0, np.arange(length, dtype=np.int32), -1)
    return Batch(ids=jnp.asarray(ids), pos=jnp.asarray(pos))


@value
class Lesson:
    """Teacher outputs for texts.

    Attributes:
        u: f16[B,T,E], the model's last hidden states, normalized.
        teacher: Its distributions over the drafter's words.
    """

    u: Array
    teacher: Teacher


@partial(jax.jit, static_argnames=("k",))
def lesson(params: Params, ends: Ends, batch: Batch, k: int) -> Lesson:
    """Compute the teacher outputs with the k likeliest words; k = 0 or too large for all words."""
    x, words = hidden(params, batch)[0], len(ends.words)
    u = hidden_of(ends.back, family(params.config).head(ends.bare, x)[..., ends.some])
    return Lesson(u=u.astype(jnp.float16), teacher=teach(ends.bare, x, min(k or words, words)))


@part
class Recipe(Rising):
    """Recipe of a drafter.

    Attributes:
        ahead: Tokens drafted one after the other.
        fall: Weight of each draft token's loss, relative to the one before.
        pull: Weight of the squared distance of hidden states.
    """

    ahead: int = 2
    fall: float = 0.8
    pull: float = 5.0

    def loss(self, score: Net, params: Params, batch: Batch, teacher: Lesson, step: Array, key: Array) -> Told:
        h, kls, gaps = first(score, params, batch, teacher.u), [], []
        # Unroll the drafter over the true tokens.
        for k in range(1, self.ahead + 1):
            token = shifted(batch.ids, k, -1)
            h = followed(score, params, h, token)
            told = jax.tree.map(partial(shifted, by=k, filled=0), teacher)
            u = foreseen(score, h)
            gap = ((u - told.u.astype(jnp.float32)) ** 2).mean(-1)
            kl = jax.checkpoint(_apart)(params, u, told.teacher)
            for kept, x in ((kls, kl), (gaps, gap)):
                n = jnp.maximum((token >= 0).sum(), 1).astype(jnp.float32)
                kept.append(jnp.where(token >= 0, x, 0).sum() / n)
        weights = self.fall ** jnp.arange(self.ahead, dtype=jnp.float32)
        each = jnp.stack(kls) + self.pull * jnp.stack(gaps)
        loss = (weights * each).sum() / weights.sum()
        names = {f"kl_{k + 1}": kl for k, kl in enumerate(kls)} | {f"gap_{k + 1}": gap for k, gap in enumerate(gaps)}
        return loss, {"loss": loss} | names


def _apart(bare: Params, u: Array, told: Teacher) -> Array:
    return divergence(draft_logits(bare, u), told)


def first(net: Net, bare: Params, batch: Batch, u: Array) -> Array:
    """Compute the initial state h_0 f32[B,T,R] at every position from u f[B,T,E]."""
    before = jnp.stack([shifted(batch.ids, -j, -1) for j in range(NEWEST - 1)], -1)
    return initial_state(net, bare, u.astype(jnp.float32), before)


def shifted(x: Array, by: int, filled: float) -> Array:
    """Shift [B,T,...] so that each position has the value `by` positions later, or earlier if negative.

    Positions outside the text are `filled`.

    >>> shifted(jnp.array([[1, 2, 3]]), 2, -1).tolist(), shifted(jnp.array([[1, 2, 3]]), -1, -1).tolist()
    ([[3, -1, -1]], [[-1, 1, 2]])
    """
    t, n = x.shape[1], min(abs(by), x.shape[1])
    part, pad = (x[:, n:], (0, n)) if by > 0 else (x[:, : t - n], (n, 0))
    return jnp.pad(part, ((0, 0), pad, *[(0, 0)] * (x.ndim - 2)), constant_values=filled)


@dataclass(kw_only=True)
class Guessing(Training):
    """Training run of a drafter. `params` has the parts of the model that the drafter uses.

    Attributes:
        model: The teacher.
        ends: The model's embedding and head for the drafter's words.
    """

    model: Params
    ends: Ends

    def taught(self, i: int) -> Lesson:
        return lesson(self.model, self.ends, rows(self.texts, [i]), self.recipe.top)


@partial(jax.jit, static_argnames=("ahead",))
def _agreeing(params: Params, net: Net, ends: Ends, batch: Batch, ahead: int) -> tuple[Array, Array]:
    """Return bool[ahead,B,T], whether the k-th draft token is the model's likeliest, and its probability."""
    x = hidden(params, batch)[0]
    logits = family(params.config).head(params, x)
    p, best = jax.nn.softmax(logits, -1), logits.argmax(-1)
    h = first(net, ends.bare, batch, hidden_of(ends.back, logits[..., ends.words[ends.some]]))
    same, likely = [], []
    for k in range(1, ahead + 1):
        h = followed(net, ends.bare, h, shifted(batch.ids, k, -1))
        token = ends.words[draft_logits(ends.bare, foreseen(net, h)).argmax(-1)]
        same.append(shifted(best, k, -1) == token)
        likely.append(jnp.take_along_axis(shifted(p, k, 0), token[..., None], -1)[..., 0])
    return jnp.stack(same), jnp.stack(likely)


def agreement(params: Params, net: Net, ends: Ends, texts: Batch, ahead: int) -> dict[str, list[float]]:
    """Measure how often the k-th draft token is what the model generates after the same text, for k = 1 to `ahead`.

    Returns:
        `greedy`: the share of draft tokens that are the model's likeliest; `drawn`: their mean probability. Averaged
        over all positions that have a k-th next token.
    """
    shares: list[list[np.ndarray]] = [[] for _ in range(2 * ahead)]
    for i in range(len(np.asarray(texts.ids))):
        one = rows(texts, [i])
        places = [np.asarray(shifted(one.ids, k, -1)) >= 0 for k in range(1, ahead + 1)]
        made = [x for some in _agreeing(params, net, ends, one, ahead) for x in np.asarray(some, np.float64)]
        for kept, x, use in zip(shares, made, places * 2, strict=True):
            kept.append(x[use])
    means = [round(float(np.concatenate(x).mean()), 4) for x in shares]
    return {"greedy": means[:ahead], "drawn": means[ahead:]}
