"""Weights as one pytree, and how they are built from named tensors."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import gcd
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jkv.arrays.tree import host, static, value
from jkv.host import forked

from .coding import EACH, MATRICES, coded, like, stacked
from .config import Mixers, ModelConfig
from .weights import Coded, Joined, rounded

Tensors = Mapping[str, Callable[[], np.ndarray]]
Blocks = Mapping[str, Callable[[], Coded]]
Put = Callable[[str, Any, Any], Array]  # name of a field, its values (an array or a Stack) and type -> where it belongs
EXACT = ("a_log", "dt_bias", "skip", "router_bias", "router_shift")  # fields of mixers and routers


@dataclass(frozen=True, kw_only=True)
class Names:
    """What a checkpoint calls its tensors: field of a block -> the tensors that it stacks, in this order.

    block: of the blocks that attend; sparse: of those that attend and have experts, with a star for an expert's number;
    mixer: of those that recur. shapes: of a family's tensors that differ from `shapes`, by the end of the name; parts:
    rows of the tensors that one tensor of the checkpoint holds, likewise; read: what a checkpoint's tensors are by
    these names, where it packs them otherwise; absent: fields that a model lacks; unread: beginnings of the names that
    are left alone.
    """

    block: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    sparse: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    mixer: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    blocks: str = "model.layers"
    embed: str = "model.embed_tokens.weight"
    norm: str = "model.norm.weight"
    head: str = "lm_head.weight"
    shapes: Callable[[ModelConfig], Mapping[str, tuple[int, ...]]] = lambda c: {}
    parts: Callable[[ModelConfig], Mapping[str, tuple[int, ...]]] = lambda c: {}
    unread: tuple[str, ...] = ()
    read: Callable[[ModelConfig, Tensors], Tensors] = lambda c, tensors: tensors
    absent: Callable[[ModelConfig], Sequence[str]] = lambda c: ()

    def ends(self, c: ModelConfig, i: int) -> Mapping[str, tuple[str, ...]]:
        """The names of block i without its place."""
        table = self.mixer if not c.attends(i) else self.sparse if c.sparse(i) else self.block
        return {n: ends for n, ends in table.items() if n not in self.absent(c)}

    def whole(self, c: ModelConfig, i: int, ends: tuple[str, ...]) -> tuple[str, ...]:
        """The names in block i; of every expert, where there is a star."""
        count = c.experts.count if c.experts and any("*" in end for end in ends) else 1
        return tuple(f"{self.blocks}.{i}.{end.replace('*', str(e))}" for e in range(count) for end in ends)

    def of(self, c: ModelConfig, i: int) -> Mapping[str, tuple[str, ...]]:
        """The whole names of block i."""
        return {n: self.whole(c, i, ends) for n, ends in self.ends(c, i).items()}

    def rows(self, c: ModelConfig, name: str, rows: int) -> tuple[int, ...]:
        """Of the tensors in the tensor of that name, which has `rows`."""
        return next((n for end, n in self.parts(c).items() if name.endswith(end)), (rows,))


@value
class Params:
    """A model: embed [V,E], one dict of arrays a layer, norm [E], head [V,E] (None: embed is used), and its config.

    The tokenizer stays on the host: programs do not take it, so models that differ in it share them.
    prefill_dtype: the float type that a prompt's products are made in, or None: that of the weights; see `reading`.

    Matrices are stored [out, in]. Products of one input share an array, so that a decode step reads few, long ones:
    `qkv` [H, G + 2, D, E], of each kv head its queries, its key and its value, and `gate_up` [H, 2, F / H, E], so that
    devices that divide H have what belongs together; of experts an axis more, [N, ...]. The fields of `EXACT` are in
    float32, whatever the dtype of the others.

    >>> from jkv import models
    >>> p = models.random(dict(model_type="llama", vocab_size=100, hidden_size=32, intermediate_size=64,
    ...     num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512))
    >>> p.embed.shape, p.layers[0]["qkv"].shape, p.config.heads
    ((100, 32), (2, 4, 8, 32), 2)
    """

    embed: Array
    layers: tuple[dict[str, Array], ...]
    norm: Array
    head: Array | None
    config: ModelConfig = static()
    tokenizer: Any = host(default=None)
    prefill_dtype: Any = static(default=None)

    def block(self, i: int) -> "Params":
        """A model that is block i alone: blocks that are alike differ in their arrays only, so programs serve them all.

        >>> from jkv import models
        >>> p = models.random(models.TINY)
        >>> p.block(0).config == p.block(1).config, p.block(1).config.depth
        (True, 1)
        """
        w, config = self.layers[i], self.config.block(i)
        return replace(self, embed=None, layers=(w,), norm=None, head=None, config=config)

    @property
    def ends(self) -> "Params":
        """The model without blocks: it turns tokens into the first one's input, and the last one's into logits."""
        return replace(self, layers=())

    @property
    def reading(self) -> "Params":
        """The model as its blocks read a prompt: matrices are multiplied in `prefill_dtype`, if there is one.

        y = sum_e round(w[o, e]) round(x[e]), summed in the type of x, which keeps it between two products. A rounded
        matrix lives as long as its product: no second copy of the weights.

        >>> from jkv import models
        >>> p = replace(models.random(models.TINY), prefill_dtype=jnp.dtype("bfloat16"))
        >>> type(p.block(0).reading.layers[0]["qkv"]).__name__
        'Rounded'
        """
        if self.prefill_dtype is None:
            return self
        change = lambda name, w: rounded(w, self.prefill_dtype) if name.removeprefix(EACH) in MATRICES else w  # noqa: E731
        return replace(self, layers=tuple({name: change(name, w) for name, w in x.items()} for x in self.layers))

    def first(self, layers: int) -> "Params":
        """The model cut in front of a layer, so that `layers` attend: a draft, and its programs compile sooner.

        >>> from jkv import models
        >>> models.random(models.TINY).first(1).config.layers
        1
        """
        c, depth = self.config, self.config.depth
        end = next((i for i in range(depth) if sum(map(c.attends, range(i + 1))) > layers), depth)
        mixers, experts = (
            replace(x, at=tuple(i for i in x.at if i < end)) if x else None for x in (c.mixers, c.experts)
        )
        cut = dict(layers=layers, ropes=c.ropes[:layers], windows=c.windows[:layers], mixers=mixers, experts=experts)
        return replace(self, layers=self.layers[:end], config=replace(c, **cut))


def shapes(c: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shape of a layer's tensor by the end of its name, as checkpoints store it: [out, in]."""
    q, kv = c.heads * c.groups * c.head_dim, c.heads * c.head_dim
    return (mixed(c.mixers, c.width) if c.mixers else {}) | {
        "q_proj.weight": (q, c.width),
        "k_proj.weight": (kv, c.width),
        "v_proj.weight": (kv, c.width),
        "o_proj.weight": (c.width, q),
        "q_proj.bias": (q,),
        "k_proj.bias": (kv,),
        "v_proj.bias": (kv,),
        "q_norm.weight": (c.head_dim,),
        "k_norm.weight": (c.head_dim,),
        "gate_proj.weight": (c.hidden, c.width),
        "up_proj.weight": (c.hidden, c.width),
        "down_proj.weight": (c.width, c.hidden),
        "layernorm.weight": (c.width,),
        "norm.weight": (c.width,),
    }


def mixed(m: Mixers, width: int) -> dict[str, tuple[int, ...]]:
    """The same of a mixer's tensors."""
    return {
        "in_proj.weight": (m.inner + m.channels + m.heads, width),
        "conv1d.weight": (m.channels, 1, m.kernel),
        "conv1d.bias": (m.channels,),
        "dt_bias": (m.heads,),
        "A_log": (m.heads,),
        ".D": (m.heads,),
        "mixer.norm.weight": (m.inner,),
        "mamba.norm.weight": (m.inner,),
        "out_proj.weight": (width, m.inner),
    }


def names(c: ModelConfig, table: Names) -> dict[str, tuple[int, ...]]:
    """Every tensor of a checkpoint and its shape."""
    out: dict[str, tuple[int, ...]] = {table.embed: (c.vocab, c.width), table.norm: (c.width,)}
    if not c.tied:
        out[table.head] = (c.vocab, c.width)
    known = (*table.shapes(c).items(), *shapes(c).items())  # its own come first: one end may be the end of another
    for i in range(c.depth):
        for tensor in (t for stack in table.ends(c, i).values() for t in stack):
            shape = next(s for end, s in known if tensor.endswith(end))
            out |= dict.fromkeys(table.whole(c, i, (tensor,)), shape)
    return out


def _spare(name: str, c: ModelConfig, table: Names) -> bool:
    unread = name.endswith("rotary_emb.inv_freq") or name.startswith(table.unread)
    return unread or (c.tied and name == table.head)


@dataclass(frozen=True)
class Stack:
    """Arrays one after the other along axis 1 (or a single one), of which what is asked for is read, and checked then.

    >>> x = Stack(("a", "b"), [np.zeros((2, 1, 3)), np.ones((2, 2, 3))], lambda name, part: None)
    >>> x.shape, x[1:].tolist()
    ((2, 3, 3), [[[0.0, 0.0, 0.0], [1.0, 1.0, 1.0], [1.0, 1.0, 1.0]]])
    """

    names: tuple[str, ...]
    parts: list[np.ndarray]
    check: Callable[[str, np.ndarray], None]

    @property
    def shape(self) -> tuple[int, ...]:
        first, *others = (x.shape for x in self.parts)
        return first if not others else (first[0], sum(x[1] for x in (first, *others)), *first[2:])

    def __getitem__(self, index: Any) -> np.ndarray:
        index = index if isinstance(index, tuple) else (index,)
        if len(self.parts) == 1:
            return self._read(0, index)
        whole = index[:1], index[2:]
        found = np.concatenate([self._read(k, (*whole[0], slice(None), *whole[1])) for k in range(len(self.parts))], 1)
        return found[(slice(None), *index[1:2])]

    def _read(self, k: int, index: tuple[Any, ...]) -> np.ndarray:
        part = self.parts[k][index]
        self.check(self.names[k], part)
        return part


def copied(_: str, x: Any, dtype: Any) -> Array:
    """The values on the default device."""
    # a copy: jax would share the memory of an aligned numpy array, which may be a file or change later
    return jnp.array(x[:], dtype=dtype)


def assemble(
    c: ModelConfig,
    table: Names,
    tensors: Tensors,
    dtype: Any,
    put: Put = copied,
    form: str | None = None,
    blocks: Blocks = MappingProxyType({}),
) -> Params:
    """Params of named tensors. Each thunk is called once and dropped, so about one copy is in memory.

    put: how an array gets from the host to where it is used; see `jkv.core.sharding.placing`. form: what matrices
    are kept as, of `coding.FORMATS`; blocks: thunks of those that are kept as they are in a file.

    ValueError lists what is wrong: missing and unused names, shapes that differ from the config, NaN or infinity.
    """
    forked.begun()
    wanted = names(c, table)
    wrong = _complain("missing", [n for n in wanted if n not in tensors])
    wrong += _complain("unused", [n for n in tensors if n not in wanted and not _spare(n, c, table)])
    if wrong:
        raise ValueError(f"the checkpoint does not fit the config of this {c.family} model: " + "; ".join(wrong))

    def get(name: str) -> np.ndarray:
        got = np.asarray(tensors[name]())
        if got.shape != wanted[name]:
            wrong.append(f"{name} has shape {got.shape}, the config needs {wanted[name]}")
        elif got.dtype == np.uint8:
            wrong.append(f"{name} holds bytes, and the config names no format of them")
        return got

    def finite(name: str, part: np.ndarray) -> None:
        if not bool(np.isfinite(part).all()):
            wrong.append(f"{name} holds NaN or infinity")

    def apart(name: str, x: np.ndarray) -> list[np.ndarray]:
        rows = table.rows(c, name, len(x))
        return np.split(x, np.cumsum(rows)[:-1]) if len(rows) > 1 else [x]

    def stack(field: str, names: tuple[str, ...], dtype: Any) -> Array | Coded | Joined | None:
        if all(name in blocks for name in names):
            return keep(field, names)
        before, parts = len(wrong), [get(name) for name in names]
        if len(wrong) > before:  # nothing to build any more: go on only to name every bad tensor
            return None
        parts = {(name, k): part for name, x in zip(names, parts, strict=True) for k, part in enumerate(apart(name, x))}
        return coded(put, form)(
            field, arranged(c, field, [name for name, _ in parts], [*parts.values()], finite), dtype
        )

    def keep(field: str, names: tuple[str, ...]) -> Coded | Joined | None:
        before, parts = len(wrong), [blocks[name]() for name in names]
        for name, x in zip(names, parts, strict=True):
            if x.shape != wanted[name]:
                wrong.append(f"{name} has shape {x.shape}, the config needs {wanted[name]}")
            elif not x.finite:
                wrong.append(f"{name} holds NaN or infinity")
        if len(wrong) > before:
            return None
        found = stacked(parts, *together([len(x.codes) for x in parts], c.heads)) if len(parts) > 1 else parts[0]
        return jax.tree.map(lambda x: put(field, x, x.dtype), found)

    made = _stacked(c, table, stack, dtype)
    if wrong:
        raise ValueError("the checkpoint cannot be used: " + "; ".join(wrong[:8]) + _more(wrong, 8))
    return made


def abstract(c: ModelConfig, table: Names, dtype: Any, form: str | None = None) -> Params:
    """Params of shapes alone, for compiling without weights; form: what matrices are kept as."""
    known = names(c, table)

    def stack(field: str, names: tuple[str, ...], dtype: Any) -> Any:
        parts = [(n, *known[name][1:]) for name in names for n in table.rows(c, name, known[name][0])]
        return like(field, joined(c, field, parts), dtype, form)

    return _stacked(c, table, stack, dtype)


def arranged(
    c: ModelConfig, field: str, names: list[str], parts: list[np.ndarray], check: Callable[[str, np.ndarray], None]
) -> Stack:
    """The array that the tensors of a field share, as `together` says; of every expert's an axis more."""
    count = c.experts.count if c.experts and field.startswith(EACH) else 1
    each = len(parts) // count
    if each > 1:
        n, _, size = together([len(x) for x in parts[:each]], c.heads)
        parts = [x.reshape(n, -1, size, *x.shape[1:]) for x in parts]
    if not field.startswith(EACH):
        return Stack(tuple(names), parts, check)
    for name, x in zip(names, parts, strict=True):
        check(name, x)
    own = [np.concatenate(parts[at : at + each], 1) if each > 1 else parts[at] for at in range(0, len(parts), each)]
    return Stack((field,), [np.stack(own)], check)


def joined(c: ModelConfig, field: str, shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Shape of the array that a field's tensors share, as `together` says; of every expert's an axis more."""
    count = c.experts.count if c.experts and field.startswith(EACH) else None
    rows = [shape[0] for shape in shapes[: len(shapes) // (count or 1)]]
    one = (*(together(rows, c.heads) if len(rows) > 1 else rows), *shapes[0][1:])
    return one if count is None else (count, *one)


def together(rows: list[int], heads: int) -> tuple[int, int, int]:
    """(n, parts, size) of the array that tensors of so many rows share: piece by piece, each cut into n pieces.

    >>> together([64, 16, 16], 2), together([100, 100], 3)
    ((2, 6, 8), (1, 2, 100))
    """
    n = gcd(heads, *rows)
    size = min(rows) // n
    return n, sum(rows) // (n * size), size


def _stacked(c: ModelConfig, table: Names, stack: Callable[[str, tuple[str, ...], Any], Any], dtype: Any) -> Params:
    """Params of what `stack` makes of the tensors of each field."""

    def block(i: int) -> dict[str, Any]:
        return {n: stack(n, t, jnp.float32 if n in EXACT else dtype) for n, t in table.of(c, i).items()}

    embed = stack("embed", (table.embed,), dtype)
    layers = tuple(block(i) for i in range(c.depth))
    norm, head = stack("norm", (table.norm,), dtype), None if c.tied else stack("head", (table.head,), dtype)
    return Params(embed=embed, layers=layers, norm=norm, head=head, config=c)


def _more(items: list[str], shown: int) -> str:
    return f" and {len(items) - shown} more" if len(items) > shown else ""


def _complain(what: str, found: list[str]) -> list[str]:
    return [f"{len(found)} tensors {what}: {', '.join(found[:5])}{_more(found, 5)}"] if found else []


def seeded(c: ModelConfig, table: Names, seed: int) -> Tensors:
    """Random tensors by name, float32, each from its own generator (seed, place in the list).

    Matrices have deviation 1/sqrt(in), so that activations keep their size at any width; norms are near 1, biases
    near 0.
    """

    def draw(place: int, name: str, shape: tuple[int, ...]) -> np.ndarray:
        noise = np.random.default_rng([seed, place]).standard_normal(shape, np.float32)
        if len(shape) == 1:
            return noise * np.float32(0.1) + np.float32("norm" in name.split(".")[-2])
        return noise * np.float32(shape[1] ** -0.5)

    return {n: partial(draw, i, n, s) for i, (n, s) in enumerate(names(c, table).items())}
