"""Texts to train on: of the training side alone, in an order that only the seed and the step decide."""

import re
from dataclasses import replace

import numpy as np
import pytest

from jkv import models
from jkv.eval import corpora, tasks
from jkv.eval.tasks import scbench
from jkv.training.data import corpora as data
from jkv.training.data import lookups
from support.commands import tokenizer

PARAMS = replace(models.random(dict(models.TINY, vocab_size=256, max_position_embeddings=2048)), tokenizer=tokenizer())


def text(batch, row):
    return PARAMS.tokenizer.decode([int(i) for i in np.asarray(batch.ids)[row] if i >= 0])


def test_held_out_text_is_never_trained_on(tmp_path):
    paragraphs = [f"Paragraph {i} of this text says {i * i}." for i in range(60)]
    path = tmp_path / "own.txt"
    path.write_text("\n\n".join(paragraphs))
    sides = [set(corpora.documents(f"{path}:{side}")) for side in ("train", "test")]
    assert all(sides) and not sides[0] & sides[1] and sides[0] | sides[1] == set(paragraphs)
    made = data.texts(PARAMS, [str(path)], 120, 8, seed=1)
    known = "\n\n".join(sorted(sides[0]))
    for row in range(8):
        whole = [p for p in paragraphs if p in text(made, row)]
        assert whole and set(whole) <= sides[0] and all(p in known for p in whole)
    assert corpora.text(f"{path}:test") == "\n\n".join(corpora.documents(f"{path}:test"))


def test_file_paragraphs_stay_in_order(tmp_path):
    path = tmp_path / "own.txt"
    path.write_text("\n\n".join(f"Paragraph {i:03} of this text." for i in range(400)))
    made = data.texts(PARAMS, [str(path)], 300, 8, seed=1)
    found = [[int(i) for i in re.findall(r"Paragraph (\d\d\d) of", text(made, row))] for row in range(8)]
    steps = np.concatenate([np.diff(numbers) for numbers in found])
    assert len(steps) > 40 and (steps > 0).mean() > 0.8  # a window may lie over the border of two runs
    assert len({numbers[0] // 100 for numbers in found}) > 2  # which come from everywhere


def test_paragraphs_shared_with_held_out_documents_are_excluded():
    train, test = (corpora.text(f"pydoc:{side}").split("\n\n") for side in ("train", "test"))
    assert not set(train) & set(test)
    whole = [set(document.split("\n\n")) for document in corpora.split("pydoc", corpora.HELD_BACK)[0]]
    assert any(document & set(test) for document in whole)  # the manual does repeat itself
    assert set(train) == set().union(*whole) - set(test)


def test_positions_count_from_text_start_and_skip_padding():
    made = data.texts(PARAMS, ["pydoc", data.TASKS], 1800, 4, seed=0)
    ids, pos = np.asarray(made.ids), np.asarray(made.pos)
    size = (ids >= 0).sum(1)
    assert (size[:2] == 1800).all() and (size[2:] > 1200).all() and ids.shape == (4, 1800)
    for row in range(4):
        assert (pos[row, : size[row]] == np.arange(size[row])).all() and (pos[row, size[row] :] == -1).all()
    labelled = np.asarray(made.labelled)
    assert (labelled.sum(1) == size - 1).all()


def test_tasks_hold_answers_and_differ_from_evaluation():
    made = data.texts(PARAMS, [data.TASKS], 1800, 2, seed=0)
    counted = data.count(PARAMS)
    for row in range(2):
        own = tasks.examples(data.ASKED[row], 1800 - 64, 1, data.SEEDS + row, counted)[0]
        assert own.gold in text(made, row)[-len(own.gold) - 80 :]
        assert own.prompt != tasks.examples(data.ASKED[row], 1800 - 64, 1, row, counted)[0].prompt
    assert all("prose" not in tasks.TASKS[name].about for name in data.ASKED)  # that is of the manual, held back or not


def grams(text, n):
    words = re.findall(r"[a-z]+|[^\sa-z]", text.lower())
    return {tuple(words[i : i + n]) for i in range(len(words) - n + 1)}


def test_lookups_share_no_wording_with_tasks():
    said = [f"{x.told}\n{x.asked}\n{x.opening}" for x in lookups.every(np.random.default_rng(0), 20)]
    own = set().union(*(grams(line, 4) for text in said for line in text.split("\n")))
    counted = lambda text: len(text) // 4  # noqa: E731
    measured = [tasks.examples(name, 700, 2, 0, counted) for name in tasks.TASKS]
    measured += [
        [x for one in scbench.sessions(name, 900, 1, 0, counted) for x in one.turns] for name in scbench.SESSIONS
    ]
    known = {gram for examples in measured for x in examples for gram in grams(f"{x.prompt} {x.gold}", 4)}
    numbers = {gram for gram in own if not any(word.isalpha() and len(word) > 1 for word in gram)}
    assert len(own) > 1000 and not (own - numbers) & known
    assert grams(tasks.examples("niah_single_2", 700, 1, 5, counted)[0].prompt, 4) & known  # as it would be found


def test_lookups_share_no_text_with_held_out_corpora():
    held = {name: grams(corpora.text(f"{name}:test"), 12) for name in data.HAYS}
    rows = data.texts(PARAMS, [data.LOOKUPS], 700, 8, seed=3)
    for i, name in enumerate([*data.HAYS] * 4):
        assert not grams(text(rows, i), 12) & held[name]
        assert grams(corpora.documents(f"{name}:test")[0], 12) & held[name]


def test_every_epoch_visits_each_text_once():
    order = data.Order(texts=5, rows=3, seed=2)
    taken = [i for step in range(10) for i in order(step)]
    assert all(sorted(taken[i : i + 5]) == list(range(5)) for i in range(0, 30, 5))
    assert taken[:5] != taken[5:10] and order(4) == data.Order(texts=5, rows=3, seed=2)(4)
    assert [order(i) for i in range(9)] != [data.Order(texts=5, rows=3, seed=3)(i) for i in range(9)]


def test_texts_need_a_tokenizer():
    with pytest.raises(ValueError, match="needs a tokenizer"):
        data.texts(replace(PARAMS, tokenizer=None), ["pydoc"], 64, 1, 0)
