"""A drafter made of a model's own blocks: what its folder holds, what it guesses, and whom it is for."""

from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest

import jkv
from jkv.generation import generating
from jkv.generation.distilled import METHOD, STEP, Distilled, Words, packed, thinned, unpacked
from jkv.generation.drafting import Drafting
from jkv.generation.named import drafter
from jkv.io import learned
from jkv.io.errors import FormatError
from jkv.models import TINY, random
from support.rig import PARAMS

TEXT = [5, 6, 7, 8, 9] * 8
EVERY = Words(of=np.arange(100), read=np.arange(100))
BLOCKS = [*range(PARAMS.config.layers)]


@pytest.fixture(autouse=True)
def still(monkeypatch):
    """A clock that stands: a pass of n tokens is taken to cost 1 + 0.2 (n - 1) steps."""
    monkeypatch.setattr(generating, "Drafting", partial(Drafting, clock=lambda: 0.0))


def written(folder, params=PARAMS, words=EVERY, blocks=BLOCKS, **card):
    arrays = packed(thinned(params, words.of, blocks), words, blocks)
    about = {"method": METHOD, "model": learned.identities(params)} | card
    learned.write(folder, arrays, about, lambda name: name.endswith(STEP))
    return str(folder)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """All blocks, and all words: the model itself, in 8 bits."""
    return written(tmp_path_factory.mktemp("whole"))


@pytest.fixture(scope="module")
def half(tmp_path_factory):
    """Its first block, and every second word: an odd token is read as the one before it."""
    words = Words(of=np.arange(0, 100, 2), read=np.arange(100) // 2)
    return written(tmp_path_factory.mktemp("half"), words=words, blocks=[0])


@pytest.mark.slow
@pytest.mark.parametrize("heat", [{}, {"temperature": 0.8, "seed": 4}])
def test_its_guesses_change_no_token(whole, half, heat):
    how = {"max_new_tokens": 40, "stop_ids": (), **heat}
    want = jkv.generate(PARAMS, "int8", [TEXT, [3, 4, 5]], **how)
    for folder in (whole, half):
        got = jkv.generate(PARAMS, "int8", [TEXT, [3, 4, 5]], draft=f"drafter(folder={folder!r})", **how)
        assert got.tokens == want.tokens and 0 < got.report.passes <= 40
        assert got.report.drafted > 0 and got.report.draft_failed is None


@pytest.mark.slow
def test_all_of_a_model_guesses_what_the_model_says(whole):
    """In 8 bits it is nearly the model: of 40 tokens at most a few passes miss."""
    got = jkv.generate(PARAMS, None, TEXT, max_new_tokens=40, stop_ids=(), draft=Distilled(PARAMS, whole))
    assert got.report.passes <= 16


@pytest.mark.slow
def test_it_reads_and_says_words_of_its_own(half):
    """Beside the small model by itself, on words: what it says are the model's tokens of these."""
    one = Distilled(PARAMS, half)
    one.begin([[4, 5, 6, 7]], 8)
    branch = one.branch([[4, 5, 6, 7, 9]])
    assert len(branch.propose([[4, 5, 6, 7, 9, 8]], 3)[0].ids) == 3
    (guess,) = one.propose([[4, 5, 6, 7, 9]], 3)
    small = thinned(PARAMS, np.arange(0, 100, 2), [0])
    want = jkv.generate(small, None, [2, 2, 3, 3, 4], max_new_tokens=3, stop_ids=())
    assert guess.ids == [2 * word for word in want.tokens] and [*guess.parent] == [-1, 0, 1]


def test_a_folder_holds_eight_bits_a_weight_and_no_embedding(whole):
    """Beside the model's own weights: half a step at most is lost, and nothing of the embedding is there."""
    arrays, _ = learned.read(whole, METHOD)
    matrices = {name: x for name, x in arrays.items() if x.dtype == np.int8}
    assert {x.dtype.itemsize for x in matrices.values()} == {1} and len(matrices) == 4 * len(BLOCKS)
    assert not any(x.size == PARAMS.embed.size for x in arrays.values())
    small, words = unpacked(arrays, PARAMS, whole)
    assert words.of.tolist() == words.read.tolist() == [*range(100)]
    for i, layer in enumerate(PARAMS.layers):
        for name, x in layer.items():
            step = np.float64(arrays.get(f"{i}.{name}{STEP}", 2.0**-9 * np.abs(x)))
            assert (np.abs(np.float64(small.layers[i][name]) - np.float64(x)) <= 0.501 * step).all()
    assert small.embed.shape == PARAMS.embed.shape


def test_it_is_for_one_model(whole, tmp_path):
    other = replace(PARAMS, norm=PARAMS.norm + 1)
    with pytest.raises(ValueError, match="were trained for the model"):
        drafter(f"drafter(folder={whole!r})", other)
    with pytest.raises(ValueError, match="drafter needs weights that were made for this model.*`jkv train drafter"):
        drafter("drafter", PARAMS)
    with pytest.raises(ValueError, match="drafter takes folder"):
        drafter("drafter(size=3)", PARAMS)
    with pytest.raises(ValueError, match="no model that verifies"):
        drafter([f"drafter(folder={whole!r})", "suffix"], PARAMS)


def test_folders_of_something_else_are_refused(whole, tmp_path):
    learned.write(tmp_path / "gate", {"a": np.zeros(2)}, {"method": "trimkv", "model": learned.identities(PARAMS)})
    with pytest.raises(FormatError, match="describes 'trimkv', not drafter"):
        Distilled(PARAMS, str(tmp_path / "gate"))
    arrays, card = learned.read(whole, METHOD)
    changes = {
        "missing": {k: x for k, x in arrays.items() if k != "norm"},
        "more": arrays | {"more": np.zeros(1)},
        "narrow": arrays | {"0.o": arrays["0.o"][:1]},
        "places": arrays | {"blocks": np.array([0, 99], np.int32)},
        "words": arrays | {"read": arrays["read"][:-1]},
        "floats": arrays | {"words": arrays["words"].astype(np.float32)},
        "beyond": arrays | {"words": arrays["words"] + 1},
        "before": arrays | {"words": arrays["words"] - 1},
        "no word": arrays | {"read": arrays["read"] + np.uint16(1)},
        "kind": arrays | {"0.o": arrays["0.o"].astype(np.float32)},
    }
    for name, some in changes.items():
        learned.write(tmp_path / name, some, {k: card[k] for k in ("method", "model")})
        with pytest.raises(FormatError, match="its arrays are not those of drafter"):
            Distilled(PARAMS, str(tmp_path / name))


def test_one_that_comes_with_jkv_is_found_by_name(whole, tmp_path, monkeypatch):
    monkeypatch.setattr(learned, "SHIPPED", tmp_path)
    written(tmp_path / "tiny-drafter")
    made = drafter("drafter", PARAMS)
    assert isinstance(made, Distilled) and made.model.params.config.layers == PARAMS.config.layers
    same = [
        np.array_equal(x, y)
        for x, y in zip(*map(jax.tree.leaves, (made.model.params, Distilled(PARAMS, whole).model.params)), strict=True)
    ]
    assert all(same)


def test_models_with_other_blocks_have_no_such_drafter():
    mamba = dict(model_type="mamba2", vocab_size=100, hidden_size=32, num_hidden_layers=1, num_heads=4, head_dim=16)
    with pytest.raises(ValueError, match="blocks that attend, without experts"):
        thinned(random(mamba | {"n_groups": 1}), np.arange(4), [0])
    assert random(TINY).config.experts is None
