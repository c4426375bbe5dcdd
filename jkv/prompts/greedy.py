"""Greedy continuations of prompts, for methods that read a draft of the answer."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from jkv.cache.cache import Decoding
from jkv.cache.padding import bucket, pad
from jkv.core import sampling as draw
from jkv.core.decode_loop import prefill_own, run_blocks
from jkv.methods.config import CacheConfig
from jkv.models import Params
from jkv.prompts.allocation import CacheShape


def greedy(params: Params, rows: list[list[int]], new: int) -> list[list[int]]:
    """Decode `new` tokens greedily after each row through the full cache."""
    b, length, model = len(rows), bucket(max(map(len, rows))), params.config
    cache = CacheShape(CacheConfig(), model, b, length + new, new, params.embed.dtype).empty()
    cache, logits = prefill_own(params, cache, pad(rows, length), fresh=True)
    sampling = draw.make(b, model.vocab, seeds=[0] * b, stop_ids=())
    state = run_blocks(params, Decoding.start(cache, logits, new), sampling, jnp.int32(new))
    return np.asarray(state.out).tolist()
