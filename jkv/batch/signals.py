"""SIGTERM, as a machine that is taken away sends it: what runs is told, and ends in time even while XLA compiles."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator

GRACE = 8.0  # seconds between the signal and the end


@contextlib.contextmanager
def stoppable(grace: float = GRACE) -> Iterator[Callable[[], bool]]:
    """Within it SIGTERM makes the given function true; the process ends with code 0 if it is still there `grace` later.

    A handler would wait for the main thread, which may be inside a compiler for minutes; so a thread of its own waits
    for the signal. Threads that were there before could still take the signal: enter it before jax starts any.
    """
    asked, over = threading.Event(), threading.Event()

    def watch() -> None:
        signal.sigwait({signal.SIGTERM})
        asked.set()
        if not over.wait(grace):
            print("stopped in the middle of a block; run the same command again to go on", file=sys.stderr, flush=True)
            os._exit(0)

    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield asked.is_set
    finally:
        over.set()
        if watcher.is_alive():
            signal.pthread_kill(watcher.ident or 0, signal.SIGTERM)
            watcher.join()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
