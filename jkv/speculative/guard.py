"""Isolation of drafter errors: a failing drafter ends drafting, not the generation."""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType

from jkv.speculative.proposer import Refusal
from jkv.utils.errors import error_message, survivable


@dataclass
class Trial:
    """Context manager around each call of a drafter; records its first error.

    Errors are suppressed, unless they are a Refusal or not survivable (such as KeyboardInterrupt).

    Attributes:
        tokens: tokens per row before the failure.
        failure: the error in one line; "" if none.

    >>> trial = Trial()
    >>> with trial:
    ...     raise MemoryError("no room")
    >>> trial.failed
    (0, 'MemoryError: no room')
    """

    tokens: int = 0
    failure: str = ""

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        """Record and suppress a survivable error."""
        if error is None or isinstance(error, Refusal) or not survivable(error):
            return False
        self.failure = self.failure or error_message(error)
        return True

    @property
    def failed(self) -> tuple[int, str] | None:
        """(index of the first token without drafts, error), or None."""
        return (self.tokens, self.failure) if self.failure else None

    def came(self, tokens: int) -> None:
        """Count tokens generated before a failure."""
        if not self.failure:
            self.tokens += tokens
