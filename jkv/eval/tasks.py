"""All tasks: those of RULER, of NIAH and of sessions with several questions."""

from jkv.eval import niah, ruler, shared  # noqa: F401 - they put their rows into TASKS
from jkv.eval.task import TASKS, Count, Example, Task, draw, examples, find, fit, none_named, string_match_all

__all__ = ["TASKS", "Count", "Example", "Task", "draw", "examples", "find", "fit", "none_named", "string_match_all"]
