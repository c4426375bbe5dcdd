"""All tasks: those of RULER, of NIAH and of sessions with several questions."""

from jkv.eval.tasks import niah, ruler, scbench  # noqa: F401 - they put their rows into TASKS
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
