"""Keys in the codec of one method, values in that of another."""

from __future__ import annotations

import pytest

from jkv.methods import METHODS, parse
from jkv.methods.base import Dense
from jkv.methods.compatibility import check
from jkv.methods.config import CacheConfig
from jkv.methods.quantization.float8 import Float
from jkv.methods.quantization.integer import Affine
from support import rig

ONLY = {"codec", "tiers", "recent", "block"}
CODES = sorted(name for name, method in METHODS.items() if {*method.axes} & {"codec", "tiers"})


def pairs(config: CacheConfig) -> list:
    return [config.codecs(tier) for tier in config.tiers]


def test_keys_of_one_method_meet_values_of_another():
    mixed = parse("fp8 | values(codec='int4(group=0)')")
    assert pairs(mixed) == [(Float(), Affine(bits=4))]
    assert pairs(parse("int8 | values")) == [(Affine(bits=8), Affine(bits=4, group=32))]
    assert pairs(parse("snapkv(budget=64) | values")) == [(Dense(), Affine(bits=4, group=32))]
    assert pairs(parse("int8 | values(codec='full')")) == [(Affine(bits=8), Dense())]
    check(parse("snapkv(budget=64, window=8) | int8 | values"), rig.MODEL)


@pytest.mark.parametrize("name", CODES)
def test_values_codec_changes_only_coded_tiers(name: str):
    text = f"{name}(budget=64)" if METHODS[name].sized else name
    plain, mixed = parse(text), parse(f"{text} | values(codec='int8')")
    codes = any(not codec.exact for codec in plain.all_codecs)  # else values alone are coded, in every tier
    for was, now, old, new in zip(pairs(plain), pairs(mixed), plain.tiers, mixed.tiers, strict=True):
        exact = codes and all(codec.exact for codec in was)
        assert now == (was if exact else (was[0], Affine(bits=8)))
        assert (new.size, new.rope, new.whole) == (old.size, old.rope, old.whole)
    assert (mixed.recent, mixed.block) == (plain.recent, plain.block)


@pytest.mark.parametrize("name", sorted(n for n in CODES if {*METHODS[n].filled} <= ONLY))
def test_same_values_codec_changes_nothing(name: str):
    assert pairs(parse(f"{name} | values(codec={name!r})")) == pairs(parse(name))


@pytest.mark.parametrize(
    ("codec", "why"),
    [("'zipcache'", "fills score"), ("'snapkv(budget=8)'", "score and budget"), ("3", "a text"), ("'int9'", "int8")],
)
def test_invalid_values_codecs_are_refused(codec: str, why: str):
    with pytest.raises(ValueError, match=why):
        parse(f"int8 | values(codec={codec})")
