"""Scores that are one function: what it reads, how it is shown, and which functions are refused."""

from __future__ import annotations

import pickle
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jkv.methods import METHODS
from jkv.methods.base import rank_by, window_attention
from support.scenes import attending, evidence


def decayed(ev, *, half):
    """Old tokens less: 2^(-age / half)."""
    return 2.0 ** ((ev.pos + 1 - ev.seen[:, None, None]).astype(jnp.float32) / half)


def test_a_function_ranks_with_its_options():
    rank = rank_by(decayed, half=2.0).rank(evidence(np.eye(4)))
    np.testing.assert_allclose(rank[0, 0], 2.0 ** (np.arange(-3, 1) / 2.0), rtol=1e-6)


def test_a_function_sees_as_many_of_the_newest_queries_as_it_asked_for():
    ev = evidence(np.eye(3), q=attending([[1 / 3] * 3, [0.2, 0.3, 0.5]]))
    assert ev.kept.pos.shape[1] == 2
    np.testing.assert_allclose(rank_by(window_attention, queries=1).rank(ev)[0, 0], [0.2, 0.3, 0.5], atol=1e-6)


def test_equal_settings_are_one_program_in_every_process():
    one, two = (rank_by(decayed, half=2.0, queries=4) for _ in range(2))
    assert one == two and hash(one) == hash(two)
    assert jax.tree.structure(one) == jax.tree.structure(pickle.loads(pickle.dumps(two)))
    assert one != replace(one, queries=5) and "0x" not in repr(one) and "decayed" in repr(one)


@pytest.mark.parametrize(
    "fn",
    [lambda ev: ev.pos, (lambda half: lambda ev: decayed(ev, half=half))(2.0), partial(decayed, half=2.0)],
    ids=["lambda", "closure", "partial"],
)
def test_a_function_that_is_made_anew_is_refused(fn):
    with pytest.raises(ValueError, match="define it at the top level of a module"):
        rank_by(fn)


@pytest.mark.parametrize("half", [[2.0], np.ones(2)], ids=["list", "array"])
def test_options_are_hashable(half):
    with pytest.raises(ValueError, match="half: options are numbers and texts"):
        rank_by(decayed, half=half)


def test_functions_are_parts_with_their_docstrings():
    parts = METHODS["snapkv"].parts
    assert [*parts] == ["Pool", "RankBy", "window_attention", "Tokens"]
    assert parts["window_attention"].startswith("SnapKV, TOVA: attention")
