"""benchmarks.quantized: transformers' quantized caches are asked what they hold and what they predict."""

import numpy as np
import pytest

from benchmarks import quantized
from benchmarks.quantized import Quantized, Theirs
from jkv import models
from jkv.bench import model_shapes

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("default")]  # of torch and transformers, not ours
CODES = (Theirs("full"), Theirs("fp8", "fp8"))  # fp8 needs no other library


@pytest.fixture(scope="module")
def peer():
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    return Quantized(model_shapes.noise(models.TINY, 4, 1), 1)


@pytest.fixture(scope="module")
def params():
    return models.random(models.TINY)  # those of noise


@pytest.fixture(scope="module")
def ids():
    return np.random.default_rng(0).integers(0, 100, (2, 48)).astype(np.int32)


def test_bits_match_tensor_sizes(peer, params, ids):
    c, found = params.config, {}
    for peer.held in CODES:
        found[peer.held.name] = peer.followed(ids[:1], 40)[1]
    assert found["full"] == [32, 32]
    assert found["fp8"] == [round(8 + 32 / (40 * c.heads * c.head_dim), 4)] * 2  # one scale for a layer's prompt
    parts = {"codes": peer.torch.zeros(3, dtype=peer.torch.uint8), "scales": (peer.torch.zeros(2), "float32", 64)}
    assert quantized.tensor_bytes(parts) == 3 + 8


def test_both_libraries_follow_same_tokens(peer, params, ids):
    mine = quantized.ours(params, ids, 40, ("full", "int8", "turboquant(bits=2)"))
    other = quantized.theirs(peer, ids, 40, CODES)
    assert mine[0]["kl"] == other[0]["kl"] == 0 and mine[0]["bits"] == other[0]["bits"] == [32, 32]
    assert mine[0]["ppl"] == pytest.approx(other[0]["ppl"], rel=1e-4)
    assert 0 < mine[1]["kl"] < mine[2]["kl"] and 0 < other[1]["kl"] < mine[2]["kl"]
    assert all(len(row["kl_by_text"]) == len(ids) for row in mine + other)


def test_quantized_caches_take_turns(peer, params, ids):
    times = quantized.timed((params, peer), ids[:1], 3, 2, ("full", "int8"), CODES)
    assert list(times) == [("jkv", "full"), ("jkv", "int8"), ("transformers", "full"), ("transformers", "fp8")]
    assert all(0 < t["ms_best"] <= t["ms"] for t in times.values())


def test_too_many_new_tokens_are_refused(capsys, tmp_path):
    with pytest.raises(SystemExit):
        quantized.main(["--new", "128", "--out", str(tmp_path / "x.json")])
    assert "give fewer" in capsys.readouterr().err
