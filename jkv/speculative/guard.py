"""A drafter on trial: what it raises ends drafting, and never a generation."""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType

from jkv.speculative.proposer import Refusal
from jkv.utils.errors import said, survivable


@dataclass
class Trial:
    """Around each call of a drafter: tokens of a row that came before it failed, and its failure in one line.

    An error of the drafter goes no farther, unless it is a Refusal or none that may be survived.

    >>> trial = Trial()
    >>> with trial:
    ...     raise MemoryError("no room")
    >>> trial.failed
    (0, 'MemoryError: no room')
    """

    tokens: int = 0
    failure: str = ""

    def __enter__(self) -> None:
        """Nothing is held."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if error is None or isinstance(error, Refusal) or not survivable(error):
            return False
        self.failure = self.failure or said(error)
        return True

    @property
    def failed(self) -> tuple[int, str] | None:
        """From which token on, of those counted from the first, none was guessed, and why; None: it has not failed."""
        return (self.tokens, self.failure) if self.failure else None

    def came(self, tokens: int) -> None:
        """So many more, with the drafter."""
        if not self.failure:
            self.tokens += tokens
