"""What tokens hold: n-gram entropies, bits per byte under a model, and cache bytes per byte of text.

python examples/tokenizer_study.py [--cache CACHE ...] [--json OUT]            a model's tokenizer and predictions
python examples/tokenizer_study.py --train 4096 --train 32768 --megabytes 1    tokenizers trained on a corpus
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np
import tokenizers
import typer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

from jkv.bench.environment import check_path
from jkv.cli.app import application, main
from jkv.cli.options import Compared, Text
from jkv.eval import corpora, experiments, quality
from jkv.eval.experiments import Say, Setting
from jkv.eval.prefill_replay import LIMIT, Prefills
from jkv.eval.results import Results, digest
from jkv.io import load as loading
from jkv.methods import parse
from jkv.utils import console
from jkv.utils.json_results import versions, write

ORDERS = 5  # longest n-gram
ENOUGH = 0.5  # above this share of n-grams that occur once, an entropy describes the sample, not the text


def entropies(ids: Sequence[int] | np.ndarray, orders: int = ORDERS) -> list[tuple[float, float]]:
    """Compute conditional n-gram entropies H(x_n | x_1 .. x_(n-1)) = H_n - H_(n-1) in bits, for n = 1, 2, ...

    H_n = -sum p log2 p over the n-grams, p their shares of the sample. Short samples underestimate the entropy. All
    orders use the same positions, those with `orders - 1` tokens before them, so that no difference is negative.

    Returns:
        Per order the entropy, and the share of n-grams that occur once.

    Raises:
        ValueError: There are not more than `orders` tokens.

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
    """Count the occurrences of each distinct row of i64[n,k]."""
    code, base = np.zeros(len(grams), np.int64), grams.max(initial=0) + 1
    for column in grams.T:
        code = np.unique(code * base + column, return_inverse=True)[1]
    return np.unique(code, return_counts=True)[1]


def _bits(counts: np.ndarray) -> float:
    shares = counts / counts.sum()
    return float(-(shares * np.log2(shares)).sum())


def stream(ids: Sequence[int] | np.ndarray, bytes: int, vocabulary: int) -> dict[str, Any]:
    """Compute tokenizer statistics of one token stream.

    Args:
        ids: Token ids of a text.
        bytes: Bytes of the text.
        vocabulary: Size V of the vocabulary.

    Returns:
        `tokens`; `bytes_token`, bytes per token; `bits`, the entropy by order; `once`, the share of n-grams that occur
        once, by order; `use` = H_1 / log2 V.
    """
    found = entropies(ids)
    return {
        "tokens": len(ids),
        "bytes_token": round(bytes / len(ids), 4),
        "bits": [round(x, 4) for x, _ in found],
        "once": [round(x, 4) for _, x in found],
        "use": round(found[0][0] / math.log2(vocabulary), 4),
    }


def trained(text: str, vocabulary: int) -> tokenizers.Tokenizer:
    """Train a byte-level BPE tokenizer of at most `vocabulary` tokens."""
    core = tokenizers.Tokenizer(BPE())
    core.pre_tokenizer = ByteLevel(add_prefix_space=False)
    alphabet = sorted(ByteLevel.alphabet())
    core.train_from_iterator([text], BpeTrainer(vocab_size=vocabulary, initial_alphabet=alphabet, show_progress=False))
    return core


def measured(s: Setting, ids: np.ndarray, source: str, prefix: int, text: str, say: Say) -> Results:
    """Measure a text's token statistics in one row, and its coding by the model through each cache in one row each.

    Rows of caches have bits per token and per byte, and `kv_byte`, the cache's bytes after `prefix` tokens per byte of
    their text.

    Args:
        s: Shared settings.
        ids: i32[samples, prefix + continuation].
        source: Name of the texts.
        prefix: Tokens of the prefix.
        text: The text for the token statistics.
        say: Progress callback.
    """
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
    """Train tokenizers on the training side of a corpus and measure the entropies of its test side.

    Args:
        corpus: Name of the corpus.
        vocabularies: Vocabulary sizes.
        megabytes: Sizes of the training text in MB.

    Returns:
        One row per size and vocabulary.

    Raises:
        ValueError: The corpus has too little text.
    """
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


def tokens(
    o: Compared,
    text: Text = Text(prefix=1024, rest=256),
    train: Annotated[
        list[int] | None,
        typer.Option(min=256, help="Train a tokenizer of this size instead of using a model; repeatable."),
    ] = None,
    megabytes: Annotated[
        list[float] | None, typer.Option(help="With --train: training text in MB; repeatable. Default: 1.")
    ] = None,
) -> None:
    """Measure a tokenizer: token entropies, the model's bits per token and byte, and KV bytes per byte of text."""
    model = {"--text": text.text, "--tokens": text.tokens, "--cache": o.cache, "--weights": o.weights}
    model |= {"--dtype": o.dtype, "--mesh": o.mesh}
    if train and (given := [name for name, x in model.items() if x is not None]):
        raise ValueError(f"--train trains on --corpus, and no model runs: leave out {', '.join(given)}, or --train")
    if megabytes and not train:
        raise ValueError("--megabytes is what tokenizers are trained on: give --train N with it, or leave it out")
    # Train and measure tokenizers, without a model.
    if train:
        check_path(out := o.out and o.out.expanduser())
        rows = study(text.corpus, train, megabytes or [1.0])
        for row in rows:
            _say(f"{row['vocabulary']:,} tokens of {row['megabytes']:g} MB", row)
        if out is not None:
            about = {"command": "tokens", "corpus": text.corpus, "text": digest([corpora.text(text.corpus)])}
            write(out, {**about, "versions": versions(("jkv", "numpy", "tokenizers"))}, rows)
        return
    # Measure a model's tokenizer, and its predictions through each cache.
    names = list(dict.fromkeys(o.cache or ["full"]))
    for name in names:
        parse(name)
    s = Setting(o.model, loading.load(o.model, o.dtype, o.mesh, o.weights), names, o.batch, o.out, o.seed)
    ids, source = experiments.texts(
        s.params, text.corpus, text.text, text.tokens, text.prefix, text.rest, o.samples, s.seed
    )
    if s.params.tokenizer is None or text.tokens is not None:
        raise ValueError("bytes of a text are asked for: give a model with a tokenizer, and a text for --tokens")
    whole = corpora.text(str(text.text) if text.text else text.corpus)
    with console.progress(len(names)) as say:
        found = measured(s, ids, source, text.prefix, whole, say)
    for row in found.rows:
        if "once" in row:
            _say(source, row)
        else:
            print(f"{row['cache']}: {row['bits_token']:.3f} bits a token, {row['bits_byte']:.3f} a byte; ", end="")
            print(f"{row['kv_byte']:,.0f} bytes of cache for a byte of text")


def _say(what: str, row: dict[str, Any]) -> None:
    bits = [f"{x:.2f}{'*' if once > ENOUGH else ''}" for x, once in zip(row["bits"], row["once"], strict=True)]
    short = f" (*: more than {ENOUGH:.0%} of the n-grams occur once)" if any("*" in x for x in bits) else ""
    print(f"{what}: {row['bytes_token']:.2f} bytes a token; bits by order {', '.join(bits)}{short}; ", end="")
    print(f"{row['use']:.0%} of log2 V")


app = application(tokens)

if __name__ == "__main__":
    main(app)
