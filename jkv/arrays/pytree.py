"""Frozen dataclasses as pytrees: `value` for array containers, `part` for settings."""

from dataclasses import dataclass, field, fields
from typing import Any, TypeVar, dataclass_transform

import jax

T = TypeVar("T")


def static(**kw: Any) -> Any:
    """Declare a field of a `value` as static: hashable, compared by value, part of a program's key."""
    return field(metadata={"kind": "static"}, **kw)


def leaf(**kw: Any) -> Any:
    """Declare a field of a `part` as holding arrays: traced, trainable, saved."""
    return field(metadata={"kind": "leaf"}, **kw)


def host(**kw: Any) -> Any:
    """Declare a field of a `value` as outside the pytree: programs do not see it and return its default."""
    return field(metadata={"kind": "host"}, **kw)


def _register(cls: type[T], default: str) -> type[T]:
    """Make a frozen dataclass and register it; `default` is the kind of undeclared fields."""
    cls = dataclass(frozen=True, kw_only=True)(cls)
    kind = {f.name: f.metadata.get("kind", default) for f in fields(cls)}  # type: ignore[arg-type]  # now a dataclass
    return jax.tree_util.register_dataclass(
        cls,
        data_fields=[n for n, k in kind.items() if k == "leaf"],
        meta_fields=[n for n, k in kind.items() if k == "static"],
        drop_fields=[n for n, k in kind.items() if k == "host"],
    )


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(static, leaf, host))
def value(cls: type[T]) -> type[T]:
    """Make a class a frozen, keyword-only pytree whose fields are arrays unless marked `static()` or `host()`."""
    return _register(cls, "leaf")


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(static, leaf))
def part(cls: type[T]) -> type[T]:
    """Make a class a frozen, keyword-only pytree whose fields are static settings unless marked `leaf()`."""
    return _register(cls, "static")
