"""Codes on disk: the cache of the device bit for bit, none of it in memory, and a value like any other."""

from __future__ import annotations

import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jkv
from jkv import methods, models
from jkv.cache import disk_pages
from jkv.cache.cache import device_bytes, disk_bytes, host_bytes
from jkv.cache.offload import is_far
from jkv.core import decode_loop
from jkv.core.compilation import Cost
from jkv.generation.inspect import summary
from jkv.generation.receipt import pages_asked
from jkv.methods.compatibility import check
from jkv.prompts.allocation import CacheShape
from support import rig

ONE = models.random(dict(models.TINY, num_hidden_layers=1), 0, jnp.float32)
ROWS = [row[row >= 0].tolist()[:n] for row, n in zip(rig.PROMPT, (50, 40), strict=True)]
NEW = 20
QUEST = "quest(pages=3, page=8, dense_layers=0"


@pytest.fixture(autouse=True)
def fresh():
    yield
    disk_pages._OPEN.clear()


def ran(text: str, prompt: Any = None, params: Any = ONE) -> jkv.Result:
    return jkv.generate(params, text, ROWS if prompt is None else prompt, max_new_tokens=NEW, stop_ids=())


def same(own: jkv.Result, far: jkv.Result) -> None:
    assert far.tokens == own.tokens
    assert far.receipt.bytes_disk > 0 == far.receipt.bytes_host and "on disk" in str(far.receipt)
    for a, b in zip(own.cache.layers, far.cache.layers, strict=True):
        for x, y in zip(a.tiers, b.tiers, strict=True):
            live = (np.asarray(x.pos) >= 0).reshape(-1)
            for p, q in zip((x.k, x.v), (y.k, y.v), strict=True):
                q = q.read(jnp.zeros((*q.lines.shape[:2], 1), jnp.int32), q.units) if is_far(q) else q
                for one, two in zip(*map(jax.tree.leaves, (p, q)), strict=True):
                    slots = live.size // (one.shape[0] * one.shape[2])
                    shown = np.broadcast_to(live.reshape(one.shape[0], 1, one.shape[2], slots).any(-1), one.shape[:3])
                    np.testing.assert_array_equal(np.asarray(one)[shown], np.asarray(two)[shown])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "more"),
    [
        ("full()", "host='all'"),
        (f"int4 | {QUEST})", "host='values'"),
        (f"int4 | {QUEST})", "host='all', hot=5"),
        ("kivi(group=16, recent=0)", "host='all'"),
        ("icecache(pages=3, page=8, sinks=8)", "host='all'"),
        ("alisa(tokens=16, page=8, window=8, recent=16)", "host='all'"),
        ("full(block=8, recent=0)", "host='auto', device_bytes=12000"),
    ],
)
def test_disk_codes_equal_device_codes(text: str, more: str, tmp_path):
    far = ran(f"{text[:-1]}{'' if text[-2] == '(' else ', '}{more}, disk={str(tmp_path)!r})")
    if text.startswith("full"):  # which has units where it is taken off the device
        assert far.tokens == ran("full").tokens and far.receipt.bytes_disk > 0
        assert "auto" not in more or device_bytes(far.cache.layers) <= 12000
    else:
        same(ran(text), far)
    assert not list(tmp_path.iterdir()) and disk_pages.records(str(tmp_path)).written > 0
    assert ("hot" in more) == (sum(pages_asked(far.cache)) > 0)


def test_disk_cache_branches_are_independent(tmp_path):
    """Two continuations of one cache, each with flushes that write, in turns, and each as if it were alone."""
    cache, logits = jkv.prefill(ONE, f"full(block=8, recent=0, host='all', disk={str(tmp_path)!r})", ROWS, reserve=40)
    assert disk_bytes(cache.layers) > host_bytes(cache.layers) == 0
    told = summary(cache).layers[0].parts[1]
    assert told.codes == cache.on_disk and 0 < told.scales < told.codes / 50  # numbers and sums of records

    def on(cache: Any, first: int, turns: int) -> tuple[Any, list[Any]]:
        out = []
        for i in range(turns):
            cache, logits = jkv.branch(ONE, cache, jnp.full(len(ROWS), (first + i) % ONE.config.vocab, jnp.int32))
            out.append(np.asarray(logits))
        return cache, out

    _, alone = on(cache, 5, 20)
    mine, one = on(cache, 5, 10)
    on(cache, 60, 20)
    _, two = on(mine, 15, 10)
    np.testing.assert_array_equal(np.stack(alone), np.stack(one + two))


def test_saved_disk_cache_resumes_in_another_process(tmp_path):
    disk = tmp_path / "disk"
    text = f"int4 | {QUEST}, host='all', disk={str(disk)!r})"
    first = ran(text)
    jkv.save_cache(first.cache, tmp_path / "cache", ONE)
    want = jkv.generate(ONE, first.cache, [[5], [6]], max_new_tokens=8, stop_ids=()).tokens
    disk_pages._OPEN.clear()  # as another process, which has no record
    again = jkv.load_cache(tmp_path / "cache", ONE)
    assert disk_bytes(again.layers) == disk_bytes(first.cache.layers)
    assert jkv.generate(ONE, again, [[5], [6]], max_new_tokens=8, stop_ids=()).tokens == want


def test_lost_disk_pages_raise(tmp_path):
    cache, _ = jkv.prefill(ONE, f"full(block=8, recent=0, host='all', disk={str(tmp_path)!r})", ROWS, reserve=40)
    file = disk_pages.records(str(tmp_path)).file.fileno()
    os.pwrite(file, os.urandom(os.fstat(file).st_size), 0)
    with pytest.raises(OSError, match="overwritten by newer ones, or are damaged"):
        jkv.generate(ONE, cache, [[5], [6]], max_new_tokens=8, stop_ids=())


def test_disk_errors_of_batch_programs_are_raised(tmp_path, monkeypatch):
    """As in a batch: what failed before, and elsewhere, is not told in its place."""
    config = methods.parse(f"full(block=8, recent=0, host='all', disk={str(tmp_path)!r})")
    cache = CacheShape(config, ONE.config, 1, 64, 8, jnp.float32).empty()
    disk_pages.FAILED.append(OSError(5, "another failure", "elsewhere"))
    monkeypatch.setattr(os, "pwrite", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space left on device: a cache's codes go there; free space"):
        Cost().run(decode_loop.prefill_own, ONE, cache, jnp.ones((1, 64), jnp.int32))


@pytest.mark.slow
def test_disk_cache_of_eight_device_sizes_is_exact(tmp_path):
    rows = [np.random.default_rng(1).integers(0, ONE.config.vocab, 440).tolist()]
    most = CacheShape(methods.parse("full"), ONE.config, 1, 504, 64, jnp.float32).shapes().nbytes // 8
    far = f"full(recent=0, block=8, host='auto', disk={str(tmp_path)!r}, device_bytes={most})"
    own, far = (ran(text, rows) for text in ("full(recent=0)", far))
    assert far.tokens == own.tokens
    assert far.receipt.bytes_kept - far.receipt.bytes_disk <= most < own.receipt.bytes_kept / 7.9
    assert far.receipt.bytes_disk >= far.receipt.bytes_moved > 0 == far.receipt.bytes_host


def test_invalid_disk_arguments_are_refused(tmp_path):
    with pytest.raises(ValueError, match="codes that host= takes off the device"):
        check(methods.parse("full(disk='somewhere')"), ONE.config)
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        CacheShape(
            methods.parse(f"full(host='all', disk={str(tmp_path / 'file')!r})"), ONE.config, 1, 40, 8, "float32"
        ).empty()
