"""Fork guard: fail fast in a process forked after JAX was used, because JAX's threads do not survive a fork.

Start workers with `multiprocessing.get_context("spawn")`, or `multiprocessing_context="spawn"` in a torch DataLoader.
Before Python 3.14, Linux forks by default.
"""

from __future__ import annotations

import os

_begun = _lost = False


def mark_started() -> None:
    """Record that this process has used JAX, so that its forks cannot."""
    global _begun
    if not _begun and hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_lose)
    _begun = True


def _lose() -> None:
    """Mark this process as a fork without JAX's threads."""
    global _lost
    _lost = True


def check() -> None:
    """Raise RuntimeError in a forked process in which JAX would hang."""
    if _lost:
        raise RuntimeError(
            "this process was forked from one that has used jax, whose threads it does not have: every computation "
            'would hang. Start workers by multiprocessing.get_context("spawn"), or fork before a model is loaded'
        )
