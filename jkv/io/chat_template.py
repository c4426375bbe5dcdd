"""Chat templates, rendered by a process of their own: they cannot take more time or memory than it is given.

Within one process neither can be bounded: what jinja2 leaves to Python's own functions (a format's width, a list that
doubles, `replace`, `join`, `tojson(indent=)`) has no steps that could be counted, and is too much to intercept. So one
child, which imports only jinja2, renders all templates under limits that the system keeps. It is started for the first
prompt, kept, and started again where a template has ended it; a runtime with threads is not forked.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

SECONDS = 5.0  # of processor time for one prompt; it takes milliseconds
LOOK = 1.0  # seconds from one look at the process to the next


def render(template: str, names: Mapping[str, Any]) -> str:
    """`template` (Jinja) rendered in a sandbox; raises ValueError for errors in it and for attempts to leave it.

    So it does after 5 seconds of processor time and beyond 1 GiB of memory. Names are plain values, as JSON has them.

    >>> render("{% for m in messages %}<{{ m.role }}>{% endfor %}", {"messages": [{"role": "user"}]})
    '<user>'
    """
    try:
        request = json.dumps({"template": template, "names": names, "seconds": SECONDS}).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"chat messages must be texts, numbers, lists and mappings ({error})") from error
    said = _CHILD.ask(request)
    if "text" in said:
        return said["text"]
    raise ValueError(
        f"the model's chat template failed: {said['error']}; check the messages' roles and order, or use plain text"
    )


class _Child:
    """The process, started when it is needed; one thread asks at a time."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.process: subprocess.Popen[bytes] | None = None
        self.owner = 0

    def ask(self, request: bytes) -> dict[str, str]:
        with self.lock:
            process = self._running()
            answered = threading.Event()
            threading.Thread(target=_watch, args=(process.pid, answered), daemon=True).start()
            try:
                return self._exchange(process, request)
            except (OSError, EOFError):
                self.stop()
                return {"error": f"it took more than {SECONDS:g} seconds or 1 GiB of memory, and was stopped"}
            except BaseException:
                self.stop()  # an answer half read would be taken for the next one's
                raise
            finally:
                answered.set()

    @staticmethod
    def _exchange(process: subprocess.Popen[bytes], request: bytes) -> dict[str, str]:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(len(request).to_bytes(8, "little") + request)
        process.stdin.flush()
        head = process.stdout.read(8)
        if len(head) < 8:
            raise EOFError
        said = process.stdout.read(size := int.from_bytes(head, "little"))
        if len(said) < size:
            raise EOFError
        return json.loads(said)

    def _running(self) -> subprocess.Popen[bytes]:
        # A fork's copy of the pipes leads to the parent's child.
        if self.process is None or self.owner != os.getpid() or self.process.poll() is not None:
            script = Path(__file__).with_name("chat_template_child.py")
            command = [sys.executable, "-I", "-S", str(script), *filter(None, sys.path)]
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            )
            self.owner = os.getpid()
        return self.process

    def stop(self) -> None:
        """End the process, if it runs."""
        process, self.process = self.process, None
        if process is not None and self.owner == os.getpid():
            process.kill()
            for pipe in (process.stdin, process.stdout):
                try:
                    pipe.close() if pipe else None
                except OSError:  # what was not sent yet
                    pass
            process.wait()


def _watch(pid: int, answered: threading.Event) -> None:
    """End a process that is stopped, which the system's limits of time do not; one that waits for a core goes on.

    Two looks: who stops and wakes a group of processes does not wake all of them at once.
    """
    stopped = 0
    with contextlib.suppress(psutil.Error):  # it has ended
        process = psutil.Process(pid)
        while not answered.wait(LOOK):
            stopped = stopped + 1 if process.status() == psutil.STATUS_STOPPED else 0
            if stopped > 1:
                process.kill()


_CHILD = _Child()
atexit.register(_CHILD.stop)
