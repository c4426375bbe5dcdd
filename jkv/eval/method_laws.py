"""Laws that every method obeys, checked for one on a tiny random model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import jax
import numpy as np

from jkv import models
from jkv.arrays.x32 import narrow
from jkv.cache.cache import Cache
from jkv.core import decode_loop
from jkv.generation.api import generate, prefill
from jkv.generation.generate import Result
from jkv.methods import known, parse
from jkv.methods.config import CacheConfig
from jkv.utils.tables import html_table, text_table

BUDGET, NEW = 48, 40  # tokens of a budget that is not given; tokens generated
LENGTHS = (120, 90)  # of two prompts
TOLERANCE = 1e-4  # of float32 logits of size 1
PROGRAMS = (decode_loop.embedded, decode_loop.attended, decode_loop.flushed, decode_loop.flushed_due, decode_loop.steps)


@dataclass(frozen=True, kw_only=True, repr=False)
class Laws:
    """What a method obeys; prints as a table.

    Attributes:
        cache: the composition.
        results: (law, whether it holds, what was found); None: it does not apply.
    """

    cache: str
    results: tuple[tuple[str, bool | None, str], ...]

    @property
    def passed(self) -> bool:
        """Whether no law is broken."""
        return all(holds is not False for _, holds, _ in self.results)

    @property
    def _rows(self) -> list[tuple[str, str, str]]:
        words = {True: "yes", False: "NO", None: "-"}
        return [(law, words[holds], found) for law, holds, found in self.results]

    def __repr__(self) -> str:
        width = max(len(found) for *_, found in self._rows)
        rows = [(law, holds, f"{found:<{width}}") for law, holds, found in self._rows]
        return text_table((self.cache, "", f"{'':<{width}}"), rows)

    def _repr_html_(self) -> str:
        return html_table(("law", "holds", "found"), self._rows, self.cache)


@narrow
def check(cache: str | CacheConfig) -> Laws:
    """Check a method's laws on a tiny random model of two layers; takes half a minute.

    Args:
        cache: the name of a method, which gets a budget of 48 tokens if it takes one, a composition, or a CacheConfig.

    Returns:
        The laws, which print as a table.

    Example:
        >>> found = check("knorm")
        >>> found.cache, found.passed, [holds for _, holds, _ in found.results]
        ('knorm(budget=48)', True, [True, True, True, True, True])
    """
    if isinstance(cache, str) and cache.isidentifier():
        name = known(cache).name
        cache = f"{name}(budget={BUDGET})" if "budget" in known(name).arguments else name
    config = parse(cache) if isinstance(cache, str) else cache
    trial = _Trial(config)
    laws: dict[str, Callable[[], tuple[bool | None, str]]] = {
        "its budget is what it keeps": trial.budget,
        "a row does not see its batch": trial.batch,
        "another prompt compiles nothing": trial.programs,
        "its bytes are those predicted": trial.size,
        "with room for all, it changes nothing": trial.neutral,
    }
    return Laws(cache=str(config), results=tuple((law, *_tried(run)) for law, run in laws.items()))


def _tried(run: Callable[[], tuple[bool | None, str]]) -> tuple[bool | None, str]:
    """Return whether a law holds; one whose run fails is broken, with the error."""
    try:
        return run()
    except Exception as error:  # noqa: BLE001  of a class that is being written
        return False, f"{type(error).__name__}: {error}"


class _Trial:
    """Runs of one config on the tiny model."""

    def __init__(self, config: CacheConfig) -> None:
        self.config, self.params = config, models.random(models.TINY)
        random = np.random.default_rng(0)
        self.prompts = [random.integers(0, self.params.config.vocab, n).tolist() for n in (*LENGTHS, LENGTHS[0])]

    @cached_property
    def together(self) -> Result:
        """Answers to the first two prompts."""
        return self.generate(*self.prompts[:2])

    @cached_property
    def other(self) -> tuple[Result, int]:
        """Answers with another first prompt, and how many programs they compiled after `together`."""
        _, before = self.together, count_programs()
        out = self.generate(self.prompts[2], self.prompts[1])
        return out, count_programs() - before

    def generate(self, *prompts: list[int]) -> Result:
        return generate(self.params, self.config, prompts, max_new_tokens=NEW, stop_ids=())

    def budget(self) -> tuple[bool | None, str]:
        """After the prompt's flush and after the last, every layer holds its budget, all slots in use."""
        if not self.config.budget.bounded:
            return None, "it has no budget of a fixed number of tokens"
        if self.config.budget.statistic is not None:
            return None, "sizes of its layers follow from the prompt"
        prompt = prefill(self.params, self.config, self.prompts[:2], reserve=NEW)[0]
        found = [self._kept(prompt, 0)]
        if not self.config.budget.on_top:  # which keeps what follows the prompt too
            cache = self.together.cache
            found.append(self._kept(cache, int(cache.fill) - cache.stay))
        holds = all(most - unit < kept <= most + unit - 1 for kept, most, unit in found)
        return holds, "; ".join(f"{kept:g} of {most:g} tokens" for kept, most, _ in found)

    def _kept(self, cache: Cache, since: int) -> tuple[float, float, int]:
        """Return the tokens, mean over heads, the budget and the unit of the layer and row that is farthest off.

        Args:
            since: tokens since the last flush, which are kept on top.
        """
        kept = np.asarray(cache.kept(), float).mean(2) - since
        sizes = np.array([plan.size.tokens for plan in cache.plan], float)
        most = np.minimum(sizes[:, None], np.asarray(cache.seen)[None] - since)
        layer, row = np.unravel_index(np.argmax(np.abs(kept - most)), kept.shape)
        return float(kept[layer, row]), float(most[layer, row]), cache.plan[layer].unit

    def batch(self) -> tuple[bool | None, str]:
        """The second row gives the same tokens beside another first one."""
        same = self.together.tokens[1] == self.other[0].tokens[1]
        return same, f"{'the same' if same else 'other'} {NEW} tokens beside another row"

    def programs(self) -> tuple[bool | None, str]:
        """Another prompt of the same length runs the programs that are there."""
        if self.config.budget.statistic is not None:
            return None, "sizes of its layers follow from the prompt"
        return self.other[1] == 0, f"{self.other[1]} programs more"

    def size(self) -> tuple[bool | None, str]:
        """The arrays of a cache are the bytes of the receipt, and those predicted before it ran."""
        out = self.together
        arrays = jax.tree.leaves((out.cache.layers, out.cache.states))
        held, told = sum(np.asarray(x).nbytes for x in arrays), out.receipt
        return held == told.bytes_kept == told.bytes_predicted, f"{held:,} held, {told.bytes_predicted:,} predicted"

    def neutral(self) -> tuple[bool | None, str]:
        """The logits of a prompt within the budget are those of the full cache."""
        if not all(codec.exact for codec in self.config.all_codecs) or self.config.prefill.traits.skips:
            return None, "it rounds or leaves out"
        short = [prompt[-24:] for prompt in self.prompts[:2]]
        full, own = (prefill(self.params, x, short)[1] for x in (None, self.config))
        gap = float(np.abs(np.asarray(full) - np.asarray(own)).max())
        return gap < TOLERANCE, f"logits differ by {gap:.0e} at most"


def count_programs() -> int:
    """Return the number of programs compiled so far for prefills, steps and flushes."""
    return sum(program._cache_size() for program in PROGRAMS)
