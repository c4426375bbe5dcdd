"""Trained weights of a method: a folder of arrays and a card with the model and the training."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

import jax.numpy as jnp
import numpy as np

from jkv.io import array_file
from jkv.io.errors import FormatError
from jkv.io.fingerprint import fingerprint
from jkv.io.safetensors import read_json
from jkv.utils.json_results import finite, overwrite

if TYPE_CHECKING:
    from jkv.models import Params

T = TypeVar("T")
WEIGHTS, CARD = "weights.safetensors", "card.json"
SHIPPED = resources.files("jkv") / "methods" / "weights"  # a folder for each that comes with the package


def identities(params: Params) -> list[str]:
    """Fingerprints of a model in float32, bfloat16 and float16: what is trained for one serves the others."""
    return [fingerprint(params, dtype) for dtype in (jnp.float32, jnp.bfloat16, jnp.float16)]


def write(
    folder: str | Path,
    arrays: Mapping[str, Any],
    card: Mapping[str, Any],
    wide: Callable[[str], bool] = lambda _: False,
) -> None:
    """Weights in float16 and their card, each file whole or not at all; the card needs `method` and `model`.

    wide: the names of those that are kept in float32; integers are kept as they are.
    """
    path = Path(folder).expanduser()
    path.mkdir(parents=True, exist_ok=True)
    with np.errstate(over="ignore"):
        types = {name: _kind(x, wide(name)) for name, x in arrays.items()}
        small = {name: np.asarray(x, types[name]) for name, x in arrays.items()}
    if wrong := [name for name, x in small.items() if not np.isfinite(x).all()]:
        kind = types[wrong[0]].name
        raise ValueError(f"{wrong[0]} holds NaN, infinity or numbers beyond {kind}; nothing was written to {path}")
    array_file.write(path / WEIGHTS, small, {"method": card["method"]})
    said = finite({**card, "sha256": array_file.digest(small, card["model"])})
    overwrite(path / CARD, json.dumps(said, indent=1, allow_nan=False) + "\n")


def _kind(x: Any, wide: bool) -> np.dtype:
    """The type that an array is kept as."""
    own = np.asarray(x).dtype
    return own if own.kind in "iu" else np.dtype(np.float32 if wide else np.float16)


def read(folder: str | Path, *methods: str) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Arrays and card of a folder that `write` wrote for one of the methods; FormatError if it is something else."""
    path = Path(folder).expanduser()
    card = read_json(path / CARD)
    if card is None:
        raise broken(path, f"it has no {CARD}")
    if card.get("method") not in methods or not isinstance(card.get("model"), list):
        raise broken(path, f"its {CARD} describes {card.get('method')!r}, not {' or '.join(methods)}")
    arrays, _ = array_file.read(path / WEIGHTS)
    if card.get("sha256") != array_file.digest(arrays, card["model"]):
        raise broken(path, f"its {CARD} was not written with its {WEIGHTS} (their SHA-256 differ)")
    if wrong := [name for name, x in arrays.items() if not np.isfinite(x).all()]:
        raise broken(path, f"{wrong[0]} holds NaN or infinity")
    return arrays, card


def broken(folder: str | Path, cause: str) -> FormatError:
    return FormatError(folder, cause, "give a folder that `jkv train` or `jkv calibrate` wrote")


def unlike(folder: str | Path, arrays: Mapping[str, np.ndarray], method: str) -> FormatError:
    """The error for arrays that are not a method's, with their names and shapes."""
    found = ", ".join(f"{name}{list(x.shape)}" for name, x in arrays.items())
    return broken(folder, f"its arrays are not those of {method} ({found})")


def check(models: Sequence[str], params: Params) -> None:
    """ValueError with both fingerprints unless `models` names this one; an empty list is for any."""
    own = fingerprint(params)
    if models and own not in models:
        raise ValueError(
            f"the weights were trained for the model {models[0]}, and this one is {own}: load that model (weights in "
            "codes are another: without weights=), or make those of this one with `jkv train` or `jkv calibrate`"
        )


def shipped(
    methods: str | tuple[str, ...], params: Params, make: Callable[..., T], *more: Hashable, how: str = "train"
) -> T:
    """make(folder, *more) of the folder that comes with jkv for a method, the first that has one, and a model.

    It is read once. ValueError with the command that makes one, where there is none.
    """
    own, methods = fingerprint(params), (methods,) if isinstance(methods, str) else methods
    cards = {folder: read_json(folder / CARD) or {} for folder in sorted(Path(str(SHIPPED)).glob("*"))}
    for method in methods:
        for folder, card in cards.items():
            if card.get("method") == method and own in card.get("model", ()):
                return _made(make, str(folder), *more)
    method = methods[0]
    raise ValueError(
        f"{method} needs weights that were made for this model ({own}), and none come with jkv: "
        f"run `jkv {how} {method} --model ... --out FOLDER`, then give that folder to {method}; weights in codes are "
        "another model than in floats: load it without weights="
    )


class Bearer:
    """A part of a cache with trained weights. gate: those, or None; models: fingerprints of what they were trained for.

    methods: whose folders it takes, its own first; kinds: of the weights, whose `axes` name the axes of each array.
    """

    gate: Any
    models: tuple[str, ...]
    methods: ClassVar[tuple[str, ...]] = ()
    kinds: ClassVar[tuple[type[Any], ...]] = ()

    @property
    def weights(self) -> Any:
        """The gate; ValueError with the command that makes one, where there is none."""
        if self.gate is None:
            name = self.methods[0]
            raise ValueError(f"{name} has no weights yet: give gate='FOLDER', as `jkv train {name}` writes it")
        return self.gate

    def gate_of(self, arrays: dict[str, np.ndarray]) -> Any:
        """The weights that arrays of a folder are, or None; ValueError for numbers that cannot be."""
        for kind in self.kinds:
            if fit(arrays, kind.axes):
                return kind(**{name: jnp.asarray(x, jnp.float32) for name, x in arrays.items()})
        return None

    def bound(self, params: Params) -> Self:
        """What has weights that were trained for this model, or where it has none, those that come with jkv.

        ValueError as `check` and `shipped` raise it.
        """
        if self.gate is None:
            return shipped(self.methods, params, trained, self)
        check(self.models, params)
        return self


B = TypeVar("B", bound=Bearer)


def trained(folder: str | Path | None, own: B) -> B:
    """`own` with what `jkv train` wrote for it into a folder, if any; FormatError if that is something else."""
    if folder is None:
        return own
    arrays, card = read(folder, *own.methods)
    try:
        gate = own.gate_of(arrays)
    except ValueError as error:
        raise broken(folder, str(error)) from error
    if gate is None:
        raise unlike(folder, arrays, own.methods[0])
    # every bearer is a part, which the type checker does not know to be a dataclass
    return replace(own, gate=gate, models=tuple(card["model"]))  # type: ignore[type-var]


def fit(arrays: Mapping[str, np.ndarray], axes: Mapping[str, Sequence[str | int]]) -> bool:
    """Whether arrays have these names and axes: a letter is the same length everywhere, a number is that length.

    >>> fit({"a": np.ones((2, 3)), "b": np.ones(3)}, {"a": "LE", "b": "E"})
    True
    >>> fit({"a": np.ones((2, 3)), "b": np.ones(2)}, {"a": "LE", "b": "E"})
    False
    """
    if arrays.keys() != axes.keys() or any(x.ndim != len(axes[name]) for name, x in arrays.items()):
        return False
    sizes: dict[str | int, int] = {}
    pairs = [(axis, n) for name, x in arrays.items() for axis, n in zip(axes[name], x.shape, strict=True)]
    return all(sizes.setdefault(axis, axis if isinstance(axis, int) else n) == n for axis, n in pairs)


@cache
def _made(make: Callable[..., T], folder: str, *more: Hashable) -> T:
    return make(folder, *more)
