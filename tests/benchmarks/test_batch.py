"""`benchmarks.batch`: which of the peer's batches counts, and what is beside it; speed itself is not tested."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from benchmarks import batch as many
from jkv import models
from jkv.bench import model_shapes
from jkv.utils import console


def test_many_prompts_beside_the_peers_best_batch(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    """A peer of 1 s a batch and 0.1 s a row takes its largest; jobs of 2 s, 1 s where they share."""
    asked = []

    def answered(params, prompts, cache, batch, shares):
        asked.append((len(prompts.tokens), batch, shares))
        seconds = 1.0 if shares else 2.0
        report = SimpleNamespace(
            batch=batch, seconds=seconds, tokens_per_s=sum(prompts.new) / seconds, compile_s=3.0, saved=0, cache_bytes=9
        )
        return report, [[1]] * len(prompts.tokens)

    def looped(peer, prompts, batch):
        n = len(prompts.tokens)
        return -(-n // batch) + 0.1 * n, [[1]] + [[2]] * (n - 1)

    monkeypatch.setattr(many, "run_job", answered)
    monkeypatch.setattr(many, "looped", looped)
    monkeypatch.setattr(many, "Transformers", lambda source, threads: None)
    found = list(many.rows(model_shapes.noise(models.TINY, 4, 1), 40, 64, 8, [0, 32], "full", 4, 1))
    assert [(x["engine"], x["shared"]) for x in found] == [
        ("transformers", 0), ("jkv batch", 0), ("transformers", 32), ("jkv batch", 32), ("jkv batch, no sharing", 32),
    ]  # fmt: skip
    assert [x["batch"] for x in found] == [32, 4, 32, 4, 4] and found[0]["seconds"] == 6
    assert [round(x["ratio"], 6) for x in found] == [1, 6, 1, 6, 3] and found[1]["same_rows"] == 1
    assert asked == [(40, 4, True)] * 4 + [(40, 4, False)] * 2  # each twice: the second run counts
    prompts = many.ragged(40, 64, 8, 32, 100)
    assert {tuple(t[:32]) for t in prompts.tokens} == {tuple(prompts.tokens[0][:32])}
    assert {4 <= len(t) - 32 <= 64 and 2 <= n <= 8 for t, n in zip(prompts.tokens, prompts.new, strict=True)} == {True}
    console.show(many.table(found))
    shown = capsys.readouterr().out
    assert all(x in shown for x in ("transformers", "jkv batch, no sharing", "6.00"))
