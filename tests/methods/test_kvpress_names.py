"""The methods that kvpress shares, as benchmarks compare them, answer to its names."""

import re

import pytest

from jkv.methods.kvpress_names import PRESSES

presses = pytest.importorskip("benchmarks.presses")


def test_every_method_that_kvpress_shares_answers_one_of_its_names():
    assert all(any(re.match(rf"{name}\b", text) for text in PRESSES.values()) for name in presses.PRESSES)
