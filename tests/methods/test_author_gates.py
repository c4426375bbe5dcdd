"""Weights that authors publish: what is read of them, what is made of it, and what is no such folder."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from zipfile import ZipFile

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jkv.io import author_weights
from jkv.io import trained_weights as io
from jkv.io.errors import FormatError
from jkv.methods import parse
from jkv.methods.base import Protect
from jkv.methods.compatibility import check
from jkv.methods.eviction.author_gates import Distilled, Repeated
from jkv.nn.gates import Surrogate
from jkv.protocols import Born
from support.tiny import DUO, MODEL, PARAMS, SINKS, ZAP, G, H, L, published_gate, published_zap, save_gate


@pytest.mark.parametrize("hidden", [None, 8])
def test_kvzap_surrogate_equals_published_module(hidden: int | None, tmp_path):
    folder = published_zap(str(tmp_path / "zap"), hidden, MODEL.width, H, L)
    score, arrays = Repeated().of(folder), load_file(f"{folder}/model.safetensors")
    x = np.random.default_rng(0).standard_normal((2, 5, MODEL.width))
    for layer in range(L):
        own = {name.removeprefix(f"layers.{layer}."): a for name, a in arrays.items() if f"layers.{layer}." in name}
        y, last = x, ""
        if hidden is not None:
            y = y @ own["0.weight"].T + own["0.bias"]
            y, last = y * 0.5 * (1 + np.vectorize(math.erf)(y / math.sqrt(2))), "2."
        want = (y @ own[f"{last}weight"].T + own[f"{last}bias"]).transpose(0, 2, 1)
        one = Repeated(gate=score.weights.part(layer))
        k, pos = jnp.zeros((2, H, 5, 4)), jnp.zeros((2, 5), jnp.int32)
        new = Born(x=jnp.asarray(x, jnp.float32), k=k, v=k, pos=pos, ids=pos, out=jnp.eye(4))
        np.testing.assert_allclose(one.birth(new)["repeated"], want, rtol=1e-4, atol=1e-5)


def gate_layer(rng: np.random.Generator, e: int, h: int, g: int, d: int, s: int) -> dict[str, np.ndarray]:
    """A layer's gate, by the names of its authors."""
    shapes = {
        "q_proj.weight": (h * g * d, e),
        "q_proj.bias": (h * g * d,),
        "k_proj.weight": (h * d, e),
        "q_norm.weight": (d,),
        "k_norm.weight": (d,),
        "k_base": (h, 1, s, d),
        "b": (h, 1, g),
    }
    return {name: rng.normal(0, 0.6, x).astype(np.float32) for name, x in shapes.items()}


def foreseen(one: dict[str, np.ndarray], x: np.ndarray, h: int, g: int, d: int) -> np.ndarray:
    """f64[H,T] of x f[T,E]: Fast KVzip's gate, head by head, query by query, sink by sink."""
    w = {name: a.astype(float) for name, a in one.items()}
    out = np.zeros((h, len(x)))
    norm = lambda y, scale: y / np.sqrt((y * y).mean() + 1e-6) * scale  # noqa: E731
    for head in range(h):
        for t, row in enumerate(x):
            k = norm(w["k_proj.weight"][head * d : (head + 1) * d] @ row, w["k_norm.weight"])
            for query in range(g):
                own = slice((head * g + query) * d, (head * g + query + 1) * d)
                q = norm(w["q_proj.weight"][own] @ row + w["q_proj.bias"][own], w["q_norm.weight"])
                logit = k @ q / math.sqrt(d) + w["b"][head, 0, query]
                others = sum(math.exp(sink @ q / math.sqrt(d) - logit) for sink in w["k_base"][head, 0])
                out[head, t] += 1 / (1 + others) / g
    return out


def test_fastkvzip_gate_equals_authors_formula(tmp_path):
    rng, (e, h, g, d, s) = np.random.default_rng(5), (12, 2, 3, 4, 5)
    layers = [gate_layer(rng, e, h, g, d, s) for _ in range(2)]
    save_gate(layers, tmp_path / "gate.safetensors")
    gate = Distilled().of(str(tmp_path / "gate.safetensors")).known
    x = rng.standard_normal((2, 6, e)).astype(np.float32)
    for layer, one in enumerate(layers):
        own = gate.part(layer)
        want = np.stack([foreseen(one, row, h, g, d) for row in x])
        np.testing.assert_allclose(own(jnp.asarray(x)), want, rtol=1e-5, atol=1e-6)
        k, pos = jnp.zeros((2, h, 6, 4)), jnp.zeros((2, 6), jnp.int32)
        new = Born(x=jnp.asarray(x), k=k, v=k, pos=pos, ids=pos, out=jnp.eye(4))
        np.testing.assert_array_equal(Distilled(gate=own).birth(new)["foreseen"], own(jnp.asarray(x)))
    narrow = author_weights.fastkvzip(SINKS)
    assert {name: a.shape[0] for name, a in narrow.items()} == dict.fromkeys(narrow, L)
    assert all(a.dtype == np.float32 for a in narrow.values())


@pytest.mark.peers
@pytest.mark.parametrize("core", ["core", "_core"])  # of numpy 1, with which authors saved, and 2
def test_docs_snippet_converts_authors_checkpoint(core: str, tmp_path, monkeypatch):
    torch = pytest.importorskip("torch", reason="no torch")

    rng = np.random.default_rng(7)
    layers = [gate_layer(rng, 12, 2, 3, 4, 5) for _ in range(2)]
    modules = [{name: torch.from_numpy(x).bfloat16() for name, x in one.items()} for one in layers]
    lost = {"loss": np.ones((3, 2)), "acc": np.ones(2, np.float32), "loss_train": np.ones(2)[0], "acc_train": 0.5}
    torch.save({"module": modules} | lost, tmp_path / "new.pt")
    with ZipFile(tmp_path / "new.pt") as new, ZipFile(tmp_path / "q4_dim16_sink16.pt", "w") as old:
        for one in new.infolist():
            old.writestr(one, new.read(one).replace(b"numpy._core.", f"numpy.{core}.".encode()))
    text = (Path(__file__).parents[2] / "docs" / "training.md").read_text()
    (lines,) = [x for x in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "safe_globals" in x]
    monkeypatch.chdir(tmp_path)
    exec(lines, {})
    found = author_weights.fastkvzip("gate.safetensors")
    want = np.stack([x["b"].float().numpy()[:, 0] for x in modules])
    assert np.array_equal(found["shift"], want) and found["query"].shape == (2, 2, 3, 4, 12)


def test_fastkvzip_has_paper_defaults():
    score = parse(f"fastkvzip(keep=0.3, gate={SINKS!r})").score
    assert isinstance(score, Protect) and (score.sinks, score.newest) == (4, 4096)
    assert (score.portion, score.short) == (0.02, 16_000)
    assert parse(f"fastkvzip(budget=200, gate={SINKS!r})").score.newest == 50
    for wrong in ("window=-1", "portion=1.0", "short=-1", "sinks=-1", "step=0"):
        with pytest.raises(ValueError, match=f"fastkvzip: .*{wrong}"):
            parse(f"fastkvzip(budget=24, {wrong})")


def test_duoattention_heads_are_read_with_window_sizes():
    heads, sinks, recent = author_weights.duoattention(DUO)
    np.testing.assert_allclose(heads, [[0.1, 0.9], [1.0, 0.3]])
    assert (sinks, recent) == (4, 48)
    config = parse(f"duoattention(share=0.25, heads={DUO!r})")
    assert config.budget.whole == (1, 2) and (config.budget.first, config.budget.local) == (4, 48)
    np.testing.assert_array_equal(config.score.score.heads, [[0, 1], [1, 1]])


def test_missing_weights_error_names_remedy():
    with pytest.raises(ValueError, match="='FOLDER'"):
        parse("duoattention").bound(PARAMS)
    with pytest.raises(ValueError, match="gate='FILE.safetensors'"):
        parse("fastkvzip(budget=24)").bound(PARAMS)
    with pytest.raises(ValueError, match="`jkv train kvzap --model"):
        parse("kvzap(budget=24)").bound(PARAMS)


@pytest.mark.parametrize("depth", [0, 1])
def test_surrogates_trained_by_jkv_are_read(depth: int, tmp_path):
    arrays = jax.device_get(Surrogate.start(MODEL, 8, jax.random.key(1), depth=depth).arrays)
    io.write(tmp_path, arrays, {"method": "kvzap", "model": io.identities(PARAMS)})
    score = parse(f"kvzap(budget=24, gate={str(tmp_path)!r})").bound(PARAMS).score.score
    assert score.weights.arrays.keys() == arrays.keys() and score.models == tuple(io.identities(PARAMS))
    for name, x in arrays.items():
        np.testing.assert_array_equal(score.weights.arrays[name], x.astype(np.float16))
    (tmp_path / "card.json").write_text("{}")
    with pytest.raises(FormatError, match="describes None"):
        parse(f"kvzap(budget=24, gate={str(tmp_path)!r})")


def test_weights_of_another_model_are_refused(tmp_path):
    wide = published_zap(str(tmp_path / "wide"), None, MODEL.width + 1, H, L)
    with pytest.raises(ValueError, match="published for it"):
        parse(f"kvzap(budget=24, gate={wide!r})").score.for_layer(MODEL, 0)
    deep = published_zap(str(tmp_path / "deep"), None, MODEL.width, H, L + 1)
    with pytest.raises(ValueError, match="another number of layers"):
        check(parse(f"kvzap(budget=24, gate={deep!r})"), MODEL)
    for i, sizes in enumerate(((MODEL.width + 1, H, G), (MODEL.width, H + 1, G), (MODEL.width, H, G + 1))):
        other = published_gate(tmp_path / f"{i}.pt", *sizes, L)
        found, own = [*sizes[1:], sizes[0]], [H, G, MODEL.width]
        why = re.escape(f"the weights are of {found}, and this llama model is of {own}")
        with pytest.raises(ValueError, match=why):
            parse(f"fastkvzip(budget=24, gate={other!r})").score.for_layer(MODEL, 0)
    deep = published_gate(tmp_path / "deep.pt", MODEL.width, H, G, L + 1)
    with pytest.raises(ValueError, match="another number of layers"):
        check(parse(f"fastkvzip(budget=24, gate={deep!r})"), MODEL)


def changed(folder: str, to: Path, **config: object) -> Path:
    """A copy of a folder with other fields in its config."""
    to.mkdir()
    for file in Path(folder).iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    old = json.loads((to / "config.json").read_text())
    (to / "config.json").write_text(json.dumps({k: v for k, v in (old | config).items() if v != "gone"}))
    return to


def test_malformed_author_folders_are_refused(tmp_path):
    for i, (fields, why) in enumerate(
        (
            ({"n_modules": "gone"}, "no whole numbers n_modules"),
            ({"hidden_dim": None}, "'layers.0.0.bias' is none of its tensors"),
            ({"n_modules": 3}, "'layers.2.0.bias' is missing"),
            ({"input_dim": 7}, r"'layers.0.0.weight' is \[8, 64\], not \[8, 7\]"),
        )
    ):
        with pytest.raises(FormatError, match=why):
            author_weights.kvzap(changed(ZAP, tmp_path / str(i), **fields))
    bad = changed(ZAP, tmp_path / "nan")
    arrays = load_file(bad / "model.safetensors")
    save_file(arrays | {"layers.1.2.bias": np.full(H, np.nan, np.float32)}, bad / "model.safetensors")
    with pytest.raises(FormatError, match="NaN"):
        author_weights.kvzap(bad)
    (bad / "model.safetensors").rename(bad / "model.pt")
    with pytest.raises(FormatError, match="pickled"):
        author_weights.kvzap(bad)
    with pytest.raises(FormatError, match="sink_size and recent_size"):
        author_weights.duoattention(changed(DUO, tmp_path / "a", sink_size="gone"))
    words = changed(DUO, tmp_path / "b")
    for text, why in (("one\ttwo\n", "no table of numbers"), ("nan\t1\n", "NaN or infinity")):
        (words / author_weights.HEADS).write_text(text)
        with pytest.raises(FormatError, match=why):
            author_weights.duoattention(words)


@pytest.mark.parametrize(
    "change, why",
    [
        (lambda one: one.pop("b"), "'module.1.b' is missing"),
        (lambda one: one.update(c=np.zeros(2, np.float32)), "'module.1.c' is none of its tensors"),
        (lambda one: one.update(b=np.zeros((2, 1, 4), np.float32)), r"'module.1.b' is \[2, 1, 4\], not \[2, 1, 3\]"),
        (lambda one: one.update(b=np.full((2, 1, 3), np.inf, np.float32)), "'module.1.b' .* NaN or infinity"),
    ],
)
def test_gate_of_another_layout_is_refused(change, why, tmp_path):
    layers = [gate_layer(np.random.default_rng(6), 12, 2, 3, 4, 5) for _ in range(2)]
    change(layers[1])
    save_gate(layers, tmp_path / "gate")
    with pytest.raises(FormatError, match=why):
        author_weights.fastkvzip(tmp_path / "gate")


def test_files_without_gate_are_refused(tmp_path):
    for name, content in (("gate.pt", b"PK\x03\x04 pickled"), ("empty", b"")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(FormatError, match="as safetensors"):
            author_weights.fastkvzip(tmp_path / name)
    for name, what in (
        ("none", "'module.0.b' is missing"),
        ("model.b", "none of its"),
        ("module.99999999.b", "'module"),
    ):
        save_file({} if name == "none" else {name: np.zeros(2)}, tmp_path / name)
        with pytest.raises(FormatError, match=what):
            author_weights.fastkvzip(tmp_path / name)


def test_gate_with_mismatched_axes_is_refused(tmp_path):
    one = gate_layer(np.random.default_rng(6), 12, 2, 3, 4, 5) | {"k_base": np.zeros((2, 5, 4), np.float32)}
    save_gate([one], tmp_path / "gate")
    with pytest.raises(FormatError, match=r"its k_base, b and k_proj.weight are \[2, 5, 4\]"):
        author_weights.fastkvzip(tmp_path / "gate")
