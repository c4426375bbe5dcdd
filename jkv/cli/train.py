"""jkv train METHOD. Imports jax and optax only when it runs.

A dataclass for each method that is trained says what its training can be told, and how much of it where nothing is.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import typer

from jkv.cli.options import MODEL, Floats, Model, Weights, flat
from jkv.utils.optional_deps import install

train = typer.Typer(
    no_args_is_help=True,
    help="Train the weights of a method for a frozen model; --resume continues a killed run.",
)

Accumulate = Annotated[int, typer.Option(min=1, help="Batches of a step.")]
Answer = Annotated[int, typer.Option(min=1, help="Last tokens of a text, whose queries judge the others.")]
Batch = Annotated[int, typer.Option(min=1, help="Texts, or moments, at a time.")]
Budget = Annotated[int, typer.Option(min=1, help="Tokens per head to train for.")]
Early = Annotated[float, typer.Option(help="Peak learning rate of the layer-wise steps.")]
Every = Annotated[int, typer.Option(min=1, help="Steps between checkpoints.")]
Rate = Annotated[float, typer.Option(help="Peak learning rate.")]
Start = Annotated[
    Path | None, typer.Option(metavar="FOLDER", help="Weights of the same method to start from, with other settings.")
]
Steps = Annotated[int, typer.Option(min=0, help="Steps of the whole model, or of what is trained without it.")]
Top = Annotated[int, typer.Option(min=0, help="Tokens of the teacher's distribution to compare; 0: all.")]
Warm = Annotated[int, typer.Option(min=0, help="Layer-wise steps, without gradients through the model.")]
Weight = Annotated[float, typer.Option(help="Weight of the capacity loss.")]
Width = Annotated[int, typer.Option(min=1, help="Hidden units of a gate, or entries that a convolution reads.")]


@dataclass(frozen=True, kw_only=True)
class Run:
    """What every training is given."""

    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Output: checkpoints, metrics, weights.")]
    model: Model = MODEL
    corpus: Annotated[
        list[str] | None,
        typer.Option(
            help="pydoc, stdlib, tasks, lookups, asks, a dataset or a text file; repeatable. Default: pydoc, stdlib."
        ),
    ] = None
    texts: Annotated[int, typer.Option(min=1, help="Texts of all corpora together.")] = 36
    length: Annotated[int, typer.Option(min=1, help="Tokens of a text.")] = 2048
    check: Annotated[int, typer.Option(min=0, help="Held-out texts to measure the result on; 0: none.")] = 4
    seed: Annotated[int, typer.Option(help="Seed of the weights, the texts and their order.")] = 0
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in FOLDER.")] = False
    dtype: Floats = "float32"
    weights: Weights = None


@dataclass(frozen=True, kw_only=True)
class Taught:
    """Steps beside a teacher."""

    start: Start = None
    steps: Steps = 0
    batch: Batch = 1
    accumulate: Accumulate = 1
    rate: Rate = 2e-4
    top: Top = 64
    every: Every = 25


@dataclass(frozen=True, kw_only=True)
class ModelSteps(Taught):
    """Steps of the whole model."""

    weight: Weight = 1.0


@dataclass(frozen=True, kw_only=True)
class Suffix(Taught):
    """Steps by the end of a text."""

    budget: Budget = 256
    answer: Annotated[int, typer.Option(min=1, help="Last tokens of a text, whose loss judges the others.")] = 128


@dataclass(frozen=True, kw_only=True)
class TrimKV(ModelSteps):
    """Gates that predict how slowly a new token decays."""

    budget: Budget = 512
    warm: Warm = 500
    early: Early = 3e-3
    width: Width = 128


@dataclass(frozen=True, kw_only=True)
class MakeEach(ModelSteps):
    """Gates of layers and heads that compete for one budget."""

    budget: Budget = 512
    steps: Steps = 1000
    rate: Rate = 1e-3
    width: Width = 64


@dataclass(frozen=True, kw_only=True)
class Locret:
    """Heads that predict the attention of an answer to each token."""

    start: Start = None
    budget: Budget = 512
    warm: Warm = 3000
    answer: Answer = 64
    rate: Rate = 5e-4
    width: Width = 128


@dataclass(frozen=True, kw_only=True)
class LoCoCo:
    """Convolutions that make mixtures of evicted tokens."""

    start: Start = None
    budget: Budget = 128
    warm: Warm = 200
    chunk: Annotated[int, typer.Option(min=1, help="Tokens of a text prefilled at a time.")] = 512
    rate: Rate = 2e-3
    width: Width = 21


@dataclass(frozen=True, kw_only=True)
class DMS(ModelSteps):
    """Switches that mark new tokens for a later eviction."""

    window: Annotated[int, typer.Option(min=1, help="Age in tokens at which a marked token is evicted.")] = 128
    ratio: Annotated[float, typer.Option(help="Final ratio of all tokens to unmarked tokens.")] = 8.0
    fall: Annotated[int, typer.Option(min=1, help="Steps until that ratio.")] = 480
    warm: Warm = 600
    early: Early = 3e-4
    weight: Weight = 3.0


@dataclass(frozen=True, kw_only=True)
class AttentionGate(ModelSteps):
    """Gates over the whole prompt, before a layer attends."""

    price: Annotated[float, typer.Option(help="Penalty in nats for keeping all tokens, layer-wise.")] = 0.75
    share: Annotated[float, typer.Option(help="Share of a prompt's tokens to keep, in steps of the whole model.")] = 0.5
    answer: Answer = 256
    warm: Warm = 300
    early: Early = 1e-2
    weight: Weight = 10.0
    rate: Rate = 1e-3
    width: Width = 8


@dataclass(frozen=True, kw_only=True)
class AttentionPredictor:
    """A forecast of the next query's attention, page by page."""

    steps: Steps = 1000
    batch: Batch = 32
    rate: Rate = 5e-4
    moments: Annotated[int, typer.Option(min=1, help="Moments sampled per text, layer and kv head.")] = 3
    page: Annotated[int, typer.Option(min=1, help="Tokens of a page.")] = 16
    dense_layers: Annotated[int, typer.Option(min=0, help="First layers without selection.")] = 2
    every: Every = 100


@dataclass(frozen=True, kw_only=True)
class KVzap(Suffix):
    """Surrogates that foresee what a repetition of the text, and its own later queries, look at."""

    warm: Annotated[int, typer.Option(min=0, help="Passes over the tokens of all texts, layer by layer.")] = 15
    early: Early = 2e-3
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of a layer-wise step.")] = 2048
    rate: Rate = 3e-4
    width: Annotated[int, typer.Option(min=0, help="Hidden units; 0: none, by ridge regression.")] = 72
    own: Annotated[float, typer.Option(min=0, help="Weight of all attention of the text's own queries.")] = 1 / 12
    window: Annotated[int, typer.Option(min=0, help="Age in tokens up to which their looks do not count.")] = 32


@dataclass(frozen=True, kw_only=True)
class Utility(Suffix):
    """Gates of kvzap and trimkv in one contest of all layers and heads, by what a text that goes on misses."""

    untrained: ClassVar[bool] = True  # without steps they are both, as they are
    foreseen: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Surrogates of jkv train kvzap; needed without --start.")
    ] = None
    fading: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Gates of jkv train trimkv. Default: those of jkv.")
    ] = None
    steps: Steps = 400
    rate: Rate = 1e-3
    window: Annotated[int, typer.Option(min=0, help="Newest tokens, which are held in any case.")] = 32


@dataclass(frozen=True, kw_only=True)
class S3Attention:
    """Dictionaries of sparse features, by which a question finds the spans of a text that are read."""

    layer: Annotated[
        list[int] | None,
        typer.Option(min=0, help="Layer to index; repeatable. Default: the first, one a sixth up and one a fifth up."),
    ] = None
    features: Annotated[int, typer.Option(min=1, help="Features of a kv head.")] = 256
    active: Annotated[int, typer.Option(min=1, help="Features that a key or a query has at most.")] = 16
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of each text in a step.")] = 256
    steps: Steps = 1000
    batch: Batch = 2
    rate: Rate = 2e-3
    every: Every = 100


@dataclass(frozen=True, kw_only=True)
class Drafter:
    """A small network that guesses what this model says, for draft=."""

    bytes: Annotated[str, typer.Option(help="Most bytes of its weights, such as 8MB; its width follows.")] = "8MB"
    words: Annotated[int, typer.Option(min=2, help="Commonest tokens, which are what it says.")] = 6144
    ahead: Annotated[int, typer.Option(min=1, help="Tokens that it learns to guess one after the other.")] = 2
    pull: Annotated[float, typer.Option(min=0, help="Weight of the distance of its hidden numbers.")] = 5.0
    prompt: Annotated[
        int,
        typer.Option(min=0, help="Tokens of a text before the model's own continuation; 0: all, if it is not short."),
    ] = 0
    temperature: Annotated[float, typer.Option(min=0, help="Of the continuation.")] = 0.7
    steps: Steps = 1000
    batch: Batch = 4
    accumulate: Accumulate = 1
    rate: Rate = 2e-3
    top: Top = 64
    every: Every = 100


@dataclass(frozen=True, kw_only=True)
class XEcoMLA:
    """The model itself with one latent a token for the keys and values of all heads; 0 steps: without training."""

    untrained: ClassVar[bool] = True  # without steps it is a model too
    rank: Annotated[int, typer.Option(min=1, help="Numbers of a token's latent.")] = 64
    rope_dim: Annotated[int, typer.Option(min=2, help="Channels of the rotated key that all heads share.")] = 32
    query_rank: Annotated[int, typer.Option(min=0, help="Rank of the matrix of all queries; 0: whole.")] = 0
    steps: Steps = 200
    batch: Batch = 1
    accumulate: Accumulate = 1
    rate: Rate = 8e-5
    top: Top = 64
    every: Every = 25


METHODS: tuple[type, ...] = (
    TrimKV, MakeEach, Locret, LoCoCo, DMS, AttentionGate, AttentionPredictor, KVzap, Utility,
    S3Attention, Drafter, XEcoMLA,
)  # fmt: skip


def _trained(kind: Any) -> None:
    """Adds the command that trains a method."""
    name = kind.__name__.lower()

    def command(ctx: typer.Context, run: Run, settings: Any) -> None:
        chosen = dict(vars(settings))
        _check(chosen, run.length, getattr(kind, "untrained", False))
        if chosen.get("start") is not None and getattr(ctx.get_parameter_source("width"), "name", "") == "COMMANDLINE":
            raise ValueError("--width is that of the weights in --start: leave it out")
        try:
            from jkv.training import commands, trainer
        except ImportError as error:
            raise ImportError(f"training needs optax and orbax ({error}); {install('train')}") from error
        given = {k: x for k, x in vars(run).items() if k not in ("corpus", "dtype", "weights")}
        given |= dict(corpora=tuple(run.corpus or ("pydoc", "stdlib")), start=chosen.pop("start", None), name=name)
        params = trainer.loaded(run.model, run.dtype, chosen.get("batch", 1), run.weights)
        commands.METHODS[name](commands.Run(params=params, **given), **chosen)

    command.__annotations__["settings"] = kind
    train.command(name, help=kind.__doc__)(flat(command))


@train.command("lpc")
def continuing(
    trace: Annotated[Path, typer.Argument(metavar="TRACE", help='JSON lines {"time": seconds, "prompt": ...}.')],
    out: Annotated[Path, typer.Option(metavar="FILE", help="Where the predictor goes: --store-evict lpc:FILE.")],
    model: Annotated[str, typer.Option(help="Whose tokenizer reads texts and messages.")] = MODEL,
    steps: Steps = 1000,
    rate: Rate = 3e-2,
    width: Width = 16,
    seed: Annotated[int, typer.Option(help="Seed of the weights, and of who is held back.")] = 0,
) -> None:
    """Which conversations go on, for a store that is full: a small network over a prompt's last tokens."""
    try:
        from jkv.training.recipes import lpc as predictor
    except ImportError as error:
        raise ImportError(f"training needs optax ({error}); {install('train')}") from error
    from jkv.eval.store_replay import encoder
    from jkv.eval.store_replay import trace as read

    for name, value in predictor.train(read(trace, encoder(model)), out, steps, rate, width, seed).items():
        print(f"{name}: {value}")


def _check(chosen: dict[str, Any], length: int, untrained: bool) -> None:
    """ValueError for numbers that do not go together; untrained: no steps are something too."""
    held = {k: chosen[k] for k in ("budget", "window", "answer") if k in chosen}
    idle = not untrained and chosen.get("warm", 0) + chosen.get("steps", 0) < 1
    if idle or max(held.values(), default=0) >= length:
        work = {k: chosen[k] for k in ("warm", "steps") if k in chosen}
        told = ", ".join(f"{k}={x}" for k, x in {**work, **held, "length": length}.items())
        raise ValueError(f"{told}: something to do, and a budget below the length, a window too")
    if chosen.get("ratio", 2) <= 1:
        raise ValueError(f"ratio={chosen['ratio']}: all tokens to those that stay; above 1, or nothing is to be marked")


for method in METHODS:
    _trained(method)
