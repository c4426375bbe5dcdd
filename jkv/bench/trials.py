"""Repeatable trials of a cache: prefill, decode steps and logits, as `generate` runs them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jkv import methods
from jkv.bench.measure import clock
from jkv.core import decode_loop, sampling
from jkv.core.compilation import Compiled, compiled
from jkv.models import Params
from jkv.prompts.allocation import CacheShape
from jkv.prompts.tokenization import reaching

Trial = Callable[[], float]  # runs once, returns milliseconds per token or prompt
Tokens = Callable[[], list[float]]  # runs once, returns milliseconds of each token


class Jkv:
    """Trials of jkv: prompts i32[rows,n], greedy decoding, in the weights' dtype.

    `longest` limits the tokens per row; a cache with relative positions may exceed the model's context.
    """

    def __init__(self, params: Params, method: str = "full", rows: int = 1, longest: int = 0) -> None:
        self.config, c = methods.parse(method).bound(params), params.config
        if self.config.unlimited:
            c = reaching(c, longest)
        self.params, self.rows = replace(params, config=c), rows
        self.sampling = sampling.make(rows, c.vocab, seeds=(0,) * rows, stop_ids=())

    def empty(self, longest: int, new: int) -> Any:
        return CacheShape(self.config, self.params.config, self.rows, longest, new, self.params.embed.dtype).empty()

    def logits(self, ids: np.ndarray) -> np.ndarray:
        """Return next-token logits f32[B,V] after prompts."""
        cache = self.empty(ids.shape[1] + 16, 16)
        return np.asarray(
            decode_loop.prefill(self.params, cache, jnp.asarray(ids, jnp.int32), fresh=True)[1], np.float32
        )

    def prefill(self, ids: np.ndarray) -> Trial:
        cache, x = self.empty(ids.shape[1] + 16, 16), jnp.asarray(ids, jnp.int32)
        return lambda: clock(lambda: decode_loop.prefill(self.params, cache, x, fresh=True))

    def decoding(self, ids: np.ndarray, new: int) -> decode_loop.Decoding:
        """Prefill, and return the decoding state with capacity for `new` tokens."""
        cache = self.empty(ids.shape[1] + new, new)
        cache, logits = decode_loop.prefill(self.params, cache, jnp.asarray(ids, jnp.int32), fresh=True)
        return decode_loop.Decoding.start(cache, logits, new)

    def full_window(self, ids: np.ndarray, steps: int) -> tuple[decode_loop.Decoding, Compiled, float]:
        """Return a decoding state with a full recent window, so that the next step flushes.

        `steps` tokens from here contain the same share of flushes as a long answer.

        Args:
            ids: Prompts, longer than a block. The last block of tokens is generated, not taken from `ids`, so that the
                state has seen as many tokens as `ids` has.
            steps: Tokens that will be decoded.

        Returns:
            The state, the compiled decode program, and its compile seconds.
        """
        n, block = ids.shape[1], self.config.steps
        state = self.decoding(ids[:, : n - block], block + steps)
        stop = jnp.int32(block)
        program, seconds = compiled(decode_loop.run_blocks.whole, self.params, state, self.sampling, stop)
        return program(self.params, state, self.sampling, stop), program, seconds

    def run(self, state: decode_loop.Decoding, stop: int) -> decode_loop.Decoding:
        return decode_loop.run_blocks(self.params, state, self.sampling, jnp.int32(stop))

    def decode(self, ids: np.ndarray, steps: int) -> Trial:
        start = self.decoding(ids, steps)

        def trial() -> float:
            state = jax.block_until_ready(jax.tree.map(jnp.copy, start))  # the loop donates its state
            return clock(lambda: self.run(state, steps)) / steps

        return trial
