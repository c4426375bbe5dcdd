"""LRQK: tokens by low-rank proxies of queries and keys, fitted on the first tokens of a text."""

from __future__ import annotations

from functools import partial, reduce

import jax
import jax.numpy as jnp
from jax import Array

from jkv.arrays.pytree import part, value
from jkv.attention.evidence import QUERIES
from jkv.methods.registry import Axes, Positive, method
from jkv.methods.selection.base import Ranked, Vote, paged, scaled_queries
from jkv.protocols import Entered, Look, Needs

EXACT = jax.lax.Precision.HIGHEST
LEAST = 1e-6  # added to the diagonal before inversion, as a text may have fewer directions than the proxies


@value
class Maps:
    """Proxy maps of each head.

    Attributes:
        q: f32[B,H,D,r], map of queries.
        k: f32[B,H,D,r], map of keys.
        known: f32[B,H], 1 once the maps are fitted.
    """

    q: Array
    k: Array
    known: Array


@part
class Factors(Ranked):
    """LRQK: read the tokens of the highest (q M_Q) . (k M_K), r = `rank` numbers each, voted by softmaxes.

    The maps of a head minimize |Q K' - A_Q A_K'|^2 + |Q - A_Q B_Q|^2 + |K - A_K B_K|^2, by two rounds of `factors`,
    with A_Q = Q M_Q of the newest `queries` of all G, and A_K = K M_K of the first keys that enter. Summary: k M_K
    bf16[r] per token. Source: LRQK (2510.23649), which fits on all queries of a prompt and solves twice per step for
    proxies of the new query and key that fit the logits just read; sharing the maps among the queries of a kv head is
    ours.
    """

    unit: int = 1
    pages: int = 512
    vote: Vote = Vote(soft=True)
    rank: int = 16
    queries: int = 64

    @property
    def needs(self) -> Needs:
        return Needs(queries=self.queries)

    def remember(self, look: Look) -> Maps:
        b, h, _, d = look.q.shape
        none = jnp.zeros((b, h, d, min(self.rank, d)))
        return Maps(q=none, k=none, known=jnp.zeros((b, h)))

    def renew(self, new: Entered) -> Maps:
        memo, asked = new.memo, new.queries
        assert asked is not None
        there, asking = new.pos >= 0, asked.pos >= 0

        def taught() -> Maps:
            k = jnp.where(there[..., None], new.k.astype(jnp.float32), 0)
            q = jnp.where(asking[:, None, None, :, None], asked.q.astype(jnp.float32), 0)
            keys = jnp.einsum("bhnud,bhnue->bhde", k, k, precision=EXACT)
            queries = jnp.einsum("bhgnd,bhgne->bhde", q, q, precision=EXACT)
            maps = factors(queries, keys, min(self.rank, k.shape[-1]))
            some = jnp.broadcast_to(there.any((2, 3)) & asking.any(1)[:, None], memo.known.shape)
            first = some & (memo.known == 0)
            q, k = (jnp.where(first[..., None, None], x, old) for x, old in zip(maps, (memo.q, memo.k), strict=True))
            return Maps(q=q, k=k, known=jnp.maximum(memo.known, some.astype(jnp.float32)))

        return jax.lax.cond((memo.known == 0).any(), taught, lambda: memo)

    def summarize(self, new: Entered) -> Array:
        return jnp.einsum("bhnud,bhdr->bhnur", new.k.astype(jnp.float32), new.memo.k).astype(jnp.bfloat16)

    def score(self, look: Look) -> Array:
        q = jnp.einsum("bhgd,bhdr->bhgr", scaled_queries(look.q), look.memo.q)
        return jnp.einsum("bhgr,bhnur->bhgnu", q, look.summary.astype(jnp.float32)).max(-1)


def factors(queries: Array, keys: Array, rank: int, rounds: int = 2) -> tuple[Array, Array]:
    """Fit M_Q, M_K f32[...,D,r] to queries Q and keys K, given their Gram matrices Q'Q and K'K f32[...,D,D].

    Each round solves for B_Q, B_K, A_Q and A_K of the loss of `Factors`, one after the other. A_Q = Q M_Q and A_K = K
    M_K throughout, starting from the r channels with the largest sums of squares, so no product is longer than D.
    Source: LRQK (2510.23649).

    >>> gram = jnp.diag(jnp.array([3.0, 2.0, 1.0]))
    >>> a, b = factors(gram, gram, 3)
    >>> (a @ b.T).round(3).tolist()
    [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]
    """
    dim = keys.shape[-1]
    eye = LEAST * jnp.broadcast_to(jnp.eye(rank), (*keys.shape[:-2], rank, rank))

    def product(*x: Array) -> Array:
        return reduce(partial(jnp.matmul, precision=EXACT), x)

    def first(gram: Array) -> Array:
        best = jax.lax.top_k(jnp.diagonal(gram, axis1=-2, axis2=-1), rank)[1]
        return jax.nn.one_hot(best, dim).swapaxes(-1, -2)

    def basis(gram: Array, m: Array) -> Array:
        """B = (A'A)^-1 A'X of A = X M."""
        return jnp.linalg.solve(product(m.mT, gram, m) + eye, product(m.mT, gram))

    def maps(gram: Array, m: Array, b: Array) -> Array:
        """Map of one side from the Gram matrix and map m of the other side, and its own basis b."""
        inner = product(m.mT, gram, m) + product(b, b.mT) + eye
        return jnp.linalg.solve(inner, (product(gram, m) + b.mT).mT).mT

    q, k = first(queries), first(keys)
    for _ in range(rounds):
        b_q, b_k = basis(queries, q), basis(keys, k)
        q = maps(keys, k, b_q)
        k = maps(queries, q, b_k)
    return q, k


@method(
    "2510.23649",
    "approximation: steps take the prompt's maps, of its last queries; a kv head's queries share theirs",
    "only what is missing crosses from host to device, and what is read is exact (no figure in the abstract)",
)
def lrqk(
    *,
    tokens: Positive = 512,
    page: Positive = 1,
    rank: Positive = 16,
    window: Positive = 64,
    sinks: int = 0,
    dense_layers: int = 0,
) -> Axes:
    """LRQK: a step reads the `tokens` of the largest products of proxies, `rank` numbers of a query and of a key each.

    The maps that make them are learned of each prompt: of its keys and its last `window` queries; of one that is read
    in chunks, or given bit by bit, of those of its beginning. page: tokens that are read together, by the best of them.
    It keeps every token and an index: it saves reads, not memory.
    """
    if window > QUERIES:
        raise ValueError(f"lrqk: window={window}: queries that the maps are learned of, from 1 to {QUERIES}")
    pages = paged("lrqk", tokens, page)
    select = Factors(unit=page, pages=pages, sinks=sinks, rank=rank, queries=window, first=dense_layers)
    return dict(select=select)
