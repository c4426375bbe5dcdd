"""One loop prefills prompts, whole or in chunks, for every caller."""

from typing import Any

import numpy as np
import pytest

from jkv.core.decode_loop import prefill_own
from jkv.prompts.prefill import prefill_step, run_prefill


@pytest.mark.parametrize("length", [8, 10])
@pytest.mark.parametrize("chunk", [0, 3, 4, 8, 10, 12])
def test_a_prefill_runs_one_program_over_the_left_padded_prompt(length: int, chunk: int):
    ids, found, steps = np.arange(2 * length, dtype=np.int32).reshape(2, length), [], set()

    class Recorder:
        def run(self, flow: Any, params: Any, cache: int, ids: Any, fresh: bool) -> tuple[int, int]:
            assert flow is prefill_own and params is None and cache == len(found)  # the cache of the call before
            found.append(np.asarray(ids))
            steps.add((ids.shape[1], fresh))
            return len(found), len(found)

    given: Any = Recorder()
    cache: Any = 0
    assert run_prefill(given, None, cache, ids, chunk) == (len(found), len(found))  # type: ignore[arg-type]
    read = np.concatenate(found, 1)
    np.testing.assert_array_equal(read[:, -length:], ids)
    assert (read[:, :-length] == -1).all() and read.shape[1] - length < steps.copy().pop()[0]
    assert steps == {prefill_step(length, chunk)}  # what serve compiles ahead
