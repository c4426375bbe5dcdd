"""Notes to the user on stderr about decisions that are not errors."""

import sys


def note(text: str) -> None:
    """Print a note to stderr, which keeps stdout for a command's output."""
    print(f"note: {text}", file=sys.stderr, flush=True)
