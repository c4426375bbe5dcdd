"""The params pytree, and how it is built from named tensors."""

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
from jkv.utils.tables import reprs

from .facts import model_facts
from .linear import Coded, Joined, Kept, rounded
from .loading import HostArray, Rows, Stack
from .quantize import EACH, MATRICES, Form, parse_form

Tensors = Mapping[str, Callable[[], Any]]  # readers of arrays, or of a `loading.Matrix` with a `dtype`
Blocks = Mapping[str, Callable[[], Any]]  # readers of a `loading.Matrix` whose rows are `Coded`
Put = Callable[[str, Any, Any], Array]  # field name, its values (Stack or Held), dtype -> array on its devices
BUFFERS = tuple(f"rotary_emb.{name}" for name in ("inv_freq", "cos_cached", "sin_cached"))  # known from the config
EXACT = ("a_log", "dt_bias", "skip", "router_bias", "router_shift")  # mixer and router fields in float32


@dataclass(frozen=True, kw_only=True)
class Names:
    """Tensor names of a family's checkpoints: field of a block -> the tensors that it stacks, in order.

    Attributes:
        block: Fields of attention blocks.
        sparse: Fields of attention blocks with experts; a star stands for the expert's number.
        mixer: Fields of recurrent blocks.
        sparse_mixer: Fields of recurrent blocks with experts.
        blocks: Prefix of the blocks' names.
        embed: Name of the embedding.
        norm: Name of the final norm.
        head: Name of the head.
        shapes: Shapes of the family's tensors that differ from `shapes` of this module, by the end of the name.
        parts: Rows of each tensor that one fused checkpoint tensor holds, by the end of the name.
        unread: Prefixes of names that are ignored.
        read: Converts a checkpoint's tensors to these names, for checkpoints that pack them differently.
        absent: Fields that a model lacks.
        place: Number of a block in the names.
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
        """Return the tensor names of block i without their prefix."""
        attending, recurring = (self.block, self.sparse), (self.mixer, self.sparse_mixer)
        table = (attending if c.attends(i) else recurring)[c.sparse(i)]
        return {n: ends for n, ends in table.items() if n not in self.absent(c)}

    def whole(self, c: ModelConfig, i: int, ends: tuple[str, ...]) -> tuple[str, ...]:
        """Return the full tensor names in block i; with a star, those of every expert."""
        count = c.experts.count if c.experts and any("*" in end for end in ends) else 1
        return tuple(f"{self.blocks}.{self.place(i)}.{end.replace('*', str(e))}" for e in range(count) for end in ends)

    def of(self, c: ModelConfig, i: int) -> Mapping[str, tuple[str, ...]]:
        """Return the full tensor names of block i by field."""
        return {n: self.whole(c, i, ends) for n, ends in self.ends(c, i).items()}

    def rows(self, c: ModelConfig, name: str, rows: int) -> tuple[int, ...]:
        """Return the rows of each tensor that the checkpoint tensor `name` with `rows` rows holds."""
        return next((n for end, n in self.parts(c).items() if name.endswith(end)), (rows,))


@value
class Params:
    """A model as a pytree: weights and config.

    Matrices are stored [out, in]. Products of one input share an array, so that a decode step reads few large arrays:
    `qkv` [H, G + 2, D, E] has the queries, the key and the value of each kv head, and `gate_up` is [H, 2, F / H, E], so
    that devices that divide H hold matching parts. Experts add an axis, [N, ...]. The fields in `EXACT` are float32,
    whatever the dtype of the others.

    Attributes:
        embed: [V,E].
        layers: One dict of arrays per layer.
        norm: [E].
        head: [V,E], or None: `embed` is used.
        config: The config.
        tokenizer: The tokenizer. It stays on the host: programs do not take it, so models that differ in it share them.
        prefill_dtype: Float type of the products in prefill, or None: that of the weights; see `reading`.

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

    __repr__, _repr_html_ = reprs("Params", model_facts)

    def block(self, i: int) -> "Params":
        """Return a model that is block i alone; equal blocks differ only in their arrays, so they share programs.

        >>> from jkv import models
        >>> p = models.random(models.TINY)
        >>> p.block(0).config == p.block(1).config, p.block(1).config.depth
        (True, 1)
        """
        w, config = self.layers[i], self.config.block(i)
        return replace(self, embed=None, layers=(w,), norm=None, head=None, config=config)

    @property
    def ends(self) -> "Params":
        """The model without blocks: embedding and head."""
        return replace(self, layers=())

    @property
    def reading(self) -> "Params":
        """The model as used in prefill: matrices are multiplied in `prefill_dtype`, if set.

        y = sum_e round(w[o, e]) round(x[e]), summed in the dtype of x, which x keeps between products. A rounded matrix
        lives only during its product, so there is no second copy of the weights.

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
        """Return the model cut so that the first `layers` attention layers remain: a draft model, quicker to compile.

        >>> from jkv import models
        >>> models.random(models.TINY).first(1).config.layers
        1
        """
        c, depth = self.config, self.config.depth
        # End before the first block that is one attention layer too many.
        end = next((i for i in range(depth) if sum(map(c.attends, range(i + 1))) > layers), depth)
        mixers, experts = (
            replace(x, at=tuple(i for i in x.at if i < end)) if x else None for x in (c.mixers, c.experts)
        )
        cut = dict(layers=layers, ropes=c.ropes[:layers], windows=c.windows[:layers], mixers=mixers, experts=experts)
        return replace(self, layers=self.layers[:end], config=replace(c, **cut))


def shapes(c: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes [out, in] of a layer's tensors, by the end of the name, as checkpoints store them."""
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
    """Return the shapes of a mixer's tensors, by the end of the name, as checkpoints store them."""
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
    """Return every tensor name of a checkpoint with its shape."""
    out: dict[str, tuple[int, ...]] = {table.embed: (c.vocab, c.width), table.norm: (c.width,)}
    if not c.tied:
        out[table.head] = (c.vocab, c.width)
    known = (*table.shapes(c).items(), *shapes(c).items())  # family first: one end may be the end of another
    for i in range(c.depth):
        for tensor in (t for stack in table.ends(c, i).values() for t in stack):
            shape = next(s for end, s in known if tensor.endswith(end))
            out |= dict.fromkeys(table.whole(c, i, (tensor,)), shape)
    return out


def _spare(name: str, table: Names) -> bool:
    return name.endswith(BUFFERS) or name.startswith(table.unread)


def copied(_: str, x: Any, dtype: Any) -> Array:
    """Copy the values to the default device."""
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
    """Build Params from named tensors, reading rows array by array: the host holds one array at a time.

    Args:
        c: Model config.
        table: Tensor names of the family.
        tensors: Readers of the tensors, by name.
        dtype: Float type of the weights.
        put: Moves an array from the host to its devices; see `jkv.core.sharding.placing`.
        form: Weight format of the matrices, or its name in `quantize.FORMATS`; None: floats.
        blocks: Readers of the tensors that are kept quantized as they are in a file.

    Raises:
        ValueError: Names are missing or unused, shapes differ from the config, or values are NaN or infinite; the
            message lists them.
    """
    fork_guard.mark_started()
    wanted = names(c, table)
    wrong = _complain("missing", [n for n in wanted if n not in tensors])
    wrong += _complain("unused", [n for n in tensors if n not in wanted and not _spare(n, table)])
    if wrong:
        said = f"the checkpoint does not fit the config of this {c.family} model: " + "; ".join(wrong)
        raise ValueError(f"{said}; take the config and the tensors of one model that is not quantized")
    checkpoint = Checkpoint(c, table, wanted, tensors, blocks, put, parse_form(form))
    made = _stacked(c, table, checkpoint.array, dtype)
    if wrong := checkpoint.wrong:
        raise ValueError("the checkpoint cannot be used: " + "; ".join(wrong[:8]) + _more(wrong, 8))
    return made


@dataclass(frozen=True)
class Checkpoint:
    """Named tensors being read into arrays.

    Attributes:
        config: Model config.
        table: Tensor names of the family.
        wanted: Expected shapes by name.
        tensors: Readers of the tensors, by name.
        blocks: Readers of the tensors that stay quantized.
        put: Moves an array from the host to its devices.
        form: Weight format, or None.
        wrong: Problems found so far.
    """

    config: ModelConfig
    table: Names
    wanted: Mapping[str, tuple[int, ...]]
    tensors: Tensors
    blocks: Blocks
    put: Put
    form: Form | None
    wrong: list[str] = field(default_factory=list)

    def array(self, layer: int | None, field: str, names: tuple[str, ...], dtype: Any) -> Array | Kept | Joined | None:
        """Read a field's tensors into its array; None if a problem was recorded, so that the others are still checked.

        Args:
            layer: Index of the layer; None: embedding, norm or head.
            field: Name of the field.
            names: Names of its tensors.
            dtype: Float type of the array.
        """
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
        return jax.tree.map(lambda x: self.put(field, HostArray(x), x.dtype), found)

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
    """Return the array that the tensors of a field share, as `together` lays it out; experts add an axis.

    Args:
        c: Model config.
        table: Tensor names of the family.
        field: Name of the field.
        names: Names of its tensors.
        parts: The tensors.
        check: check(name, rows) is called for all rows that are read.
    """
    count = c.experts.count if c.experts and field.startswith(EACH) else None
    # Split fused tensors into their parts.
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
    """Build Params of shapes only, to compile without weights; `form` and `blocks` as in `assemble`."""
    known, kept = names(c, table), parse_form(form)

    def array(layer: int | None, field: str, names: tuple[str, ...], dtype: Any) -> Any:
        if all(name in blocks for name in names):
            found = [x.like() for x in stacked(c, table, field, names, [blocks[name]() for name in names]).apart()]
            return found[0] if len(found) == 1 else Joined(parts=tuple(found))
        parts = [jax.ShapeDtypeStruct(known[name], dtype) for name in names]
        shape = stacked(c, table, field, names, parts).shape
        return kept.like(layer, field, shape, jnp.dtype(dtype)) if kept else jax.ShapeDtypeStruct(shape, dtype)

    return _stacked(c, table, array, dtype)


def together(rows: list[int], heads: int) -> tuple[int, int, int]:
    """Return (n, parts, size) of the array that tensors with these rows share, each cut into n interleaved pieces.

    >>> together([64, 16, 16], 2), together([100, 100], 3)
    ((2, 6, 8), (1, 2, 100))
    """
    n = gcd(heads, *rows)
    size = min(rows) // n
    return n, sum(rows) // (n * size), size


def _stacked(
    c: ModelConfig, table: Names, stack: Callable[[int | None, str, tuple[str, ...], Any], Any], dtype: Any
) -> Params:
    """Build Params with `stack(layer, field, tensor names, dtype)` for each field; layer is None outside the layers."""

    def block(i: int) -> dict[str, Any]:
        return {n: stack(i, n, t, jnp.float32 if n in EXACT else dtype) for n, t in table.of(c, i).items()}

    embed = stack(None, "embed", (table.embed,), dtype)
    layers = tuple(block(i) for i in range(c.depth))
    norm, head = (
        stack(None, "norm", (table.norm,), dtype),
        None if c.tied else stack(None, "head", (table.head,), dtype),
    )
    return Params(embed=embed, layers=layers, norm=norm, head=head, config=c)


def disassemble(params: Params, table: Names) -> dict[str, np.ndarray]:
    """Return the tensors of a float model without experts by checkpoint name: the inverse of `assemble`.

    >>> from jkv import models
    >>> p = models.random(models.TINY)
    >>> disassemble(p, models.llama.TENSORS)["model.layers.1.self_attn.k_proj.weight"].shape
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
    """Return random float32 tensors by name, each from its own generator (seed, place in the list).

    Matrices have standard deviation 1/sqrt(in), so that activations keep their size at any width; norms are near 1,
    biases near 0.
    """

    def draw(place: int, name: str, shape: tuple[int, ...]) -> np.ndarray:
        noise = np.random.default_rng([seed, place]).standard_normal(shape, np.float32)
        if len(shape) == 1:
            return noise * np.float32(0.1) + np.float32("norm" in name.split(".")[-2])
        return noise * np.float32(shape[1] ** -0.5)

    return {n: partial(draw, i, n, s) for i, (n, s) in enumerate(names(c, table).items())}
