"""Measures every family against what transformers recorded, into results/families.json.

python tests/golden/parity.py
"""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from make import CASES, HERE, LENGTHS, weights

from jkv import models
from jkv.utils import json_results

OUT = Path(__file__).parents[2] / "results" / "families.json"


def measured(name: str) -> dict[str, Any]:
    """The largest logit and difference of a case, over its prompt and its last position, and equal greedy tokens."""
    with np.load(HERE / f"{name}.npz") as f:
        g = dict(f)
    tensors = {n: (lambda a=a: a) for n, a in weights(CASES[name], int(g["seed"])).items()}
    params = models.build(CASES[name], tensors, jnp.float32)
    got, wide = np.asarray(jax.jit(models.forward)(params, g["ids"], g["pos"])), max(LENGTHS)
    live = g["pos"][:, :wide] >= 0
    pairs = [(got[:, :wide][live], g["prompt"][live]), (got[:, -1], g["last"])]
    same = got[:, wide - 1 : -1].argmax(-1) == g["ids"][:, wide:]
    return dict(
        model=name,
        family=params.config.family,
        largest=max(float(abs(want).max()) for _, want in pairs),
        difference=max(float(abs(a - b).max()) for a, b in pairs),
        equal=int(same.sum()),
        tokens=same.size,
        transformers=json.loads(str(g["versions"]))["transformers"],
    )


if __name__ == "__main__":
    versions = json_results.versions(["jkv", "jax", "jaxlib", "numpy"])
    json_results.write(OUT, {"versions": versions, "dtype": "float32"}, [measured(name) for name in CASES])
