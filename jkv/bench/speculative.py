"""Speculative against plain decoding of the same prompts: ms per token and tokens per pass, by kind of text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich import box
from rich.table import Table

from jkv.bench.environment import SEED
from jkv.bench.measure import turns
from jkv.bench.speed import number
from jkv.core.compilation import Cost
from jkv.eval import corpora
from jkv.generation.api import generate
from jkv.generation.arguments import parse_arguments
from jkv.generation.generate import Generation, Result
from jkv.models import Params
from jkv.speculative.build import build_drafter
from jkv.speculative.draft_length import WIDTHS
from jkv.speculative.proposer import Drafter, Guess

Found = tuple[float, float, Result, bool]  # plain and drafted ms per token, drafted result, whether tokens agree
KINDS = ("quote", "code", "json", "prose", "again")
NAMES = ("Ada", "Ben", "Chen", "Dora", "Emil", "Fay", "Gus", "Hana", "Ivo", "Jo", "Kai", "Lia")


def prompts(kind: str, params: Params, samples: int) -> list[str]:
    """Return prompts of a kind.

    The kinds ask for a passage to be repeated, code to be repeated with another name, records to be listed again, or a
    story; prompts of "again" are passages that an earlier run has repeated almost identically.
    """
    assert params.tokenizer is not None
    if kind == "prose":
        return [f"Write a long story about {x} and a lighthouse." for x in NAMES[:samples]]
    if kind == "json":
        rng, out = np.random.default_rng(SEED), []
        for _ in range(samples):
            records = [
                f'{{"name": "{x}", "age": {rng.integers(20, 80)}, "city": "Bern"}}' for x in rng.permutation(NAMES)
            ]
            out.append("Add the field country to each record of this list:\n[" + ",\n ".join(records) + "]")
        return out
    if kind == "code":
        passages = _passages(params.tokenizer, "stdlib:test", samples)
        return [f"Copy this code, with self renamed to this:\n```python\n{x}\n```" for x in passages]
    return [f"Repeat this text word for word:\n\n{x}" for x in _passages(params.tokenizer, "pydoc:test", samples)]


@lru_cache(2)  # encoding a corpus takes seconds, and two kinds use the same one
def _passages(tokenizer: Any, corpus: str, samples: int) -> list[str]:
    """Return passages of 200 tokens that no drafter of `jkv train` was trained on."""
    windows = corpora.windows(tokenizer.encode(corpora.text(corpus)), 200, samples, SEED)
    return [tokenizer.decode(x) for x in np.asarray(windows).tolist()]


def rows(
    params: Params, cache: str, drafts: Sequence[str], samples: int, new: int, rounds: int
) -> Iterator[dict[str, Any]]:
    """Yield a record for each kind and drafter: ms per token drafted and plain, in turns, and the receipt's numbers.

    Each prompt gets a fresh drafter, except for "again", where it has seen an answer to the truncated prompt.
    """
    for kind in KINDS:
        texts = prompts(kind, params, samples)
        for draft in drafts:
            found = [_pair(params, cache, draft, text, kind, new, rounds) for text in texts]
            yield _row(kind, draft, found)


def long(
    params: Params, cache: str, drafts: Sequence[str], batch: int, context: int, new: int, rounds: int
) -> Iterator[dict[str, Any]]:
    """Yield a record for each drafter, as `rows` does, for one batch that greedily continues texts of `context` tokens.

    The texts are prefilled once for all drafters and rounds.

    Raises:
        ValueError: Texts and answer exceed the model's context.
    """
    assert params.tokenizer is not None
    tokens = params.tokenizer.encode(corpora.text("stdlib"))
    texts = np.asarray(corpora.windows(tokens, context, batch, SEED)).tolist()
    begun = Generation(params, parse_arguments(params, cache, max_new_tokens=new, stop_ids=()), texts, single=False)
    for draft in drafts:
        plain, drafted = (partial(_on, begun, params, x) for x in (None, draft))
        for width in WIDTHS:
            _on(begun, params, Sure(width - 1, build_drafter(draft, params).top))
        yield _row(f"{batch} texts of {context} tokens", draft, [_timed(plain, drafted, rounds)])


def _on(begun: Generation, params: Params, draft: str | Drafter | None) -> Result:
    """Decode from a prefilled generation, with or without drafts; the generation can be used again."""
    one = copy(begun)
    one.state, one.cost = jax.tree.map(jnp.copy, begun.state), Cost()
    one.drafter = None if draft is None else build_drafter(draft, params)
    for _ in one.blocks():
        pass
    return one.result()


def _row(kind: str, draft: str, found: Sequence[Found]) -> dict[str, Any]:
    plain, ms, results, equal = zip(*found, strict=True)
    plain, ms = np.asarray(plain), np.asarray(ms)
    reports = [x.receipt for x in results]
    each = [x.tokens_new / x.rows / (x.passes or 1) for x in reports]
    return {
        "kind": kind,
        "draft": draft,
        "plain_ms": float(plain.mean()),
        "ms": float(ms.mean()),
        "speedup": float(plain.sum() / ms.sum()),
        "speedups": (plain / ms).round(3).tolist(),
        "tokens_a_pass": float(np.mean(each)),
        "tokens_alone": float(np.mean([x.tokens_alone for x in reports])),
        "drafted": sum(x.drafted or 0 for x in reports),
        "drafted_taken": sum(x.drafted_taken or 0 for x in reports),
        "bytes_kept": max(x.bytes_kept for x in reports),
        "bytes_draft": max(x.bytes_draft or 0 for x in reports),
        "equal": all(equal),
        "prompts": len(found),
    }


def _pair(params: Params, cache: str, draft: str, text: str, kind: str, new: int, rounds: int) -> Found:
    heat = {"temperature": 0.7, "seed": SEED} if kind == "prose" else {}

    def run(guess: Drafter | None, text: str) -> Result:
        ask = [{"role": "user", "content": text}]
        return generate(params, cache, ask, max_new_tokens=new, stop_ids=(), drafter=guess, **heat)

    def drafted() -> Result:
        guess = build_drafter(draft, params)
        if kind == "again":
            run(guess, text[: 9 * len(text) // 10])
        return run(guess, text)

    for width in WIDTHS:  # compile and run every program once before timing
        run(Sure(width - 1, build_drafter(draft, params).top), text)
    return _timed(lambda: run(None, text), drafted, rounds)


class Sure:
    """A drafter that always proposes a fixed number of tokens with full confidence, to run passes of a given width."""

    rows_change = False
    nbytes = 0

    def __init__(self, n: int, top: int) -> None:
        self.n, self.top = n, top

    def begin(self, rows: list[list[int]], new: int, verifier: Any = None) -> None:
        """Do nothing."""

    def propose(self, rows: list[list[int]], most: int, verifier: Any = None) -> list[Guess]:
        n = min(self.n, most)
        return [Guess([0] * n, range(-1, n - 1), [1.0] * n)] * len(rows)

    def learn(self, ids: Any, top: Any) -> None:
        """Do nothing."""

    def branch(self, rows: list[list[int]]) -> Sure:
        return self

    def end(self, rows: list[list[int]]) -> None:
        """Do nothing."""


def _timed(plain_: Callable[[], Result], drafted: Callable[[], Result], rounds: int) -> Found:
    results = turns([plain_, drafted], rounds)
    plain, ms = (1e3 * np.median([x.receipt.decode_s / x.receipt.tokens_new for x in some]) for some in results)
    (a, *_), (b, *_) = results
    return float(plain), float(ms), b, a.tokens == b.tokens


def table(found: Sequence[dict[str, Any]]) -> Table:
    """Format the rows as a table that also renders as markdown."""
    some = "text", "drafts", "plain, ms", "ms a token", "speed-up", "tokens a pass", "a row alone", "draft, MiB", "same"
    out = Table(*some, box=box.MARKDOWN)
    for r in found:
        numbers = (number(r[x]) for x in ("plain_ms", "ms", "speedup", "tokens_a_pass", "tokens_alone"))
        out.add_row(r["kind"], r["draft"], *numbers, number(r["bytes_draft"] / 2**20), "yes" if r["equal"] else "no")
    return out
