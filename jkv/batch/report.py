"""The result of a job, as numbers, as text and as an exit code."""

from __future__ import annotations

from dataclasses import dataclass

from jkv.batch.signals import FAILED, STOPPED


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a job came to. Rows and tokens are those of all runs and all processes; speeds are of this run's work.

    failed: rows written with an error; saved: prompt tokens that common beginnings spared this run, of `prompt` that
    its rows have; cache_bytes: of the largest running batch of a process; stopped: rows are left.
    """

    cache: str
    rows: int
    done: int
    failed: int
    tokens_prompt: int
    tokens_new: int
    seconds: float
    tokens_per_s: float
    prefilled: int
    saved: int
    cache_bytes: int
    batch: int
    buckets: list[dict[str, int]]
    programs: int
    compile_s: float
    processes: int
    stopped: bool

    @property
    def code(self) -> int:
        """The exit code: STOPPED if rows are left, FAILED if all are written and some are errors, 0 otherwise."""
        return STOPPED if self.stopped else FAILED if self.failed else 0

    def __str__(self) -> str:
        share = self.saved / max(self.saved + self.prefilled, 1)
        left = f", {self.rows - self.done - self.failed} left: run the same command again" if self.stopped else ""
        return "\n".join(
            [
                f"rows         {self.done} done, {self.failed} failed, of {self.rows}{left}",
                f"tokens       {self.tokens_prompt:,} read, {self.tokens_new:,} generated, "
                f"{self.tokens_per_s:,.1f} a second",
                f"prefixes     {self.saved:,} prompt tokens spared, {share:.0%}",
                *(
                    f"prompts      of up to {b['tokens']:,} tokens, read {b['chunk']:,} at a time"
                    for b in self.buckets
                    if b["chunk"]
                ),
                f"cache        {self.cache}, {self.cache_bytes / 2**20:,.1f} MiB, {self.batch} rows at once",
                f"programs     {self.programs} compiled in {self.compile_s:.1f} s",
            ]
        )
