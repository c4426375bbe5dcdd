"""Records that are rounded and entropy-coded: as wrong as the formula says, and as small as entropy allows."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import jkv
from jkv.io import array_file
from jkv.prefix_cache import store_codec
from jkv.prefix_cache.store import BLOCK

L, H, N, D = 8, 2, BLOCK, 16


def record(dtype=np.float32, seed: int = 0) -> dict[str, np.ndarray]:
    """Channels of scales and means of their own, values narrower than keys, and what a score notes."""
    rng = np.random.default_rng(seed)
    k = rng.normal(rng.normal(0, 2, (L, H, 1, D)), rng.gamma(1, 1, (L, H, 1, D)), (L, H, N, D)).astype(dtype)
    v = rng.normal(0, rng.gamma(1, 1, (L, H, 1, D // 2)), (L, H, N, D // 2)).astype(dtype)
    return {"k": k, "v": v, "0.noted": rng.normal(size=(H, N)).astype(np.float32)}


@pytest.mark.parametrize("level", [1, 2, 3])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_error_is_at_most_half_bin_width(level, dtype):
    codec, x = store_codec.CacheGen(level), record(dtype)
    back = codec.decode(codec.encode(x))
    assert set(back) == set(x) and np.array_equal(back["0.noted"], x["0.noted"])
    for side in store_codec.SIDES:
        assert back[side].dtype == x[side].dtype and back[side].shape == x[side].shape
        exact, found = x[side].astype(np.float32), back[side].astype(np.float32)
        most = np.abs(exact).max((1, 3), keepdims=True) / (2 * codec.half(side, L)[:, None, None, None])
        rounding = 0 if dtype == np.float32 else np.abs(exact) * 2.0**-8  # of what the number is given back as
        assert (np.abs(found - exact) <= most * 1.01 + rounding).all()


def test_bins_by_level_and_depth_match_cachegen():
    """Of 32 layers: 10 and 20, and 2, are where bins change."""
    want = {1: ([16, 16, 12], [16, 12]), 2: ([32, 16, 16], [32, 16]), 3: ([32, 32, 32], [32, 32])}
    for level, (keys, values) in want.items():
        assert (2 * (store_codec.CacheGen(level).half("k", 32) + 1)).tolist() == np.repeat(keys, [10, 10, 12]).tolist()
        assert (2 * (store_codec.CacheGen(level).half("v", 32) + 1)).tolist() == np.repeat(values, [2, 30]).tolist()


def test_bin_centers_zeros_and_constants_round_trip_exactly():
    codec = store_codec.CacheGen(1)  # of one layer: 16 bins, -7..7
    k = np.random.default_rng(0).integers(-7, 8, (1, H, N, D)).astype(np.float32)
    k[..., 0] = 7
    for x in (k, np.zeros_like(k), np.full_like(k, -3.5)):
        np.testing.assert_array_equal(codec.decode(codec.encode({"k": x, "v": x}))["k"], x)
    k[0, 0, 0, 0] = np.inf  # what is not finite is kept as it is
    np.testing.assert_array_equal(codec.decode(codec.encode({"k": k, "v": k}))["v"], k)


def test_code_length_is_near_entropy():
    codec, x = store_codec.CacheGen(2), record()
    coded, bits, symbols = codec.encode(x), 0.0, 0
    for side in store_codec.SIDES:
        half, wide = codec.half(side, L)[:, None, None, None], x[side]
        s = np.rint(wide * half / np.abs(wide).max((1, 3), keepdims=True)).astype(int)
        for channel in s.transpose(0, 1, 3, 2).reshape(-1, N):
            share = np.unique(channel, return_counts=True)[1] / N
            bits -= N * (share * np.log2(share)).sum()
        symbols += s.size
    taken = sum(coded[f"{side}.code"].nbytes for side in store_codec.SIDES) * 8
    assert bits < taken < 1.12 * bits and taken < 0.75 * symbols * np.log2(16)
    assert sum(x.nbytes for x in coded.values()) < sum(x.nbytes for x in record(np.float16).values()) / 3


def test_store_rounds_records_and_separates_codecs(tmp_path: Path):
    ids, held = list(range(2 * BLOCK)), [record(), record(seed=1)]
    store = jkv.PrefixCache(tmp_path, codec="cachegen")
    store.put("root", ids, lambda i: held[i])
    for x, found in zip(held, store.match("root", ids), strict=True):
        want = store.codec.decode(store.codec.encode(x))
        assert all(np.array_equal(found[name], want[name]) for name in want)
        assert not np.array_equal(found["k"], x["k"])
    assert [len(jkv.PrefixCache(tmp_path, codec=x).match("root", ids)) for x in ("", "cachegen(level=3)")] == [0, 0]
    assert sum(x.stat().st_size for x in tmp_path.glob("*.kv")) < sum(x.nbytes for y in held for x in y.values()) / 5
    for wrong in ("zip", "cachegen(level=4)", "cachegen()"):
        with pytest.raises(ValueError, match="cachegen"):
            jkv.PrefixCache(tmp_path, codec=wrong)


@pytest.mark.parametrize("part", ["code", "top", "mean", "spread", "shape", "like"])
def test_malformed_records_miss_and_are_deleted(tmp_path: Path, part: str):
    """Arrays that are not there, too short, of another type; a code that ends too early, or is of other numbers."""
    store, ids = jkv.PrefixCache(tmp_path, codec="cachegen"), list(range(BLOCK))
    store.put("root", ids, lambda i: record())
    (path,) = tmp_path.glob("*.kv")
    arrays, meta = array_file.read(path)
    x, name = arrays[f"k.{part}"], f"k.{part}"
    harms = [{name: x.astype(np.float64)}, {name: x[None]}, {name: x[:-1]}, {name: x[:0]}]
    if part == "like":
        harms = []
    if part == "code":
        harms += [{name: x[: len(x) // 2]}, {name: x[::-1].copy()}]
    for harm in [None, *harms]:
        without = {other: y for other, y in arrays.items() if other != name}
        array_file.write(path, without if harm is None else arrays | harm, meta)
        assert store.match("root", ids) == [] and not path.exists(), harm


def test_unequal_record_sizes_fit_store(tmp_path: Path):
    """A beginning that takes little says nothing of what follows."""
    old, new = list(range(11 * BLOCK)), list(range(1000, 1000 + 6 * BLOCK))
    nothing = {side: np.zeros_like(record()[side]) for side in store_codec.SIDES}
    size = len(jkv.PrefixCache(tmp_path / "one", codec="cachegen").codec.encode(record())["k.code"]) * 4 * 2 + 6000
    store = jkv.PrefixCache(tmp_path / "store", bytes=12 * size, codec="cachegen")
    store.put("root", old, lambda i: record())
    store.put("root", new, lambda i: record() if i else nothing)
    assert len(store.match("root", new)) == 6
    assert sum(x.stat().st_size for x in store.folder.glob("*.kv")) <= 12 * size


def test_missing_entropy_coder_error_names_extra(monkeypatch):
    monkeypatch.setattr(store_codec, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"constriction, which is missing; run pip install -e '.\[entropy\]'"):
        jkv.PrefixCache("nowhere", codec="cachegen")


# ------------------------------------------------------------------------------------------------ levels and a link


class Shaped:
    """A store behind a link of so many bytes a second, and the clock that it takes; what was read, by level."""

    def __init__(self, folder: Path, within: float, monkeypatch: pytest.MonkeyPatch) -> None:
        self.store, self.now, self.speed = jkv.PrefixCache(folder, codec=f"cachegen(within={within:g})"), 0.0, 1e9
        self.levels: list[int] = []
        monkeypatch.setattr(store_codec, "clock", lambda: self.now)
        read = self.store._read

        def reads(name: str, level: store_codec.CacheGen):
            self.now += self.store._path(name).stat().st_size / self.speed
            self.levels.append(level.level)
            return read(name, level)

        monkeypatch.setattr(self.store, "_read", reads)

    def match(self, ids: list[int]) -> list[int]:
        """The levels of the records that came."""
        self.levels = []
        assert len(self.store.match("root", ids)) == len(self.levels)
        return self.levels


@pytest.fixture
def shaped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shaped:
    out = Shaped(tmp_path, 8.0, monkeypatch)
    out.store.put("root", list(range(8 * BLOCK)), lambda i: record(seed=i))
    return out


def sizes(shaped: Shaped) -> list[list[int]]:
    """Of each record, the bytes of levels 3, 2 and 1."""
    return [[x or 0 for x in shaped.store._sizes(forms)] for forms in shaped.store._names("root", range(8 * BLOCK))]


def test_level_follows_link_speed(shaped: Shaped):
    assert shaped.match([*range(8 * BLOCK)]) == [3] * 8
    shaped.speed = 1e-6
    assert shaped.match([*range(8 * BLOCK)]) == [3]  # as fast as it was, it seemed
    assert shaped.match([*range(8 * BLOCK)]) == [1]  # and now it is known
    shaped.speed = 1e9
    assert shaped.match([*range(8 * BLOCK)]) == [1, *[3] * 7]


@pytest.mark.parametrize("level", [3, 2, 1])
def test_highest_level_within_deadline_is_chosen(shaped: Shaped, level: int):
    """A link that brings each level in its share of the time, just so."""
    shaped.speed = max(x[3 - level] for x in sizes(shaped)) * 1.001  # bytes in the second of each
    assert shaped.match([*range(8 * BLOCK)])[0] == 3  # nothing is known yet
    shaped.now = 0.0
    got = shaped.match([*range(8 * BLOCK)])
    assert len(got) == 8 and got[0] == level and min(got) >= level and shaped.now <= 8.0


def test_deadline_is_divided_over_stored_records_only(shaped: Shaped):
    """A short beginning that the store has, before a long text that it has not."""
    shaped.match([*range(8 * BLOCK)])
    shaped.speed = max(x[0] for x in sizes(shaped)) * 1.001
    shaped.match([*range(8 * BLOCK)])
    shaped.now = 0.0
    assert shaped.match([*range(8 * BLOCK), *range(90 * BLOCK)]) == [3] * 8


def test_records_decode_at_their_level_and_are_shared(shaped: Shaped):
    ids = [*range(8 * BLOCK)]
    shaped.speed = max(x[2] for x in sizes(shaped)) * 1.001
    shaped.match(ids[:BLOCK])
    found = shaped.store.match("root", ids)
    for i, (level, got) in enumerate(zip(shaped.levels[-8:], found, strict=True)):
        codec = store_codec.CacheGen(level)
        want = codec.decode(codec.encode(record(seed=i)))
        assert all(np.array_equal(got[name], want[name]) for name in want)
    assert [
        len(jkv.PrefixCache(shaped.store.folder, codec=f"cachegen(level={n})").match("root", ids)) for n in (1, 2, 3)
    ] == [8] * 3


def test_torn_record_falls_back_to_another_level(shaped: Shaped):
    ids, best = [*range(8 * BLOCK)], shaped.store._names("root", range(8 * BLOCK))[2][0]
    shaped.store._path(best).write_bytes(b"")
    assert len(shaped.store.match("root", ids)) == 8 and shaped.levels == [3, 3, 3, 2, 3, 3, 3, 3, 3]
    assert not shaped.store._path(best).exists()
    shaped.store.put("root", ids, lambda i: record(seed=i))  # and what is not whole is written again
    assert shaped.match(ids) == [3] * 8


def test_all_levels_stay_within_store_bytes(tmp_path: Path):
    store = jkv.PrefixCache(tmp_path, bytes=300_000, codec="cachegen(within=1)")
    for start in range(0, 40 * BLOCK, 4 * BLOCK):
        store.put("root", list(range(start, start + 4 * BLOCK)), lambda i: record(seed=i))
        assert sum(x.stat().st_size for x in tmp_path.glob("*.kv")) <= 300_000
    assert len(store.match("root", list(range(start, start + 4 * BLOCK)))) == 4
    for wrong in ("within=0", "within=-1", "within=x", "within=1,level=2"):
        with pytest.raises(ValueError, match="cachegen"):
            jkv.PrefixCache(tmp_path, codec=f"cachegen({wrong})")
