"""Trained weights of a method: a folder with arrays and a card that describes the model and the training."""

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
    from jkv.nn.network import Kind

T = TypeVar("T")
WEIGHTS, CARD = "weights.safetensors", "card.json"
SHIPPED = resources.files("jkv") / "methods" / "weights"  # one folder for each set of weights in the package


def identities(params: Params) -> list[str]:
    """Return the fingerprints of a model in float32, bfloat16 and float16; weights trained for one serve all three."""
    return [fingerprint(params, dtype) for dtype in (jnp.float32, jnp.bfloat16, jnp.float16)]


def write(
    folder: str | Path,
    arrays: Mapping[str, Any],
    card: Mapping[str, Any],
    wide: Callable[[str], bool] = lambda _: False,
) -> None:
    """Write weights in float16 and their card to a folder, each file atomically.

    Args:
        folder: The folder, created if needed.
        arrays: Weights by name; integers keep their type.
        card: Description, with at least `method` and `model`.
        wide: Whether the array of a name is kept in float32.

    Raises:
        ValueError: An array holds NaN, infinity or numbers beyond its type; nothing is written.
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
    """Return the dtype that an array is stored in."""
    own = np.asarray(x).dtype
    return own if own.kind in "iu" else np.dtype(np.float32 if wide else np.float16)


def read(folder: str | Path, *methods: str) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Read the arrays and card of a folder that `write` wrote for one of `methods`; else FormatError."""
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
    """Build the error for a folder that is not usable as trained weights."""
    return FormatError(folder, cause, "give a folder that `jkv train` or `jkv calibrate` wrote")


def unlike(folder: str | Path, arrays: Mapping[str, np.ndarray], method: str) -> FormatError:
    """Build the error for arrays that do not fit a method, with their names and shapes."""
    found = ", ".join(f"{name}{list(x.shape)}" for name, x in arrays.items())
    return broken(folder, f"its arrays are not those of {method} ({found})")


def check(models: Sequence[str], params: Params) -> None:
    """Raise ValueError with both fingerprints unless `models` contains this model; an empty list accepts any."""
    own = fingerprint(params)
    if models and own not in models:
        raise ValueError(
            f"the weights were trained for the model {models[0]}, and this one is {own}: load that model (weights in "
            "codes are another: without weights=), or make those of this one with `jkv train` or `jkv calibrate`"
        )


def shipped(
    methods: str | tuple[str, ...], params: Params, make: Callable[..., T], *more: Hashable, how: str = "train"
) -> T:
    """Load the weights that come with jkv for a method and this model: make(folder, *more), cached.

    Args:
        methods: Method or methods to look for; the first with a folder for this model is used.
        params: The model.
        make: Builds the result from the folder.
        more: Further arguments of `make`.
        how: The jkv command that makes such weights, for the error message.

    Raises:
        ValueError: No shipped weights fit; the message has the command that makes them.
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
    """Mixin for parts of a cache config that have trained weights.

    Attributes:
        gate: The weights, or None.
        models: Fingerprints of the models they were trained for.
        methods: Methods whose folders this part accepts, its own first.
    """

    gate: Any
    models: tuple[str, ...]
    methods: ClassVar[tuple[str, ...]] = ()

    @staticmethod
    def kind() -> Kind:
        """Import the class of the network that the weights belong to."""
        raise NotImplementedError

    @property
    def weights(self) -> Any:
        """The weights; ValueError with the command that makes them if they are missing."""
        if self.gate is None:
            name = self.methods[0]
            raise ValueError(f"{name} has no weights yet: give gate='FOLDER', as `jkv train {name}` writes it")
        return self.gate

    def gate_of(self, arrays: dict[str, np.ndarray]) -> Any:
        """Build the weights from a folder's arrays, None if they are not a network's; ValueError for bad numbers."""
        from jkv.nn.network import restore

        return restore(self.kind(), arrays)

    def bound(self, params: Params) -> Self:
        """Return this part with weights for this model: its own after a check, else those that come with jkv.

        Raises:
            ValueError: As `check` and `shipped`.
        """
        if self.gate is None:
            return shipped(self.methods, params, trained, self)
        check(self.models, params)
        return self


B = TypeVar("B", bound=Bearer)


def trained(folder: str | Path | None, own: B) -> B:
    """Return `own` with the weights that `jkv train` wrote into a folder; unchanged if `folder` is None.

    Raises:
        FormatError: The folder has something else.
    """
    if folder is None:
        return own
    arrays, card = read(folder, *own.methods)
    try:
        gate = own.gate_of(arrays)
    except ValueError as error:
        raise broken(folder, str(error)) from error
    if gate is None:
        raise unlike(folder, arrays, own.methods[0])
    # every Bearer is a dataclass, which the type checker does not know
    return replace(own, gate=gate, models=tuple(card["model"]))  # type: ignore[type-var]


def fit(arrays: Mapping[str, np.ndarray], axes: Mapping[str, Sequence[str | int]]) -> bool:
    """Return whether arrays have these names and axes; a letter is one length everywhere, a number that length.

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
