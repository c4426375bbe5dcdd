"""Weights as one pytree, and how they are built from named tensors."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, pairwise
from math import gcd
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jkv.arrays.pytree import host, static, value
from jkv.models.config import Mixers, ModelConfig
from jkv.utils import fork_guard

from .linear import Coded, Joined, Kept, rounded
from .loading import Held, Rows, Stack
from .quantize import EACH, MATRICES, Form, named

Tensors = Mapping[str, Callable[[], Any]]  # thunks of arrays, or of a `stacks.Matrix` with their `dtype`
Blocks = Mapping[str, Callable[[], Any]]  # thunks of a `stacks.Matrix` whose rows are `Coded`
Put = Callable[[str, Any, Any], Array]  # name of a field, its values (a Stack or Held) and type -> where it belongs
BUFFERS = tuple(f"rotary_emb.{name}" for name in ("inv_freq", "cos_cached", "sin_cached"))  # which the config says too
EXACT = ("a_log", "dt_bias", "skip", "router_bias", "router_shift")  # fields of mixers and routers


@dataclass(frozen=True, kw_only=True)
class Names:
    """What a checkpoint calls its tensors: field of a block -> the tensors that it stacks, in this order.

    block: of the blocks that attend; sparse: of those that attend and have experts, with a star for an expert's number;
    mixer, sparse_mixer: of those that recur, likewise. shapes: of a family's tensors that differ from `shapes`, by the
    end of the name; parts: rows of the tensors that one tensor of the checkpoint holds, likewise; read: what a
    checkpoint's tensors are by these names, where it packs them otherwise; absent: fields that a model lacks; unread:
    beginnings of the names that are left alone; place: the number of a block in the names.
    """

    block: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    sparse: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    mixer: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    sparse_mixer: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    blocks: str = "model.layers"
    embed: str = "model.embed_tokens.weight"
    norm: str = "model.norm.weight"
    head: str = "lm_head.weight"
    shapes: Callable[[ModelConfig], Mapping[str, tuple[int, ...]]] = lambda c: {}
    parts: Callable[[ModelConfig], Mapping[str, tuple[int, ...]]] = lambda c: {}
    unread: tuple[str, ...] = ()
    read: Callable[[ModelConfig, Tensors], Tensors] = lambda c, tensors: tensors
    absent: Callable[[ModelConfig], Sequence[str]] = lambda c: ()
    place: Callable[[int], int] = lambda i: i

    def ends(self, c: ModelConfig, i: int) -> Mapping[str, tuple[str, ...]]:
        """The names of block i without its place."""
        attending, recurring = (self.block, self.sparse), (self.mixer, self.sparse_mixer)
        table = (attending if c.attends(i) else recurring)[c.sparse(i)]
        return {n: ends for n, ends in table.items() if n not in self.absent(c)}

    def whole(self, c: ModelConfig, i: int, ends: tuple[str, ...]) -> tuple[str, ...]:
        """The names in block i; of every expert, where there is a star."""
        count = c.experts.count if c.experts and any("*" in end for end in ends) else 1
        return tuple(f"{self.blocks}.{self.place(i)}.{end.replace('*', str(e))}" for e in range(count) for end in ends)

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


def _spare(name: str, table: Names) -> bool:
    return name.endswith(BUFFERS) or name.startswith(table.unread)


def copied(_: str, x: Any, dtype: Any) -> Array:
    """The values on the default device."""
    return jnp.asarray(x.read((), dtype))


def assemble(
    c: ModelConfig,
    table: Names,
    tensors: Tensors,
    dtype: Any,
    put: Put = copied,
    form: Form | str | None = None,
    blocks: Blocks = MappingProxyType({}),
) -> Params:
    """Params of named tensors, of which rows are read when an array is made of them: the host has one array at a time.

    put: how an array gets from the host to where it is used; see `jkv.core.sharding.placing`. form: what matrices
    are kept as, or its name in `coding.FORMATS`; blocks: thunks of those that are kept as they are in a file.

    ValueError lists what is wrong: missing and unused names, shapes that differ from the config, NaN or infinity.
    """
    fork_guard.begun()
    wanted = names(c, table)
    wrong = _complain("missing", [n for n in wanted if n not in tensors])
    wrong += _complain("unused", [n for n in tensors if n not in wanted and not _spare(n, table)])
    if wrong:
        said = f"the checkpoint does not fit the config of this {c.family} model: " + "; ".join(wrong)
        raise ValueError(f"{said}; take the config and the tensors of one model that is not quantized")
    checkpoint = Checkpoint(c, table, wanted, tensors, blocks, put, named(form))
    made = _stacked(c, table, checkpoint.array, dtype)
    if wrong := checkpoint.wrong:
        raise ValueError("the checkpoint cannot be used: " + "; ".join(wrong[:8]) + _more(wrong, 8))
    return made


@dataclass(frozen=True)
class Checkpoint:
    """Named tensors on their way into arrays; wrong: what was found of them."""

    config: ModelConfig
    table: Names
    wanted: Mapping[str, tuple[int, ...]]
    tensors: Tensors
    blocks: Blocks
    put: Put
    form: Form | None
    wrong: list[str] = field(default_factory=list)

    def array(self, layer: int | None, field: str, names: tuple[str, ...], dtype: Any) -> Array | Kept | Joined | None:
        """What the tensors of a field are kept as; None: what is wrong with them is noted, and the others are read."""
        kept = all(name in self.blocks for name in names)
        before, parts = len(self.wrong), [self._found(name, kept) for name in names]
        if len(self.wrong) > before:
            return None
        x = stacked(self.config, self.table, field, names, parts, self._finite_codes if kept else self._finite)
        if kept:
            found = [own.mapped() for own in x.apart()]
            return self._put(field, found[0] if len(found) == 1 else Joined(parts=tuple(found)))
        code = None if self.form is None else self.form.coder(layer, field, jnp.dtype(dtype))
        return self._put(field, code(x)) if code else self.put(field, x, dtype)

    def _put(self, field: str, found: Any) -> Any:
        return jax.tree.map(lambda x: self.put(field, Held(x), x.dtype), found)

    def _found(self, name: str, kept: bool) -> Any:
        got = self.blocks[name]() if kept else self.tensors[name]()
        if got.shape != self.wanted[name]:
            self._note(f"{name} has shape {got.shape}, the config needs {self.wanted[name]}")
        elif not kept and got.dtype == np.uint8:
            self._note(f"{name} holds bytes, and the config names no format of them")
        return got

    def _finite(self, name: str, rows: np.ndarray) -> None:
        if not bool(np.isfinite(rows).all()):
            self._note(f"{name} holds NaN or infinity")

    def _finite_codes(self, name: str, rows: Coded) -> None:
        if not rows.finite:
            self._note(f"{name} holds NaN or infinity")

    def _note(self, text: str) -> None:
        if text not in self.wrong:
            self.wrong.append(text)


def stacked(
    c: ModelConfig,
    table: Names,
    field: str,
    names: Sequence[str],
    parts: Sequence[Any],
    check: Callable[[str, Any], None] = lambda name, rows: None,
) -> Stack:
    """The array that the tensors of a field share, as `together` says; of every expert's an axis more."""
    count = c.experts.count if c.experts and field.startswith(EACH) else None
    own: list[tuple[str, Any]] = []
    for name, x in zip(names, parts, strict=True):
        ends = list(accumulate(table.rows(c, name, x.shape[0]), initial=0))
        own += [(name, x)] if len(ends) == 2 else [(name, Rows(x, a, b)) for a, b in pairwise(ends)]
    each = len(own) // (count or 1)
    n, _, size = together([x.shape[0] for _, x in own[:each]], c.heads) if each > 1 else (0, 0, 1)
    return Stack([name for name, _ in own], [x for _, x in own], n, size, count, check)


def abstract(
    c: ModelConfig, table: Names, dtype: Any, form: Form | str | None = None, blocks: Blocks = MappingProxyType({})
) -> Params:
    """Params of shapes alone, for compiling without weights; form, blocks: as for `assemble`."""
    known, kept = names(c, table), named(form)

    def array(layer: int | None, field: str, names: tuple[str, ...], dtype: Any) -> Any:
        if all(name in blocks for name in names):
            found = [x.like() for x in stacked(c, table, field, names, [blocks[name]() for name in names]).apart()]
            return found[0] if len(found) == 1 else Joined(parts=tuple(found))
        parts = [jax.ShapeDtypeStruct(known[name], dtype) for name in names]
        shape = stacked(c, table, field, names, parts).shape
        return kept.like(layer, field, shape, jnp.dtype(dtype)) if kept else jax.ShapeDtypeStruct(shape, dtype)

    return _stacked(c, table, array, dtype)


def together(rows: list[int], heads: int) -> tuple[int, int, int]:
    """(n, parts, size) of the array that tensors of so many rows share: piece by piece, each cut into n pieces.

    >>> together([64, 16, 16], 2), together([100, 100], 3)
    ((2, 6, 8), (1, 2, 100))
    """
    n = gcd(heads, *rows)
    size = min(rows) // n
    return n, sum(rows) // (n * size), size


def _stacked(
    c: ModelConfig, table: Names, stack: Callable[[int | None, str, tuple[str, ...], Any], Any], dtype: Any
) -> Params:
    """Params of what `stack` makes of the tensors of each layer's field, and of those of no layer."""

    def block(i: int) -> dict[str, Any]:
        return {n: stack(i, n, t, jnp.float32 if n in EXACT else dtype) for n, t in table.of(c, i).items()}

    embed = stack(None, "embed", (table.embed,), dtype)
    layers = tuple(block(i) for i in range(c.depth))
    norm, head = (
        stack(None, "norm", (table.norm,), dtype),
        None if c.tied else stack(None, "head", (table.head,), dtype),
    )
    return Params(embed=embed, layers=layers, norm=norm, head=head, config=c)


def apart(params: Params, table: Names) -> dict[str, np.ndarray]:
    """The tensors of a model in floats without experts, by their names in a checkpoint: `assemble` undone.

    >>> from jkv import models
    >>> p = models.random(models.TINY)
    >>> apart(p, models.llama.TENSORS)["model.layers.1.self_attn.k_proj.weight"].shape
    (16, 32)
    """
    c = params.config
    known, out = names(c, table), {table.embed: np.asarray(params.embed), table.norm: np.asarray(params.norm)}
    if params.head is not None:
        out[table.head] = np.asarray(params.head)
    for i, w in enumerate(params.layers):
        for stack, found in table.of(c, i).items():
            rows = {name: table.rows(c, name, known[name][0]) for name in found}
            every = [n for own in rows.values() for n in own]
            n, parts, size = together(every, c.heads)
            x = np.asarray(w[stack]).reshape(n, parts, size, *known[found[0]][1:])
            pieces = iter(np.split(x, list(accumulate(r // (n * size) for r in every))[:-1], 1))
            for name, own in rows.items():
                out[name] = np.concatenate([next(pieces).reshape(r, *x.shape[3:]) for r in own])
    return out


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
