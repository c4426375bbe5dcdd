"""The report of a job: numbers, text and exit code."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jkv.batch.preemption import FAILED, STOPPED
from jkv.generation.receipt import rate, speed


@dataclass(frozen=True, kw_only=True)
class Report:
    """Results of a job.

    Rows and tokens count all runs and all processes; speeds are of this run.

    Attributes:
        cache: the cache config.
        rows: rows of the input.
        done: rows that are answered.
        failed: rows that are written with an error.
        tokens_prompt: prompt tokens of answered rows.
        tokens_new: generated tokens of answered rows.
        seconds: time of this run in the slowest process.
        tokens_per_s: generated tokens per second of this run.
        prefilled: prompt tokens that this run computed.
        saved: prompt tokens that this run did not compute, because of a shared prefix, the prefix cache or a suspended
            row.
        cache_bytes: bytes of the largest running batch of a process.
        batch: rows that decode at once.
        buckets: size of each bucket.
        programs: compiled programs.
        compile_s: seconds of compilation.
        processes: processes of the job.
        stopped: whether rows are left.
        resumed: rows that continued from an earlier run.
        suspended: rows that a later run can resume.
        suspended_bytes: bytes of their arrays.
        drafts: of the first process: verify passes, draft tokens per row and accepted ones; None without drafts.
        stages: of a job with prefill and decode workers: per stage its workers, rows, tokens or steps (units), seconds
            and peak bytes; then caches handed over, rows done again, and workers that changed stage.
        draft_failed: tokens after which the drafter failed, and its error; plain steps ran from there.
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
        """Exit code: STOPPED if rows are left, FAILED if all are written and some are errors, else 0."""
        return STOPPED if self.stopped else FAILED if self.failed else 0

    @property
    def _speed(self) -> str:
        """Generated tokens per second of this run without compilation; `speed` gives "-" if too few to measure."""
        made = round(self.tokens_per_s * self.seconds)
        return speed(rate(made, max(self.batch, 1), self.seconds - self.compile_s), 1)

    @property
    def _held(self) -> str:
        """Text about prefixes that are held once."""
        rows = sum(b["held_once"] for b in self.buckets)
        return f"; {rows} rows share beginnings that are held once" if rows else ""

    @property
    def _kept(self) -> str:
        """Text about suspended rows."""
        return f"{self.suspended_bytes / 2**20:,.1f} MiB: the next run goes on with them"

    @property
    def _failed(self) -> str:
        """Text about a drafter that failed."""
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
    """Format the lines about the stages of a job.

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
    """Format the draft counts.

    >>> _drafts(4, 10, 6)
    '2.50 tokens a pass, 6 of 10 drafted taken'
    """
    return f"{(passes + taken) / max(passes, 1):.2f} tokens a pass, {taken} of {drafted} drafted taken"
