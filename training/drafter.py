"""Training a drafter: a few blocks of a frozen model, over its commonest words, learn what that model says next.

    loss = KL(p || q), p and q over the drafter's n words alone

p is the model's distribution, q the drafter's, whose embedding and output are the model's own rows: they are frozen,
and no bytes of its. It begins with blocks of the model, evenly spaced from the first to the last. The texts go on as
the model itself continues them, as those are what it will be asked to guess (DistillSpec, 2310.08461).

The size decides the depth: as many blocks as fit with 8 bits a weight, a step for each output, and the words' map.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jkv.generation.api import generate
from jkv.generation.distilled import STEP, Words, packed, thinned
from jkv.models import Params, family
from jkv.training.data import rows
from jkv.training.losses import Batch
from jkv.training.measured import Measured
from jkv.training.student import hidden

HEADER, ENTRY = 4096, 128  # bytes of a file beside its arrays, and of each of them, at most
TOGETHER = 32  # texts that are continued at once
SLICE = 256  # tokens whose nearest words are looked for at once


def places(layers: int, n: int) -> list[int]:
    """The n of so many blocks that a drafter begins with.

    >>> places(30, 1), places(30, 2), places(30, 3)
    ([0], [0, 29], [0, 14, 29])
    """
    return np.linspace(0, layers - 1, n).astype(int).tolist()


def stored(params: Params, n: int, words: int) -> int:
    """Bytes of the file of a drafter of n blocks, at most."""
    known = Words(of=np.arange(min(words, params.config.vocab)), read=np.zeros(params.config.vocab, np.int32))
    arrays = packed(thinned(params, known.of, places(params.config.layers, n)), known, range(n))
    return HEADER + sum(x.nbytes + ENTRY for x in arrays.values())


def depth(params: Params, bytes: int, words: int) -> int:
    """The most blocks that fit into bytes; ValueError where none does."""
    sizes = [stored(params, n, words) for n in (1, 2)]
    if bytes < sizes[0]:
        raise ValueError(
            f"bytes={bytes:,}: one block of this model and the map of {words:,} words take {sizes[0]:,}; give as many"
        )
    return min(1 + (bytes - sizes[0]) // (sizes[1] - sizes[0]), params.config.layers)


def commonest(texts: Batch, vocab: int, n: int) -> np.ndarray:
    """i32[n]: the tokens that texts have most often, by their ids; of equal ones the lowest; all, if n is more.

    >>> commonest(Batch(ids=jnp.array([[5, 6, 6, 1, -1]]), pos=None), 9, 3).tolist()
    [1, 5, 6]
    """
    ids = np.asarray(texts.ids)
    counts = np.bincount(ids[ids >= 0], minlength=vocab)
    return np.sort(np.argsort(-counts, kind="stable")[:n]).astype(np.int32)


def nearest(params: Params, of: np.ndarray) -> np.ndarray:
    """i32[V]: for each token the word of `of` whose embedding has the largest cosine with its; a word is its own."""
    unit = lambda x: x / jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), 1e-9)  # noqa: E731

    @jax.jit
    def of_some(some: Array, among: Array) -> Array:
        return (unit(some.astype(jnp.float32)) @ unit(among.astype(jnp.float32)).T).argmax(-1)

    embed = np.asarray(params.embed)
    pad = np.pad(embed, ((0, -len(embed) % SLICE), (0, 0))).reshape(-1, SLICE, embed.shape[1])
    found = np.concatenate([np.asarray(of_some(x, embed[of])) for x in pad])[: len(embed)].astype(np.int32)
    found[of] = np.arange(len(of))
    return found


def begun(params: Params, texts: Batch, words: int, at: Sequence[int]) -> tuple[Params, Words]:
    """The drafter before its training, and its words: the commonest of the texts."""
    of = commonest(texts, params.config.vocab, words)
    return thinned(params, of, at), Words(of=of, read=nearest(params, of))


def wide(name: str) -> bool:
    """Which arrays of a drafter are kept in float32."""
    return name.endswith(STEP)


def cut(texts: Batch, prompt: int) -> Batch:
    """Texts of which those that are whole keep their first `prompt` tokens; 0: all.

    >>> cut(Batch(ids=jnp.array([[5, 6, 7], [8, 9, -1]]), pos=jnp.array([[0, 1, 2], [0, 1, -1]])), 1).ids.tolist()
    [[5, -1, -1], [8, 9, -1]]
    """
    ids, pos = np.array(texts.ids), np.array(texts.pos)
    beyond = (ids[:, -1:] >= 0) & (np.arange(ids.shape[1]) >= (prompt or ids.shape[1]))
    return Batch(ids=jnp.asarray(np.where(beyond, -1, ids)), pos=jnp.asarray(np.where(beyond, -1, pos)))


def pieces(texts: Batch) -> list[list[int]]:
    """The texts that end early, as many together as are continued at once."""
    short = np.flatnonzero(np.asarray(texts.ids)[:, -1] < 0).tolist()
    return [short[i : i + TOGETHER] for i in range(0, len(short), TOGETHER)]


def _after(params: Params, some: list[list[int]], new: int, heat: float, seed: int) -> np.ndarray:
    """i[n,new]: what the model says after rows, -1 where it has ended."""
    made = generate(params, None, [*some], max_new_tokens=new, temperature=heat, seed=seed).tokens
    return np.array([[*row, *[-1] * (new - len(row))] for row in made if isinstance(row, list)])


def continued(
    params: Params, texts: Batch, heat: float, seed: int, kept: Measured, say: Callable[[str], None]
) -> Batch:
    """Texts, those that end early as the model continues them.

    heat: the temperature. `kept` has what a killed training has continued already.
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


def in_words(texts: Batch, words: Words) -> Batch:
    """Texts as the drafter reads them."""
    ids = np.asarray(texts.ids)
    return Batch(
        ids=jnp.asarray(np.where(ids >= 0, words.read[np.maximum(ids, 0)], -1).astype(np.int32)), pos=texts.pos
    )


@jax.jit
def _agreeing(params: Params, small: Params, of: Array, tokens: Batch, own: Batch) -> tuple[Array, Array]:
    """At every place whether the drafter's likeliest word is the model's likeliest token, and how likely it is."""
    token = of[family(small.config).head(small, hidden(small, own)[0]).argmax(-1)]
    logits = family(params.config).head(params, hidden(params, tokens)[0])
    p = jnp.take_along_axis(jax.nn.softmax(logits, -1), token[..., None], -1)[..., 0]
    return logits.argmax(-1) == token, p


def agreement(params: Params, small: Params, words: Words, texts: Batch) -> dict[str, float]:
    """How often the drafter's likeliest word is what the model says after the same text: its likeliest token
    (`greedy`), and one that is drawn (`drawn`); means over the labelled places."""

    read, found = in_words(texts, words), ([], [])
    for i in range(len(np.asarray(texts.ids))):
        use = np.asarray(rows(texts, [i]).labelled)
        for kept, x in zip(
            found, _agreeing(params, small, jnp.asarray(words.of), rows(texts, [i]), rows(read, [i])), strict=True
        ):
            kept.append(np.asarray(x, np.float64)[use])
    greedy, drawn = (round(float(np.concatenate(x).mean()), 4) for x in found)
    return {"greedy": greedy, "drawn": drawn}
