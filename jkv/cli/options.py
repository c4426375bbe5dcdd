"""Options that several commands take, each with the same words: one, or a dataclass of those that go together.

A command names such a dataclass as the type of a parameter; `flat` makes an option of each of its fields.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

MODEL = "smollm2-135m"  # where none is named
Model = Annotated[
    str, typer.Option(help="A known name, a .gguf file, a model folder, a URL of one, or hub:org/name\\[@REVISION].")
]
FLOATS = "Type of weights and exact tokens: float32, bfloat16 or float16."
Floats = Annotated[str, typer.Option("--dtype", help=FLOATS)]
Dtype = Annotated[str | None, typer.Option(help=f"{FLOATS} Default: bfloat16, on CPUs and old GPUs float32.")]


Weights = Annotated[
    str | None,
    typer.Option(
        help="What matrices are kept as: int8, int4, file (a .gguf file's own blocks), \"bitstack(bytes='4GiB')\". "
        "Default: --dtype."
    ),
]
PrefillDtype = Annotated[
    str | None,
    typer.Option(help="Type that a prompt's products are made in: bfloat16 is faster on many CPUs. Default: --dtype."),
]
Mesh = Annotated[
    str | None, typer.Option(help="Devices that share the weights, such as data=2,model=4. Default: one device.")
]
Chunk = Annotated[
    int | None,
    typer.Option(
        min=0, help="Prompt tokens prefilled at a time; 0: all. Default: all, or as many as memory has room for."
    ),
]


@dataclass(frozen=True, kw_only=True)
class Stored:
    """A folder of the beginnings of prompts that were read."""

    store: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="Read beginnings of prompts from there that were read before.")
    ] = None
    store_bytes: Annotated[str, typer.Option(help="Most that the folder holds, such as 8GiB.")] = "8GiB"
    store_evict: Annotated[str, typer.Option(help="What goes first: lru, or lpc:FILE, of jkv train lpc.")] = "lru"
    store_codec: Annotated[
        str, typer.Option(help='"": what it holds is exact; or cachegen(level=1), 2 or 3, or cachegen(within=SECONDS).')
    ] = ""

    def open(self) -> Any:
        """A `jkv.Store`, or None; raises ValueError."""
        from jkv.prefix_cache.store import Store

        if self.store is None:
            if self != Stored():
                raise ValueError("--store-bytes, --store-evict and --store-codec are of a folder: give --store too")
            return None
        return Store(self.store, self.store_bytes, self.store_evict, codec=self.store_codec)


@dataclass(frozen=True, kw_only=True)
class ChatOptions:
    """What the model's template is told in every chat."""

    chat_template_kwargs: Annotated[
        str | None,
        typer.Option(metavar="JSON", help="What the chat template is told, such as '{\"enable_thinking\": false}'."),
    ] = None

    def __post_init__(self) -> None:
        self._read()

    def _read(self) -> dict[str, Any]:
        try:
            options = json.loads(self.chat_template_kwargs or "{}")
        except ValueError:
            options = None
        if not isinstance(options, dict):
            raise ValueError(f"--chat-template-kwargs {self.chat_template_kwargs}: give a JSON object")
        return options

    def give(self, params: Any) -> Any:
        """The same model, whose template is told so. ValueError for one that has none."""
        options = self._read()
        if not options:
            return params
        if params.tokenizer is None or params.tokenizer.template is None:
            raise ValueError("--chat-template-kwargs: this model has no chat template; leave it out")
        return replace(params, tokenizer=params.tokenizer.tell(**options))


def flat(run: Callable[..., None]) -> Callable[..., None]:
    """The command of a function: each field of a parameter that is a dataclass is an option of its own.

    Defaults are those of the fields, or of the parameter's own default, which is such a dataclass.
    """
    hints, options, groups = get_type_hints(run, include_extras=True), [], {}
    for p in signature(run).parameters.values():
        kind = hints[p.name]
        if not is_dataclass(kind):
            options.append(p.replace(kind=Parameter.KEYWORD_ONLY, annotation=kind))
            continue
        groups[p.name], types = kind, get_type_hints(kind, include_extras=True)
        for f in fields(kind):
            default = f.default if p.default is Parameter.empty else getattr(p.default, f.name)
            default = Parameter.empty if default is MISSING else default
            options.append(Parameter(f.name, Parameter.KEYWORD_ONLY, default=default, annotation=types[f.name]))
    flattened = Signature(options)

    @wraps(run)
    def command(**given: Any) -> None:
        bound = flattened.bind(**given)
        bound.apply_defaults()
        given = dict(bound.arguments)
        made = {name: kind(**{f.name: given.pop(f.name) for f in fields(kind)}) for name, kind in groups.items()}
        run(**made, **given)

    command.__signature__ = flattened  # type: ignore[attr-defined]  # inspect reads it
    command.__annotations__ = {o.name: o.annotation for o in options}
    return command


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """The sampling of tokens."""

    temperature: Annotated[float, typer.Option(help="Temperature of sampling; 0: greedy.")] = 0.0
    top_k: Annotated[int, typer.Option(help="Sample from the k most probable tokens; 0: all.")] = 0
    top_p: Annotated[float, typer.Option(help="Sample from the smallest set with this total probability.")] = 1.0
    min_p: Annotated[float, typer.Option(help="Drop tokens below this fraction of the highest probability.")] = 0.0
    repetition_penalty: Annotated[float, typer.Option(help="Above 1: tokens that occurred become less probable.")] = 1.0


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The model of a measurement of quality, and where its result goes."""

    model: Model = MODEL
    seed: Annotated[int, typer.Option(help="Seed of the texts' positions and of the tasks.")] = 0
    out: Annotated[
        Path | None, typer.Option("--json", metavar="OUT", help="Result file; a re-run goes on where it was.")
    ] = None
    dtype: Dtype = None
    weights: Weights = None
    mesh: Mesh = None


@dataclass(frozen=True, kw_only=True)
class Compared(Measured):
    """The caches that are measured, and on how much."""

    cache: Annotated[list[str] | None, typer.Option("--cache", help="A composition; repeatable. Default: full.")] = None
    samples: Annotated[int, typer.Option(help="Texts, or prompts of each task.")] = 4
    batch: Annotated[int, typer.Option(help="Rows, or questions of a session, at a time.")] = 4


@dataclass(frozen=True, kw_only=True)
class Text:
    """A text whose beginning is compressed, and whose continuation is predicted."""

    corpus: Annotated[
        str, typer.Option(help="pydoc (prose), stdlib (code), either with :test, a dataset: wikitext, ...")
    ] = "pydoc"
    text: Annotated[Path | None, typer.Option("--text", metavar="FILE", help="Your own UTF-8 text instead.")] = None
    tokens: Annotated[
        Path | None, typer.Option("--tokens", metavar="FILE.npz", help="int32 \\[n, prefix + continue].")
    ] = None
    prefix: Annotated[int, typer.Option(help="Tokens that are prefilled and compressed.")] = 2048
    rest: Annotated[int, typer.Option("--continue", help="Tokens after them, predicted one by one.")] = 256


@dataclass(frozen=True, kw_only=True)
class Subject:
    """The weights whose speed is measured."""

    model: Annotated[
        str | None, typer.Option(help="A known name, a .gguf file, a model folder, or hub:org/name\\[@REVISION].")
    ] = None  # or a shape
    shape: Annotated[
        str | None, typer.Option(help="A public model's shape: llama-3.1-8b, llama-3.2-1b, qwen3-8b, ...")
    ] = None
    random_weights: Annotated[
        bool, typer.Option("--random-weights", help="Seeded noise in the shape of --shape or --model.")
    ] = False
    dtype: Dtype = None
    weights: Weights = None


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The cores that a measurement of speed takes, and where its rows go."""

    threads: Annotated[
        int | None, typer.Option(min=1, help="Confine the process to so many of its cores. Default: all of them.")
    ] = None
    out: Annotated[Path | None, typer.Option("--json", metavar="PATH", help="Also write the rows to this file.")] = None


CACHES = ("full", "snapkv(budget=512) | int4")
Caches = Annotated[
    list[str] | None, typer.Option("--cache", help=f"A composition; repeatable. Default: {' and '.join(CACHES)}")
]
Context = Annotated[
    list[int] | None, typer.Option(min=1, help="Tokens in the cache; repeatable. Default: 512 and 2048.")
]
Rounds = Annotated[int, typer.Option(min=1, help="Timed rounds, after one that is not.")]


@dataclass(frozen=True, kw_only=True)
class Timed(Subject, Machine):
    """The weights, caches, contexts and rows of a measurement of speed."""

    context: Context = None
    batch: Annotated[int, typer.Option(min=1, help="Rows of a batch.")] = 1
    cache: Caches = None
    rounds: Rounds = 5
