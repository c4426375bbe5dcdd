"""What a store costs whose records are rounded: bits of a number, and KL to the prompt that was read.

python -m benchmarks.store_codecs results/transit.json, which goes on where it was. Of a text's first 1,024 tokens 960
are in the store, and 128 that follow are forced, with the full cache.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jkv
from jkv.eval import corpora

PROMPT, MORE, TEXTS = 1024, 128, 4
CORPORA = "pydoc", "stdlib"
CODECS = "cachegen(level=1)", "cachegen(level=2)", "cachegen(level=3)"


def logprobs(params: Any, ids: np.ndarray, store: Any) -> np.ndarray:
    """f32[MORE,V]: of each token behind the prompt, and of the one behind the last."""
    cache, logits = jkv.prefill(params, "full", [ids[:PROMPT].tolist()], reserve=MORE, prefix_cache=store)
    out = []
    for token in ids[PROMPT:]:
        out.append(logits[0])
        cache, logits = jkv.step(params, cache, jnp.asarray([token]))
    return np.asarray(jax.nn.log_softmax(jnp.stack(out)))


def measured(params: Any, corpus: str, codec: str) -> dict[str, Any]:
    ids = np.asarray(params.tokenizer.encode(corpora.text(corpus)))
    kl, bits, seconds = [], [], []
    for text in corpora.windows(ids, PROMPT + MORE, TEXTS):
        with tempfile.TemporaryDirectory() as folder:
            store = jkv.PrefixCache(folder, codec=codec)
            want = logprobs(params, text, store)
            taken = sum(x.stat().st_size for x in Path(folder).glob("*.kv"))
            began = time.process_time()
            jkv.PrefixCache(folder, codec=codec).match(store_root(params, store), text[:960].tolist())
            seconds.append(time.process_time() - began)
            got = logprobs(params, text, store)
            assert store.reused == 960
        c = params.config
        bits.append(8 * taken / (960 * c.layers * c.heads * 2 * c.head_dim))
        kl.append(float((np.exp(want) * (want - got)).sum(-1).mean()))
    spread = float(np.std(kl, ddof=1) / len(kl) ** 0.5)
    rounded = lambda x: float(f"{x:.4g}")  # noqa: E731
    row = {"kl": rounded(np.mean(kl)), "kl_se": rounded(spread), "bits": rounded(np.mean(bits))}
    return row | {"ms_token": rounded(1e3 * np.mean(seconds) / 960)}


def store_root(params: Any, store: Any) -> str:
    from jkv.prefix_cache.stored_prefix import StoredPrefixes

    return StoredPrefixes(store, params, jkv.parse("full")).root


if __name__ == "__main__":
    out = Path(sys.argv[1])
    rows = json.loads(out.read_text())["rows"] if out.exists() else []
    params = jkv.load("smollm2-135m")
    for corpus in CORPORA:
        for codec in CODECS:
            key = {"corpus": corpus, "codec": codec, "texts": TEXTS}
            if not any(key.items() <= row.items() for row in rows):
                rows.append(key | measured(params, corpus, codec))
                out.write_text(json.dumps({"rows": rows}, indent=1) + "\n")
                print(rows[-1], flush=True)
