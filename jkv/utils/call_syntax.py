"""Parser of call syntax such as "name(argument=value)", with literal arguments."""

from __future__ import annotations

import ast
import difflib
from collections.abc import Collection
from typing import Any


def read_call(stage: str, text: str) -> tuple[str, dict[str, Any]]:
    """Parse one call into its name and literal keyword arguments.

    Args:
        stage: the call.
        text: the whole text that contains it, for error messages.

    Raises:
        ValueError: the call cannot be parsed, an argument is not a literal, or it is given twice.
    """
    try:
        node = ast.parse(stage, mode="eval").body
    except (SyntaxError, TypeError):  # not Python, or not text
        raise ValueError(f"cannot read {stage!r} in {text!r}: write name or name(argument=value)") from None
    call = node if isinstance(node, ast.Call) else ast.Call(func=node, args=[], keywords=[])
    if not isinstance(call.func, ast.Name) or call.args or any(k.arg is None for k in call.keywords):
        raise ValueError(f"cannot read {stage!r} in {text!r}: write name or name(argument=value)")
    try:
        given = {str(k.arg): ast.literal_eval(k.value) for k in call.keywords}
    except (ValueError, TypeError):  # TypeError: a set of lists
        raise ValueError(f"arguments in {stage!r} must be plain numbers, strings or True/False") from None
    if len(given) < len(call.keywords):
        raise ValueError(f"{stage!r} in {text!r} gives an argument twice: leave one of them out")
    return call.func.id, {name: tuple(x) if isinstance(x, list) else x for name, x in given.items()}


def read_one_of(known: Collection[str], text: str, what: str) -> tuple[str, dict[str, Any]]:
    """Parse a call whose name must be known; ValueError for another name, with the closest known one.

    Args:
        known: the names.
        text: the call.
        what: the kind of thing named, for error messages.
    """
    name, arguments = read_call(text, text)
    if name not in known:
        near = difflib.get_close_matches(name, known, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"it is one of {', '.join(known)}"
        raise ValueError(f"unknown {what} {name!r}: {hint}")
    return name, arguments
