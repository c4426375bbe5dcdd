"""Chat templates, rendered in a child process with hard limits on time and memory.

Within one process neither can be bounded: work that jinja2 leaves to Python functions (a format's width, a list that
doubles, `replace`, `join`, `tojson(indent=)`) has no steps to count, and is too much to intercept. So one child
process, which imports only jinja2, renders all templates under limits that the operating system enforces. It starts at
the first prompt, stays, and is restarted if a template has ended it. It is not forked, because the runtime has threads.
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

SECONDS = 5.0  # CPU time limit per prompt; rendering takes milliseconds
LOOK = 1.0  # seconds between two checks of the process state


def render(template: str, names: Mapping[str, Any]) -> str:
    """Render a Jinja template in a sandbox, within 5 seconds of CPU time and 1 GiB of memory.

    Args:
        template: The template text.
        names: Variables of the template, plain JSON values.

    Raises:
        ValueError: The template has an error, tries to leave the sandbox or exceeds the limits.

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
    """The rendering process: started on first use, serving one thread at a time."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.process: subprocess.Popen[bytes] | None = None
        self.owner = 0

    def ask(self, request: bytes) -> dict[str, str]:
        """Send a request and return the answer, {"text"} or {"error"}."""
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
                self.stop()  # the rest of a half-read answer would be taken for the next one
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
        # After a fork, the copied pipes lead to the parent's child.
        if self.process is None or self.owner != os.getpid() or self.process.poll() is not None:
            script = Path(__file__).with_name("chat_template_child.py")
            command = [sys.executable, "-I", "-S", str(script), *filter(None, sys.path)]
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            )
            self.owner = os.getpid()
        return self.process

    def stop(self) -> None:
        """Kill the process if it is running."""
        process, self.process = self.process, None
        if process is not None and self.owner == os.getpid():
            process.kill()
            for pipe in (process.stdin, process.stdout):
                try:
                    pipe.close() if pipe else None
                except OSError:  # unsent data
                    pass
            process.wait()


def _watch(pid: int, answered: threading.Event) -> None:
    """Kill a process in the stopped state, which CPU time limits do not end; one that waits for a core continues.

    Two checks in a row must agree, because resuming a stopped process group does not wake all processes at once.
    """
    stopped = 0
    with contextlib.suppress(psutil.Error):  # the process has ended
        process = psutil.Process(pid)
        while not answered.wait(LOOK):
            stopped = stopped + 1 if process.status() == psutil.STATUS_STOPPED else 0
            if stopped > 1:
                process.kill()


_CHILD = _Child()
atexit.register(_CHILD.stop)
