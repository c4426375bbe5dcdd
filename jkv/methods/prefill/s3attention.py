"""S3-Attention: prompt compression by sparse features of the question's queries.

A sparse autoencoder of each kv head maps a key, or a query, to a few of F features:

    z = relu((x - centre) encode' + bias), of which the `active` largest count;  x ~ z decode + centre

Keys and queries are un-rotated. Both share one dictionary, so that a feature means the same in a query as in a key;
each has its own centre and bias, because their means differ. Source: S3-Attention (2601.17702), from its abstract.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jkv.arrays.pytree import leaf, part, static, value
from jkv.io import trained_weights
from jkv.io.trained_weights import trained
from jkv.methods.base import rank_by, window_attention
from jkv.methods.config import CacheConfig
from jkv.methods.prefill.prompt_compression import PromptCompression
from jkv.methods.prefill.spans import bm25, disjoint, scaled, sums
from jkv.methods.registry import Axes, Positive, method
from jkv.protocols import DraftRunner

if TYPE_CHECKING:
    from jkv.models import ModelConfig, Params
    from jkv.models.rope import Rope

METHOD = "s3attention"
KEYS, QUERIES = 0, 1  # index into `centre` and `bias`


@value
class Dictionary:
    """Autoencoders of the kv heads of N layers: encode, decode f[N,H,F,D], centre f[N,H,2,D], bias f[N,H,2,F].

    layers: indices of the N layers, ascending; active: features of a key or a query. One head's part has no axes [N,H].
    """

    encode: Array
    decode: Array
    centre: Array
    bias: Array
    layers: tuple[int, ...] = static()
    active: int = static()

    axes: ClassVar = dict(encode="NHFD", decode="NHFD", centre=["N", "H", 2, "D"], bias=["N", "H", 2, "F"])

    @property
    def arrays(self) -> dict[str, Any]:
        """What a folder stores."""
        return vars(self)

    def features(self, x: Array, of: int) -> Array:
        """z f32[n,F] of a head's keys or queries (`of`) x f[n,D]; all but the `active` largest are 0."""
        z = jax.nn.relu((x.astype(jnp.float32) - self.centre[of][None]) @ self.encode.T + self.bias[of][None])
        least = jax.lax.top_k(z, self.active)[0][:, -1:]
        return jnp.where(z >= least, z, 0)

    def restored(self, z: Array, of: int) -> Array:
        """f32[n,D]: reconstruct keys or queries (`of`) from their features."""
        return z @ self.decode + self.centre[of][None]


def relevance(own: Dictionary, k: Array, q: Array, ranked: Array, asked: Array) -> Array:
    """f32[T]: relevance of a head's keys k f[T,D] to its queries q f[n,D], by features; 0 unless ranked bool[T].

    s_t = sum over f of z_tf w_f, w_f = log(T' / T_f) sum over asked i of z_if

    T' keys are ranked, and T_f of them have the feature: a feature of all keys is worth nothing.
    """
    z = jnp.where(ranked[:, None], own.features(k, KEYS), 0)
    wanted = jnp.where(asked[:, None], own.features(q, QUERIES), 0).sum(0)
    having, count = (x.sum(0, dtype=jnp.float32) for x in (z > 0, ranked))
    rare = jnp.log(jnp.maximum(count, 1) / jnp.maximum(having, 1))
    return z @ (wanted * rare)


@partial(jax.jit, static_argnames=("ropes",))
def shares(
    gate: Dictionary, k: list[Array], q: list[Array], pos: Array, at: Array, end: Array, ropes: tuple[Rope, ...]
) -> Array:
    """f32[B,T]: each token's share of the total relevance, averaged over layers and heads.

    Tokens before `end` are ranked, and queries from there on ask. One head at a time is in memory.

    Args:
        k: For each layer, f[B,H,T,D].
        q: For each layer, f[B,H,G,n,D].
        pos: i32[B,T], positions of the keys.
        at: i32[B,n], positions of the queries.
        end: i32[B].
        ropes: The rope that rotated each layer.
    """
    ranked, asked = (pos >= 0) & (pos < end[:, None]), (at >= 0) & (at >= end[:, None])

    def one(given: tuple[Dictionary, Array, Array]) -> Array:
        own, k, q = given
        groups = q.shape[1]
        each = jax.vmap(partial(relevance, own))
        s = each(k, q.reshape(len(q), -1, q.shape[-1]), ranked, jnp.tile(asked, (1, groups)))
        return s / jnp.maximum(s.sum(-1, keepdims=True), 1e-30)

    def layer(i: int) -> Array:
        plain = (
            ropes[i].rotate(k[i], pos[:, None], inverse=True),
            ropes[i].rotate(q[i], at[:, None, None], inverse=True),
        )
        heads = jax.tree.map(lambda x: x[i], gate), *(jnp.swapaxes(x, 0, 1) for x in plain)
        return jax.lax.map(one, heads).mean(0)

    return jnp.stack([layer(i) for i in range(len(ropes))]).mean(0)


@part
class Featured(trained_weights.Bearer, PromptCompression):
    """S3-Attention: read the last `window` tokens, and the spans whose keys share features with their queries.

    A span of `span` tokens is worth the sum of its tokens' shares, and its BM25 for the last tokens, each scaled to
    [0,1] over the prompt's spans: (1 - lexical) features + lexical words. As many disjoint whole spans as fit into
    `tokens` are read, with the largest total. Source: S3-Attention (2601.17702), from its abstract, where an index of
    features is kept on the host; here a prompt is asked once, so no index is kept.

    Attributes:
        window: Last tokens, the question.
        span: Tokens of a span.
        lexical: Weight of BM25.
        gate: The dictionary, or None: shipped with jkv for the model. The draft ends with its last layer.
        models: Fingerprints of the models that the dictionary was trained for.
    """

    window: int = 64
    span: int = 32
    lexical: float = 0.25
    gate: Dictionary | None = leaf(default=None)
    models: tuple[str, ...] = ()

    methods: ClassVar = (METHOD,)

    def gate_of(self, arrays: dict[str, np.ndarray]) -> Dictionary | None:
        if not trained_weights.fit(arrays, Dictionary.axes | {"layers": "N", "active": ""}):
            return None
        layers, active = tuple(arrays["layers"].tolist()), int(arrays["active"])
        rise = list(layers) == sorted({*layers}) and min(layers, default=-1) >= 0
        if not rise or not 1 <= active <= arrays["encode"].shape[2]:
            raise ValueError(f"layers={list(layers)}, active={active}: layers that rise, and 1 feature or more")
        floats = {name: jnp.asarray(arrays[name], jnp.float32) for name in Dictionary.axes}
        return Dictionary(layers=layers, active=active, **floats)

    def depth(self, model: ModelConfig) -> int:
        return super().depth(model) if self.gate is None else self.gate.layers[-1] + 1

    def check(self, config: CacheConfig, model: ModelConfig, chunk: int) -> None:
        super().check(config, model, chunk)
        sizes = (model.heads, model.head_dim)
        if self.gate is not None and (found := (self.gate.encode.shape[1], self.gate.encode.shape[3])) != sizes:
            raise ValueError(
                f"{config}: its features are of {found[0]} kv heads of {found[1]} channels, and the model has "
                f"{sizes[0]} of {sizes[1]}: make them for it with `jkv train {METHOD}`"
            )

    def scores(self, params: Params, rows: list[list[int]], runner: DraftRunner) -> list[np.ndarray]:
        """Worth f[S] of each span before the last `window` tokens; empty for a prompt without spans."""
        gate, model = self.weights, params.config
        config = CacheConfig(score=rank_by(window_attention, queries=self.window))
        draft = runner.draft(params.first(self.depth(model)), config)
        layers, ropes = [draft.layers[i] for i in gate.layers], tuple(model.ropes[i] for i in gate.layers)
        k, q = [x.recent.k for x in layers], [x.queries.q for x in layers]
        pos, at, end = layers[0].recent.pos, layers[0].queries.pos, draft.seen - self.window
        found = np.asarray(shares(gate, k, q, pos, at, end, ropes))
        each = zip(rows, found, np.asarray(pos) >= 0, strict=True)
        return [self.worth(ids, share[live]) for ids, share, live in each]

    def worth(self, ids: list[int], share: np.ndarray) -> np.ndarray:
        """f64[S]: worth of the spans before the last `window` tokens of a prompt, from each token's share f[n]."""
        text, asked = ids[: -self.window], ids[-self.window :]
        features, words = sums(share[: len(text)], self.span), bm25(np.array(text, int), asked, self.span)
        return (1 - self.lexical) * scaled(features) + self.lexical * scaled(words)

    def kept(self, score: np.ndarray) -> list[int]:
        first, n = disjoint(score, (self.tokens - self.window) // self.span, self.span), len(score) + self.span - 1
        spans = [i for start in first for i in range(start, start + self.span)]
        return spans + list(range(n, n + self.window))


@method(
    "2601.17702",
    "reconstruction from the abstract: one dictionary of features for keys and queries; a prompt is asked once",
    "close to the full context on LongBench in several model families",
)
def s3attention(
    *,
    tokens: int = 2048,
    window: Positive = 64,
    span: Positive = 32,
    lexical: float = 0.25,
    gate: str | None = None,
) -> Axes:
    """S3-Attention: only `tokens` of a longer prompt are read, spans with the sparse features of its last `window`.

    Only prompts longer than 2048 tokens are cut by default. `span`: tokens of a span. lexical: the weight of BM25
    beside the features, from 0 to 1. `gate` is a folder of `jkv train s3attention`; the draft ends with the last layer
    that it has features of.
    """
    if tokens < window + span or not 0 <= lexical <= 1:
        raise ValueError(
            f"s3attention: tokens={tokens}, window={window}, span={span}, lexical={lexical}: room for the window and a "
            "span, and a weight from 0 to 1"
        )
    compression = Featured(tokens=tokens, window=window, span=span, lexical=float(lexical))
    return dict(compression=trained(gate, compression))
