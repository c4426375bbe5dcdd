"""llama.cpp, of the package xllamacpp, beside jkv: the same .gguf file, in the codes that the file has."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from jkv.bench.engines import Jkv, Tokens

NAME = "llama.cpp"
# What llama.cpp keeps keys and values in where jkv has this cache, by the names of its types.
CACHES = {"full": "F16", "int8": "Q8_0", "int4": "Q4_0"}
LIKELY = 20  # words whose log-probabilities must be those of jkv
APART = 1.0  # nats that they may differ by: llama.cpp rounds what weights are multiplied by to 8 bits


def shared(cache: str, tokens: int) -> str:
    """The type in which llama.cpp keeps what this cache of jkv keeps of so many; ValueError if it has none.

    >>> shared("int8", 9)
    'Q8_0'
    """
    if cache not in CACHES:
        raise ValueError(f"--vs {NAME}: it has no {cache}; both have {', '.join(CACHES)}")
    return CACHES[cache]


class LlamaCpp:
    """Trials of llama.cpp on the CPU: one row, its own kernels, greedy tokens.

    A prompt is read once and stays; each trial of decoding reads its last token again. Times are those that llama.cpp
    gives: of a prompt, and of each token from the second on.
    """

    name = NAME

    def __init__(self, file: Path, threads: int) -> None:
        import xllamacpp  # pyright: ignore[reportMissingImports]  an extra

        self.cpp, self.file, self.threads, self.kept = xllamacpp, file, threads, CACHES["full"]
        self.server: Any = None

    def follow(self, cache: str, tokens: int) -> str:
        """Hold a prompt in the type of this cache."""
        self.kept = shared(cache, tokens)
        return self.kept

    def trial(self, what: str, ids: np.ndarray, steps: int) -> Tokens:
        """Of each prompt or token, as `speed.rows` asks."""
        if len(ids) > 1:
            raise ValueError(f"--batch {len(ids)} beside {NAME}: it is asked for one row here; leave --batch out")
        self._start(ids.shape[1] + steps + 1)
        if what == "prefill":
            return lambda: [self._ask(ids[0], 1, cache_prompt=False)[-1]["timings"]["prompt_ms"]]

        def trial() -> list[float]:
            said = self._ask(ids[0], steps + 1, cache_prompt=True, timings_per_token=True)
            marks = {x["timings"]["predicted_n"]: x["timings"]["predicted_ms"] for x in said}
            # a piece may be several tokens: the bytes of one character
            return [t for (m, a), (n, b) in pairwise(sorted(marks.items())) for t in [(b - a) / (n - m)] * (n - m)]

        return trial

    def apart(self, engine: Jkv) -> float:
        """The largest difference of the likeliest words' log-probabilities; ValueError if that is of another model."""
        ids = np.random.default_rng(1).integers(0, engine.params.config.vocab, (1, 16))
        self._start(32)
        (token,) = self._ask(ids[0], 1, cache_prompt=False, n_probs=LIKELY)[0]["choices"][0]["logprobs"]["content"]
        theirs = {x["id"]: x["logprob"] for x in token["top_logprobs"]}
        own = engine.logits(ids)[0].astype(np.float64)
        own -= np.logaddexp.reduce(own)
        found = max(abs(own[word] - p) for word, p in theirs.items())
        if found > APART:
            raise ValueError(f"the two engines do not run the same model: log-probabilities differ by {found:.3g}")
        return float(found)

    def _start(self, longest: int) -> None:
        """A server with room for so many tokens in the place of the one before."""
        self.server = None
        p = self.cpp.CommonParams()
        p.model.path, p.n_ctx, p.n_parallel, p.n_gpu_layers = str(self.file), longest, 1, 0
        p.cpuparams.n_threads = p.cpuparams_batch.n_threads = self.threads
        p.cache_type_k = p.cache_type_v = getattr(self.cpp.ggml_type, f"GGML_TYPE_{self.kept}")
        p.warmup, p.ctx_shift, p.verbosity = False, False, -1
        self.server = self.cpp.Server(p)

    def _ask(self, ids: Sequence[int] | np.ndarray, new: int, **how: Any) -> list[dict[str, Any]]:
        """What it says of so many greedy tokens after those, piece by piece."""
        greedy = {"samplers": ["top_k"], "top_k": 1, "ignore_eos": True}
        said: list[dict[str, Any]] = []
        asked = {"prompt": np.asarray(ids).tolist(), "n_predict": new, "stream": True, **greedy, **how}
        self.server.handle_completions(asked, said.append)
        for x in said:
            if "error" in x:
                raise ValueError(f"{NAME}: {json.dumps(x['error'])}")
        return said
