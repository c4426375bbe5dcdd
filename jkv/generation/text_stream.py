"""The text of one row while it is generated."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from itertools import chain

from jkv.arrays.x32 import narrow
from jkv.generation.arguments import GenerateArguments
from jkv.generation.generate import Generation, Result
from jkv.generation.stop_strings import StopChecker
from jkv.models import Params


class TextStream(Iterator[str]):
    """Iterate over the pieces of a text as they become final.

    The Result is also the value of `yield from stream`.

    Attributes:
        tokens: token ids so far. They may be ahead of the text, whose last characters may wait for a token.

    >>> import jkv
    >>> from jkv.generation.arguments import parse_arguments
    >>> params = jkv.models.random(jkv.models.TINY)
    >>> stream = TextStream(params, parse_arguments(params, "int8", max_new_tokens=4), [[5, 6, 7]], True)
    >>> len(stream.result.tokens), stream.tokens == stream.result.tokens
    (4, True)
    """

    def __init__(self, params: Params, given: GenerateArguments, rows: list[list[int]], single: bool) -> None:
        self.tokens: list[int] = []
        self._result: Result | None = None
        self._pieces = self._run(params, given, rows, single)

    def __next__(self) -> str:
        for piece in self._pieces:
            return piece
        raise StopIteration(self._result)

    def __repr__(self) -> str:
        return f"TextStream({len(self.tokens)} tokens, {'going on' if self._result is None else 'complete'})"

    @property
    def result(self) -> Result:
        """The Result; generates what is left of the text first."""
        for _ in self:
            pass
        if self._result is None:
            raise RuntimeError("this stream has no result: it was closed, or ended by an error")
        return self._result

    def close(self) -> None:
        """Stop generating."""
        self._pieces.close()

    @narrow
    def _run(
        self, params: Params, given: GenerateArguments, rows: list[list[int]], single: bool
    ) -> Generator[str, None, None]:
        """Generate the row, and yield its text as it becomes final."""
        run = Generation(params, given, rows, single)
        checker = StopChecker(params.tokenizer, run.stop)
        for tokens in chain([run.first()], run.blocks()):
            self.tokens = tokens[0]
            if piece := checker.take(tokens[0][checker.count :]):
                yield piece
        if rest := checker.finish():
            yield rest
        self._result = run.result()
