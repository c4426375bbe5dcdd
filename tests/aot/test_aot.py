"""jkv plan: bytes are those of the real arrays, refusals are reported, the search finds the border."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from typer.testing import CliRunner

from jkv import methods, models
from jkv.aot import hlo
from jkv.aot import memory_estimate as plan
from jkv.aot.targets import Target, target
from jkv.cache.cache import tree_bytes
from jkv.cli import app as cli
from jkv.core import sharding
from jkv.io.load import load
from jkv.prompts.allocation import CacheShape
from support import ggufs

MODEL = models.random(models.TINY).config
JOB = plan.Job(
    model=MODEL, config=methods.parse("snapkv(budget=40, window=8)"), batch=2, context=128, chunk=32, dtype=jnp.float32
)


@pytest.mark.slow
def test_program_bytes_match_array_bytes():
    prefill, decode = plan.programs(JOB, target("cpu"))
    new = 64  # half of the context
    cache = CacheShape(JOB.config, MODEL, 2, 128, new, jnp.float32).empty()
    assert prefill.weights == decode.weights == tree_bytes(models.random(models.TINY))
    assert prefill.cache == decode.cache == cache.nbytes
    assert decode.kernels == "xla" and decode.refused is None and decode.collectives == ()
    assert prefill.what == "prefill, 32 tokens" and decode.what == "decode"
    weights = decode.weights / 4 - MODEL.vocab * MODEL.width  # all but the embedding of tokens are multiplied
    assert 1 < prefill.flops / (2 * 64 * weights) < 1.5 and 1 < decode.flops / (2 * 2 * weights) < 5
    assert all(p.moved > p.weights + p.cache for p in (prefill, decode))
    for program in (prefill, decode):  # the new cache takes the old one's memory
        assert (
            program.weights + program.cache < program.peak - program.temporary < program.weights + 1.5 * program.cache
        )


def test_program_fits_if_peak_fits():
    program = plan.decode(JOB, target("cpu"))
    machine = replace(target("cpu"), memory=program.peak)
    assert program.fits(machine) and not program.fits(replace(machine, memory=program.peak - 1))
    assert not replace(program, refused="too large").fits(target("cpu"))


@pytest.mark.parametrize("most", [0, 1, 2, 7, 100])
def test_search_finds_largest_batch(monkeypatch, most: int):
    """Programs of 1000 bytes of weights and 10 a row, and what the compiler adds from 4 rows on."""

    def decode(job: plan.Job, machine: Target) -> plan.Program:
        peak = 1000 + 10 * job.batch + (3 if job.batch > 4 else 0)
        return plan.Program(what="decode", weights=1000, cache=0, kernels="xla", compile_s=0, peak=peak)

    monkeypatch.setattr(plan, "decode", decode)
    said: list[str] = []
    found = plan.largest(JOB, replace(target("cpu"), memory=1000 + 10 * most + 4), said.append)
    assert most - max(1, most // 16) <= found <= most and len(said) <= plan.TRIES


def test_byte_budget_and_fixed_tier_are_mesh_invariant():
    """Capacities are rounded up so that devices can divide them; how many slots are used is not."""
    one = methods.parse("streaming(bytes='40KiB', sinks=5) | kivi(group=8, recent=8)")
    mesh = Mesh(np.array([*jax.devices()] * 3).reshape(1, 1, 3), ("data", "model", "context"))
    many = one.over(sharding.MeshPlan(mesh))
    plans = [CacheShape(x, MODEL, 2, 300, 16, jnp.float32).layout()[0][0] for x in (one, many)]
    assert [t.capacity for t in plans[0].tiers] == [t.most for t in plans[0].tiers] == [t.most for t in plans[1].tiers]
    assert plans[0].capacity == plans[1].capacity and plans[1].tiers[0].most == 8
    for tier in plans[1].tiers:
        assert tier.capacity % 24 == 0 and tier.most <= tier.capacity < tier.most + 24


def test_job_uses_requested_mesh():
    job, machine = replace(JOB, mesh="data=2,context=3"), replace(target("cpu"), devices=[*jax.devices()] * 6)
    assert dict(job.over(machine).mesh.shape) == {"data": 2, "model": 1, "context": 3}
    with pytest.raises(ValueError, match="data=2 divides the rows, and there are 3; give a multiple"):
        replace(job, batch=3).over(machine)
    watching = replace(job, config=methods.parse("attentionpredictor"))
    with pytest.raises(ValueError, match="context in a mesh.*give them to data or model, or take quest"):
        plan.decode(watching, machine)


def test_rows_indivisible_by_devices_are_refused():
    devices = [*jax.devices()] * 3  # two kv heads: three devices divide rows only
    assert sharding.unit(devices, MODEL) == 3
    with pytest.raises(ValueError, match="rows come in multiples of 3, and there are 2"):
        sharding.mesh(devices, MODEL, 2)


REFUSED: list[tuple[list[str], str]] = [
    (["--topology", "v5e"], "a chip and its grid, such as v5e:2x4"),
    (["--topology", "v9z:2x4"], "chips are v4, v5e"),
    (["--topology", "cpu", "--context", "99999"], "give less"),
    (["--topology", "cpu", "--dtype", "int3"], "must be one of"),
    (["--topology", "cpu", "--cache", "snapkw"], "snapkv"),
    (["--topology", "cpu", "--largest"], "is not known"),
    (["--topology", "cpu", "--mesh", "context=2"], "it takes 2 devices, and there are 1"),
]


@pytest.mark.parametrize(("arguments", "says"), REFUSED, ids=[" ".join(a) for a, _ in REFUSED])
def test_invalid_plan_arguments_give_one_line_errors(arguments: list[str], says: str, monkeypatch: Any):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    result = CliRunner().invoke(cli.app, ["plan", "--model", "smollm2-135m", *arguments])
    assert result.exit_code == 1 and says in result.output and "Traceback" not in result.output


def test_program_costs_are_printed_and_saved(monkeypatch: Any, tmp_path: Any):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    made = dict(what="decode", weights=3 << 20, flops=2e9, moved=2**21, cycles=4_000_000)
    one = plan.Program(**made, cache=1 << 20, kernels="xla", compile_s=0)
    monkeypatch.setattr(plan, "programs", lambda job, machine: iter([one]))
    path = tmp_path / "new" / "costs.json"
    arguments = ["plan", "--model", "smollm2-135m", "--topology", "cpu", "--costs", "--json", str(path)]
    result = CliRunner().invoke(cli.app, arguments)
    assert result.exit_code == 0 and "weights and cache MiB" in result.output, result.output
    (row,) = json.loads(path.read_text())["rows"]
    assert row.items() >= (made | {"cache": "full", "bytes": 1 << 20}).items()
    machine = replace(target("cpu"), rates=(1e12, 2**30))
    for clock, own in ((None, ["-", "-"]), (1e9, ["4.000", "50%"])):
        shown = plan.costs([("full", one)], replace(machine, clock=clock))
        cells = [list(column.cells)[0] for column in shown.columns]
        assert cells == ["full", "decode", "2.00", "2.000", "2.0", "1.953", "4.0", *own]


LOOPS = """%limit (x: s32[]) -> pred[] {
  %most = s32[] constant(17)
  ROOT %lt = pred[] compare(%at, %most), direction=LT
}
%open (x: s32[]) -> pred[] {
  %most = s32[] constant(9)
  ROOT %and = pred[] and(%lt, %alive)
}
%fused (x: f32[8]) -> f32[8] {
  %add = f32[8] add(%x, %x)
}
%body (x: f32[8]) -> f32[8] {
  %inner = f32[8] fusion(%x), calls=%fused, backend_config={"estimated_cycles":"100"}
}
%turn (x: f32[8]) -> f32[8] {
  %one = f32[8] fusion(%x), calls=%fused, metadata={op_name="f/step/a"}, backend_config={"estimated_cycles":"7"}
  %loop = f32[8] while(%x), condition=%limit, body=%body, metadata={op_name="f/step/b"}
}
ENTRY %main () -> f32[8] {
  %first = f32[8] while(%x), condition=%limit, body=%body
  %known = f32[8] while(%x), condition=%open, body=%body, backend_config={"known_trip_count":{"n":"3"}}
  %rest = f32[8] while(%x), condition=%open, body=%turn
}"""


def test_hlo_cycles_are_counted_once_or_per_step():
    assert hlo.cycles(LOOPS) == {"once": 2000, "step": 1707}


@pytest.mark.slow
@pytest.mark.parametrize("text", ["int8", "h2o(budget=40)"])
def test_plan_uses_largest_fitting_prefill_chunk(text: str):
    """Whole if that fits; a method that needs it whole is planned so; what the compiler refuses is planned smaller."""
    job = replace(JOB, config=methods.parse(text), context=512, chunk=None)
    whole, _ = plan.programs(job, target("cpu"))
    assert whole.what == "prefill, 256 tokens" and whole.reading.startswith("whole")
    machine = replace(target("cpu"), memory=whole.peak * 3 // 4)
    less, decode = plan.programs(job, machine)
    if text != "int8":
        assert less.what == whole.what and not less.fits(machine) and "this method needs it" in less.reading
        return
    size = int(less.what.split()[1])
    assert less.fits(machine) and size in (32, 64, 128) and less.reading.startswith(f"{size} tokens at a time: ")
    asked, _ = plan.programs(replace(job, chunk=0), machine)
    assert asked.what == whole.what and not asked.fits(machine)


@pytest.mark.slow
def test_plan_counts_gguf_blocks_as_stored(tmp_path):
    kinds = {name: gguf.GGMLQuantizationType.Q8_0 for name, x in ggufs.weights().items() if x.ndim == 2}
    path, out = ggufs.tiny(tmp_path / "m.gguf", kinds=kinds), tmp_path / "out.json"
    asked = ["plan", "--model", path, "--topology", "cpu", "--context", 64, "--weights", "file", "--json", out]
    done = CliRunner().invoke(cli.app, [*map(str, asked)])
    assert done.exit_code == 0, done.output
    weights = tree_bytes(load(path, "bfloat16", weights="file"))
    assert {row["weights"] for row in json.loads(out.read_text())["rows"]} == {weights}
    assert "prefill, 32 tokens: whole: about 0.00 GiB" in done.output
    done = CliRunner().invoke(cli.app, ["plan", "--model", "llama-3.1-8b", "--topology", "cpu", "--weights", "file"])
    assert done.exit_code == 1 and "keeps the blocks of a .gguf file, and llama-3.1-8b has none" in done.output
