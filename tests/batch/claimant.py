"""A process that claims one folder after the other, each time it is told to, and writes a row if it may.

python claimant.py FOLDER LINKS WHO
"""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path
from typing import Any

from jkv.batch.local_output import Shard, claim


def no(*_: Any) -> None:
    raise OSError(errno.EPERM, os.strerror(errno.EPERM))


if __name__ == "__main__":
    folder, links, who = Path(sys.argv[1]), bool(int(sys.argv[2])), int(sys.argv[3])
    if not links:
        os.link = no
    for i in range(40):
        print(f"ready {i}", flush=True)
        sys.stdin.readline()
        try:
            claim(folder / str(i), {"owner": who}, {})
            shard = Shard(folder / str(i), {1: str(who)})
        except ValueError:
            continue
        shard.add([{"line": 1, "id": who, "key": str(who), "tokens": [], "prompt_tokens": 1}])
        shard.close()
