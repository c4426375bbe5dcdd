"""Gates of one layer: small networks that score each token of a layer's normed input x f[B,T,E] for each kv head."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.scipy.special import logsumexp

from jkv.nn.network import Network, Shapes, per_layer

if TYPE_CHECKING:
    from jkv.models import ModelConfig

LOG_BETA_MAX = -1e-30  # a gate may round to 1 in float32, where age must still count
QUERIES = 256  # an attention gate's queries whose attention is in memory at once

even = nnx.initializers.variance_scaling(1.0, "fan_in", "normal")  # deviation 1 / sqrt(inputs)


class MLP(nnx.Module):
    """out(act(hidden(x))) in float32, one output per kv head.

    Args:
        width: Numbers of the input, E.
        heads: Kv heads, H.
        hidden: Width of the hidden layers.
        depth: Hidden layers.
        offset: Initial bias of the output.
    """

    use_bias: ClassVar[bool] = True
    init: ClassVar[nnx.Initializer] = staticmethod(even)
    depths: ClassVar[tuple[int, ...]] = (1,)  # that a folder may have

    def __init__(
        self, width: int, heads: int, hidden: int, depth: int = 1, *, offset: float = 0.0, rngs: nnx.Rngs
    ) -> None:
        widths = [width, *[hidden] * depth]
        how: dict[str, Any] = dict(use_bias=self.use_bias, kernel_init=self.init, rngs=rngs)
        self.hidden = nnx.List([nnx.Linear(i, o, **how) for i, o in zip(widths, widths[1:], strict=False)])
        self.out = nnx.Linear(widths[-1], heads, bias_init=nnx.initializers.constant(offset), **how)

    @staticmethod
    def act(x: Array) -> Array:
        """The activation of hidden layers."""
        return nnx.silu(x)

    @classmethod
    def sizes(cls, shapes: Shapes) -> dict[str, int]:
        if (depth := sum(name.endswith(".kernel") for name in shapes) - 1) not in cls.depths:
            raise LookupError(f"{cls.__name__} with {depth} hidden layers")
        width, *hidden = shapes["hidden.0.kernel" if depth else "out.kernel"]
        return dict(width=width, heads=shapes["out.kernel"][1], hidden=hidden[0], depth=depth)

    @classmethod
    def start(cls, model: ModelConfig, hidden: int, key: Array, depth: int = 1, offset: float = 0.0) -> Network:
        """Initialize the networks of a model's layers.

        >>> from jkv import models
        >>> RetentionGate.start(models.read_config(models.TINY), 8, jax.random.key(0)).arrays["out.kernel"].shape
        (2, 8, 2)
        """
        return per_layer(partial(cls, model.width, model.heads, hidden, depth, offset=offset), model.layers, key)

    def __call__(self, x: Array) -> Array:
        """f32[B,H,T] of x f[B,T,E]."""
        x = x.astype(jnp.float32)
        for layer in self.hidden:
            x = self.act(layer(x))
        return self.out(x).swapaxes(1, 2)


class RetentionGate(MLP):
    """log beta, below 0: how slowly each token fades (TRIM-KV, 2512.03324; Make Each Token Count, 2605.09649)."""

    init, depths = staticmethod(nnx.initializers.normal(0.02)), (1, 2)

    def __call__(self, x: Array) -> Array:
        return jnp.minimum(jax.nn.log_sigmoid(super().__call__(x)), LOG_BETA_MAX)


class Estimate(MLP):
    """A logit of either sign, without biases.

    The heads of Locret (2410.01805) read a token's un-rotated [q; k; v], which are products of x: the same functions,
    except where a model norms q and k.
    """

    use_bias = False


class Surrogate(MLP):
    """Predicted log attention (KVzap, 2601.07891); with depth 0 linear."""

    depths = (0, 1)

    @staticmethod
    def act(x: Array) -> Array:
        return nnx.gelu(x, approximate=False)


class UtilityGate(nnx.Module):
    """A `Surrogate` that predicts lookups, a `RetentionGate` for how fast the rest fades, and the rest's level in nats.

    Args:
        foreseen: Sizes of the surrogate.
        fading: Sizes of the gate.
    """

    def __init__(self, foreseen: dict[str, int], fading: dict[str, int], *, rngs: nnx.Rngs) -> None:
        self.foreseen, self.fading = Surrogate(**foreseen, rngs=rngs), RetentionGate(**fading, rngs=rngs)
        self.level = nnx.Param(jnp.zeros(foreseen["heads"]))

    @classmethod
    def sizes(cls, shapes: Shapes) -> dict[str, dict[str, int]]:
        def part(of: str) -> Shapes:
            return {name.removeprefix(of): x for name, x in shapes.items() if name.startswith(of)}

        return dict(foreseen=Surrogate.sizes(part("foreseen.")), fading=RetentionGate.sizes(part("fading.")))

    def worth(self, foreseen: Array, log_beta: Array, age: Array) -> Array:
        """f32[B,H,T]: log(exp(foreseen) + exp(level) beta^age) for ages f32[B,1 or H,T]."""
        return jnp.logaddexp(foreseen, self.level[None, :, None] + age * log_beta)


class EvictionSwitch(nnx.Module):
    """out(gain x): whether a token evicts the one before it.

    The adapter of DMS (2506.05345) norms the residual itself, with its own gain; a gain on x is the same function.
    `layers`: share of a text that stays in the layer, the mean over the training texts plus one standard deviation, by
    which layers divide a budget.
    """

    def __init__(self, width: int, heads: int, *, rngs: nnx.Rngs) -> None:
        self.out = nnx.Linear(width, heads, use_bias=False, kernel_init=nnx.initializers.zeros, rngs=rngs)
        self.gain, self.layers = nnx.Param(jnp.ones(width)), nnx.Param(jnp.ones(()))

    @classmethod
    def start(cls, model: ModelConfig) -> Network:
        """Initialize switches that keep everything."""
        return per_layer(partial(cls, model.width, model.heads), model.layers, jax.random.key(0))

    @classmethod
    def sizes(cls, shapes: Shapes) -> dict[str, int]:
        width, heads = shapes["out.kernel"]
        return dict(width=width, heads=heads)

    def __call__(self, x: Array) -> Array:
        """f32[B,H,T] of x f[B,T,E]."""
        return self.out(x.astype(jnp.float32) * self.gain[None, None]).swapaxes(1, 2)


class AttentionGate(nnx.Module):
    """u = out [o_1; ...; o_N] + offset per kv head, from N small attention heads of P channels (2410.12876).

    o_n = softmax(q_n k_n / sqrt(P)) v_n; every token attends to all tokens of its text, later ones too.

    Args:
        offset: Initial bias of the output: with a positive one the gate keeps everything.
    """

    def __init__(self, width: int, heads: int, own: int, channels: int, *, offset: float = 0.0, rngs: nnx.Rngs) -> None:
        self.q, self.k, self.v = (
            nnx.LinearGeneral(width, (own, channels), use_bias=False, kernel_init=even, rngs=rngs) for _ in range(3)
        )
        zeros, constant = nnx.initializers.zeros, nnx.initializers.constant(offset)
        how: dict[str, Any] = dict(axis=(-2, -1), kernel_init=zeros, bias_init=constant, rngs=rngs)
        self.out = nnx.LinearGeneral((own, channels), heads, **how)

    @classmethod
    def start(cls, model: ModelConfig, own: int, channels: int, offset: float, key: Array) -> Network:
        """Initialize the gates of a model's layers, with random attention that they do not use yet."""
        return per_layer(partial(cls, model.width, model.heads, own, channels, offset=offset), model.layers, key)

    @classmethod
    def sizes(cls, shapes: Shapes) -> dict[str, int]:
        (width, own, channels), heads = shapes["q.kernel"], shapes["out.kernel"][2]
        return dict(width=width, heads=heads, own=own, channels=channels)

    def __call__(self, x: Array, of: Array) -> Array:
        """f32[B,H,T] of x f[B,T,E].

        Args:
            of: i32[B,T]: the text of each token; -1 for a token outside any text, which is masked.
        """
        x = jnp.where((of >= 0)[..., None], x.astype(jnp.float32), 0)
        q, k, v = (project(x).swapaxes(1, 2) for project in (self.q, self.k, self.v))
        t, n = x.shape[1], min(x.shape[1], QUERIES)
        pad = -t % n

        def some(tile: tuple[Array, Array]) -> Array:
            q, own = tile
            logits = jnp.einsum("bntp,bnsp->bnts", q, k) * q.shape[-1] ** -0.5
            see = (own[:, None, :, None] == of[:, None, None]) & (of >= 0)[:, None, None]
            p = jax.nn.softmax(jnp.where(see, logits, -1e30), -1)
            return jnp.einsum("bnts,bnsp->btnp", p, v)

        tiles = jnp.pad(q, ((0, 0), (0, 0), (0, pad), (0, 0))), jnp.pad(of, ((0, 0), (0, pad)), constant_values=-1)
        cut = [jnp.stack(jnp.split(x, (t + pad) // n, axis)) for x, axis in zip(tiles, (2, 1), strict=True)]
        o = jnp.concatenate(list(jax.lax.map(some, (cut[0], cut[1]))), 1)[:, :t]
        return self.out(o).swapaxes(1, 2)


class SinkGate(nnx.Module):
    """mean over G of 1 / (1 + sum over s of exp((sink_s . q_g - k . q_g) / sqrt(D) - shift_g)), per kv head.

    q and k are the projections of x, normed, each channel times its scale. Source: Fast KVzip (2601.17668).
    """

    def __init__(self, width: int, heads: int, groups: int, channels: int, sinks: int, *, rngs: nnx.Rngs) -> None:
        self.query = nnx.LinearGeneral(width, (heads, groups, channels), rngs=rngs)
        self.key = nnx.LinearGeneral(width, (heads, channels), use_bias=False, rngs=rngs)
        self.query_norm, self.key_norm = (nnx.RMSNorm(channels, epsilon=1e-6, rngs=rngs) for _ in range(2))
        self.sinks, self.shift = nnx.Param(jnp.zeros((heads, sinks, channels))), nnx.Param(jnp.zeros((heads, groups)))

    @classmethod
    def sizes(cls, shapes: Shapes) -> dict[str, int]:
        (width, heads, groups, channels), sinks = shapes["query.kernel"], shapes["sinks"][1]
        return dict(width=width, heads=heads, groups=groups, channels=channels, sinks=sinks)

    def __call__(self, x: Array) -> Array:
        """f32[B,H,T], in [0, 1], of x f[B,T,E]."""
        x = x.astype(jnp.float32)
        q, k = self.query_norm(self.query(x)), self.key_norm(self.key(x))
        own = jnp.einsum("bthd,bthgd->bhgt", k, q)
        sinks = jnp.einsum("hsd,bthgd->bhgts", self.sinks[...], q)
        root = q.shape[-1] ** 0.5
        return jax.nn.sigmoid(own / root + self.shift[None, :, :, None] - logsumexp(sinks / root, -1)).mean(2)
