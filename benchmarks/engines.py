"""The engines of a comparison: transformers, kvpress and llama.cpp beside jkv, with the same weights."""

from __future__ import annotations

import copy
import time
from typing import Any

import jax.numpy as jnp
import numpy as np

from benchmarks import presses
from benchmarks.llama import LlamaCpp
from jkv.bench.measure import clock
from jkv.bench.speed import Peer
from jkv.bench.trials import Jkv, Tokens, Trial
from jkv.io.load import read
from jkv.io.model_source import Source
from jkv.models import Params


class Transformers:
    """The same trials with transformers on torch CPU, with its default attention and full cache.

    The model is given by name, or as config and tensors. Raises ValueError if transformers expects other tensors.
    """

    name = "transformers"

    def __init__(self, what: str | Source, threads: int, dtype: str = "float32") -> None:
        import torch  # pyright: ignore[reportMissingImports]  an extra
        from transformers import AutoConfig, AutoModelForCausalLM  # pyright: ignore[reportMissingImports]  an extra

        torch.set_num_threads(threads)
        torch.manual_seed(0)
        source = read(what) if isinstance(what, str) else what
        rest = copy.deepcopy(dict(source.config))  # transformers modifies its config
        config = AutoConfig.for_model(rest.pop("model_type"), **rest)
        self.torch = torch
        self.model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).eval()
        own = self.model.state_dict()
        missing, unused = own.keys() - source.tensors.keys() - {"lm_head.weight"}, source.tensors.keys() - own.keys()
        if missing or unused:
            raise ValueError(f"transformers does not fit this model: missing {missing}, unused {unused}")
        for key, get in source.tensors.items():
            own[key].copy_(torch.tensor(np.asarray(get(), np.float32)))

    def absorb(self, ids: Any, cache: Any) -> Any:
        """Run tokens through the model and return logits [B,1,V] of the newest one; the cache grows in place."""
        with self.torch.inference_mode():
            x = self.torch.as_tensor(ids)
            return self.model(x, past_key_values=cache, use_cache=True, logits_to_keep=1).logits

    def step(self, logits: Any, cache: Any, at: int) -> Any:
        """Take one greedy step: `absorb` the most likely token at position `at`."""
        return self.absorb(logits[:, -1].argmax(-1, keepdim=True), cache)

    def follow(self, cache: str, tokens: int) -> str:
        """Use the peer's equivalent of this jkv cache, if it has one, and return its name there."""
        return "full"

    def cache(self) -> Any:
        from transformers import DynamicCache  # pyright: ignore[reportMissingImports]  an extra

        return DynamicCache(config=self.model.config)

    def prefill(self, ids: np.ndarray) -> Trial:
        return lambda: clock(lambda: self.absorb(ids, self.cache()))

    def tokens(self, ids: np.ndarray, steps: int) -> Tokens:
        """Return a trial that times each of `steps` greedy tokens after the prompt."""
        start = self.cache()
        first = self.absorb(ids, start)

        def trial() -> list[float]:
            cache = copy.copy(
                start
            )  # a shallow copy, because not every cache can be truncated, and its layers replace their tensors
            cache.layers = [copy.copy(x) for x in start.layers]
            logits, times = first, []
            for i in range(steps):
                began = time.perf_counter()
                logits = self.step(logits, cache, ids.shape[1] + i)
                times.append((time.perf_counter() - began) * 1e3)
            return times

        return trial

    def decode(self, ids: np.ndarray, steps: int) -> Trial:
        trial = self.tokens(ids, steps)
        return lambda: sum(trial()) / steps

    def trial(self, what: str, ids: np.ndarray, steps: int) -> Tokens:
        """Return a trial that times each prompt or token, for `speed.rows`."""
        if what == "decode":
            return self.tokens(ids, steps)
        whole = self.prefill(ids)
        return lambda: [whole()]


class Kvpress(Transformers):
    """transformers with a cache that kvpress compresses after prefill; generated tokens are appended uncompressed."""

    name = "kvpress"

    def __init__(self, what: str | Source, threads: int, dtype: str = "float32") -> None:
        import kvpress  # pyright: ignore[reportMissingImports]  an extra

        super().__init__(what, threads, dtype)
        self.kv, self.press, self.moved = kvpress, None, 0
        self.usual = self.model.config._attn_implementation

    def follow(self, cache: str, tokens: int) -> str:
        method, kept = presses.shared(cache, tokens)
        # Half a token more, because kvpress rounds down the share that it keeps.
        gone = max(0.0, 1 - (kept + 0.5) / tokens)
        self.press = None if method == "full" or not gone else presses.PRESSES[method](self.kv, gone, kept)
        self.moved = tokens - kept if isinstance(self.press, self.kv.KeyRerotationPress) else 0
        return f"{method}, {kept} tokens" if self.press else "full"

    def absorb(self, ids: Any, cache: Any) -> Any:
        if self.press is None or cache.get_seq_length():
            return super().absorb(ids, cache)
        observes = isinstance(self.press, self.kv.ObservedAttentionPress)  # only eager attention returns its weights
        self.model.set_attn_implementation("eager" if observes else self.usual)
        with self.press(self.model):
            logits = super().absorb(ids, cache)
        self.model.set_attn_implementation(self.usual)
        return logits

    def step(self, logits: Any, cache: Any, at: int) -> Any:
        ids = logits[:, -1].argmax(-1, keepdim=True)
        with self.torch.inference_mode():
            places = self.torch.full_like(
                ids, at - self.moved
            )  # by default transformers counts positions from the cache's length
            return self.model(ids, past_key_values=cache, position_ids=places, use_cache=True).logits


def peer_of(vs: str, params: Params, source: Source, threads: int, dtype: str) -> Peer:
    """Create a peer: transformers or kvpress with the same weights, or llama.cpp with the same file.

    Raises:
        ValueError: The peer does not compute the same model.
    """
    if vs == LlamaCpp.name:
        assert source.file is not None  # the command line checks this
        llama = LlamaCpp(source.file, threads)
        llama.apart(Jkv(params))
        return llama
    peer = {kind.name: kind for kind in (Transformers, Kvpress)}[vs](source, threads, dtype)
    largest_difference(Jkv(params), peer)
    return peer


def largest_difference(engine: Jkv, peer: Transformers) -> float:
    """Return the largest logit difference for one prompt. Raises ValueError if it is too large for equal weights."""
    ids = np.random.default_rng(1).integers(0, engine.params.config.vocab, (engine.rows, 16))
    ours = engine.logits(ids)
    theirs = peer.absorb(ids, peer.cache())[:, -1].float().numpy()
    found = float(abs(ours - theirs).max())
    # 16-bit types round in every layer, so their limit is relative to the largest logit
    if found > (1e-2 if engine.params.embed.dtype == jnp.float32 else 0.1 * float(abs(theirs).max())):
        raise ValueError(f"the two engines do not run the same model: logits differ by {found:.3g}")
    return found
