"""The options of `jkv train` are what its recipes take: no option is of a setting that is gone."""

from __future__ import annotations

from dataclasses import MISSING, fields
from types import SimpleNamespace
from typing import Any

import pytest

from jkv.cli import train
from jkv.training import commands


class Reached(Exception):
    """A method has made its recipe, and begins to work."""


class Run:
    """The settings that recipes are made of; whatever else is asked for is work."""

    seed, length, start, params = 0, 2048, None, SimpleNamespace(config=SimpleNamespace(layers=30))

    def __getattr__(self, name: str) -> Any:
        raise Reached(name)


def test_every_method_has_a_command():
    assert {kind.__name__.lower() for kind in train.METHODS} == commands.METHODS.keys()


@pytest.mark.parametrize("kind", train.METHODS, ids=lambda kind: kind.__name__)
def test_a_recipe_takes_every_option(kind: type):
    chosen = {f.name: f.default for f in fields(kind) if f.name != "start"}
    assert MISSING not in chosen.values()
    with pytest.raises((Reached, AttributeError, ValueError)):  # and no TypeError: an option that nothing takes
        commands.METHODS[kind.__name__.lower()](Run(), **chosen)
