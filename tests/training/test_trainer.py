"""jkv train: what it learns is used, a killed training ends like one that was not, and trouble loses nothing."""

import errno
import json
import os
import shutil
import subprocess
import sys
from dataclasses import fields, replace
from itertools import product
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jkv
from jkv.cli.train import METHODS
from jkv.io import load as loading
from jkv.io import trained_weights
from jkv.io.safetensors import read_json
from jkv.io.trained_weights import trained
from jkv.methods.eviction.trained_gates import Outlook, Retention
from jkv.models import Projected
from jkv.models.weights.linear import Coded, decoded
from jkv.nn.gates import RetentionGate
from jkv.training import commands, trainer
from jkv.training.checkpoints import Folder
from jkv.training.data import corpora
from jkv.training.losses import Batch
from jkv.training.recipes import trimkv
from support.commands import PARAMS, call, refused
from support.tiny import published_zap

ARGUMENTS = (
    "--budget 12 --warm 8 --steps 20 --every 5 --rate 1e-2 --texts 5 --length 64 --corpus pydoc --width 8 --top 0 "
    "--accumulate 2 --check 0"
).split()


@pytest.fixture(autouse=True, scope="module")
def tiny():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "load", lambda what, dtype="float32", *_: PARAMS)
        patch.setattr(loading, "read", lambda what: SimpleNamespace(config=dict(jkv.models.TINY, vocab_size=256)))
        yield patch


def train(out, *more, name="trimkv"):
    return call("train", name, "--out", out, *ARGUMENTS, *more)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of an uninterrupted training."""
    out = tmp_path_factory.mktemp("whole")
    result = train(out)
    assert result.exit_code == 0, result.output
    return out


def metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_training_lowers_loss_and_weights_are_usable(whole):
    rows = metrics(whole)
    assert [row["number"] for row in rows] == list(range(1, 23)) and sum("warm" in row for row in rows) == 2
    steps = [row["loss"] for row in rows if "loss" in row]
    assert np.mean(steps[-5:]) < np.mean(steps[:5]) - 0.01
    assert all(np.isfinite(x) for row in rows for x in row.values())
    card = read_json(whole / "card.json")
    assert card["method"] == "trimkv" and card["recipe"]["steps"] == 20 and card["losses"] == rows[-1]
    text = f"trimkv(budget=12, gate={str(whole)!r})"
    out = jkv.generate(PARAMS, text, "the quick brown fox " * 4, max_new_tokens=4)
    assert out.receipt.config == text and out.receipt.ratio > 1
    assert (whole / "curves.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_quantized_model_trains_like_its_decoded_floats(tiny, tmp_path):
    codes = replace(jkv.models.random(PARAMS.config, form="int8"), tokenizer=PARAMS.tokenizer)
    floats = jax.tree.map(decoded, codes, is_leaf=lambda x: isinstance(x, Coded))
    floats = replace(floats, tokenizer=PARAMS.tokenizer)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "load", lambda what, dtype, mesh, weights: {"int8": codes, None: floats}[weights])
        for out, more in (("codes", ["--weights", "int8"]), ("floats", [])):
            result = train(tmp_path / out, *more, "--steps", 3, "--warm", 2, "--accumulate", 1)
            assert result.exit_code == 0, result.output
    ours, theirs = ([row["loss"] for row in metrics(tmp_path / out) if "loss" in row] for out in ("codes", "floats"))
    assert len(set(ours)) == len(ours) == 3
    np.testing.assert_allclose(ours, theirs, rtol=1e-4)
    text = f"trimkv(budget=12, gate={str(tmp_path / 'codes')!r})"
    assert jkv.generate(codes, text, "the quick brown fox " * 4, max_new_tokens=4).receipt.config == text
    with pytest.raises(ValueError, match="model"):  # another model than that of the floats
        jkv.generate(floats, text, "the quick brown fox " * 4, max_new_tokens=4)


@pytest.mark.slow
def test_training_starts_from_saved_weights(whole, tmp_path):
    more = [*ARGUMENTS[: ARGUMENTS.index("--width")], *ARGUMENTS[ARGUMENTS.index("--width") + 2 :], "--start", whole]
    result = call("train", "trimkv", "--out", tmp_path / "on", *more, "--warm", 0, "--steps", 1, "--rate", 1e-9)
    assert result.exit_code == 0, result.output
    before, after = (trained(folder, Retention()).gate.arrays for folder in (whole, tmp_path / "on"))
    for name, x in before.items():
        np.testing.assert_allclose(after[name], x, atol=2e-9)
    assert "start" in read_json(tmp_path / "on" / "card.json")
    refused(call("train", "dms", "--out", tmp_path / "no", "--start", whole), "trimkv", str(whole))
    refused(train(tmp_path / "no", "--start", whole), "--width is that of the weights in --start")
    no_weights = call("train", "attentionpredictor", "--out", tmp_path / "no", "--start", whole)
    refused(no_weights, "No such option: --start", "--help", code=2)
    with pytest.MonkeyPatch.context() as patch:
        other = replace(PARAMS, norm=PARAMS.norm + 1)
        patch.setattr(loading, "load", lambda what, dtype, *_: other)
        refused(call("train", "trimkv", "--out", tmp_path / "no", "--start", whole), "were trained for the model")
    assert not (tmp_path / "no").exists()


def folders(name, out):
    """Folders with weights that a training of `name` may go on from: of every method whose it takes, of either depth,
    as a training begins them and with layers that differ in everything."""
    score, key = {"trimkv": Retention(), "makeeach": Outlook()}[name], jax.random.key(0)
    begin = {1: RetentionGate.start(PARAMS.config, 8, key), 2: trimkv.start_tied(PARAMS.config, 8, 3.0, key)}
    for method, depth in product(score.methods, begin):
        begun = begin[depth].arrays
        noise = {k: x + 0.1 * np.random.default_rng(0).standard_normal(x.shape) for k, x in begun.items()}
        for which, arrays in (("begun", begun), ("apart", noise)):
            folder = out / f"{method}-{depth}-{which}"
            trained_weights.write(folder, arrays, {"method": method, "model": trained_weights.identities(PARAMS)})
            yield folder


@pytest.mark.parametrize("name", ["trimkv", "makeeach"])
def test_start_weights_are_preserved_or_refused(name, tmp_path, monkeypatch):
    said = []

    class Looked(commands.Training):
        def run(self, score):
            rng = np.random.default_rng(1)
            x = jnp.asarray(rng.standard_normal((1, 4, PARAMS.config.width)), jnp.float32)
            bias = self.recipe.bias(score, self.texts, jax.random.key(0))
            a, age = Projected(x=x, q=x, k=x, v=x), jnp.ones((1, 1, 4), jnp.int32)
            said.append((x, [np.asarray(bias(i, a, age)[0][:, :, 0]) for i in range(PARAMS.config.layers)]))
            raise ValueError("looked at")

    monkeypatch.setattr(commands, "Training", Looked)
    given = "--budget 24 --steps 1 --texts 2 --length 48 --corpus pydoc --check 0".split()
    for folder in folders(name, tmp_path):
        out = tmp_path / f"out-{folder.name}"
        result = call("train", name, "--out", out, *given, "--start", folder)
        if "looked at" in result.stderr:
            gate = trained(folder, {"trimkv": Retention(), "makeeach": Outlook()}[name]).gate
            x, log_beta = said.pop()
            own = [gate.part(i)(x) for i in range(PARAMS.config.layers)]
            np.testing.assert_allclose(log_beta, np.stack(own), rtol=1e-5)
        else:
            refused(result, str(folder), "layer to layer", "begin without --start", "jkv train trimkv")
            assert name == "makeeach" and "2-begun" not in folder.name and not out.exists()


@pytest.mark.slow
def test_makeeach_weights_are_usable(tiny, tmp_path):
    given = "--budget 24 --steps 3 --texts 2 --length 48 --corpus pydoc --width 4 --check 1 --rate 0.01".split()
    result = call("train", "makeeach", "--out", tmp_path, *given)
    assert result.exit_code == 0, result.output
    card = read_json(tmp_path / "card.json")
    assert card["method"] == "makeeach" and set(card["eval"]["ppl"]) == {"full", "streaming", "makeeach"}
    out, middle = (np.asarray(trained(tmp_path, Outlook()).gate.arrays[f"{x}.kernel"]) for x in ("out", "hidden.1"))
    assert (out == out[:1]).all() and np.ptp(middle, 0).max() > 0
    refused(train(tmp_path / "few", "--check", 1), "layer 0 would hold 12 tokens")  # streaming, beside it
    assert not (tmp_path / "few").exists()
    assert len(metrics(tmp_path)) == 3 and {"kl", "ce", "capacity"} <= metrics(tmp_path)[-1].keys()


@pytest.fixture
def stopped(whole, tmp_path, tiny):
    """The folder of a training that was killed after its 14th number, while it wrote a checkpoint and a line."""
    tell = trainer.Training._tell

    def stop(self, what, told):
        tell(self, what, told)
        if self.state.number == 14:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer.Training, "_tell", stop)
        assert train(tmp_path).exit_code == 130
    assert (tmp_path / "checkpoints" / "14").is_dir()  # what Ctrl-C leaves; a kill leaves less:
    (tmp_path / "checkpoints" / "14").rename(tmp_path / "checkpoints" / "14.orbax-checkpoint-tmp")
    shutil.rmtree(tmp_path / "checkpoints" / "14.orbax-checkpoint-tmp" / "default" / "d")
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"number": 15, "lo')
    return tmp_path


def test_killed_training_resumes_exactly(whole, stopped):
    result = train(stopped, "--resume")
    assert result.exit_code == 0, result.output
    a, b = (jax.tree.leaves(trained(folder, Retention())) for folder in (whole, stopped))
    assert all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))
    assert metrics(stopped) == metrics(whole)  # of every step, to the last bit
    last = [Folder(f, read_json(f / "training.json"), True).last(None) for f in (whole, stopped)]
    assert all(np.array_equal(x, y) for x, y in zip(*map(jax.tree.leaves, last), strict=True))


def test_resume_refuses_another_training(whole, tiny, tmp_path):
    refused(train(whole), "holds a training already", "--resume")
    refused(train(whole, "--resume", "--seed", 1), "holds another training", "recipe", "give another --out")
    with pytest.MonkeyPatch.context() as patch:
        other = replace(PARAMS, norm=PARAMS.norm + 1)
        patch.setattr(loading, "load", lambda what, dtype, *_: other)
        refused(train(whole, "--resume"), "holds another training, with model")
    assert len(metrics(whole)) == 22


def test_nonfinite_loss_stops_training_and_keeps_last_state(tiny, tmp_path, whole):
    tell = trainer.Training._tell

    def spoil(self, what, told):
        tell(self, what, told)
        if self.state.number == 6:
            self.params = replace(PARAMS, norm=jnp.inf * PARAMS.norm)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer.Training, "_tell", spoil)
        result = train(tmp_path)
    assert result.exit_code == 1
    error = result.stderr.splitlines()[-1]
    assert "error: the loss, or a weight, is not finite at step 5, with the texts [" in error
    assert "after 4 steps is kept" in error and "lower --rate" in error
    state = Folder(tmp_path, read_json(tmp_path / "training.json"), True).last(None)
    assert int(state["step"]) == 4 and all(np.isfinite(np.asarray(x)).all() for x in jax.tree.leaves(state))
    assert metrics(tmp_path) == metrics(whole)[:6]
    assert not (tmp_path / "card.json").exists()


@pytest.fixture(scope="module")
def given_folders(tmp_path_factory):
    """Folders that a training asks for: gates that foresee, and gates that fade."""
    at, c = tmp_path_factory.mktemp("folders"), PARAMS.config
    card = {"method": "trimkv", "model": trained_weights.identities(PARAMS)}
    trained_weights.write(at / "fading", RetentionGate.start(c, 8, jax.random.key(0)).arrays, card)
    zap = published_zap(str(at / "foreseen"), 8, c.width, c.heads, c.layers)
    return {"foreseen": zap, "fading": at / "fading"}


@pytest.mark.parametrize("settings", METHODS)
def test_training_records_every_setting(settings, tmp_path, monkeypatch, given_folders):
    """All that the weights depend on: not how often they are saved, nor at which budget some are measured.

    Of a folder that is read, what is in it.
    """
    told = []

    def stopped(path, what, resume):
        told.append(what)
        raise ValueError("told")

    monkeypatch.setattr(commands, "Folder", stopped)
    small = dict(budget=12, window=8, answer=8, chunk=32, page=4, moments=2, fall=7, ratio=3.0, width=9, dense_layers=1)
    small |= dict(rank=12, rope_dim=4, layer=1)
    name, given = settings.__name__.lower(), {f.name: small.get(f.name, f.default) for f in fields(settings)}
    read = {k: given_folders[k] for k in given.keys() & given_folders.keys()}
    given = {k: x for k, x in given.items() if k != "start"} | read
    options = [x for k, v in given.items() for x in (f"--{k.replace('_', '-')}", v)]
    result = call(
        "train", name, "--out", tmp_path, *options, "--texts", 2, "--length", 200, "--corpus", "pydoc", "--check", 0
    )
    assert result.stderr.splitlines()[-1] == "error: told", result.stderr
    wrote = told[0] | told[0]["recipe"]
    assert ("gates" in wrote) == bool(read) and (wrote.get("layers") == (1,)) == ("layer" in given)  # it says all
    unsaid = {"every", "layer", *read} | ({"budget"} if name in ("locret", "kvzap", "utility") else set())
    assert {k: wrote.get(k) for k in given.keys() - unsaid} == {k: given[k] for k in given.keys() - unsaid}


@pytest.mark.parametrize("what", ["warm", "step"])
def test_nonfinite_weights_are_never_saved(tiny, tmp_path, whole, what):
    """What the last update of a layer, or of all, breaks, no loss has seen."""

    def broken(score):
        return replace(score, gate=score.gate.update(lambda x: x.at[1, 0, 0].set(jnp.nan), "hidden.0.kernel"))

    with pytest.MonkeyPatch.context() as patch:
        if what == "warm":
            warmed = trimkv.Recipe.warmed
            patch.setattr(trimkv.Recipe, "warmed", lambda *a: ((broken(s), x) for s, x in warmed(*a)))
        else:
            whole_model = lambda score: score.gate.arrays["out.kernel"].ndim == 3  # noqa: E731
            step, broke = trainer.TrainState.apply_gradients, lambda s: broken(s) if whole_model(s) else s
            patch.setattr(
                trainer.TrainState,
                "apply_gradients",
                lambda state, grads: (made := step(state, grads=grads)).replace(params={"score": broke(made.score)}),
            )
        result = train(tmp_path, *(["--seed", 3] if what == "step" else []))  # a program that is not compiled yet
    assert result.exit_code == 1 and "the loss, or a weight, is not finite at" in result.stderr
    state = Folder(tmp_path, read_json(tmp_path / "training.json"), True).last(None)
    assert all(np.isfinite(np.asarray(x)).all() for x in jax.tree.leaves(state))
    assert int(state["layers"]) + int(state["step"]) == {"warm": 0, "step": 2}[what]


@pytest.mark.parametrize(
    "damage",
    [b"\0" * 30, b'{"number": 3, "lo', b"[1]", b"{}", b'{"number": "3"}', b"\xff\xfe", b"[" * 100_000],
    ids=["nul", "torn", "list", "nothing", "text", "bytes", "deep"],
)
def test_damaged_metrics_line_is_skipped(whole, tmp_path, damage, capsys):
    shutil.copy(whole / "training.json", tmp_path)
    lines = (whole / "metrics.jsonl").read_bytes().splitlines()
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join([*lines[:2], damage, *lines[3:]]) + b"\n")
    with Folder(tmp_path, read_json(whole / "training.json"), True) as folder:
        assert [row["number"] for row in folder.metrics()] == [1, 2, *range(4, 23)]
    assert "metrics.jsonl: line 3 is damaged and left out" in capsys.readouterr().err


def test_finished_training_resumes_with_damaged_metrics(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "again")
    (tmp_path / "again" / "metrics.jsonl").write_bytes(b"\0\0\n")
    result = train(tmp_path / "again", "--resume")
    assert result.exit_code == 0 and "line 1 is damaged" in result.stderr, result.output


HOLDER = """
import sys
from pathlib import Path
from jkv.utils.file_locks import locked
with locked(Path(sys.argv[1])):
    print("in", flush=True)
    sys.stdin.read()
"""


def test_locked_folder_is_refused_unchanged(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "again")
    before = {p: p.read_bytes() for p in (tmp_path / "again").rglob("*") if p.is_file()}
    held = [sys.executable, "-c", HOLDER, str(tmp_path / "again" / ".lock")]
    with subprocess.Popen(held, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "in\n"
        refused(train(tmp_path / "again", "--resume"), "another process trains in it", "another --out")
        other.kill()
    assert {p: p.read_bytes() for p in before} == before
    assert train(tmp_path / "again", "--resume").exit_code == 0  # what a kill held is free
    assert not (tmp_path / "again" / ".lock").exists()


def test_full_disk_does_not_hide_first_error(tiny, tmp_path):
    with pytest.MonkeyPatch.context() as patch:

        def full(self, number, value):
            raise OSError(errno.ENOSPC, "No space left on device")

        def broken(self):
            raise ValueError("the first error")

        patch.setattr(Folder, "save", full)
        patch.setattr(trainer.Training, "_steps", broken)
        result = train(tmp_path, "--warm", 0)
    assert result.exit_code == 1 and result.stderr.splitlines()[-1] == "error: the first error"
    assert "the state could not be kept" in result.stderr and "No space left" in result.stderr


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--length", 100000], "the model's context is 512"),
        (["--budget", 64], "a budget below the length"),
        (["--check", 4000], "pydoc:test: the corpus has"),
        (["--corpus", "nothing"], "there is no corpus or file 'nothing'"),
        (["--texts", 1, "--corpus", "stdlib"], "at least one of each of the 2 sources"),
        (["--warm", 0, "--steps", 0], "something to do"),
    ],
)
def test_invalid_settings_are_refused_before_writing(tmp_path, more, says):
    refused(train(tmp_path / "out", *more), says)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("option", ["--texts 0", "--budget 0", "--every 0", "--steps -1", "--top -1", "--check -1"])
def test_too_small_options_are_refused_by_name(tmp_path, option):
    refused(train(tmp_path / "out", *option.split()), f"'{option.split()[0]}'", "trimkv --help", code=2)
    assert not (tmp_path / "out").exists()


def test_unknown_method_is_refused(tmp_path):
    refused(train(tmp_path, name="snapkv"), "No such command 'snapkv'", "train --help", code=2)
    assert all(settings.__name__.lower() in call("train", "--help").stdout for settings in METHODS)


def test_renamed_held_out_texts_are_refused(tiny, tmp_path, monkeypatch):
    held, _ = corpora.held_back(PARAMS, "pydoc", 200, 2, 0)
    made = Batch(ids=jnp.asarray(np.pad(held, ((0, 0), (9, 0)), constant_values=7)), pos=jnp.zeros((2, 209), int))
    monkeypatch.setattr(corpora, "texts", lambda *_: made)
    refused(train(tmp_path / "out", "--length", 200, "--check", 2), "100% of pydoc:test", "leave out the --corpus")
    assert not (tmp_path / "out").exists()


def test_corpus_shorter_than_text_is_refused(tmp_path):
    (tmp_path / "short.txt").write_text("\n\n".join(f"a paragraph, number {i}" for i in range(9)))
    refused(train(tmp_path / "out", "--corpus", tmp_path / "short.txt", "--length", 500), "too short", "500")


def test_lessons_are_cached_within_memory_limit(monkeypatch):
    asked = []

    class Recipe(trainer.Recipe):
        def lesson(self, params, batch):
            asked.append(int(batch.ids[0, 0]))
            return jnp.zeros((1, 10))

    monkeypatch.setattr(trainer, "MEMORY", 100)  # bytes, of 40 each
    ids = jnp.arange(3)[:, None]
    run = trainer.Training(PARAMS, Batch(ids=ids, pos=0 * ids), Recipe(), None)
    assert all(run._lesson(i).shape == (10,) for i in (0, 1, 2, 0, 1, 2))
    assert asked == [0, 1, 2, 2]


def test_equal_recipes_share_their_optimizer_and_so_their_programs():
    one, two = (trainer.tx(trimkv.Recipe(budget=8, warm=0, seed=seed)) for seed in (0, 0))
    assert one is two is not trainer.tx(trimkv.Recipe(budget=8, warm=0, seed=1))


MESH = """
import jax, jax.numpy as jnp, numpy as np, sys
from jkv import models
from jkv.methods.eviction.trained_gates import Retention
from jkv.nn.gates import RetentionGate
from jkv.training import trainer
from jkv.training.checkpoints import Folder
from jkv.training.recipes import trimkv
from jkv.training.losses import Batch

assert len(jax.devices()) == 2
params = models.random(models.TINY)
ids = jnp.asarray(np.random.default_rng(0).integers(0, 100, (4, 32)), jnp.int32)
texts = Batch(ids=ids, pos=jnp.tile(jnp.arange(32), (4, 1)))
recipe = trimkv.Recipe(budget=8, warm=0, steps=1, batch=2, accumulate=2, rise=1, rate=1e-2)
score = Retention(gate=RetentionGate.start(params.config, 4, jax.random.key(0)))
run = trainer.Training(params, texts, recipe, Folder(sys.argv[1], {}, False))
run.run(score)
where = {len(x.sharding.device_set) for x in jax.tree.leaves(run.params)}
which = trainer.Order(4, 4, 0)(0)
batches = jax.tree.map(lambda x: x.reshape(2, 2, 32), trainer.rows(texts, which))
told = jax.tree.map(lambda *x: np.stack(x).reshape(2, 2, *x[0].shape), *(run.lessons[i] for i in which))
_, want = trainer.train_step(trainer.create(score, recipe.tune()), params, batches, told, recipe)
got = run.folder.metrics()[0]
print(where, max(abs(got[k] - float(x)) for k, x in want.items() if k != "finite"))
"""


@pytest.mark.slow
def test_two_device_step_equals_one_device_step(tmp_path):
    flags = "--xla_force_host_platform_device_count=2 --xla_backend_optimization_level=0"
    done = subprocess.run(
        [sys.executable, "-c", MESH, str(tmp_path / "out")], capture_output=True, text=True, timeout=300,
        env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    where, apart = done.stdout.split("}")
    assert where == "{2" and float(apart) < 1e-5
