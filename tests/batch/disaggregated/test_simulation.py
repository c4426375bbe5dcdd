"""The simulation of stages: by hand where it is small, by a law where it is not."""

from __future__ import annotations

import json
from math import inf
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from jkv.batch.disaggregated.simulation import (
    Costs,
    Served,
    SimulatedRequest,
    Simulation,
    arrivals,
    best,
    in_time,
    plans,
)
from jkv.cli.app import app

COSTS = Costs(token=1.0, step=0.5, slots=2, block=4, ahead=1)


def test_three_requests_by_hand():
    """One worker a stage. Prompts of 2, 3 and 1 s. The second is read from 2 to 5 and enters at the border at 6; the
    third is read until 6, and enters at 7, where the block ends with the last of its rows."""
    asked = [SimulatedRequest(0.0, 2, 9), SimulatedRequest(0.0, 3, 2), SimulatedRequest(0.0, 1, 1)]
    got = Simulation(asked, (1, 1), COSTS).run()
    assert got == [Served(2.5, 6.5), Served(6.5, 7.0), Served(7.5, 7.5)]


def test_in_time_requires_both_deadlines():
    asked = [SimulatedRequest(1.0, 1, 3), SimulatedRequest(1.0, 1, 3), SimulatedRequest(1.0, 1, 1)]
    served = [Served(2.0, 3.0), Served(2.0, 4.0), Served(9.0, 9.0)]
    assert in_time(asked, served, 1.0, 0.5) == 1 / 3 and in_time(asked, served, 1.0, 1.0) == 2 / 3
    assert in_time(asked, served, 8.0, 1.0) == 1 and in_time(asked, served, 0.9, 1.0) == 0


@pytest.mark.parametrize("every", [inf, 3.0])
def test_more_workers_serve_more_requests_in_time(every: float):
    rng = np.random.default_rng(0)
    lengths = [(int(a), int(b)) for a, b in zip(rng.integers(1, 9, 60), rng.integers(1, 30, 60), strict=True)]
    asked = arrivals(lengths, 0.4)
    costs = Costs(token=0.5, step=0.1, slots=2, block=4, every=every)
    shares = []
    for workers in ((1, 1), (2, 2), (20, 20)):
        served = Simulation(asked, workers, costs).run()
        shares.append(in_time(asked, served, 8.0, 0.25))
        for x, y in zip(asked, served, strict=True):
            assert y.first >= x.at + x.tokens * 0.5 + 0.1 - 1e-9
            assert y.last - y.first == pytest.approx((x.new - 1) * 0.1)
    assert shares == sorted(shares) and shares[0] < shares[-1] == 1


def test_workers_move_to_prefill_backlog():
    """All of the work is prefilling: of four workers that decode two or more go."""
    asked = [SimulatedRequest(0.0, 10, 1)] * 40
    stays = Simulation(asked, (1, 4), COSTS)
    goes = Simulation(asked, (1, 4), Costs(**{**vars(COSTS), "every": 5.0}))
    late, soon = (max(x.last for x in run.run()) for run in (stays, goes))
    assert stays.changes == 0 and goes.changes >= 2 and soon < late / 2
    assert all(x.last < inf for x in goes.served)


def test_planner_finds_best_worker_split():
    costs = Costs(token=1.0, step=0.01, slots=8, block=16)
    found = list(plans([(4, 4)] * 200, 4, (0.2, 0.6, 1.5), costs, first=30.0, later=1.0))
    assert len(found) == 9
    chosen = best(found)
    assert chosen is not None and (chosen["prefill"], chosen["decode"], chosen["rate"]) == (3, 1, 0.6)
    assert best(found, share=1.1) is None


def test_costs_require_report_with_stages():
    with pytest.raises(ValueError, match="give that of a job with --stages"):
        Costs.of({"batch": 4, "stages": None})


def test_bench_stages_simulates_with_measured_times(tmp_path: Path):
    """Prompts of 10 s and answers of no time: three workers of four have to prefill."""
    answered = {"line": 1, "key": "a", "tokens": [1, 2], "prompt_tokens": 10}
    (tmp_path / "rows-00000-of-00001.jsonl").write_text(json.dumps(answered) + "\n")
    done = {"prefill": {"seconds": 20, "units": 20}, "decode": {"seconds": 1, "units": 1000}, "handed": {"block": 16}}
    (tmp_path / "report.json").write_text(json.dumps({"batch": 4, "stages": done}))
    call = ["bench", "stages", str(tmp_path), "--first", "60", "--later", "1", "--rate", "0.15", "--rate", "0.25"]
    result = CliRunner().invoke(app, [*call, "--json", str(tmp_path / "out.json"), "--requests", "100"])
    assert result.exit_code == 0 and "| 3 " in result.stdout and "% *" in result.stdout, result.output
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert len(rows) == 6 and result.stderr.count("in time\n") == 6
    chosen = best(rows)
    assert chosen is not None and (chosen["prefill"], chosen["rate"]) == (3, 0.25)
    (tmp_path / "report.json").write_text(json.dumps({"batch": 4, "stages": None}))
    assert "give that of a job with --stages" in CliRunner().invoke(app, call).stderr
