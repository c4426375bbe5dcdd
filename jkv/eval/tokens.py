"""What a tokenizer's tokens hold: their entropies, bits by a model, and bytes of keys and values for a byte of text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import tokenizers
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

from jkv.eval import corpora, quality
from jkv.eval.experiments import Say, Setting
from jkv.eval.prefill_replay import LIMIT, Prefills
from jkv.eval.results import Results

ORDERS = 5  # tokens of the longest n-grams
ENOUGH = 0.5  # the share of n-grams that occur once, above which an entropy says more of the sample than of the text


def entropies(ids: Sequence[int] | np.ndarray, orders: int = ORDERS) -> list[tuple[float, float]]:
    """Of order n = 1, 2, ...: H(x_n | x_1 .. x_(n-1)) = H_n - H_(n-1) in bits, H_n = -sum p log2 p over the n-grams,
    p their shares of the sample, and the share of n-grams that occur once. Short samples give too little.

    Every order is of the same positions, those that have `orders - 1` tokens before them, so none is below 0. Raises
    ValueError for fewer tokens than that.

    >>> entropies([0, 1] * 50, 3)[0][0], abs(round(entropies([0, 1] * 50, 3)[1][0], 3))
    (1.0, 0.0)
    """
    ids = np.asarray(ids, np.int64)
    if len(ids) <= orders:
        raise ValueError(f"{len(ids)} tokens: n-grams of {orders} need {orders + 1} or more; give a longer text")
    grams = np.lib.stride_tricks.sliding_window_view(ids, orders)
    out = []
    for n in range(1, orders + 1):
        counts, before = _counts(grams[:, orders - n :]), _counts(grams[:, orders - n : -1])
        out.append((max(_bits(counts) - _bits(before), 0.0), float((counts == 1).sum() / len(grams))))
    return out


def _counts(grams: np.ndarray) -> np.ndarray:
    """How often each row i64[n,k] occurs."""
    code, base = np.zeros(len(grams), np.int64), grams.max(initial=0) + 1
    for column in grams.T:
        code = np.unique(code * base + column, return_inverse=True)[1]
    return np.unique(code, return_counts=True)[1]


def _bits(counts: np.ndarray) -> float:
    shares = counts / counts.sum()
    return float(-(shares * np.log2(shares)).sum())


def stream(ids: Sequence[int] | np.ndarray, bytes: int, vocabulary: int) -> dict[str, Any]:
    """bytes_token; bits: by order; once: the share of n-grams that occur once; use: H_1 / log2 V."""
    found = entropies(ids)
    return {
        "tokens": len(ids),
        "bytes_token": round(bytes / len(ids), 4),
        "bits": [round(x, 4) for x, _ in found],
        "once": [round(x, 4) for _, x in found],
        "use": round(found[0][0] / math.log2(vocabulary), 4),
    }


def trained(text: str, vocabulary: int) -> tokenizers.Tokenizer:
    """A byte-level BPE of so many tokens, or as many as the text has."""
    core = tokenizers.Tokenizer(BPE())
    core.pre_tokenizer = ByteLevel(add_prefix_space=False)
    alphabet = sorted(ByteLevel.alphabet())
    core.train_from_iterator([text], BpeTrainer(vocab_size=vocabulary, initial_alphabet=alphabet, show_progress=False))
    return core


def measured(s: Setting, ids: np.ndarray, source: str, prefix: int, text: str, say: Say) -> Results:
    """A row for the tokens of a text, and one a cache: bits of a token and of a byte by the model, and `kv_byte`, bytes
    of the cache after `prefix` tokens for a byte of their text."""
    tokenizer = s.params.tokenizer
    how = {"prefix": prefix, "continue": ids.shape[1] - prefix, "samples": len(ids)}
    found = s.results("tokens", [ids.tobytes(), text], source=source, **how)
    key = {"task": f"entropy/{source}"}
    if found.find(**key) is None:
        found.add(key | stream(tokenizer.encode(text), len(text.encode()), tokenizer.vocab_size))
    sizes = [[len(tokenizer.decode(x).encode()) for x in part] for part in (ids[:, :prefix], ids[:, prefix:])]
    about = quality.Texts(ids, prefix, False, s.batch, Prefills(limit=LIMIT if len(s.caches) > 1 else 0))

    def run(config: Any, _: Any) -> dict[str, Any]:
        row = quality.perplexity(s.params, config, about)
        bits = math.log2(row["ppl"])
        more = {"bits_token": bits, "bits_byte": bits * ids[:, prefix:].size / sum(sizes[1])}
        more["kv_byte"] = row["bytes"] * len(ids) / sum(sizes[0])
        return row | {k: round(x, 4) for k, x in more.items()}

    s.each(found, say, [{"task": f"tokens/{source}"}], run)
    return found


def study(corpus: str, vocabularies: Sequence[int], megabytes: Sequence[float]) -> list[dict[str, Any]]:
    """Tokenizers of so many tokens, trained on so much of the training side of a corpus: entropies of what they make of
    its other side. ValueError for a corpus that has too little text."""
    whole, other = corpora.text(f"{corpus}:train"), corpora.text(f"{corpus}:test")
    if len(whole.encode()) < 1e6 * max(megabytes):
        most = len(whole.encode()) / 1e6
        raise ValueError(f"{corpus} has {most:.2f} MB to train on, and {max(megabytes):g} are asked for: give fewer")
    rows = []
    for size in megabytes:
        part = whole.encode()[: int(1e6 * size)].decode("utf-8", "ignore")
        for vocabulary in vocabularies:
            core = trained(part, vocabulary)
            ids = core.encode(other, add_special_tokens=False).ids
            row = {"corpus": corpus, "megabytes": size, "vocabulary": core.get_vocab_size()}
            rows.append(row | stream(ids, len(other.encode()), core.get_vocab_size()))
    return rows
