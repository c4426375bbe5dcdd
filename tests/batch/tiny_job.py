"""`jkv batch` on a tiny model, as a program of its own: it can be killed, and be one of several.

python tiny_job.py SOURCE OUT CACHE [HOSTS [MESH]]
"""

from __future__ import annotations

import sys

from jkv.cli.app import app
from jkv.io import load


def tiny(*_: object):
    from jkv import models
    from jkv.io.model_source import Source

    hf = models.TINY | dict(hidden_size=64, num_hidden_layers=1)
    c = models.read_config(hf)
    return Source(hf, models.params.seeded(c, models.family(c).TENSORS, 0))


if __name__ == "__main__":
    load.read = tiny
    source, out, cache, *more = sys.argv[1:]
    rows = "auto" if len(more) == 2 else "4"
    options = [x for pair in zip(("--hosts", "--mesh"), more, strict=False) for x in pair]
    app(["batch", source, out, "--cache", cache, "--batch", rows, *options])
