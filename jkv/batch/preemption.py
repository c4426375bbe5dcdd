"""Preemption: SIGTERM stops a job in time, even while XLA compiles."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator

GRACE = 8.0  # seconds between the signal and the exit
STOPPED = os.EX_TEMPFAIL  # 75: the same command resumes the job
FAILED = os.EX_DATAERR  # 65: all rows are written, some as errors


@contextlib.contextmanager
def stoppable(grace: float = GRACE) -> Iterator[Callable[[], bool]]:
    """Yield a function that returns True after SIGTERM; `grace` seconds later the process exits with STOPPED.

    Python's handlers wait for the main thread, which may be inside a compiler for minutes. So the signal number goes to
    a pipe at once, and a separate thread reads it. Call it on the main thread only.

    Args:
        grace: seconds between the signal and the exit.
    """
    asked, over = threading.Event(), threading.Event()
    end, begin = os.pipe()
    os.set_blocking(begin, False)

    def watch() -> None:
        while number := os.read(end, 1):
            if number[0] == signal.SIGTERM and not asked.is_set():
                asked.set()
                if not over.wait(grace):
                    print("stopped at once: run the same command again to go on", file=sys.stderr, flush=True)
                    os._exit(STOPPED)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    # Route signals to the pipe until the block ends.
    handler, wakeup = signal.signal(signal.SIGTERM, lambda *_: None), signal.set_wakeup_fd(begin)
    try:
        yield asked.is_set
    finally:
        over.set()
        signal.set_wakeup_fd(wakeup)
        signal.signal(signal.SIGTERM, handler)
        os.close(begin)
        watcher.join()
        os.close(end)
