"""A job without a model, whose output is in a store on this machine: it can be killed.

python bucket_job.py ROOT ROWS
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from jkv.batch import object_store_output  # noqa: E402
from support import stores  # noqa: E402

if __name__ == "__main__":
    root, rows = Path(sys.argv[1]), int(sys.argv[2])
    stores.install(root)
    object_store_output.EVERY = 0.0
    from etils import epath

    out = epath.Path("gs://bucket/jobs/out")
    print("begun", flush=True)
    object_store_output.claim(out, {}, {})
    held = object_store_output.Parts(out, {i: f"k{i}" for i in range(1, rows + 1)})
    for line in range(1, rows + 1):
        if line not in held.done:
            held.add([{"line": line, "id": None, "key": f"k{line}", "tokens": [1], "prompt_tokens": 1}])
    held.close()
