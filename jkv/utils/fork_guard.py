"""Processes that were forked from one that has used jax: jax's threads are not in them, and they would wait for ever.

What jax made is of use in one process only. Workers begin anew: `multiprocessing.get_context("spawn")`, or
`multiprocessing_context="spawn"` of a torch DataLoader; before Python 3.14 Linux forks where nothing is said.
"""

from __future__ import annotations

import os

_begun = _lost = False


def begun() -> None:
    """Note that this process has used jax: its forks cannot."""
    global _begun
    if not _begun and hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_lose)
    _begun = True


def _lose() -> None:
    global _lost
    _lost = True


def check() -> None:
    """Raise RuntimeError in a process in which jax would hang."""
    if _lost:
        raise RuntimeError(
            "this process was forked from one that has used jax, whose threads it does not have: every computation "
            'would hang. Start workers by multiprocessing.get_context("spawn"), or fork before a model is loaded'
        )
