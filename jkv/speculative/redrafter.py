"""A recurrent drafter distilled from its model, after ReDrafter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, fields, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jkv.arrays.pytree import value
from jkv.cache.cache import tree_bytes
from jkv.io import trained_weights
from jkv.models import Params, family
from jkv.models.weights.linear import rows
from jkv.models.weights.quantize import int8
from jkv.speculative.autoregressive import Chains, Draws, Known, likely, probabilities
from jkv.speculative.draft_length import NODES, ROW
from jkv.speculative.proposer import Verifier

METHOD = "drafter"
STEP = ".step"  # suffix for the scales of quantized matrices
NEWEST = 4  # tokens that the initial state reads: the next one, and the three before it
SEEN = 4  # logits per hidden number that are used to recover the hidden state


@value
class Net:
    """A recurrent network of width R for a model of width E, after ReDrafter (2403.09919).

    h_0 = U u + sum_j N_j e(x_{t-j}), j = 0 to 2
    h_k = B_2(B_1(h_{k-1} + S n(h_{k-1}) + X e(x_{t+k})))
    B(h) = h + D (silu(G n(h)) * (P n(h)))
    u_k = n(O n(h_k)), q_k = head(u_k)

    u f32[E]: the model's last hidden state after token t, with root mean square 1, and u_k after token t + k. q_k: the
    logits of token t + k + 1. e: a token's embedding, with root mean square 1. n(h) = h / rms(h). head: the model's
    own, for part of its vocabulary. Each matrix is [out, in].
    """

    hidden: Array  # U
    newest: Array  # N [NEWEST - 1,R,E]
    state: Array  # S
    word: Array  # X
    gate: Array  # G [2,2R,R]
    up: Array  # P [2,2R,R]
    down: Array  # D [2,R,2R]
    out: Array  # O


@value
class Ends:
    """The parts of the verifying model that a drafter uses, which are not in its folder.

    Attributes:
        bare: the model without blocks, and with the head of the drafter's words only.
        words: i32[n], the model's token of each word.
        back: f32[m,E], recovers the hidden state u from the logits z = W u of m words.
    """

    bare: Params
    words: Array
    back: Array

    @property
    def some(self) -> np.ndarray:
        """i[m], the words whose logits recover the hidden state."""
        return spread(self.words.shape[0], self.back.shape[0])


def spread(n: int, m: int) -> np.ndarray:
    """Return i32[m], evenly spaced numbers from 0 to n - 1.

    >>> spread(9, 3).tolist()
    [0, 4, 8]
    """
    return np.linspace(0, n - 1, m).astype(np.int32)


def ends(params: Params, words: np.ndarray) -> Ends:
    """Return a model's embedding, and its head for some tokens, in float32.

    back = W (W' W)^-1 by least squares, where W maps hidden states of root mean square 1 to logits. Directions that no
    logit depends on are 0.

    >>> from jkv import models
    >>> ends(models.random(models.TINY), np.arange(10)).bare.head.shape
    (10, 32)
    """
    table = params.embed if params.head is None else params.head
    head = rows(table, jnp.asarray(words)).astype(jnp.float32)
    bare = replace(params.ends, head=head, norm=params.norm.astype(jnp.float32), tokenizer=None)
    width = head.shape[1]
    each = family(bare.config).head(bare, jnp.eye(width)[None])[0].T / jnp.sqrt(width)  # rms 1
    m = min(len(words), SEEN * width)
    some = np.asarray(each, np.float64)[spread(len(words), m)]
    gram = some.T @ some
    gram += 1e-9 * np.trace(gram) / len(gram) * np.eye(len(gram))
    back = np.linalg.solve(gram, some.T).T
    return Ends(bare=bare, words=jnp.asarray(words, jnp.int32), back=jnp.asarray(back, jnp.float32))


def hidden_of(back: Array, z: Array) -> Array:
    """Recover u f32[...,E], with root mean square 1, from the logits f32[...,m] of the selected words."""
    return _even(z @ back)


def initial_state(net: Net, bare: Params, u: Array, before: Array) -> Array:
    """Return h_0 f32[...,R].

    Args:
        u: f32[...,E].
        before: i32[...,NEWEST - 1], the tokens up to u's, the newest first; -1: none.
    """
    return u @ net.hidden.T + jnp.einsum("...je,jre->...r", _embedded(bare, before), net.newest)


def followed(net: Net, bare: Params, h: Array, token: Array) -> Array:
    """Return h_k f32[...,R] from h_{k-1} and the next token i32[...]."""
    h = h + _even(h) @ net.state.T + _embedded(bare, token) @ net.word.T
    for gate, up, down in zip(net.gate, net.up, net.down, strict=True):
        y = _even(h)
        h = h + (jax.nn.silu(y @ gate.T) * (y @ up.T)) @ down.T
    return h


def foreseen(net: Net, h: Array) -> Array:
    """Return u_k f32[...,E] from h_k."""
    return _even(_even(h) @ net.out.T)


def draft_logits(bare: Params, u: Array) -> Array:
    """Return the logits q_k f32[B,T,n] from u_k f32[B,T,E]."""
    return family(bare.config).head(bare, u)


def _even(x: Array) -> Array:
    """Return x / rms(x), over the last axis."""
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6)


def _embedded(bare: Params, ids: Array) -> Array:
    """Return the embeddings e f32[...,E] of tokens i32[...]; 0 for -1."""
    some = ids.reshape(1, -1)
    x = family(bare.config).embed(bare, jnp.maximum(some, 0)).astype(jnp.float32)
    return jnp.where(some[..., None] >= 0, _even(x), 0).reshape(*ids.shape, -1)


@jax.jit
def chains(
    net: Net, ends: Ends, logits: Array, newest: Array, known: Array, most: Array, odds: Array
) -> tuple[Array, Array]:
    """Draw one chain of tokens per row.

    A chain ends after `most` tokens. All end when no row's chance of full acceptance exceeds ROW: on slow passes, one
    more token then brings less than it costs.

    Args:
        logits: f32[B,V], the model's newest.
        newest: i32[B,NEWEST], each row's tokens, the next one first; -1: none.
        known: i32[B,N], known tokens after the next one; -1: none.
        most: maximum tokens.
        odds: f32[2], bias and slope of `Odds`.

    Returns:
        Tokens i32[B,N], -1: none; and their probabilities f32[B,N].
    """
    bare, some = ends.bare, ends.words[ends.some]
    h = initial_state(net, bare, hidden_of(ends.back, logits[:, some]), newest[:, 1:])

    def going(carry: tuple[Array, ...]) -> Array:
        i, chance = carry[0], carry[3]
        return (i < most) & (chance > ROW).any()

    def one(carry: tuple[Array, ...]) -> tuple[Array, ...]:
        i, h, token, chance, ids, qs = carry
        h = followed(net, bare, h, token)
        q = draft_logits(bare, foreseen(net, h)[:, None])[:, 0]
        best = q.argmax(-1)
        p = probabilities(q)
        sure = known[:, i]
        token = jnp.where(sure >= 0, sure, ends.words[best])
        chance = chance * jnp.where(sure >= 0, 1, likely(p, odds))
        return i + 1, h, token, chance, ids.at[:, i].set(token), qs.at[:, i].set(p)

    b, n = known.shape
    start = jnp.int32(0), h, newest[:, 0], jnp.ones(b), jnp.full((b, n), -1, jnp.int32), jnp.zeros((b, n))
    *_, ids, qs = jax.lax.while_loop(going, one, start)
    return ids, qs


def packed(net: Net, words: np.ndarray) -> dict[str, np.ndarray]:
    """Return a drafter's arrays for storage: int8 matrices with a scale per output, and the words."""
    arrays = {"words": words.astype(np.int32)}
    for f in fields(Net):
        coded = int8(np.asarray(getattr(net, f.name)), np.dtype(np.float32))
        arrays[f.name], arrays[f.name + STEP] = np.asarray(coded.codes), np.asarray(coded.step.values)
    return arrays


def wide(name: str) -> bool:
    """Whether an array of this name is stored in float32."""
    return name.endswith(STEP)


def like(width: int, inner: int) -> Net:
    """Return a zero network of width `inner` for a model of width `width`."""
    of = partial(jnp.zeros, dtype=jnp.float32)
    return Net(
        hidden=of((inner, width)),
        newest=of((NEWEST - 1, inner, width)),
        state=of((inner, inner)),
        word=of((inner, width)),
        gate=of((2, 2 * inner, inner)),
        up=of((2, 2 * inner, inner)),
        down=of((2, inner, 2 * inner)),
        out=of((width, inner)),
    )


def unpacked(arrays: Mapping[str, np.ndarray], params: Params, folder: str) -> tuple[Net, np.ndarray]:
    """Rebuild the network and words that `packed` stored; FormatError for other arrays."""
    wrong = trained_weights.unlike(folder, arrays, METHOD)
    try:
        words, inner = arrays["words"], len(arrays["state"])
    except (KeyError, TypeError) as error:
        raise wrong from error
    if words.ndim != 1 or not words.size or words.min() < 0 or words.max() >= params.config.vocab or not inner:
        raise wrong
    # Compare names, shapes and types with those of a zero network.
    forms = [
        {name: (x.shape, x.dtype) for name, x in some.items()}
        for some in (arrays, packed(like(params.config.width, inner), words))
    ]
    if forms[0] != forms[1]:
        raise wrong
    each = {f.name: arrays[f.name] * arrays[f.name + STEP] for f in fields(Net)}
    return Net(**{name: jnp.asarray(x, jnp.float32) for name, x in each.items()}), words


def read(folder: str) -> tuple[str, dict[str, np.ndarray], tuple[str, ...]]:
    """Read a folder written by `jkv train drafter`: its path, arrays, and the fingerprints of its models."""
    arrays, card = trained_weights.read(folder, METHOD)
    return folder, arrays, tuple(card["model"])


@dataclass
class Distilled(Chains):
    """Drafting by a small recurrent network distilled from the verifying model (ReDrafter, 2403.09919).

    It starts from the model's hidden state, recovered from the logits, and continues token by token (`Net`). So it
    needs no prefill, holds no per-row state, and rows may change between calls. It drafts only the model's most
    frequent tokens. Unlike the paper, it also reads the three tokens before, draws one chain instead of a beam, and
    stores int8 matrices.

    Attributes:
        params: the verifying model.
        folder: written by `jkv train drafter`; None: the one shipped with jkv for this model.
        net: the network.
        ends: the model's embedding and head.

    Raises:
        ValueError: for weights of another model, or if none are shipped for this one.
        FormatError: for a folder with other contents.
    """

    params: Params
    folder: str | None = None
    rows_change: bool = field(default=True, init=False, repr=False)
    net: Net = field(init=False, repr=False)
    ends: Ends = field(init=False, repr=False)

    def __post_init__(self) -> None:
        folder, arrays, models = (
            trained_weights.shipped(METHOD, self.params, read) if self.folder is None else read(self.folder)
        )
        trained_weights.check(models, self.params)
        self.net, words = unpacked(arrays, self.params, folder)
        self.ends = ends(self.params, words)
        self.nbytes = tree_bytes((self.net, self.ends.bare.head, self.ends.back))
        # It was trained on sampled tokens; greedy ones are accepted more often.
        self.odds.bias, self.odds.slope = 1.0, 5.0

    def draw(self, rows: list[list[int]], most: int, verifier: Verifier | None = None, known: Known = ()) -> Draws:
        """Draw one chain per row from the verifier's logits."""
        assert verifier is not None
        known = known or [[] for _ in rows]
        newest = [_filled(row[: -NEWEST - 1 : -1], NEWEST) for row in rows]
        sure = [_filled(more, NODES) for more in known]
        given = jnp.asarray(newest, jnp.int32), jnp.asarray(sure, jnp.int32), jnp.int32(most)
        odds = jnp.asarray([self.odds.bias, self.odds.slope], jnp.float32)
        made = chains(self.net, self.ends, verifier.state.logits, *given, odds)
        ids, qs, alive = (np.asarray(x).tolist() for x in (*made, verifier.state.alive))
        each = zip(ids, qs, known, alive, strict=True)
        return [_new(ids, qs, len(more)) if on else ([], []) for ids, qs, more, on in each]

    def branch(self, rows: list[list[int]]) -> Distilled:
        """Return a copy that shares the weights."""
        branch = copy(self)
        branch.newest = []
        return branch


def _filled(ids: Sequence[int], n: int) -> list[int]:
    """Pad or cut ids to n, with -1."""
    return [*ids, *[-1] * n][:n]


def _new(ids: list[int], qs: list[float], n: int) -> tuple[list[int], list[float]]:
    """Return the chain's tokens and probabilities after its n known ones."""
    made = [(t, q) for t, q in zip(ids, qs, strict=True) if t >= 0][n:]
    return [t for t, _ in made], [q for _, q in made]
