"""Weights of so many bytes: what fits, a folder of blocks in their order, and what is refused."""

import json
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

import jkv
from jkv import models
from jkv.aot.memory_estimate import Job
from jkv.aot.targets import target
from jkv.cache.cache import tree_bytes
from jkv.io import array_file, bitstack
from jkv.io.errors import FormatError
from jkv.io.fingerprint import fingerprint, sampled
from jkv.io.from_pytree import from_tree
from jkv.io.load import kept
from jkv.io.model_source import Source
from jkv.methods import parse
from jkv.models.weights import bitstack as signed
from jkv.models.weights import params as building

CONFIG = dict(models.TINY, hidden_size=64, num_hidden_layers=1)
MODEL = models.read_config(CONFIG)
TENSORS = building.seeded(MODEL, models.FAMILIES[MODEL.family].TENSORS, 0)
TREE = {name: read() for name, read in TENSORS.items()}
K, LEVELS = 2, 3
PLACES = [(0, name) for name in ("qkv", "o", "gate_up", "down")]
ORDER = [PLACES[i] for i in (2, 0, 3, 1, 1, 0, 2, 3)]


def asked(most: int | str, **more: object) -> str:
    return f"bitstack(bytes={most!r}{''.join(f', {k}={x!r}' for k, x in more.items())})"


def load(text: str, tree: dict[str, np.ndarray] = TREE, **more: object) -> models.Params:
    return from_tree(CONFIG, tree, weights=text, **more)


@pytest.fixture
def folder(tmp_path: Path) -> bitstack.Folder:
    made = bitstack.Folder(tmp_path, dict(model=sampled(MODEL, TENSORS), k=K, levels=LEVELS))
    dense = models.build(CONFIG, TENSORS, np.dtype("float32"))
    for place in PLACES:
        made.write(place, signed.decompose(np.asarray(dense.layers[0][place[1]]), K, LEVELS))
    made.finish(ORDER, {})
    return made


def least() -> int:
    """Bytes with one block of each matrix: tables of int8 with a step of 4 bytes a row, floats, and blocks."""
    tables, vectors = 2 * MODEL.vocab * (MODEL.width + 4), 3 * 4 * MODEL.width
    return tables + vectors + sum(signed.block_bytes(x, K) for x in bitstack.shapes(MODEL).values())


def test_byte_budget_takes_first_blocks_that_fit(folder: bitstack.Folder):
    sizes = {place: signed.block_bytes(shape, K) for place, shape in bitstack.shapes(MODEL).items()}
    assert list(sizes) == PLACES
    for n in range(len(ORDER) + 1):
        size = least() + sum(sizes[place] for place in ORDER[:n])
        more = sizes[ORDER[n]] - 1 if n < len(ORDER) else 10**6
        for most in (size, size + more):
            form, _ = kept("", Source(CONFIG, TENSORS), "float32", asked(most, blocks=str(folder.path)))
            assert form.counts == {place: 1 + ORDER[:n].count(place) for place in PLACES}
            assert tree_bytes(models.abstract(MODEL, form=form)) == size


def test_loaded_weights_equal_folder_blocks(folder: bitstack.Folder):
    p = load(asked(least() + signed.block_bytes(bitstack.shapes(MODEL)[ORDER[0]], K), blocks=str(folder.path)))
    for place in PLACES:
        w, n = p.layers[0][place[1]], 2 if place == ORDER[0] else 1
        signs, left, right = folder.blocks(place)
        for got, want in ((w.signs, signs[..., :n, :]), (w.left, left[..., :n, :]), (w.right, right[:n])):
            np.testing.assert_array_equal(got, want)
    floats = models.build(CONFIG, TENSORS, np.dtype("float32"), form="int8")
    assert all(np.array_equal(*x) for x in zip(*map(jax.tree.leaves, (p.embed, floats.embed)), strict=True))


def test_blocks_are_made_level_by_level_without_folder(capsys: pytest.CaptureFixture[str]):
    sizes = [signed.block_bytes(x, K) for x in bitstack.shapes(MODEL).values()]
    p = load(asked(least() + sum(sizes) + sizes[0], k=K))
    assert [w.right.shape[0] for w in map(p.layers[0].get, ("qkv", "o", "gate_up", "down"))] == [3, 2, 2, 2]
    assert "[4/4] layer 1, down: 2 blocks" in capsys.readouterr().err
    other = load(asked(least() + sum(sizes), k=K))
    assert len({fingerprint(p), fingerprint(other), fingerprint(load(asked(least() + sum(sizes), k=K)))}) == 2
    assert [x.shape[-2] for x in (other.layers[0]["qkv"].left, p.layers[0]["qkv"].left)] == [2, 3]


@pytest.mark.parametrize(
    "text, cause",
    [
        ("bitstack", "give the bytes of all weights, such as bitstack"),
        ("bitstack(bytes='1kB')", "one block of each matrix takes .* with the tables in int8: give as many or more"),
        ("bitstack(bytes='1MB', k=65)", r"k=65: a matrix \[128, 64\] has a rank of 1 to 64"),
        ("bitstack(bytes='1MB', k=0)", "k=0: give the rank of a block"),
        ("bitstack(bytes='1MB', level=2)", "bitstack has no level=; it takes bytes, blocks, k"),
        ("bitstack(bytes='1MB', k=2, blocks='x')", "have their k already; leave k out"),
        ("bitstack(bytes='1MB', blocks=2)", "blocks is a folder"),
        ("bitstack(bytes='1 furlong')", "give a number with a unit"),
        ("bitstack(bytes='1MB', blocks='/none')", "it has no card.json; give a folder that `jkv calibrate bitstack`"),
        ("bitstick(bytes='1MB')", r"must be one of int8, int4, file, bitstack\(bytes=...\), or left out"),
    ],
)
def test_invalid_weight_options_are_refused(text: str, cause: str):
    with pytest.raises(ValueError, match=cause):
        load(text)


def test_byte_budget_below_minimum_is_refused():
    assert tree_bytes(load(asked(least(), k=K))) == least()
    with pytest.raises(ValueError, match=f"one block of each matrix takes {least()} "):
        load(asked(least() - 1, k=K))


def test_blocks_of_another_model_are_refused(folder: bitstack.Folder):
    name = "model.layers.0.self_attn.o_proj.weight"
    other = {**TREE, name: TREE[name] + 1}
    with pytest.raises(ValueError, match="has the blocks of the model .* and this one is"):
        load(asked("1MB", blocks=str(folder.path)), other)


def test_nan_weights_are_refused():
    name = "model.layers.0.self_attn.o_proj.weight"
    with pytest.raises(ValueError, match=f"bitstack weights: {name}: NaN or infinity in it"):
        load(asked("1MB", k=K), {**TREE, name: np.full_like(TREE[name], np.nan)})


def test_mesh_is_refused():
    with pytest.raises(ValueError, match="bitstack weights are of one device: leave the mesh out"):
        load(asked("1MB", k=K), mesh="model=1")


@pytest.mark.parametrize("what", ["cut", "other run", "nan", "gone", "card", "order", "text", "shape", "type"])
def test_damaged_folder_is_refused(folder: bitstack.Folder, what: str):
    file, card = folder.file((0, "o")), folder.path / bitstack.CARD
    signs, left, right = folder.blocks((0, "o"))
    if what == "cut":
        file.write_bytes(file.read_bytes()[:-100])
    elif what == "other run":
        replace(folder, what={**folder.what, "k": 3}).write((0, "o"), (signs, left, right))
    elif what == "nan":
        folder.write((0, "o"), (signs, left * np.float16("nan"), right))
    elif what == "gone":
        file.unlink()
    elif what == "card":
        card.write_text(json.dumps({"method": "bitstack", "what": {}, "order": [[0]]}))
    elif what == "text":
        replace(folder, what={**folder.what, "levels": str(LEVELS)}).finish(ORDER, {})
    elif what == "shape":
        folder.write((0, "o"), (signs, left[..., :1], right))
    elif what == "type":
        folder.write((0, "o"), (signs.astype(np.int8), left, right))
    else:
        folder.finish([*ORDER, (0, "o")], {})
    cause = {"cut": "truncated", "other run": "another run", "nan": "NaN", "gone": "no such file", "card": "damaged"}
    cause |= {"text": r"damaged \(levels='3', k=2\)"} | dict.fromkeys(("shape", "type"), "no 3 blocks of a matrix")
    with pytest.raises(FormatError, match=cause.get(what, "orders more than the 3 blocks")):
        load(asked("1MB", blocks=str(folder.path)))


def test_failed_write_leaves_old_blocks(folder: bitstack.Folder, monkeypatch: pytest.MonkeyPatch):
    before = folder.blocks((0, "o"))
    monkeypatch.setattr(array_file, "sync", lambda path: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        folder.write((0, "o"), (before[0] ^ 255, *before[1:]))
    np.testing.assert_array_equal(folder.blocks((0, "o"))[0], before[0])


def test_memory_estimate_counts_bytes_and_refuses_two_devices():
    form, _ = kept("", Source(CONFIG, TENSORS), "float32", asked(least(), k=K))
    job = Job(model=MODEL, config=parse("full"), batch=1, context=64, chunk=0, dtype=np.dtype("float32"), form=form)
    one = target("cpu")
    assert job.over(one).bytes(job.params) == least()
    two = replace(one, devices=[*one.devices, *one.devices])
    with pytest.raises(ValueError, match="bitstack weights are of one device"):
        replace(job, model=replace(MODEL, heads=2)).over(two)


@pytest.mark.slow
def test_saved_cache_round_trips(tmp_path: Path):
    p = load(asked(2 * least(), k=K))
    ids = [3, 1, 4] * 20
    spec = "snapkv(budget=40, window=8) | int8"
    whole = jkv.generate(p, spec, ids, max_new_tokens=12)
    assert whole.receipt.weights == "bitstack, int8" and whole.receipt.bytes_weights == tree_bytes(p) <= 2 * least()
    drafted = jkv.generate(p, "full", ids, max_new_tokens=12, drafter="suffix")
    assert drafted.tokens == jkv.generate(p, "full", ids, max_new_tokens=12).tokens
    cache, _ = jkv.prefill(p, spec, [ids], reserve=16)
    jkv.save_cache(cache, tmp_path / "c.safetensors", p)
    again = jkv.load_cache(tmp_path / "c.safetensors", p)
    assert all(np.array_equal(*x) for x in zip(*map(jax.tree.leaves, (cache, again)), strict=True))
    with pytest.raises(ValueError, match="model"):
        jkv.load_cache(tmp_path / "c.safetensors", load(asked(least(), k=K)))
