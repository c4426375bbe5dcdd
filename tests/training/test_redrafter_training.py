"""jkv train drafter: within its bytes, on the model's own continuations, and by the divergence from the model."""

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jkv
from jkv import models
from jkv.io import load as loading
from jkv.io import trained_weights
from jkv.speculative.redrafter import (
    Distilled,
    draft_logits,
    ends,
    followed,
    foreseen,
    hidden_of,
    initial_state,
    like,
    packed,
    wide,
)
from jkv.training.data import corpora
from jkv.training.losses import Batch
from jkv.training.recipes import redrafter
from jkv.training.resumable_search import Measured
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


def test_drafter_width_fills_its_byte_limit(tmp_path):
    """The file of one number more would be larger than asked for, but for what is set aside for its header."""
    spare = redrafter.HEADER + 20 * redrafter.ENTRY
    for size in (20_000, 60_000, 250_000):
        n = redrafter.inner(64, size, 30)
        sizes = []
        for inner in (n, n + 1):
            arrays = packed(like(64, inner), np.arange(30))
            trained_weights.write(tmp_path, arrays, {"method": "drafter", "model": []}, wide)
            sizes.append((tmp_path / trained_weights.WEIGHTS).stat().st_size)
        assert n > 1 and sizes[0] <= size < sizes[1] + spare
    with pytest.raises(ValueError, match="bytes=4,000: a drafter of one number that says 30 words takes"):
        redrafter.inner(64, 4_000, 30)


def test_initial_projections_are_inverse():
    for inner in (64, 80):
        net = redrafter.start(64, inner, 0)
        np.testing.assert_allclose(net.out @ net.hidden, np.eye(64), atol=1e-5)
    few = redrafter.start(64, 16, 0)
    np.testing.assert_allclose(few.hidden @ few.out, np.eye(16), atol=1e-5)


def test_vocabulary_holds_most_common_words():
    texts = batch([[7, 7, 9, 9, 9, 300, 2]], 9)
    assert redrafter.commonest(texts, 400, 3).tolist() == [2, 7, 9]


@pytest.mark.slow
def test_short_texts_are_continued_by_model_once(tmp_path):
    """And the beginnings of all, if so asked; each is continued once, also if the process is killed."""
    rows = [RNG.integers(0, 256, n).tolist() for n in (5, 24, 9)]
    texts, said = batch(rows, 24), []
    what = {"seed": 0}
    for prompt, short in ((0, [0, 2]), (12, [0, 1, 2])):
        path = Path(tmp_path, f"{prompt}.json")
        begun = redrafter.cut(texts, prompt)
        made = redrafter.continued(PARAMS, begun, 0.0, 3, Measured(path, what), said.append)
        got = np.asarray(made.ids)
        for i, row in enumerate(rows):
            begin = row[:12] if prompt and len(row) == 24 else row
            new = 24 - max(len(r[:12] if len(r) == 24 else r) for r in rows) if prompt else 24 - 9
            want = jkv.generate(PARAMS, None, [begin], max_new_tokens=new).tokens[0] if i in short else []
            assert got[i, : len(begin) + len(want)].tolist() == begin + want
            assert (got[i, len(begin) + len(want) :] == -1).all()
        np.testing.assert_array_equal(np.asarray(made.pos), np.where(got >= 0, np.arange(24), -1))
        with pytest.MonkeyPatch.context() as patch:
            patch.delattr(redrafter, "generate")
            again = redrafter.continued(PARAMS, begun, 0.0, 3, Measured(path, what), said.append)
        np.testing.assert_array_equal(again.ids, got)
    assert said == ["3 texts continued"] * 4


def logits(params, row):
    ids = jnp.asarray([row], jnp.int32)
    return np.asarray(models.forward(params, ids, jnp.arange(len(row))[None]), np.float64)[0]


def test_loss_and_agreement_match_numpy():
    """Text by text and place by place, beside chains that begin there and are given what comes."""
    rows = [RNG.integers(0, 256, n).tolist() for n in (14, 9)]
    texts, of = batch(rows, 14), np.arange(0, 250, 2)
    own, ahead = ends(PARAMS, of), 3
    net = redrafter.start(PARAMS.config.width, 12, 0)
    net = replace(net, out=5 * net.out)
    told = redrafter.lesson(PARAMS, own, texts, len(of))
    recipe = redrafter.Recipe(ahead=ahead, fall=0.5, pull=3.0)
    got, parts = jax.jit(recipe.loss)(net, own.bare, texts, told, jnp.int32(0), jax.random.key(0))
    kl, gap, greedy, drawn = ([[] for _ in range(ahead)] for _ in range(4))
    for row in rows:
        every = logits(PARAMS, row)
        p = np.exp(every) / np.exp(every).sum(-1, keepdims=True)
        us = np.asarray(hidden_of(own.back, jnp.asarray(every[:, of[own.some]], jnp.float32)))
        for t in range(len(row) - 1):
            before = jnp.asarray([[*row[: t + 1][::-1], -1, -1, -1][:3]], jnp.int32)
            h = initial_state(net, own.bare, jnp.asarray(us[t : t + 1]), before)
            for k, token in enumerate(row[t + 1 : t + 1 + ahead]):
                h = followed(net, own.bare, h, jnp.asarray([token], jnp.int32))
                u = foreseen(net, h)
                gap[k].append(((np.asarray(u[0]) - us[t + 1 + k]) ** 2).mean())
                q = np.asarray(draft_logits(own.bare, u[:, None]), np.float64)[0, 0]
                q = np.exp(q) / np.exp(q).sum()
                best, of_words = t + 1 + k, p[t + 1 + k][of] / p[t + 1 + k][of].sum()
                kl[k].append((of_words * (np.log(of_words) - np.log(q))).sum())
                greedy[k].append(p[best].argmax() == of[q.argmax()])
                drawn[k].append(p[best][of[q.argmax()]])
    means = [np.mean(x) for x in kl]
    np.testing.assert_allclose([parts[f"kl_{k + 1}"] for k in range(ahead)], means, rtol=2e-3)
    each = np.array(means) + 3 * np.array([np.mean(x) for x in gap])
    np.testing.assert_allclose(got, np.dot(each, [1, 0.5, 0.25]) / 1.75, rtol=2e-3)
    agreeing = redrafter.agreement(PARAMS, net, own, texts, ahead)
    np.testing.assert_allclose(agreeing["greedy"], [np.mean(x) for x in greedy], atol=6e-5)
    np.testing.assert_allclose(agreeing["drawn"], [np.mean(x) for x in drawn], atol=6e-5)


def test_requests_contain_no_answer():
    made = corpora.texts(PARAMS, [corpora.ASKS], 200, 12, seed=0)
    said = [PARAMS.tokenizer.decode([int(i) for i in row if i >= 0]) for row in np.asarray(made.ids)]
    assert len({*said}) > 8 and all(text.startswith("[") and text.endswith("]") and "{" not in text for text in said)
    assert said == [
        PARAMS.tokenizer.decode([int(i) for i in row if i >= 0])
        for row in np.asarray(corpora.texts(PARAMS, [corpora.ASKS], 200, 12, seed=0).ids)
    ]


@pytest.mark.slow
def test_training_lowers_loss_and_resumes_exactly(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    result = train(one, "--steps", 24, "--check", 1, "--bytes", "20kB")
    assert result.exit_code == 0, result.output
    assert "so many are what the model says" in result.stdout
    card = trained_weights.read_json(one / trained_weights.CARD)
    rows = [trained_weights.json.loads(line)["loss"] for line in (one / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 24 and np.mean(rows[-3:]) < 0.7 * np.mean(rows[:3])
    assert card["bytes"] == "20kB" and (one / trained_weights.WEIGHTS).stat().st_size <= 20_000 and card["tokens"] > 200
    text = f"drafter(folder={str(one)!r})"
    want = jkv.generate(PARAMS, None, "the quick brown fox", max_new_tokens=12)
    assert jkv.generate(PARAMS, None, "the quick brown fox", max_new_tokens=12, drafter=text).tokens == want.tokens

    advance = redrafter.Guessing._tell

    def killed(self, *told):
        advance(self, *told)
        if self.state.number == 10:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(redrafter.Guessing, "_tell", killed)
        assert train(two, "--steps", 24, "--check", 0, "--bytes", "20kB").exit_code != 0
        patch.undo()
        patch.setattr(loading, "load", lambda what, dtype="float32", *_: PARAMS)
        patch.delattr(redrafter, "generate")  # what was continued is read
        assert train(two, "--steps", 24, "--check", 0, "--bytes", "20kB", "--resume").exit_code == 0
    ours, theirs = (trained_weights.read(folder, "drafter")[0] for folder in (one, two))
    assert ours.keys() == theirs.keys() and all(np.array_equal(ours[k], theirs[k]) for k in ours)
    assert len(Distilled(PARAMS, str(two)).ends.words) == 60


def test_invalid_settings_are_refused_before_writing(tmp_path):
    out = tmp_path / "no"
    refused(train(out, "--bytes", "2kB"), "bytes=2,000", "give as many")
    refused(train(out, "--ahead", 48), "ahead=48, length=48", "longer text")
    refused(train(out, "--bytes", "few"), "give a number with a unit")
    refused(train(out, "--prompt", 48), "prompt=48", "longer text")
    assert not out.exists()
