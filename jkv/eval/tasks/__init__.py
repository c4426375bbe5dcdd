"""Synthetic tasks: RULER, needle in a haystack, and multi-question sessions."""

from jkv.eval.tasks import niah, ruler, scbench  # noqa: F401 - importing registers their tasks in TASKS
from jkv.eval.tasks.registry import (
    TASKS,
    Count,
    Example,
    Task,
    draw,
    examples,
    find,
    fit,
    none_named,
    string_match_all,
)

__all__ = ["TASKS", "Count", "Example", "Task", "draw", "examples", "find", "fit", "none_named", "string_match_all"]
