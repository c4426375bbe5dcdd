"""jkv train drafter: within its bytes, on the model's own continuations, and by the divergence from the model."""

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jkv
from jkv import models
from jkv.generation.distilled import Distilled, Words, packed, thinned
from jkv.io import learned
from jkv.io import load as loading
from jkv.training import data, distilling, drafter
from jkv.training.losses import Batch
from jkv.training.measured import Measured
from support.commands import PARAMS, call, refused

ARGUMENTS = "--corpus asks --corpus pydoc --texts 6 --length 48 --batch 2 --words 60 --rate 5e-3 --every 4".split()
RNG = np.random.default_rng(5)


@pytest.fixture(autouse=True, scope="module")
def tiny():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "load", lambda what, dtype="float32", *_: PARAMS)
        yield patch


def train(out, *more):
    return call("train", "drafter", "--out", out, *ARGUMENTS, *more)


def batch(rows, length) -> Batch:
    ids = np.array([[*row, *[-1] * (length - len(row))] for row in rows], np.int32)
    return Batch(ids=jnp.asarray(ids), pos=jnp.asarray(np.where(ids >= 0, np.arange(length, dtype=np.int32), -1)))


def test_a_drafter_has_as_many_blocks_as_fit_into_its_bytes(tmp_path):
    """The file of one block more would be larger than asked for, but for what is set aside for its header."""
    params = models.random(dict(models.TINY, num_hidden_layers=5, num_attention_heads=8, hidden_size=64))
    words, spare = Words(of=np.arange(30), read=np.zeros(100, np.int32)), drafter.HEADER + 60 * drafter.ENTRY
    for size in (60_000, 100_000, 120_000):
        n = drafter.depth(params, size, 30)
        sizes = []
        for blocks in (n, n + 1):
            arrays = packed(thinned(params, words.of, range(blocks)), words, range(blocks)) if blocks <= 5 else {}
            learned.write(tmp_path, arrays, {"method": "drafter", "model": []}, drafter.wide)
            sizes.append((tmp_path / learned.WEIGHTS).stat().st_size)
        assert 0 < n < 5 and sizes[0] <= size < sizes[1] + spare
    assert drafter.depth(params, 10**9, 30) == 5
    with pytest.raises(ValueError, match="bytes=9,000: one block of this model and the map of 30 words take"):
        drafter.depth(params, 9_000, 30)


def test_a_token_is_read_as_the_word_of_the_nearest_embedding():
    params = models.random(dict(models.TINY, vocab_size=400))
    texts = batch([[7, 7, 9, 9, 9, 300, 2]], 9)
    small, words = drafter.begun(params, texts, 3, [1])
    assert words.of.tolist() == [2, 7, 9]
    wide = np.asarray(params.embed, np.float64)
    unit = wide / np.linalg.norm(wide, axis=1, keepdims=True)
    assert words.read.tolist() == (unit @ unit[words.of].T).argmax(1).tolist()
    np.testing.assert_array_equal(small.embed, params.embed[words.of])
    np.testing.assert_array_equal(small.layers[0]["o"], params.layers[1]["o"])
    assert (
        drafter.in_words(texts, words).ids.tolist()[0][:2] == [1, 1] and drafter.in_words(texts, words).ids[0, -1] == -1
    )


@pytest.mark.slow
def test_short_texts_go_on_as_the_model_continues_them(tmp_path):
    """And the beginnings of all, if so asked; each is continued once, also if the process is killed."""
    rows = [RNG.integers(0, 256, n).tolist() for n in (5, 24, 9)]
    texts, said = batch(rows, 24), []
    what = {"seed": 0}
    for prompt, short in ((0, [0, 2]), (12, [0, 1, 2])):
        path = Path(tmp_path, f"{prompt}.json")
        begun = drafter.cut(texts, prompt)
        made = drafter.continued(PARAMS, begun, 0.0, 3, Measured(path, what), said.append)
        got = np.asarray(made.ids)
        for i, row in enumerate(rows):
            begin = row[:12] if prompt and len(row) == 24 else row
            new = 24 - max(len(r[:12] if len(r) == 24 else r) for r in rows) if prompt else 24 - 9
            want = jkv.generate(PARAMS, None, [begin], max_new_tokens=new).tokens[0] if i in short else []
            assert got[i, : len(begin) + len(want)].tolist() == begin + want
            assert (got[i, len(begin) + len(want) :] == -1).all()
        np.testing.assert_array_equal(np.asarray(made.pos), np.where(got >= 0, np.arange(24), -1))
        with pytest.MonkeyPatch.context() as patch:
            patch.delattr(drafter, "generate")
            again = drafter.continued(PARAMS, begun, 0.0, 3, Measured(path, what), said.append)
        np.testing.assert_array_equal(again.ids, got)
    assert said == ["3 texts continued"] * 4


def logits(params, row):
    ids = jnp.asarray([row], jnp.int32)
    return np.asarray(models.forward(params, ids, jnp.arange(len(row))[None]), np.float64)[0]


@pytest.mark.slow
def test_the_loss_is_the_divergence_over_the_words_and_agreement_counts_what_is_said():
    """Beside float64 numpy and the oracle of models, text by text."""
    rows = [RNG.integers(0, 256, n).tolist() for n in (20, 13)]
    texts = batch(rows, 20)
    small, words = drafter.begun(PARAMS, texts, 25, [1])
    bare, read = replace(small, layers=()), drafter.in_words(texts, words)
    told = distilling.lesson(PARAMS, bare, texts, 25)
    score = {"layers": small.layers, "norm": small.norm}
    got, _ = jax.jit(distilling.Recipe().loss)(score, bare, read, told, jnp.int32(0), jax.random.key(0))
    kl, greedy, drawn = [], [], []
    for row in rows:
        every, own = logits(PARAMS, row)[:-1], logits(small, words.read[row].tolist())[:-1]
        p, q = every[:, words.of], own - np.log(np.exp(own).sum(-1, keepdims=True))
        p = p - np.log(np.exp(p).sum(-1, keepdims=True))
        kl += (np.exp(p) * (p - q)).sum(-1).tolist()
        token = words.of[own.argmax(-1)]
        greedy += (every.argmax(-1) == token).tolist()
        drawn += (np.exp(every) / np.exp(every).sum(-1, keepdims=True))[np.arange(len(token)), token].tolist()
    np.testing.assert_allclose(got, np.mean(kl), rtol=1e-4)
    found = drafter.agreement(PARAMS, small, words, texts)
    assert found == {"greedy": round(np.mean(greedy), 4), "drawn": pytest.approx(np.mean(drawn), abs=6e-5)}


def test_requests_are_texts_without_an_answer():
    made = data.texts(PARAMS, [data.ASKS], 200, 12, seed=0)
    said = [PARAMS.tokenizer.decode([int(i) for i in row if i >= 0]) for row in np.asarray(made.ids)]
    assert len({*said}) > 8 and all(text.startswith("[") and text.endswith("]") and "{" not in text for text in said)
    assert said == [
        PARAMS.tokenizer.decode([int(i) for i in row if i >= 0])
        for row in np.asarray(data.texts(PARAMS, [data.ASKS], 200, 12, seed=0).ids)
    ]


@pytest.mark.slow
def test_it_learns_what_the_model_says_and_goes_on_after_a_kill(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    result = train(one, "--steps", 24, "--check", 1, "--bytes", "20kB")
    assert result.exit_code == 0, result.output
    assert "the model says what is guessed in" in result.stdout
    card = learned.read_json(one / learned.CARD)
    rows = [learned.json.loads(line)["loss"] for line in (one / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 24 and np.mean(rows[-3:]) < 0.7 * np.mean(rows[:3])
    assert card["bytes"] == "20kB" and (one / learned.WEIGHTS).stat().st_size <= 20_000 and card["tokens"] > 200
    text = f"drafter(folder={str(one)!r})"
    want = jkv.generate(PARAMS, None, "the quick brown fox", max_new_tokens=12)
    assert jkv.generate(PARAMS, None, "the quick brown fox", max_new_tokens=12, draft=text).tokens == want.tokens

    advance = distilling.Distilling._tell

    def killed(self, *told):
        advance(self, *told)
        if self.state.number == 10:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distilling.Distilling, "_tell", killed)
        assert train(two, "--steps", 24, "--check", 0, "--bytes", "20kB").exit_code != 0
        patch.undo()
        patch.setattr(loading, "load", lambda what, dtype="float32", *_: PARAMS)
        patch.delattr(drafter, "generate")  # what was continued is read
        assert train(two, "--steps", 24, "--check", 0, "--bytes", "20kB", "--resume").exit_code == 0
    ours, theirs = (learned.read(folder, "drafter")[0] for folder in (one, two))
    assert ours.keys() == theirs.keys() and all(np.array_equal(ours[k], theirs[k]) for k in ours)
    assert Distilled(PARAMS, str(two)).model.params.config.vocab == 60


def test_what_cannot_be_is_refused_before_anything_is_written(tmp_path):
    out = tmp_path / "no"
    refused(train(out, "--bytes", "2kB"), "bytes=2,000", "give as many")
    refused(train(out, "--bytes", "few"), "give a number with a unit")
    refused(train(out, "--prompt", 48), "prompt=48", "longer text")
    assert not out.exists()
