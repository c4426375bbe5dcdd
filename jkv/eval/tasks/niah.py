"""Needle in a haystack: one sentence at a chosen depth of running prose."""

from __future__ import annotations

import numpy as np

from jkv.eval.tasks.registry import Count, Example, fit, string_match_all, task
from jkv.eval.tasks.words import coined, numbers, prose

DEPTHS = 11  # 0%, 10% .. 100%


def needle(rng: np.random.Generator, length: int, depth: float, count: Count, source: str = "pydoc") -> Example:
    """Build a prompt of at most `length` tokens with one needle.

    Args:
        rng: Random generator.
        length: Most tokens of the prompt.
        depth: Place of the needle: 0 is the first sentence of the prose, 1 the last.
        count: Counts tokens.
        source: Corpus of the prose.

    Raises:
        ValueError: `depth` is outside 0..1, or the needle does not fit `length`.
    """
    if not 0 <= depth <= 1:
        raise ValueError(f"depth={depth}: a fraction from 0 (start) to 1 (end); for 50% give 0.5")
    town, code = coined(rng, 1)[0].capitalize(), numbers(rng, 1, 6)[0]

    def build(rng: np.random.Generator, n: int) -> Example:
        sentence = f"The lighthouse keeper of {town} opens the door with the code {code}."
        return Example(
            context="Read the text below, then answer the question after it.\n\n"
            + prose(rng, n, [(depth, sentence)], source),
            question=f"\n\nWith which code does the lighthouse keeper of {town} open the door?\n",
            prefix=f"The lighthouse keeper of {town} opens the door with the code",
            answers=(code,),
            meta={"depth": depth, "kind": "prose", "needles": (sentence,)},
        )

    return fit(build, rng, length, count, least=24, text=lambda example: example.prompt)


@task("niah", new=16, score=string_match_all)
def niah(rng: np.random.Generator, length: int, count: Count, source: str = "pydoc") -> Example:
    """One needle in prose, at one of eleven evenly spaced depths."""
    return needle(rng, length, int(rng.integers(DEPTHS)) / (DEPTHS - 1), count, source)
