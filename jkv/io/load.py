"""Model loading by name, file, folder, hub repository or object store URL."""

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
HUB = "hub:"  # prefix that forces a hub repository even if a local path has the same name
_REPO = re.compile(
    r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(/(?P<file>[\w./-]+\.gguf))?(@(?P<revision>[A-Za-z0-9][\w./-]*))?"
)


def dtype_of(dtype: str | None) -> str:
    """Return `dtype` after checking it, or the default for this process's devices if it is None.

    >>> dtype_of("float16"), dtype_of(None) in ("float32", "bfloat16")
    ('float16', True)
    """
    if dtype is not None:
        check_dtype(dtype)
        return dtype
    return "float32" if why_slow("bfloat16") else "bfloat16"


def why_slow(dtype: str) -> str:
    """Explain why weights of this dtype are slow on this process's devices, and what to use ("" if they are not).

    XLA makes float32 copies of 16-bit matrices on a CPU, and of bfloat16 matrices on GPUs before Ampere (8.0), as the
    programs compiled for a T4 show.
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
    """Raise ValueError for a dtype that weights, or the products with them, cannot have."""
    if dtype not in DTYPES:
        raise ValueError(f"{name} is {dtype!r}; it must be one of {', '.join(DTYPES)}")


def check_weights(weights: str | None, known: Iterable[str] = FORMS) -> None:
    """Raise ValueError for an unknown weight format; `known` lists the accepted names besides bitstack."""
    from jkv.io import bitstack

    if weights is None or weights in known:
        return
    if not bitstack.is_asked(weights):
        forms = ", ".join((*known, f"{bitstack.NAME}(bytes=...)"))
        raise ValueError(f"weights is {weights!r}; it must be one of {forms}, or left out: floats")
    bitstack.parse_spec(weights)


def kept(
    what: str | Path, source: Source, dtype: str, weights: str | None, bars: ExitStack | None = None
) -> tuple[Form | str | None, Mapping[str, Callable[[], Any]]]:
    """Resolve `weights` to the format of the matrices and the blocks kept from a file, as `models.build` takes them.

    Args:
        what: Name or path of the model, for error messages.
        source: The described model.
        dtype: Float type of the weights, or the type that codes stand for.
        weights: Weight format as `load` takes it, or None for floats.
        bars: Exit stack that receives the progress bar of a format that takes long to make.

    Returns:
        The format (None if `weights` is None or "file"), and the quantized tensors to keep as they are in the file, by
        name.

    Raises:
        ValueError: The format is unknown, or this file does not have it.
    """
    from jkv.io import bitstack

    check_weights(weights)
    if weights == "file":
        return None, blocks_of(what, source, dtype)
    if weights is None or not bitstack.is_asked(weights):
        return weights, {}
    return bitstack.form(weights, source.config, source.tensors, dtype, bars), {}


def blocks_of(what: str | Path, source: Source, dtype: str) -> Mapping[str, Callable[[], Any]]:
    """Return readers of the tensors a file has quantized, by name, as `models.build` takes them.

    Args:
        what: Name or path of the model, for error messages.
        source: The described model.
        dtype: Float type that the codes stand for.

    Raises:
        ValueError: A tensor has a quantization type that cannot be kept in memory, or the file has no quantized
            tensors.
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
    """Load the model that `what` names, with weights in `dtype` and its tokenizer.

    `what` is a name ("smollm2-135m"), a .gguf file, a folder with config.json and safetensors, a hub repository or an
    object store URL. A hub repository is "hub:org/name", at a commit, tag or branch "hub:org/name@REVISION", or one of
    its .gguf files "hub:org/name/FILE.gguf". "org/name" also works if no local folder `org` exists, with a note on
    stderr that a hub is used; `read(what).commit` is the commit that was read. A URL of a file or folder in an object
    store ("gs://bucket/model") is downloaded into the cache folder.

    Args:
        what: The model to load.
        dtype: "float32", "bfloat16" or "float16". None: float32 on a CPU and on a GPU before Ampere, else bfloat16.
        mesh: Devices that share the weights, such as "data=4,model=2". The host sends each device only its own part.
        weights: Format of the matrices in memory; everything else stays in `dtype`. None: floats in `dtype`. "int8":
            one step per output. "int4": a step and a low per 32 inputs. "file": the quantized blocks of a .gguf file,
            without changing a weight. "bitstack(bytes='60MiB')": sign matrices and low-rank products, as many as fit
            into the byte budget for all weights; with blocks='FOLDER' in the order that `jkv calibrate bitstack`
            measured.
        prefill_dtype: Float type of the products in prefill; None: `dtype`. "bfloat16" is faster on CPUs with bfloat16
            instructions; it rounds weights and activations to 8 bits where they are multiplied. Sums, cached values and
            all decode steps stay in `dtype`.

    Raises:
        ValueError: The model cannot be found or read.
        jkv.io.hub.FetchError: A download failed.
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
    """Print a note on stderr if weights of this dtype are slow here."""
    if why := why_slow(dtype):
        note(why)


def read(what: str | Path) -> Source:
    """Describe the model that `load` would load, without reading its weights into memory; raises as `load` does."""
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
        if Path(path.parts[0]).is_dir():  # a mistyped local path must not load someone else's model
            raise ValueError(f"there is no folder {what!r} in {path.parts[0]}; {HUB}{what} is the repository on a hub")
        note(f"there is no folder {what!r} here, so a hub is asked for {HUB}{what}")
        return _read_repository(what)
    raise ValueError(_unknown(str(what)))


def _read_repository(name: str) -> Source:
    """Describe the model at "org/name" or "org/name/FILE.gguf" on a hub, each optionally with "@REVISION"."""
    from jkv.io.gguf_model import read_gguf

    if not (asked := _REPO.fullmatch(name)):
        raise ValueError(
            f"{name!r} is no repository on a hub; write {HUB}org/name or {HUB}org/name@REVISION, or "
            f"{HUB}org/name/FILE.gguf"
        )
    got = hub.snapshot(asked["repo"], asked["revision"], asked["file"])
    return dataclasses.replace(_read_folder(got) if got.is_dir() else read_gguf(got), commit=hub.commit(got))


def _read_folder(path: Path) -> Source:
    """Describe the model of a folder; print a note if its tensors have a head that its config says is tied."""
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
