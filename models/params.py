"""Weights as one pytree, and how they are built from named tensors."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jkv.tree import static, value

from .config import ModelConfig

Tensors = Mapping[str, Callable[[], np.ndarray]]


@value
class Params:
    """A model: embed [V,E], one dict of arrays a layer, norm [E], head [V,E] (None: embed is used), and its config.

    Matrices are stored [out, in]. Products of one input share a matrix: `qkv` [(HG + 2H) D, E] (all queries, then keys,
    then values) and `gate_up` [2F, E], so that a decode step reads few, long matrices.

    >>> from jkv import models
    >>> p = models.random(dict(model_type="llama", vocab_size=100, hidden_size=32, intermediate_size=64,
    ...     num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512))
    >>> p.embed.shape, p.layers[0]["qkv"].shape, p.config.heads
    ((100, 32), (64, 32), 2)
    """

    embed: Array
    layers: tuple[dict[str, Array], ...]
    norm: Array
    head: Array | None
    config: ModelConfig = static()
    tokenizer: Any = static(default=None)

    def first(self, layers: int) -> "Params":
        """The model cut after its first layers: it makes no sense, and its programs compile sooner.

        >>> from jkv import models
        >>> models.random(models.TINY).first(1).config.layers
        1
        """
        c = self.config
        cut = dict(layers=layers, ropes=c.ropes[:layers], windows=c.windows[:layers])
        return replace(self, layers=self.layers[:layers], config=replace(c, **cut))


def shapes(c: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shape of a layer's tensor by the end of its name, as checkpoints store it: [out, in]."""
    q, kv = c.heads * c.groups * c.head_dim, c.heads * c.head_dim
    return {
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
    }


def names(c: ModelConfig, table: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[int, ...]]:
    """Every tensor of a checkpoint and its shape; `table` maps a field of a layer to the tensors that it stacks."""
    out = {"model.embed_tokens.weight": (c.vocab, c.width), "model.norm.weight": (c.width,)}
    if not c.tied:
        out["lm_head.weight"] = (c.vocab, c.width)
    known = shapes(c)
    for i in range(c.layers):
        for tensor in (t for stack in table.values() for t in stack):
            shape = next(s for end, s in known.items() if tensor.endswith(end))
            out[f"model.layers.{i}.{tensor}"] = shape
    return out


def _spare(name: str, c: ModelConfig) -> bool:
    return name.endswith("rotary_emb.inv_freq") or (c.tied and name == "lm_head.weight")


def assemble(c: ModelConfig, table: Mapping[str, tuple[str, ...]], tensors: Tensors, dtype: Any) -> Params:
    """Params of named tensors. Each thunk is called once and dropped, so about one copy is in memory.

    ValueError lists what is wrong: missing and unused names, shapes that differ from the config, NaN or infinity.
    """
    wanted = names(c, table)
    wrong = _complain("missing", [n for n in wanted if n not in tensors])
    wrong += _complain("unused", [n for n in tensors if n not in wanted and not _spare(n, c)])
    if wrong:
        raise ValueError(f"the checkpoint does not fit the config of this {c.family} model: " + "; ".join(wrong))

    def get(name: str) -> np.ndarray:
        got = np.asarray(tensors[name]())
        if got.shape != wanted[name]:
            wrong.append(f"{name} has shape {got.shape}, the config needs {wanted[name]}")
        elif not bool(np.isfinite(got).all()):
            wrong.append(f"{name} holds NaN or infinity")
        return got

    def stack(ends: tuple[str, ...], at: str) -> Array | None:
        before, parts = len(wrong), [get(at + end) for end in ends]
        if len(wrong) > before:  # nothing to build any more: go on only to name every bad tensor
            return None
        # a copy: jax would share the memory of an aligned numpy array, which may be a file or change later
        return jnp.array(np.concatenate(parts) if len(parts) > 1 else parts[0], dtype=dtype)

    embed = stack(("embed_tokens.weight",), "model.")
    layers = tuple({n: stack(t, f"model.layers.{i}.") for n, t in table.items()} for i in range(c.layers))
    norm = stack(("norm.weight",), "model.")
    head = None if c.tied else stack(("lm_head.weight",), "")
    if wrong:
        raise ValueError("the checkpoint cannot be used: " + "; ".join(wrong[:8]) + _more(wrong, 8))
    return Params(embed=embed, layers=layers, norm=norm, head=head, config=c)  # type: ignore[arg-type]


def abstract(c: ModelConfig, table: Mapping[str, tuple[str, ...]], dtype: Any) -> Params:
    """Params of shapes alone, for compiling without weights."""
    known = names(c, table)

    def stack(ends: tuple[str, ...], at: str) -> jax.ShapeDtypeStruct:
        parts = [known[at + end] for end in ends]
        return jax.ShapeDtypeStruct((sum(p[0] for p in parts), *parts[0][1:]), dtype)

    layers = tuple({n: stack(t, f"model.layers.{i}.") for n, t in table.items()} for i in range(c.layers))
    embed, norm = stack(("embed_tokens.weight",), "model."), stack(("norm.weight",), "model.")
    head = None if c.tied else stack(("lm_head.weight",), "")
    return Params(embed=embed, layers=layers, norm=norm, head=head, config=c)  # type: ignore[arg-type]


def _more(items: list[str], shown: int) -> str:
    return f" and {len(items) - shown} more" if len(items) > shown else ""


def _complain(what: str, found: list[str]) -> list[str]:
    return [f"{len(found)} tensors {what}: {', '.join(found[:5])}{_more(found, 5)}"] if found else []


def seeded(c: ModelConfig, table: Mapping[str, tuple[str, ...]], seed: int) -> Tensors:
    """Random tensors by name, float32, each from its own generator (seed, place in the list).

    Matrices have deviation 1/sqrt(in), so that activations keep their size at any width; norms are near 1, biases
    near 0.
    """

    def draw(place: int, name: str, shape: tuple[int, ...]) -> np.ndarray:
        noise = np.random.default_rng([seed, place]).standard_normal(shape, np.float32)
        if len(shape) == 1:
            return noise * np.float32(0.1) + np.float32(name.endswith("norm.weight"))
        return noise * np.float32(shape[1] ** -0.5)

    return {n: partial(draw, i, n, s) for i, (n, s) in enumerate(names(c, table).items())}
