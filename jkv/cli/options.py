"""Command-line options shared by several commands: single options, and dataclasses that group related ones.

A command declares a parameter with such a dataclass as its type; `flat` turns each field into an option.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

if TYPE_CHECKING:
    from jkv.models import ModelConfig

MODEL = "smollm2-135m"  # the default model
CACHE = "int8"  # the default cache: KL 4e-5 to the full one on SmolLM2-135M, 3.4 times smaller (docs/quality.md)
ADVICE = {
    "nothing lost that you would notice (default)": "int8",
    "half of those bytes": "int4",
    "one document, many questions": "kvzip(keep=0.5) | int4(rotate=True)",
    "one question, at the end of a long prompt": "snapkv(budget=512) | int4",
    "endless text in constant memory": "streaming(budget=512), with --chunk 512",
}
WHICH = "Which cache?\n\n" + "\n\n".join(f"  {wish}: {cache}" for wish, cache in ADVICE.items())
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]
Model = Annotated[str, typer.Option(help="Model: known name, .gguf file, folder, URL, or hub:org/name\\[@REVISION].")]
FLOATS = "Type of weights and unquantized keys and values: float32, bfloat16 or float16."
Cached = Annotated[
    str | None,
    typer.Option(
        "--cache",
        help=f"Cache methods, joined by |; list them with: jkv methods. Default: {CACHE} (full, if no layer attends).",
    ),
]
Floats = Annotated[str, typer.Option("--dtype", help=FLOATS)]
Dtype = Annotated[str | None, typer.Option(help=f"{FLOATS} Default: bfloat16; float32 on CPUs and old GPUs.")]


Weights = Annotated[
    str | None,
    typer.Option(
        help="Weight format in memory: int8, int4, file (keep the .gguf's own blocks), \"bitstack(bytes='4GiB')\". "
        "Default: --dtype."
    ),
]
PrefillDtype = Annotated[
    str | None,
    typer.Option(
        help="Type of matrix products in prefill; bfloat16 is faster on CPUs with AVX512-BF16 or AMX. Default: --dtype."
    ),
]
Mesh = Annotated[
    str | None, typer.Option(help="Device mesh to shard over, such as data=2,model=4. Default: one device.")
]
Chunk = Annotated[
    int | None,
    typer.Option(
        min=0,
        help="Prompt tokens per prefill chunk; 0: the whole prompt. Default: the whole prompt, or what fits in memory.",
    ),
]


@dataclass(frozen=True, kw_only=True)
class PrefixCacheOptions:
    """The options of the persistent prefix cache."""

    prefix_cache: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="Folder of a persistent prefix cache, reused across runs.")
    ] = None
    prefix_cache_bytes: Annotated[str, typer.Option(help="Size limit of --prefix-cache, such as 8GiB.")] = "8GiB"
    prefix_cache_evict: Annotated[
        str, typer.Option(help="Eviction policy of --prefix-cache: lru, or lpc:FILE (from jkv train lpc).")
    ] = "lru"
    prefix_cache_codec: Annotated[
        str,
        typer.Option(
            help='Compression of --prefix-cache: "" (exact), cachegen(level=1..3) or cachegen(within=SECONDS).'
        ),
    ] = ""

    def open(self) -> Any:
        """Open the `jkv.PrefixCache`, or return None without a folder; ValueError for options that need one."""
        from jkv.prefix_cache.store import PrefixCache

        if self.prefix_cache is None:
            if self != PrefixCacheOptions():
                raise ValueError("--prefix-cache-bytes, -evict and -codec need a folder: give --prefix-cache too")
            return None
        return PrefixCache(
            self.prefix_cache, self.prefix_cache_bytes, self.prefix_cache_evict, codec=self.prefix_cache_codec
        )


@dataclass(frozen=True, kw_only=True)
class ChatOptions:
    """The options of the chat template."""

    chat_template_kwargs: Annotated[
        str | None,
        typer.Option(metavar="JSON", help="Arguments of the chat template, such as '{\"enable_thinking\": false}'."),
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
        """Return the model with these chat template arguments. Raises ValueError if it has no chat template."""
        options = self._read()
        if not options:
            return params
        if params.tokenizer is None or params.tokenizer.template is None:
            raise ValueError("--chat-template-kwargs: this model has no chat template; leave it out")
        return replace(params, tokenizer=params.tokenizer.tell(**options))


def default_cache(model: ModelConfig) -> str:
    """Return the default cache of a model; one without attention layers has nothing to compress."""
    return CACHE if model.layers else "full"


def flat(run: Callable[..., None]) -> Callable[..., None]:
    """Turn a function into a command whose dataclass parameters are flattened into one option per field.

    An option's default is the field's, or comes from the parameter's default, an instance of the dataclass.
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
    """The sampling parameters."""

    temperature: Annotated[float, typer.Option(help="Sampling temperature; 0: greedy.")] = 0.0
    top_k: Annotated[int, typer.Option(help="Sample from the k most probable tokens; 0: all.")] = 0
    top_p: Annotated[float, typer.Option(help="Sample from the smallest set with this total probability.")] = 1.0
    min_p: Annotated[float, typer.Option(help="Drop tokens below this fraction of the highest probability.")] = 0.0
    repetition_penalty: Annotated[float, typer.Option(help="Above 1: makes repeated tokens less likely.")] = 1.0


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The options of every quality measurement: model, seed, result file, types and mesh."""

    model: Model = MODEL
    seed: Annotated[int, typer.Option(help="Seed of the text positions and the tasks.")] = 0
    out: Annotated[
        Path | None, typer.Option("--json", metavar="OUT", help="Result file; a re-run resumes from it.")
    ] = None
    dtype: Dtype = None
    weights: Weights = None
    mesh: Mesh = None


@dataclass(frozen=True, kw_only=True)
class Compared(Measured):
    """The options of quality measurements that compare caches."""

    cache: Annotated[list[str] | None, typer.Option("--cache", help="A cache; repeatable. Default: full.")] = None
    samples: Annotated[int, typer.Option(help="Number of texts, or of prompts per task.")] = 4
    batch: Annotated[int, typer.Option(help="Batch size (texts, or questions of a session).")] = 4


@dataclass(frozen=True, kw_only=True)
class Text:
    """The options of a text: its prefix is prefilled and compressed, its continuation is predicted."""

    corpus: Annotated[
        str, typer.Option(help="pydoc (prose) or stdlib (code), also with :test; or a dataset such as wikitext.")
    ] = "pydoc"
    text: Annotated[
        Path | None, typer.Option("--text", metavar="FILE", help="Your own UTF-8 text instead of --corpus.")
    ] = None
    tokens: Annotated[
        Path | None,
        typer.Option("--tokens", metavar="FILE.npz", help="Token ids instead: int32 \\[n, prefix + continue]."),
    ] = None
    prefix: Annotated[int, typer.Option(help="Tokens prefilled and compressed.")] = 2048
    rest: Annotated[int, typer.Option("--continue", help="Tokens after the prefix, predicted one by one.")] = 256


@dataclass(frozen=True, kw_only=True)
class Subject:
    """The options of the model whose speed is measured."""

    model: Annotated[
        str | None, typer.Option(help="Model: known name, .gguf file, folder, or hub:org/name\\[@REVISION].")
    ] = None  # or --shape
    shape: Annotated[
        str | None, typer.Option(help="Shape of a public model: llama-3.1-8b, llama-3.2-1b, qwen3-8b, ...")
    ] = None
    random_weights: Annotated[
        bool, typer.Option("--random-weights", help="Use seeded random weights in the shape of --shape or --model.")
    ] = False
    dtype: Dtype = None
    weights: Weights = None


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The options of every speed measurement: CPU cores and result file."""

    threads: Annotated[int | None, typer.Option(min=1, help="Number of CPU cores to use. Default: all.")] = None
    out: Annotated[Path | None, typer.Option("--json", metavar="PATH", help="Also write the results here.")] = None


CACHES = ("full", "snapkv(budget=512) | int4")
Caches = Annotated[
    list[str] | None, typer.Option("--cache", help=f"Cache to measure; repeatable. Default: {' and '.join(CACHES)}")
]
Context = Annotated[
    list[int] | None, typer.Option(min=1, help="Tokens in the cache; repeatable. Default: 512 and 2048.")
]
Rounds = Annotated[int, typer.Option(min=1, help="Timed rounds, after one warm-up round.")]


@dataclass(frozen=True, kw_only=True)
class Timed(Subject, Machine):
    """The options of speed measurements over caches and contexts."""

    context: Context = None
    batch: Annotated[int, typer.Option(min=1, help="Batch size.")] = 1
    cache: Caches = None
    rounds: Rounds = 5
