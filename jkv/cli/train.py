"""The `jkv train` commands. Import jax and optax only when they run.

Each trainable method has a dataclass with its options and their defaults; its docstring is the command's help.
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

Accumulate = Annotated[int, typer.Option(min=1, help="Batches accumulated per step.")]
Answer = Annotated[int, typer.Option(min=1, help="Last tokens of a text; their queries score the others.")]
Batch = Annotated[int, typer.Option(min=1, help="Batch size (texts, or sampled moments).")]
Budget = Annotated[int, typer.Option(min=1, help="Tokens per head to train for.")]
Early = Annotated[float, typer.Option(help="Peak learning rate of the layer-wise steps.")]
Every = Annotated[int, typer.Option(min=1, help="Steps between checkpoints.")]
Rate = Annotated[float, typer.Option(help="Peak learning rate.")]
Start = Annotated[Path | None, typer.Option(metavar="FOLDER", help="Weights of the same method to start from.")]
Steps = Annotated[int, typer.Option(min=0, help="Steps through the whole model, or of standalone training.")]
Top = Annotated[int, typer.Option(min=0, help="Top tokens of the teacher's distribution to match; 0: all.")]
Warm = Annotated[int, typer.Option(min=0, help="Layer-wise steps, without gradients through the model.")]
Weight = Annotated[float, typer.Option(help="Weight of the capacity loss.")]
Width = Annotated[int, typer.Option(min=1, help="Hidden units of a gate, or kernel width of a convolution.")]


@dataclass(frozen=True, kw_only=True)
class Run:
    """The options of every training run."""

    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Output folder: checkpoints, metrics, weights.")]
    model: Model = MODEL
    corpus: Annotated[
        list[str] | None,
        typer.Option(
            help="pydoc, stdlib, tasks, lookups, asks, a dataset or text file; repeatable. Default: pydoc, stdlib."
        ),
    ] = None
    texts: Annotated[int, typer.Option(min=1, help="Number of texts, over all corpora.")] = 36
    length: Annotated[int, typer.Option(min=1, help="Tokens per text.")] = 2048
    check: Annotated[int, typer.Option(min=0, help="Number of held-out texts to evaluate on; 0: none.")] = 4
    seed: Annotated[int, typer.Option(help="Seed of the weights, texts and their order.")] = 0
    resume: Annotated[bool, typer.Option("--resume", help="Resume the run in FOLDER.")] = False
    dtype: Floats = "float32"
    weights: Weights = None


@dataclass(frozen=True, kw_only=True)
class Taught:
    """The options of distillation from a teacher."""

    start: Start = None
    steps: Steps = 0
    batch: Batch = 1
    accumulate: Accumulate = 1
    rate: Rate = 2e-4
    top: Top = 64
    every: Every = 25


@dataclass(frozen=True, kw_only=True)
class ModelSteps(Taught):
    """The options of distillation through the whole model, with a capacity loss."""

    weight: Weight = 1.0


@dataclass(frozen=True, kw_only=True)
class Suffix(Taught):
    """The options of training on the loss of a text's last tokens."""

    budget: Budget = 256
    answer: Annotated[int, typer.Option(min=1, help="Last tokens of a text; their loss scores the others.")] = 128


@dataclass(frozen=True, kw_only=True)
class TrimKV(ModelSteps):
    """Train gates that predict how slowly each new token decays."""

    budget: Budget = 512
    warm: Warm = 500
    early: Early = 3e-3
    width: Width = 128


@dataclass(frozen=True, kw_only=True)
class MakeEach(ModelSteps):
    """Train gates that make all layers and heads compete for one budget."""

    budget: Budget = 512
    steps: Steps = 1000
    rate: Rate = 1e-3
    width: Width = 64


@dataclass(frozen=True, kw_only=True)
class Locret:
    """Train heads that predict how much an answer will attend to each token."""

    start: Start = None
    budget: Budget = 512
    warm: Warm = 3000
    answer: Answer = 64
    rate: Rate = 5e-4
    width: Width = 128


@dataclass(frozen=True, kw_only=True)
class LoCoCo:
    """Train convolutions that merge evicted tokens into the cache."""

    start: Start = None
    budget: Budget = 128
    warm: Warm = 200
    chunk: Annotated[int, typer.Option(min=1, help="Tokens per prefill chunk.")] = 512
    rate: Rate = 2e-3
    width: Width = 21


@dataclass(frozen=True, kw_only=True)
class DMS(ModelSteps):
    """Train gates that mark new tokens for delayed eviction."""

    window: Annotated[int, typer.Option(min=1, help="Age in tokens at which a marked token is evicted.")] = 128
    ratio: Annotated[float, typer.Option(help="Final compression ratio (all tokens / unmarked tokens).")] = 8.0
    fall: Annotated[int, typer.Option(min=1, help="Steps until --ratio is reached.")] = 480
    warm: Warm = 600
    early: Early = 3e-4
    weight: Weight = 3.0


@dataclass(frozen=True, kw_only=True)
class AttentionGate(ModelSteps):
    """Train gates that see the whole prompt before a layer attends."""

    price: Annotated[float, typer.Option(help="Penalty in nats for keeping all tokens, in layer-wise steps.")] = 0.75
    share: Annotated[float, typer.Option(help="Fraction of prompt tokens to keep, in steps of the whole model.")] = 0.5
    answer: Answer = 256
    warm: Warm = 300
    early: Early = 1e-2
    weight: Weight = 10.0
    rate: Rate = 1e-3
    width: Width = 8


@dataclass(frozen=True, kw_only=True)
class AttentionPredictor:
    """Train a predictor of the next query's attention to each page."""

    steps: Steps = 1000
    batch: Batch = 32
    rate: Rate = 5e-4
    moments: Annotated[int, typer.Option(min=1, help="Moments sampled per text, layer and kv head.")] = 3
    page: Annotated[int, typer.Option(min=1, help="Tokens per page.")] = 16
    dense_layers: Annotated[int, typer.Option(min=0, help="First layers without selection.")] = 2
    every: Every = 100


@dataclass(frozen=True, kw_only=True)
class KVzap(Suffix):
    """Train surrogates that predict which tokens a repetition of the text, and its own later queries, attend to."""

    warm: Annotated[int, typer.Option(min=0, help="Layer-wise epochs over the tokens of all texts.")] = 15
    early: Early = 2e-3
    tokens: Annotated[int, typer.Option(min=1, help="Tokens per layer-wise step.")] = 2048
    rate: Rate = 3e-4
    width: Annotated[int, typer.Option(min=0, help="Hidden units; 0: linear, by ridge regression.")] = 72
    own: Annotated[float, typer.Option(min=0, help="Weight of the attention of the text's own queries.")] = 1 / 12
    window: Annotated[int, typer.Option(min=0, help="Own queries within this many tokens of a key are ignored.")] = 32


@dataclass(frozen=True, kw_only=True)
class Utility(Suffix):
    """Train kvzap and trimkv gates to rank tokens of all layers and heads together, by the loss of a continuation."""

    untrained: ClassVar[bool] = True  # without steps it joins both as they are
    foreseen: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Weights of jkv train kvzap; required without --start.")
    ] = None
    fading: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Weights of jkv train trimkv. Default: the ones shipped with jkv."),
    ] = None
    steps: Steps = 400
    rate: Rate = 1e-3
    window: Annotated[int, typer.Option(min=0, help="Newest tokens, which are always kept.")] = 32


@dataclass(frozen=True, kw_only=True)
class S3Attention:
    """Train dictionaries of sparse features by which a query selects the text spans to read."""

    layer: Annotated[
        list[int] | None,
        typer.Option(
            min=0, help="Layer to index; repeatable. Default: the first, and those at a sixth and a fifth of the depth."
        ),
    ] = None
    features: Annotated[int, typer.Option(min=1, help="Features per kv head.")] = 256
    active: Annotated[int, typer.Option(min=1, help="Maximum active features per key or query.")] = 16
    tokens: Annotated[int, typer.Option(min=1, help="Tokens per text and step.")] = 256
    steps: Steps = 1000
    batch: Batch = 2
    rate: Rate = 2e-3
    every: Every = 100


@dataclass(frozen=True, kw_only=True)
class Drafter:
    """Train a small draft network for speculative decoding (drafter=)."""

    bytes: Annotated[str, typer.Option(help="Size limit of its weights, such as 8MB; sets its width.")] = "8MB"
    words: Annotated[int, typer.Option(min=2, help="Vocabulary: the most common tokens, which it can propose.")] = 6144
    ahead: Annotated[int, typer.Option(min=1, help="Number of consecutive draft tokens it is trained for.")] = 2
    pull: Annotated[float, typer.Option(min=0, help="Weight of the hidden-state distance in the loss.")] = 5.0
    prompt: Annotated[
        int,
        typer.Option(
            min=0, help="Tokens of a text before the model's own continuation; 0: all of a text that is not short."
        ),
    ] = 0
    temperature: Annotated[float, typer.Option(min=0, help="Sampling temperature of the continuation.")] = 0.7
    steps: Steps = 1000
    batch: Batch = 4
    accumulate: Accumulate = 1
    rate: Rate = 2e-3
    top: Top = 64
    every: Every = 100


@dataclass(frozen=True, kw_only=True)
class XEcoMLA:
    """Convert the model to one latent per token for the KV of all heads, and train it; 0 steps: convert only."""

    untrained: ClassVar[bool] = True  # without steps it is a usable model too
    rank: Annotated[int, typer.Option(min=1, help="Dimension of a token's latent.")] = 64
    rope_dim: Annotated[int, typer.Option(min=2, help="Channels of the shared rotary key.")] = 32
    query_rank: Annotated[int, typer.Option(min=0, help="Rank of the query projection; 0: full rank.")] = 0
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
    """Add the command that trains a method, with the fields of `kind` as options."""
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
    out: Annotated[Path, typer.Option(metavar="FILE", help="Output file, for --prefix-cache-evict lpc:FILE.")],
    model: Annotated[str, typer.Option(help="Model whose tokenizer encodes texts and messages.")] = MODEL,
    steps: Steps = 1000,
    rate: Rate = 3e-2,
    width: Width = 16,
    seed: Annotated[int, typer.Option(help="Seed of the weights and of the held-out split.")] = 0,
) -> None:
    """Train a predictor of which conversations continue, used to evict from a full prefix cache."""
    try:
        from jkv.training.recipes import lpc as predictor
    except ImportError as error:
        raise ImportError(f"training needs optax ({error}); {install('train')}") from error
    from jkv.eval.store_replay import encoder
    from jkv.eval.store_replay import trace as read

    for name, value in predictor.train(read(trace, encoder(model)), out, steps, rate, width, seed).items():
        print(f"{name}: {value}")


def _check(chosen: dict[str, Any], length: int, untrained: bool) -> None:
    """Raise ValueError for inconsistent settings; `untrained` methods may run without steps."""
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
