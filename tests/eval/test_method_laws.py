"""What is wrong with a method of one's own is said by name."""

from collections.abc import Iterator

import jax.numpy as jnp
import pytest

import jkv
from jkv.core.flush import check_rank
from jkv.methods import METHODS, Score, method, part
from jkv.methods.budgets.sizes import Tokens
from jkv.methods.config import CacheConfig
from jkv.methods.eviction.position import Protect

PARAMS = jkv.models.random(jkv.models.TINY)
PROMPT = list(range(80))


def refused(score, message):
    with pytest.raises(ValueError, match=message):
        jkv.prefill(PARAMS, CacheConfig(score=score, budget=Tokens(tokens=40)), PROMPT)


@part
class Latest(Score):
    """The newest stay."""

    def rank(self, ev):
        return ev.pos.astype(jnp.float32)


@part
class Nan(Score):
    def birth(self, new):
        return {"norm": jnp.linalg.norm(new.k.astype(jnp.float32), axis=-1)}

    def rank(self, ev):
        return jnp.log(1 - ev.columns["norm"])


@part
class Flat(Score):
    def rank(self, ev):
        return ev.pos[:, 0].astype(jnp.float32)


@part
class Whole(Score):
    def rank(self, ev):
        return ev.pos


@part
class Silent(Score):
    pass


class Bare(Score):
    def rank(self, ev):
        return ev.pos.astype(jnp.float32)


@pytest.mark.parametrize(
    ("score", "message"),
    [
        (Nan(), "Nan.rank gives NaN for [0-9]+ of 96 tokens"),
        (Protect(score=Nan()), "Nan.rank gives NaN"),
        (Flat(), r"rank of Flat returns float32\[1, 48\]: .* float32\[1,2,48\]"),
        (Whole(), r"rank of Whole returns int32\[1, 2, 48\]"),
        (Protect(score=Flat()), "rank of Flat returns"),
        (Silent(), "Silent has no rank"),
        (Bare(), "Bare is a class without @part"),
        (Protect(score=Bare()), "Bare is a class without @part"),
    ],
    ids="nan, nan within, flat, whole, flat within, silent, bare, bare within".split(", "),
)
def test_what_is_wrong_with_a_score_is_said_with_its_name(score, message):
    refused(score, message)


def test_a_wrong_shape_is_met_in_the_flush_too():
    with pytest.raises(ValueError, match=r"rank of Protect of Latest returns float32\[1, 9\]: with 1 rows, 2 kv heads"):
        check_rank(Protect(score=Latest()), jnp.zeros((1, 9)), (1, 2, 9))
    check_rank(Latest(), jnp.zeros((1, 1, 9)), (1, 2, 9))


def test_a_score_is_tried_once():
    ranked = []

    @part
    class Counted(Latest):
        def rank(self, ev):
            ranked.append(type(ev.window.k).__name__)
            return ev.pos.astype(jnp.float32)

    config = CacheConfig(score=Counted(), budget=Tokens(tokens=40))
    for _ in range(2):
        jkv.methods.compatibility.check(config, PARAMS.config)
    assert len(ranked) == 1


@pytest.fixture
def own() -> Iterator[str]:
    @method("a test", "exact")
    def latest_of_all(size):
        """The newest stay."""
        return dict(score=Latest(), budget=size)

    yield "latest_of_all"
    del METHODS["latest_of_all"]


def test_a_stranger_says_itself_how_exact_it_is(own):
    assert jkv.parse(f"{own}(budget=40)").exactness == "exact (as its author says)"
    assert "author" not in jkv.parse("knorm(budget=40)").exactness


def test_the_laws_of_a_method_are_a_table(own):
    found = jkv.methods.check(own)
    assert found.passed and found.cache == f"{own}(budget=48)"
    assert [holds for _, holds, _ in found.results] == [True] * 5
    assert repr(found).startswith(found.cache) and found._repr_html_().count("<tr>") == 6


def test_a_broken_law_is_told_from_one_that_does_not_apply(own, monkeypatch):
    from jkv.eval import method_laws

    monkeypatch.setattr(method_laws._Trial, "batch", lambda self: (False, "1 of 2"))
    for name in ("programs", "size", "neutral"):
        monkeypatch.setattr(method_laws._Trial, name, lambda self: 1 / 0)
    monkeypatch.setattr(method_laws._Trial, "budget", lambda self: (None, "no budget"))
    found = jkv.methods.check("int8")
    assert not found.passed and [holds for _, holds, _ in found.results] == [None, False, False, False, False]
    assert "ZeroDivisionError" in repr(found)
