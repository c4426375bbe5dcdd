"""Frozen dataclasses as pytrees: `value` for what is made of arrays, `part` for what is made of settings."""

from dataclasses import dataclass, field, fields
from typing import Any, TypeVar, dataclass_transform

import jax

T = TypeVar("T")


def static(**kw: Any) -> Any:
    """A field of a `value` that is part of the program, not an array: hashable, compared by value."""
    return field(metadata={"kind": "static"}, **kw)


def leaf(**kw: Any) -> Any:
    """A field of a `part` that holds arrays: traced, trainable, saved."""
    return field(metadata={"kind": "leaf"}, **kw)


def host(**kw: Any) -> Any:
    """A field of a `value` that is no part of the pytree: no program takes it, and what jax makes has the default."""
    return field(metadata={"kind": "host"}, **kw)


def _register(cls: type[T], default: str) -> type[T]:
    cls = dataclass(frozen=True, kw_only=True)(cls)
    kind = {f.name: f.metadata.get("kind", default) for f in fields(cls)}  # type: ignore[arg-type]  # it is one by now
    return jax.tree_util.register_dataclass(
        cls,
        data_fields=[n for n, k in kind.items() if k == "leaf"],
        meta_fields=[n for n, k in kind.items() if k == "static"],
        drop_fields=[n for n, k in kind.items() if k == "host"],
    )


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(static, leaf, host))
def value(cls: type[T]) -> type[T]:
    """A frozen, keyword-only pytree whose fields are arrays unless marked `static()` or `host()`."""
    return _register(cls, "leaf")


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(static, leaf))
def part(cls: type[T]) -> type[T]:
    """A frozen, keyword-only pytree whose fields are settings unless marked `leaf()`."""
    return _register(cls, "static")
