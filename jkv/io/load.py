"""Loading of models: by name, by file, by folder, by hub repository or by URL of an object store."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jkv.arrays.x32 import narrow
from jkv.io import hub, object_store
from jkv.io.files import refuse_pointer
from jkv.io.model_source import Source
from jkv.utils.notes import note

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from jkv.models import Params
    from jkv.models.weights.quantize import Form

DTYPES = ("float32", "bfloat16", "float16")
FORMS = ("int8", "int4", "file")
HUB = "hub:"  # before what is a repository whatever lies here
_REPO = re.compile(
    r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(/(?P<file>[\w./-]+\.gguf))?(@(?P<revision>[A-Za-z0-9][\w./-]*))?"
)


def dtype_of(dtype: str | None) -> str:
    """The type of weights that is asked for; None: what this process's devices are made for.

    >>> dtype_of("float16"), dtype_of(None) in ("float32", "bfloat16")
    ('float16', True)
    """
    if dtype is not None:
        check_dtype(dtype)
        return dtype
    return "float32" if why_slow("bfloat16") else "bfloat16"


def why_slow(dtype: str) -> str:
    """Why such weights are slow on this process's devices, and what to take; "" where they are not.

    XLA makes float32 copies of 16-bit matrices on a CPU, and of bfloat16 ones for GPUs before Ampere (8.0), as its
    compiler's programs for a T4 show.
    """
    import jax

    from jkv.kernels import capability

    device = jax.devices()[0]
    if device.platform == "cpu" and dtype != "float32":
        text = "on a CPU a token takes 4 times as long and all weights lie in memory as float32 too"
        return f"with {dtype} {text}; take float32"
    if dtype == "bfloat16" and (capability() or 8) < 8:
        text = f"a {device.device_kind} multiplies no bfloat16: a float32 copy of its matrix precedes each product"
        return f"{text}; take float32, or float16 where it holds the model's numbers"
    return ""


def check_dtype(dtype: str, name: str = "dtype") -> None:
    """Raise ValueError for a type that weights, or their products, cannot have."""
    if dtype not in DTYPES:
        raise ValueError(f"{name} is {dtype!r}; it must be one of {', '.join(DTYPES)}")


def check_weights(weights: str | None, known: Iterable[str] = FORMS) -> None:
    """Raise ValueError for a form that weights cannot be kept in."""
    from jkv.io import bitstack

    if weights is None or weights in known:
        return
    if not bitstack.is_asked(weights):
        forms = ", ".join((*known, f"{bitstack.NAME}(bytes=...)"))
        raise ValueError(f"weights is {weights!r}; it must be one of {forms}, or left out: floats")
    bitstack.asked(weights)


def kept(
    what: str | Path, source: Source, dtype: str, weights: str | None, bars: ExitStack | None = None
) -> tuple[Form | str | None, Mapping[str, Callable[[], Any]]]:
    """The form that matrices are kept in, and those that stay as they are in a file, as `models.build` takes both.

    bars: where the bar of a form goes that takes long to make. Raises ValueError for a form that there is not, here or
    in this file.
    """
    from jkv.io import bitstack

    check_weights(weights)
    if weights == "file":
        return None, blocks_of(what, source, dtype)
    if weights is None or not bitstack.is_asked(weights):
        return weights, {}
    return bitstack.form(weights, source.config, source.tensors, dtype, bars), {}


def blocks_of(what: str | Path, source: Source, dtype: str) -> Mapping[str, Callable[[], Any]]:
    """What a file has in codes, for weights that stand for `dtype`, as `models.build` takes it.

    Raises ValueError for codes that memory has no form for, and where there are none.
    """
    import jax.numpy as jnp

    for name, kind in source.kinds.items():
        if name not in source.blocks and kind.startswith("Q"):
            raise ValueError(f"weights='file': tensor {name} has type {kind}, which memory has no form for; use int8")
    if not source.blocks:
        raise ValueError(f"weights='file' keeps the blocks of a .gguf file, and {what} has none: use int8 or int4")
    return {name: partial(read, jnp.dtype(dtype)) for name, read in source.blocks.items()}


@narrow
def load(
    what: str | Path,
    dtype: str | None = None,
    mesh: str | Mesh | None = None,
    weights: str | None = None,
    prefill_dtype: str | None = None,
) -> Params:
    """The model `what` names, its weights as `dtype` and its tokenizer with it.

    dtype: float32, bfloat16 or float16; None: float32 on a CPU and on a GPU before Ampere, else bfloat16.
    weights: what its matrices are kept as in memory: "int8" (one step an output), "int4" (a step and a low for 32
    inputs), "file" (the blocks of a .gguf file, exactly as they are there), "bitstack(bytes='60MiB')" (signs and
    products of low rank, as many as fit into so many bytes of all weights; blocks='FOLDER': in the order that `jkv
    calibrate bitstack` measured), or None: all in `dtype`, which is that of everything else. mesh: devices that share
    the weights, such as "data=4,model=2"; each gets its part from the host, and no more. prefill_dtype: what the
    products of a prompt are made in, None: `dtype`. "bfloat16" is faster on CPUs that have instructions for it; it
    rounds weights and activations to 8 bits where they are multiplied. Sums, what is kept and every generated token
    stay in `dtype`.

    `what` is a name ("smollm2-135m"), a .gguf file, a folder with config.json and safetensors, or a hub repository:
    "hub:org/name", at one commit, tag or branch "hub:org/name@REVISION", of its .gguf files one
    "hub:org/name/FILE.gguf". "org/name" is one too where there is no folder `org` here, and stderr says that a hub is
    asked; `read(what).commit` is the commit that was read. Or the URL of such a file or folder in an object store
    ("gs://bucket/model"), which is fetched into the cache folder.

    Raises ValueError for what cannot be found or read, `jkv.io.hub.FetchError` if a download fails.
    """
    dtype = dtype_of(dtype)
    check_weights(weights)
    if prefill_dtype is not None:
        check_dtype(prefill_dtype, "prefill_dtype")
    import jax.numpy as jnp

    from jkv.core import sharding
    from jkv.models import build, read_config
    from jkv.models.weights.params import copied
    from jkv.models.weights.quantize import check_divided

    source, put = read(what), copied
    _note_slow(dtype)
    if mesh is not None:
        model = read_config(source.config)
        over = sharding.here(mesh, model) if isinstance(mesh, str) else mesh
        put = sharding.placing(over)
    with ExitStack() as bars:
        form, blocks = kept(what, source, dtype, weights, bars)
        if mesh is not None:
            check_divided(form)
        params = build(source.config, source.tensors, jnp.dtype(dtype), put, form, blocks)
    inner = None if prefill_dtype is None else jnp.dtype(prefill_dtype)
    return dataclasses.replace(params, tokenizer=source.tokenizer, prefill_dtype=inner)


def _note_slow(dtype: str) -> None:
    """Says on stderr that such weights are slow here, if they are."""
    if why := why_slow(dtype):
        note(why)


def read(what: str | Path) -> Source:
    """What `load` would load, described but not yet in memory; raises as `load` does."""
    from jkv.io.gguf_model import read_gguf

    if isinstance(what, str) and what in hub.NAMES:
        return read_gguf(hub.fetch(what))
    if isinstance(what, str) and what.startswith(HUB):
        return _read_repository(what.removeprefix(HUB))
    path = object_store.fetched(what) if object_store.is_url(what) else Path(what).expanduser()
    if path.is_dir():
        return _read_folder(path)
    if path.suffix.lower() == ".gguf" and path.exists():
        refuse_pointer(path)
        return read_gguf(path)
    if path.exists():
        raise ValueError(f"{path} is neither a .gguf file nor a folder; give one of these, or a name like {_names()}")
    if isinstance(what, str) and path.suffix.lower() != ".gguf" and _REPO.fullmatch(what):
        if Path(path.parts[0]).is_dir():  # a folder's name with a slip must not load a stranger's model
            raise ValueError(f"there is no folder {what!r} in {path.parts[0]}; {HUB}{what} is the repository on a hub")
        note(f"there is no folder {what!r} here, so a hub is asked for {HUB}{what}")
        return _read_repository(what)
    raise ValueError(_unknown(str(what)))


def _read_repository(name: str) -> Source:
    """What "org/name", "org/name/FILE.gguf" or one of these "@revision" is on a hub."""
    from jkv.io.gguf_model import read_gguf

    if not (asked := _REPO.fullmatch(name)):
        raise ValueError(
            f"{name!r} is no repository on a hub; write {HUB}org/name or {HUB}org/name@REVISION, or "
            f"{HUB}org/name/FILE.gguf"
        )
    got = hub.snapshot(asked["repo"], asked["revision"], asked["file"])
    return dataclasses.replace(_read_folder(got) if got.is_dir() else read_gguf(got), commit=hub.commit(got))


def _read_folder(path: Path) -> Source:
    """The model of a folder; says on stderr where its tensors have another head than its config says."""
    from jkv.io.safetensors import read_folder
    from jkv.models import settle_head

    source = read_folder(path)
    config, tensors = settle_head(source.config, source.tensors)
    if config != source.config:
        text = "the config ties the head to the embedding, but its weights have another one, which is used"
        note(f"{path}: {text}")
    return dataclasses.replace(source, config=config, tensors=tensors)


def _names() -> str:
    return ", ".join(hub.NAMES)


def _unknown(what: str) -> str:
    close = difflib.get_close_matches(what.lower(), hub.NAMES, n=1, cutoff=0.4)
    hint = f"did you mean {close[0]}?" if close else f"names are: {_names()};"
    return f"there is no model, file or folder {what!r}; {hint} a .gguf file, a folder or {HUB}org/name also works"
