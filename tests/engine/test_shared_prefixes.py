"""Groups of common beginnings against the numbers of the method's spec and against every partition of small jobs."""

from __future__ import annotations

import os

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jkv.engine.shared_prefixes import Group, groups


def saved(found: list[Group]) -> int:
    return sum(g.saved for g in found)


def test_deep_prefix_forks_if_it_saves_more():
    """c = 100 tokens with two requests of its own and g = 200 more tokens with three: 700 saved, 400 without g."""
    c, g = list(range(100)), list(range(1000, 1200))
    prompts = [np.array(x) for x in ([*c, 1, 1], [*c, 2, 2], [*c, *g, 3], [*c, *g, 4], [*c, *g, 5])]
    found = groups(prompts)
    assert found == [Group(100, (0, 1)), Group(300, (2, 3, 4))] and saved(found) == 700
    assert saved(groups([*prompts[:2], np.array([*c, *g[:50], 3]), np.array([*c, *g[:50], 4])])) == 300  # 50 < 100


def test_disjoint_prompts_form_no_group():
    assert groups([np.array([i, 1, 2, 3]) for i in range(5)]) == []
    assert groups([]) == groups([np.array([1, 2, 3])]) == []


def test_equal_prompts_keep_last_token():
    assert groups([np.array([1, 2, 3])] * 3) == [Group(2, (0, 1, 2))]


def partitions(items: list[int]):
    """Every way to divide the items into sets."""
    if not items:
        yield []
        return
    first, rest = items[0], items[1:]
    for part in partitions(rest):
        yield [[first], *part]
        for i in range(len(part)):
            yield [*part[:i], [first, *part[i]], *part[i + 1 :]]


def brute(prompts: list[list[int]], least: int) -> int:
    """The most tokens that any division of the prompts into groups saves."""

    def value(members: list[int]) -> int:
        shared = len(os.path.commonprefix([prompts[i][:-1] for i in members]))
        return (len(members) - 1) * shared if shared >= least else 0

    return max(sum(map(value, part)) for part in partitions(list(range(len(prompts)))))


@settings(max_examples=150, deadline=None)
@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=6), min_size=1, max_size=6), st.integers(1, 3))
def test_groups_save_maximal_tokens(prompts: list[list[int]], least: int):
    found = groups([np.array(p) for p in prompts], least)
    assert saved(found) == brute(prompts, least)
    members = [i for g in found for i in g.members]
    assert len(members) == len(set(members))
    for g in found:
        assert g.length >= least and len({tuple(prompts[i][: g.length]) for i in g.members}) == 1
        assert all(len(prompts[i]) > g.length for i in g.members)
