"""llama.cpp (package xllamacpp) as a peer: the same .gguf file, in its own quantized format."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from jkv.bench.trials import Jkv, Tokens

NAME = "llama.cpp"
# KV cache types of llama.cpp, by the jkv cache that they correspond to.
CACHES = {"full": "F16", "int8": "Q8_0", "int4": "Q4_0"}
LIKELY = 20  # top tokens whose log-probabilities must agree with jkv
APART = 1.0  # tolerance in nats, because llama.cpp rounds activations to 8 bits


def shared(cache: str, tokens: int) -> str:
    """Return the KV cache type of llama.cpp that corresponds to a jkv cache. Raises ValueError if there is none.

    >>> shared("int8", 9)
    'Q8_0'
    """
    if cache not in CACHES:
        raise ValueError(f"--vs {NAME}: it has no {cache}; both have {', '.join(CACHES)}")
    return CACHES[cache]


class LlamaCpp:
    """Trials of llama.cpp on the CPU: one row, its own kernels, greedy decoding.

    A prompt is prefilled once and stays cached; each decoding trial reads its last token again. Times are reported by
    llama.cpp: for the prompt, and for each token from the second on.
    """

    name = NAME

    def __init__(self, file: Path, threads: int) -> None:
        import xllamacpp  # pyright: ignore[reportMissingImports]  an extra

        self.cpp, self.file, self.threads, self.kept = xllamacpp, file, threads, CACHES["full"]
        self.server: Any = None

    def follow(self, cache: str, tokens: int) -> str:
        """Use the KV cache type that corresponds to this jkv cache, and return its name."""
        self.kept = shared(cache, tokens)
        return self.kept

    def trial(self, what: str, ids: np.ndarray, steps: int) -> Tokens:
        """Return a trial that times each prompt or token, for `speed.rows`."""
        if len(ids) > 1:
            raise ValueError(f"--batch {len(ids)} beside {NAME}: it is asked for one row here; leave --batch out")
        self._start(ids.shape[1] + steps + 1)
        if what == "prefill":
            return lambda: [self._ask(ids[0], 1, cache_prompt=False)[-1]["timings"]["prompt_ms"]]

        def trial() -> list[float]:
            said = self._ask(ids[0], steps + 1, cache_prompt=True, timings_per_token=True)
            marks = {x["timings"]["predicted_n"]: x["timings"]["predicted_ms"] for x in said}
            # a piece may be several tokens that form one character
            return [t for (m, a), (n, b) in pairwise(sorted(marks.items())) for t in [(b - a) / (n - m)] * (n - m)]

        return trial

    def apart(self, engine: Jkv) -> float:
        """Return the largest log-probability difference of the top tokens. Raises ValueError if the models differ."""
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
        """Replace the server by one with a context of `longest` tokens."""
        self.server = None
        p = self.cpp.CommonParams()
        p.model.path, p.n_ctx, p.n_parallel, p.n_gpu_layers = str(self.file), longest, 1, 0
        p.cpuparams.n_threads = p.cpuparams_batch.n_threads = self.threads
        p.cache_type_k = p.cache_type_v = getattr(self.cpp.ggml_type, f"GGML_TYPE_{self.kept}")
        p.warmup, p.ctx_shift, p.verbosity = False, False, -1
        self.server = self.cpp.Server(p)

    def _ask(self, ids: Sequence[int] | np.ndarray, new: int, **how: Any) -> list[dict[str, Any]]:
        """Generate `new` greedy tokens after `ids`, and return the server's streamed responses."""
        greedy = {"samplers": ["top_k"], "top_k": 1, "ignore_eos": True}
        said: list[dict[str, Any]] = []
        asked = {"prompt": np.asarray(ids).tolist(), "n_predict": new, "stream": True, **greedy, **how}
        self.server.handle_completions(asked, said.append)
        for x in said:
            if "error" in x:
                raise ValueError(f"{NAME}: {json.dumps(x['error'])}")
        return said
