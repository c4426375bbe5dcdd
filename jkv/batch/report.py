"""The result of a job, as numbers, as text and as an exit code."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jkv.batch.preemption import FAILED, STOPPED
from jkv.generation.receipt import rate, speed


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a job came to. Rows and tokens are those of all runs and all processes; speeds are of this run's work.

    failed: rows written with an error; saved: prompt tokens of its rows that this run did not read, as others begin
    alike, a store had them, or the rows had been suspended; cache_bytes: of the largest running batch of a process;
    stopped: rows are left; resumed: rows that went on where an earlier run was stopped; suspended: rows that a later
    run can go on with, suspended_bytes: of their arrays; drafts: of the first process, passes of batches, tokens of a
    row that they verified beside each next one, and those of them that came; None: no drafts; draft_failed: after how
    many tokens of its batches the drafter was left out, as it failed, and its error. stages: of a job of several
    stages, the workers that were in each, their rows, tokens or steps (units), seconds and most bytes, what was handed
    over, rows that were done again, and changes of a stage.
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
    resumed: int = 0
    suspended: int = 0
    suspended_bytes: int = 0
    drafts: dict[str, int] | None = None
    stages: dict[str, Any] | None = None
    draft_failed: tuple[int, str] | None = None

    @property
    def code(self) -> int:
        """The exit code: STOPPED if rows are left, FAILED if all are written and some are errors, 0 otherwise."""
        return STOPPED if self.stopped else FAILED if self.failed else 0

    @property
    def _speed(self) -> str:
        """Of what this run generated, without what compiling took; "-" where that is too little to tell."""
        made = round(self.tokens_per_s * self.seconds)
        return speed(rate(made, max(self.batch, 1), self.seconds - self.compile_s), 1)

    @property
    def _held(self) -> str:
        rows = sum(b["held_once"] for b in self.buckets)
        return f"; {rows} rows share beginnings that are held once" if rows else ""

    @property
    def _kept(self) -> str:
        return f"{self.suspended_bytes / 2**20:,.1f} MiB: the next run goes on with them"

    @property
    def _failed(self) -> str:
        if self.draft_failed is None:
            return ""
        return f"; plain steps after {self.draft_failed[0]} tokens of its batches: {self.draft_failed[1]}"

    def __str__(self) -> str:
        share = self.saved / max(self.saved + self.prefilled, 1)
        left = f", {self.rows - self.done - self.failed} left: run the same command again" if self.stopped else ""
        return "\n".join(
            [
                f"rows         {self.done} done, {self.failed} failed, of {self.rows}{left}",
                f"tokens       {self.tokens_prompt:,} read, {self.tokens_new:,} generated, {self._speed} a second",
                f"prefixes     {self.saved:,} prompt tokens spared, {share:.0%}{self._held}",
                *([f"resumed      {self.resumed} rows went on where they were"] if self.resumed else []),
                *([f"suspended    {self.suspended} rows, {self._kept}"] if self.suspended else []),
                *(
                    f"prompts      of up to {b['tokens']:,} tokens, read {b['chunk']:,} at a time"
                    for b in self.buckets
                    if b["chunk"]
                ),
                f"cache        {self.cache}, {self.cache_bytes / 2**20:,.1f} MiB, {self.batch} rows at once",
                *([] if self.drafts is None else [f"drafts       {_drafts(**self.drafts)}{self._failed}"]),
                *([] if self.stages is None else _stages(**self.stages)),
                f"programs     {self.programs} compiled in {self.compile_s:.1f} s",
            ]
        )


def _stages(handed: dict[str, int], redone: int, changes: list[str], **stages: dict[str, Any]) -> list[str]:
    """
    >>> _stages({"rows": 2, "bytes": 1 << 20, "file_bytes": 1 << 20, "ahead": 2, "most_ahead": 1}, 0, [])
    ['handed over  2 rows, 1.0 MiB of caches, 1 of 2 ahead at most, 0 done again']
    """
    out = [
        f"{name:<12} {x['rows']} rows, {x['seconds']:,.1f} s, {x['peak_bytes'] / 2**20:,.0f} MiB at most"
        for name, x in stages.items()
    ]
    again = "".join(f", {x}" for x in changes)
    return [
        *out,
        f"handed over  {handed['rows']} rows, {handed['bytes'] / 2**20:,.1f} MiB of caches, "
        f"{handed['most_ahead']} of {handed['ahead']} ahead at most, {redone} done again{again}",
    ]


def _drafts(passes: int = 0, drafted: int = 0, taken: int = 0) -> str:
    """
    >>> _drafts(4, 10, 6)
    '2.50 tokens a pass, 6 of 10 drafted taken'
    """
    return f"{(passes + taken) / max(passes, 1):.2f} tokens a pass, {taken} of {drafted} drafted taken"
