"""KVzap, Fast KVzip: scores by gates that the authors publish."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from jax import Array

from jkv.arrays.pytree import leaf, part
from jkv.io import author_weights, trained_weights
from jkv.methods.base import Protect
from jkv.methods.budgets.sizes import Size, at_most
from jkv.methods.eviction.trained_gates import Trained, contest, protected_contest
from jkv.methods.registry import Axes, method
from jkv.protocols import Born, Columns, Evidence, Score

if TYPE_CHECKING:
    from jkv.models import ModelConfig, Params
    from jkv.nn.network import Kind, Network


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


@part
class Repeated(Trained):
    """KVzap: predicted log of the most attention that a token would get if the text were repeated.

    A surrogate predicts what it was trained on: KVzap's authors (2601.07891) weigh attention by the contribution of the
    value.
    """

    methods, column = ("kvzap",), "repeated"

    @staticmethod
    def kind() -> Kind:
        from jkv.nn.gates import Surrogate

        return Surrogate

    def of(self, folder: str) -> Repeated:
        """Load the weights of a folder: one of `jkv train kvzap`, or one that `io.author_weights.kvzap` reads."""
        if (Path(folder).expanduser() / trained_weights.CARD).exists():
            return trained_weights.trained(folder, self)
        return replace(self, gate=self.gate_of(author_weights.kvzap(folder)))

    def for_layer(self, model: ModelConfig, layer: int) -> Score:
        if self.gate is not None:
            arrays, own = self.gate.arrays, (model.heads, model.width)
            first = arrays.get("hidden.0.kernel", arrays["out.kernel"])
            if (found := (arrays["out.bias"].shape[-1], first.shape[-2])) != own:
                raise of_another("kvzap (kv heads, width)", found, model, own)
        return self

    def rank(self, ev: Evidence) -> Array:
        return ev.columns[self.column]


@part
class Distilled(Score):
    """Fast KVzip: predicted largest share of attention that KVzip's repetition would pay a token.

    gate: weights that `io.author_weights.fastkvzip` reads, or None before they are given. Source: Fast KVzip
    (2601.17668).
    """

    gate: Network | None = leaf(default=None)

    def bound(self, params: Params) -> Distilled:
        self.known  # noqa: B018 - or its error
        return self

    @property
    def known(self) -> Network:
        """The gate; ValueError that says what to give if it is missing."""
        if self.gate is None:
            raise ValueError(
                "fastkvzip knows no gate yet: give gate='FILE.safetensors', made of one that its authors publish "
                "(docs/training.md says how)"
            )
        return self.gate

    def of(self, file: str) -> Distilled:
        """Load the gate from a file that its authors published."""
        from jkv.nn.gates import SinkGate
        from jkv.nn.network import restore

        return Distilled(gate=restore(SinkGate, author_weights.fastkvzip(file)))

    def for_layer(self, model: ModelConfig, layer: int) -> Score:
        own = model.heads, model.groups, model.width
        if self.gate is not None:
            width, *heads, _ = self.gate.arrays["query.kernel"].shape[-4:]
            if (found := (*heads, width)) != own:
                raise of_another("fastkvzip (kv heads, queries of each, width)", found, model, own)
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
