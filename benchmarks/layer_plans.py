"""A plan beside caches that are equal in all layers, at its bytes: python -m benchmarks.layer_plans [pydoc:test ...].

On texts that the plan was not made from; a killed run goes on where it was, in results/layers/budgets.json.
"""

import sys
from functools import partial
from pathlib import Path

import jax.numpy as jnp

from jkv import load, parse
from jkv.cache.cache import tree_bytes
from jkv.eval import corpora
from jkv.eval.layer_cost import LayerTexts
from jkv.io.fingerprint import fingerprint
from jkv.prompts.allocation import CacheShape
from jkv.training.resumable_search import Measured

PREFIX, AFTER, TEXTS = 512, 128, 6
PLAN = "planned(plan='results/layers/snapkv-3.94MB')"
UNIFORM = (  # as many tokens, by hundredths of the text, as fit into 3,946,560 bytes
    "snapkv(keep=0.56, window=8) | turboquant(bits=4)",
    "snapkv(keep=0.63, window=8) | turboquant(bits=4, values=3)",
    "snapkv(keep=0.71, window=8) | turboquant(bits=4, values=2)",
    "snapkv(keep=0.71, window=8) | turboquant(bits=3)",
)


if __name__ == "__main__":
    params = load("smollm2-135m", dtype="float32")
    what = {"model": fingerprint(params), "prefix": PREFIX, "continue": AFTER, "texts": TEXTS, "measured": "KL by text"}
    kept = Measured(Path("results/layers/budgets.json"), what)
    for source in sys.argv[1:] or ("pydoc:test", "stdlib:test"):
        ids = corpora.windows(params.tokenizer.encode(corpora.text(source)), PREFIX + AFTER, TEXTS, 0)
        alone, found = LayerTexts(params, ids, PREFIX), {}
        for text in (PLAN, *UNIFORM):
            config = parse(text).bound(params)
            size = tree_bytes(CacheShape(config, params.config, 1, PREFIX + AFTER, 0, jnp.float32).layout()[1])
            found[text] = kept(f"{source}: {text}, {size:,} bytes", partial(alone, config))
            less = found[text] - found[PLAN]
            error = less.std(ddof=1) / TEXTS**0.5
            print(
                f"{source} {size:,} bytes, KL {found[text].mean():.4f}, {less.mean():+.4f} +- {error:.4f}: {text}",
                flush=True,
            )
