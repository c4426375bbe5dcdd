"""`tiny_job.py`, killed when the second of the rows that it suspends has its bytes, and not yet its name."""

from __future__ import annotations

import os
import runpy
import signal
from pathlib import Path
from typing import Any

records = []
real = os.replace


def replace(old: Any, new: Any) -> None:
    if str(new).endswith(".row"):
        records.append(new)
    if len(records) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    real(old, new)


if __name__ == "__main__":
    os.replace = replace
    runpy.run_path(str(Path(__file__).with_name("tiny_job.py")), run_name="__main__")
