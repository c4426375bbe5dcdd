"""One process of a job on a tiny model, as a program of its own: it can be killed, and be one of several.

python tiny_job.py SOURCE OUT CACHE [HOSTS]
"""

from __future__ import annotations

import sys
from pathlib import Path

import jkv.batch.cli
from jkv.batch.requests import Settings
from jkv.batch.signals import stoppable
from jkv.io import load

TINY = dict(hidden_size=64, num_hidden_layers=1)


def tiny(*_: object):
    from jkv import models

    return models.random(models.TINY | TINY)


def main(source: str, out: str, cache: str, hosts: str | None = None) -> None:
    load.load = tiny
    with stoppable() as stopped:
        report = jkv.batch.cli.start(
            Path(source), Path(out), "tiny", cache, None, 4, Settings(max_new_tokens=60), "float32", hosts, stopped,
            lambda done, total, how: print(done, flush=True),
        )  # fmt: skip
    print(report.done, report.stopped)


if __name__ == "__main__":
    main(*sys.argv[1:])
