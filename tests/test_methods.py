"""Compositions by text: they round-trip, and what cannot be is refused by name."""

import pytest

from jkv.methods import CATALOGUE, parse


@pytest.mark.parametrize("name", sorted(CATALOGUE))
def test_every_row_says_what_it_is(name):
    row = CATALOGUE[name]
    assert row.about and row.claim and row.paper and row.axes


@pytest.mark.parametrize(
    "text",
    [
        "full",
        "snapkv(budget=512, window=16) | int4",
        "quest(pages=8) | int8",
        "h2o(keep=0.25, recent=8) | kivi(bits=4)",
    ],
)
def test_text_round_trips(text):
    assert str(parse(text)) == text
    assert parse(str(parse(text))) == parse(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("snapvk(budget=512)", "did you mean 'snapkv'"),
        ("nothing_like_it_at_all", "see `jkv methods`"),
        ("snapkv(buget=512)", "did you mean 'budget'"),
        ("snapkv(512)", "name\\(argument=value\\)"),
        ("snapkv(budget=", "cannot read"),
        ("", "cannot read"),
        ("int8 | ", "cannot read"),
        ("snapkv", "exactly one of"),
        ("snapkv(budget=9, keep=0.5)", "exactly one of"),
        ("snapkv(budget=print(1))", "plain numbers"),
        ("snapkv(budget='9')", "budget=9"),
        ("snapkv(budget=512) | h2o(budget=512)", "snapkv and h2o both fill the axis 'score'"),
        ("int8 | int4", "int8 and int4 both fill the axis 'codec'"),
        ("__import__('os').system('id')", "cannot read"),
    ],
)
def test_text_that_cannot_be(text, message):
    with pytest.raises(ValueError, match=message):
        parse(text)
