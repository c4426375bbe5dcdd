"""`jkv batch` on a tiny model, as a program of its own: it can be killed, and be one of several.

python tiny_job.py SOURCE OUT CACHE [HOSTS [MESH]]
"""

from __future__ import annotations

import sys
from pathlib import Path

from jkv.batch.cli import batch
from jkv.io import load


def tiny(*_: object):
    from jkv import models
    from jkv.io.source import Source

    hf = models.TINY | dict(hidden_size=64, num_hidden_layers=1)
    c = models.read_config(hf)
    return Source(hf, models.params.seeded(c, models.family(c).TENSORS, 0))


if __name__ == "__main__":
    load.read = tiny
    hosts, mesh, *_ = *sys.argv[4:], None, None
    rows = "auto" if mesh else "4"
    batch(*map(Path, sys.argv[1:3]), model="tiny", cache=sys.argv[3], batch=rows, hosts=hosts, mesh=mesh)
