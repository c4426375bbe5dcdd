"""Sentences to the user on stderr: decisions that are no errors."""

import sys


def note(text: str) -> None:
    """Prints a sentence, beside what a command writes to stdout."""
    print(f"note: {text}", file=sys.stderr, flush=True)
