"""Allocation of workers to stages, and when a worker changes its stage."""

from __future__ import annotations

from collections.abc import Sequence

PREFILL = "prefill"
STAGES = PREFILL, "decode"
MOST = 64  # processes on one machine, each of which holds the weights


def divided(text: str) -> tuple[int, ...]:
    """Parse the number of workers of each of STAGES.

    Args:
        text: such as "prefill=1,decode=3".

    Raises:
        ValueError: another text, a stage without workers, or more than MOST in all.

    >>> divided("prefill=1,decode=3")
    (1, 3)
    """
    pairs = [x.strip().split("=") for x in text.split(",")]
    found = {x[0].strip(): x[1].strip() for x in pairs if len(x) == 2}
    if len(pairs) != len(found) or found.keys() != set(STAGES) or not all(x.isdecimal() for x in found.values()):
        raise ValueError(f"--stages {text}: give a number of processes for each, such as prefill=1,decode=1")
    out = tuple(int(found[stage]) for stage in STAGES)
    if min(out) < 1 or sum(out) > MOST:
        raise ValueError(f"--stages {text}: each stage has one process or more, all together {MOST} at most")
    return out


def decide(queues: Sequence[int], workers: Sequence[int]) -> tuple[int, int] | None:
    """Choose a stage that gives a worker and one that gets it, or None. Source: EPD (2501.05460).

    The stage with the longest queue gets a worker if another queue is less than half as long. Of the stages with
    shorter queues, the one with the most workers gives one, and keeps at least one. Ties go to the first stage.

    Args:
        queues: rows waiting for each stage.
        workers: workers of each stage.

    Returns:
        Indices of the giving and of the getting stage.

    >>> decide((9, 1, 1), (1, 3, 2)), decide((9, 5, 6), (1, 3, 2)), decide((9, 1), (1, 1))
    ((1, 0), None, None)
    """
    longest = max(queues)
    if all(2 * n >= longest for n in queues):
        return None
    donors = [i for i, n in enumerate(queues) if n < longest and workers[i] > 1]
    return (max(donors, key=lambda i: workers[i]), queues.index(longest)) if donors else None
