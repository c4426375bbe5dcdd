"""What a terminal and a notebook show of a model."""

from typing import Any

import jax

from .linear import forms


def model_facts(params: Any) -> list[tuple[str, str]]:
    """Return the name and value of each fact about Params."""
    c = params.config
    return [
        ("family", c.family),
        ("blocks", f"{c.depth}, of which {c.layers} attend with {c.heads * c.groups} heads and {c.heads} kv heads"),
        ("width", f"{c.width:,}"),
        ("vocabulary", f"{c.vocab:,}"),
        ("context", f"{c.context:,} tokens"),
        ("weights", f"{sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(params)):,} bytes, {forms(params)}"),
        ("tokenizer", "no" if params.tokenizer is None else "yes"),
    ]
