"""Shapes and types that the protocols and kernels promise, checked wherever a test traces an implementation.

A promise is a function of an implementation and its arguments, annotated by jaxtyping and checked by beartype. Letters
are those of `jkv.protocols`; one letter is one length within a call, and {x} is the length x of an argument.
"""

from collections.abc import Callable, Iterator
from functools import wraps
from importlib import import_module
from typing import Any

from beartype import beartype
from jax import Array
from jaxtyping import Bool, Float, Float32, Int32, jaxtyped

from jkv.arrays.online_softmax import Partial
from jkv.protocols import Codec, Merge, Score, Selector

checked = jaxtyped(typechecker=beartype)
Run = Callable[..., Any]
OfTokens = Float32[Array, "{ev.pos.shape[0]} {ev.pos.shape[1]} {ev.pos.shape[2]}"]


@checked
def rank(run: Run, score: Any, ev: Any) -> Float32[Array, "{ev.pos.shape[0]} _ {ev.pos.shape[2]}"]:
    return run(score, ev)


@checked
def observe(run: Run, score: Any, ev: Any) -> dict[str, OfTokens]:
    return run(score, ev)


@checked
def birth(run: Run, score: Any, new: Any) -> dict[str, Float32[Array, "{new.k.shape[0]} {new.k.shape[1]} _"]]:
    return run(score, new)


@checked
def expires(
    run: Run, score: Any, columns: Any, pos: Int32[Array, "B _ S"], *slots: int, **named: int
) -> Int32[Array, "B _ S"] | None:
    return run(score, columns, pos, *slots, **named)


@checked
def decode(run: Run, codec: Any, code: Any) -> Float32[Array, "n D"]:
    return run(codec, code)


@checked
def encode(run: Run, codec: Any, x: Float[Array, "n D"], *more: Any) -> Any:
    return run(codec, x, *more)


@checked
def logits(run: Run, codec: Any, q: Float[Array, "N D"], tile: Any) -> Float32[Array, "N n"]:
    return run(codec, q, tile)


@checked
def mix(run: Run, codec: Any, w: Float32[Array, "N n"], tile: Any) -> Float32[Array, "N D"]:
    return run(codec, w, tile)


@checked
def pick(run: Run, selector: Any, look: Any) -> Any:
    units, memo = run(selector, look)
    assert isinstance(look.q, Float[Array, "B H G D"]) and isinstance(look.pos, Int32[Array, "B H n"]), look
    assert isinstance(units, Int32[Array, "B H U"]), units
    return units, memo


@checked
def into(
    run: Run, merge: Any, ev: Any, kept: Bool[Array, "B H S"], lost: Any, entries: Any
) -> tuple[Int32[Array, "B H m"], Float32[Array, "B H m D"], Float32[Array, "B H m Dv"]]:
    return run(merge, ev, kept, lost, entries)


@checked
def attention(
    run: Run,
    q: Float[Array, "B H G T D"],
    k: Any,
    v: Any,
    pos: Int32[Array, "B *slots"],
    first: Int32[Array, "B T"],
    last: Int32[Array, "B T"],
    *more: Any,
    **named: Any,
) -> Partial:
    found = run(q, k, v, pos, first, last, *more, **named)
    assert isinstance(found.acc, Float[Array, "B H G T Dv"]), found.acc
    assert isinstance(found.m, Float[Array, "B H G T"]) and isinstance(found.l, Float[Array, "B H G T"]), found.m
    return found


@checked
def sums(
    run: Run,
    q: Float[Array, "B H G T D"],
    k: Float[Array, "B H S D"],
    pos: Int32[Array, "B S"],
    first: Int32[Array, "B T"],
    last: Int32[Array, "B T"],
    lse: Float[Array, "B H G T"],
    scale: float,
) -> Float[Array, "B H S"]:
    return run(q, k, pos, first, last, lse, scale)


@checked
def entered(
    run: Run,
    q: Float[Array, "B H G T D"],
    k: Float[Array, "B H R D"],
    v: Float[Array, "B H R D"],
    new_k: Float[Array, "B H 1 D"],
    new_v: Float[Array, "B H 1 D"],
    at: Int32[Array, ""],
    pos: Int32[Array, "B R"],
    put: Int32[Array, "B R"],
    first: Int32[Array, "B T"],
    last: Int32[Array, "B T"],
    scale: float,
) -> tuple[Partial, Float[Array, "B H R D"], Float[Array, "B H R D"]]:
    part, *window = run(q, k, v, new_k, new_v, at, pos, put, first, last, scale)
    assert isinstance(part.acc, Float[Array, "B H G T D"]) and isinstance(part.l, Float[Array, "B H G T"]), part
    return part, *window


PROMISES = (
    (Score, (rank, observe, birth, expires)),
    (Codec, (decode, encode, logits, mix)),
    (Selector, (pick,)),
    (Merge, (into,)),
)
KERNELS = (
    ("decode_attention", attention),
    ("paged_attention", attention),
    ("prefill_attention", attention),
    ("attention_column_sums", sums),
    ("window_attention", attention),
    ("window_attention", entered),
)


def below(kind: type) -> Iterator[type]:
    """A class and all that are made of it."""
    yield kind
    for one in kind.__subclasses__():
        yield from below(one)


def install() -> None:
    """Puts every implementation there is behind its promise: the classes of the catalogue, and the kernels' oracles."""
    import_module("jkv.methods")
    for kind, promises in PROMISES:
        for one in below(kind):
            for promise in promises:
                if promise.__name__ in vars(one):
                    setattr(one, promise.__name__, _behind(promise, vars(one)[promise.__name__]))
    for operation, promise in KERNELS:
        module = import_module(f"jkv.kernels.{operation}.reference")
        setattr(module, promise.__name__, _behind(promise, getattr(module, promise.__name__)))


def _behind(promise: Run, run: Run) -> Run:
    @wraps(run)
    def call(*args: Any, **named: Any) -> Any:
        return promise(run, *args, **named)

    return call
