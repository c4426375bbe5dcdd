"""KVzap, Fast KVzip: scores by gates that the authors publish."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import jax
import jax.numpy as jnp
from jax import Array
from jax.scipy.special import logsumexp

from jkv.arrays.pytree import leaf, part, value
from jkv.io import author_weights, trained_weights
from jkv.methods.base import Protect
from jkv.methods.budgets.sizes import Size, at_most
from jkv.methods.eviction.trained_gates import Trained, contest, protected_contest
from jkv.methods.registry import Axes, method
from jkv.models import linear
from jkv.models.llama import rms
from jkv.protocols import Born, Columns, Evidence, Score

if TYPE_CHECKING:
    from jkv.models import ModelConfig, Params

GATE_EPS = 1e-6  # epsilon of the gate's norms, whatever the model's is


def of_another(name: str, found: tuple[int, ...], model: ModelConfig, own: tuple[int, ...]) -> ValueError:
    """Error for weights whose sizes do not match the model's.

    Args:
        name: Method and names of the sizes, for the message.
        found: Sizes of the weights.
        own: Sizes of the model.
    """
    return ValueError(
        f"{name}: the weights are of {list(found)}, and this {model.family} model is of {list(own)}: give those that "
        "were published for it"
    )


@value
class Linear:
    """out x + offset of the layer's normed input x, per kv head.

    out f[L,H,E], offset f[L,H]. In a layer's own score the arrays have no axis L.
    """

    out: Array
    offset: Array

    axes: ClassVar = dict(out="LHE", offset="LH")

    @property
    def width(self) -> int:
        """Width of the input."""
        return self.out.shape[-1]

    def __call__(self, x: Array) -> Array:
        """f32[B,H,T] of x f[B,T,E]."""
        return (linear(self.out, x.astype(jnp.float32)) + self.offset[None, None]).transpose(0, 2, 1)


@value
class Surrogate:
    """out gelu(into x + bias) + offset of the layer's normed input x, per kv head.

    into f[L,W,E], bias f[L,W], out f[L,H,W], offset f[L,H]. In a layer's own score the arrays have no axis L.
    """

    into: Array
    bias: Array
    out: Array
    offset: Array

    axes: ClassVar = dict(into="LWE", bias="LW", out="LHW", offset="LH")

    @property
    def width(self) -> int:
        """Width of the input."""
        return self.into.shape[-1]

    def __call__(self, x: Array) -> Array:
        """f32[B,H,T] of x f[B,T,E]."""
        hidden = jax.nn.gelu(linear(self.into, x.astype(jnp.float32)) + self.bias[None, None], approximate=False)
        return (linear(self.out, hidden) + self.offset[None, None]).transpose(0, 2, 1)


@part
class Repeated(Trained):
    """KVzap: predicted log of the most attention that a token would get if the text were repeated.

    A surrogate predicts what it was trained on: KVzap's authors (2601.07891) weigh attention by the contribution of the
    value.
    """

    methods, column, kinds = ("kvzap",), "repeated", (Surrogate, Linear)

    def of(self, folder: str) -> Repeated:
        """Load the weights of a folder: one of `jkv train kvzap`, or one that `io.author_weights.kvzap` reads."""
        if (Path(folder).expanduser() / trained_weights.CARD).exists():
            return trained_weights.trained(folder, self)
        arrays = {name: jnp.asarray(x) for name, x in author_weights.kvzap(folder).items()}
        return replace(self, gate=(Surrogate if "into" in arrays else Linear)(**arrays))

    def for_layer(self, model: ModelConfig, layer: int) -> Score:
        if self.gate is not None:
            found, own = (self.gate.out.shape[0], self.gate.width), (model.heads, model.width)
            if found != own:
                raise of_another("kvzap (kv heads, width)", found, model, own)
        return self

    def rank(self, ev: Evidence) -> Array:
        return ev.columns[self.column]


@value
class SinkGate:
    """mean over G of 1 / (1 + sum over s of exp((sink_s . q_g - k . q_g) / sqrt(D) - shift_g)), per kv head.

    q = rms(query x + offset) and k = rms(key x), each channel times its scale, x the layer's normed input. query
    f[L,H,G,D,E], offset f[L,H,G,D], key f[L,H,D,E], query_scale and key_scale f[L,D], sinks f[L,H,S,D], shift f[L,H,G].
    In a layer's own score the arrays have no axis L.
    """

    query: Array
    offset: Array
    key: Array
    query_scale: Array
    key_scale: Array
    sinks: Array
    shift: Array

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Kv heads, query heads per kv head, and width of the input."""
        h, g = self.shift.shape[-2:]
        return h, g, self.key.shape[-1]

    def __call__(self, x: Array) -> Array:
        """f32[B,H,T], in [0, 1], of x f[B,T,E]."""
        x = x.astype(jnp.float32)
        q = rms(self.query_scale, linear(self.query, x) + self.offset[None, None], GATE_EPS)
        k = rms(self.key_scale, linear(self.key, x), GATE_EPS)
        own = jnp.einsum("bthd,bthgd->bhgt", k, q)
        sinks = jnp.einsum("hsd,bthgd->bhgts", self.sinks, q)
        root = self.sinks.shape[-1] ** 0.5
        return jax.nn.sigmoid(own / root + self.shift[None, :, :, None] - logsumexp(sinks / root, -1)).mean(2)


@part
class Distilled(Score):
    """Fast KVzip: predicted largest share of attention that KVzip's repetition would pay a token.

    gate: weights that `io.author_weights.fastkvzip` reads, or None before they are given. Source: Fast KVzip
    (2601.17668).
    """

    gate: SinkGate | None = leaf(default=None)

    def bound(self, params: Params) -> Distilled:
        self.known  # noqa: B018 - or its error
        return self

    @property
    def known(self) -> SinkGate:
        """The gate; ValueError that says what to give if it is missing."""
        if self.gate is None:
            raise ValueError(
                "fastkvzip knows no gate yet: give gate='FILE.safetensors', made of one that its authors publish "
                "(docs/training.md says how)"
            )
        return self.gate

    def of(self, file: str) -> Distilled:
        """Load the gate from a file that its authors published."""
        return Distilled(gate=SinkGate(**{name: jnp.asarray(x) for name, x in author_weights.fastkvzip(file).items()}))

    def for_layer(self, model: ModelConfig, layer: int) -> Score:
        own = model.heads, model.groups, model.width
        if self.gate is not None and self.gate.sizes != own:
            raise of_another("fastkvzip (kv heads, queries of each, width)", self.gate.sizes, model, own)
        return self

    def birth(self, new: Born) -> Columns:
        return {"foreseen": self.known(new.x)}

    def rank(self, ev: Evidence) -> Array:
        return ev.columns["foreseen"]


@method(
    "2601.07891",
    "exact for weights of its authors; a budget, not a threshold, of a whole prompt; jkv's own foresee attention alone",
    "2x to 4x smaller at the accuracy of the full cache, Qwen3-8B, Llama-3.1-8B and Qwen3-32B",
)
def kvzap(size: Size, *, window: int = 128, sinks: int = 0, step: int | None = None, gate: str | None = None) -> Axes:
    """KVzap: a small model foresees KVzip's scores when a token is made; tokens of all layers and heads compete.

    gate: a folder of `jkv train kvzap`, or one as the authors publish it, of one layer or two; the first `sinks` and
    the newest `window` stay; slots come in steps of `step` tokens (None: a quarter of the budget).
    """
    score = Repeated() if gate is None else Repeated().of(gate)
    return protected_contest("kvzap", size, score, window, sinks, step)


@method(
    "2601.17668",
    "exact for gates of its authors, of a prompt in one piece; what is generated is ranked with it at a flush",
    "up to 70% of the tokens go with hardly a loss, Qwen2.5-1M, Qwen3 and Gemma 3",
)
def fastkvzip(
    size: Size,
    *,
    window: int = 4096,
    portion: float = 0.02,
    short: int = 16_000,
    sinks: int = 4,
    step: int | None = None,
    gate: str | None = None,
) -> Axes:
    """Fast KVzip: a small gate foresees KVzip's scores when a token is made; tokens of all layers and heads compete.

    gate: a file of safetensors with a gate of the authors, who publish pickles (docs/training.md converts one). The
    first `sinks` and the newest `window` stay, but with a prompt of less than `short` tokens only a `portion` of the
    text, and at most a quarter of `budget`; slots come in steps of `step` tokens (None: a quarter of the budget).
    """
    if min(window, sinks, short) < 0 or not 0 <= portion < 1 or (step is not None and step < 1):
        raise ValueError(
            f"fastkvzip: window={window}, portion={portion}, short={short}, sinks={sinks}, step={step}: newest tokens, "
            "0 or more, a share of the text from 0 to below 1, tokens, 0 or more, first ones too, and slots, 1 or more"
        )
    score = Distilled() if gate is None else Distilled().of(gate)
    newest = at_most(window, size.tokens, 4)
    size = size.above("fastkvzip", sinks, "its first tokens")
    score = Protect(score=score, sinks=sinks, newest=newest, portion=float(portion), short=short)
    return contest(size, score, step)
