"""Caches as values: forked, saved, rolled back, extended, and refused where that cannot be."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jkv
from jkv.io.errors import FormatError

TEXTS = [
    "full",
    "snapkv(budget=40, window=8) | int4",
    "h2o(budget=40)",
    "streaming(budget=40)",
    "kivi(recent=0, group=8)",
]
PROMPT = [[(7 * i) % 97 for i in range(60)], [(11 * i) % 89 for i in range(45)]]


@pytest.fixture(scope="module")
def params():
    return jkv.models.random(dict(jkv.models.TINY, hidden_size=64), 0, jnp.float32)


def steps(params, cache, token, n):
    """n greedy tokens, one step at a time; the given cache stays."""
    out, one = [], jkv.branch
    for _ in range(n):
        (cache, logits), one = one(params, cache, token), jkv.step
        token = logits.argmax(-1).astype(jnp.int32)
        out.append(np.asarray(token))
    return cache, np.stack(out, 1)


@pytest.mark.parametrize("text", TEXTS)
def test_saved_cache_round_trips(params, text, tmp_path):
    cache, logits = jkv.prefill(params, text, PROMPT)
    token = logits.argmax(-1).astype(jnp.int32)
    cache, _ = steps(params, cache, token, 5)
    jkv.save_cache(cache, tmp_path / "cache.jkv", params)
    loaded = jkv.load_cache(tmp_path / "cache.jkv", params)
    assert jax.tree.structure(loaded) == jax.tree.structure(cache)
    assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(loaded), jax.tree.leaves(cache), strict=True))
    np.testing.assert_array_equal(steps(params, cache, token, 24)[1], steps(params, loaded, token, 24)[1])


def test_cache_of_another_model_is_refused(params, tmp_path):
    cache, _ = jkv.prefill(params, "full", PROMPT)
    jkv.save_cache(cache, tmp_path / "c", params)
    other = dataclasses.replace(params, norm=params.norm + 1)
    with pytest.raises(FormatError, match="belongs to the model .* and this one is"):
        jkv.load_cache(tmp_path / "c", other)


def test_cache_of_another_config_is_refused(params, tmp_path):
    cache, _ = jkv.prefill(params, "full", PROMPT)
    jkv.save_cache(cache, tmp_path / "c", params)
    with pytest.raises(FormatError, match=r"its cache is full, not int8; leave out config="):
        jkv.load_cache(tmp_path / "c", params, jkv.parse("int8"))


def test_truncated_cache_is_refused(params, tmp_path):
    cache, _ = jkv.prefill(params, "full", PROMPT)
    jkv.save_cache(cache, tmp_path / "c", params)
    data = (tmp_path / "c").read_bytes()
    (tmp_path / "c").write_bytes(data[: len(data) // 2])
    with pytest.raises(FormatError, match="truncated"):
        jkv.load_cache(tmp_path / "c", params)


@pytest.mark.parametrize("text", TEXTS)
def test_rollback_is_exact_since_last_flush(params, text):
    cache, logits = jkv.prefill(params, text, PROMPT)
    token = logits.argmax(-1).astype(jnp.int32)
    cache, _ = steps(params, cache, token, 3)
    longer, _ = steps(params, cache, token, 4)
    _, want = steps(params, cache, token, 30)
    _, got = steps(params, longer.rollback(4), token, 30)
    np.testing.assert_array_equal(got, want)


def test_rollback_past_flush_is_refused(params):
    cache, logits = jkv.prefill(params, "h2o(budget=40)", PROMPT)
    with pytest.raises(ValueError, match="keep the older"):
        cache.rollback(1)


@pytest.mark.parametrize("text", ["full(recent=0)", "snapkv(budget=40, window=8)"])
def test_rollback_is_bounded_by_paused_row(params, text):
    cache, logits = jkv.prefill(params, text, PROMPT)
    token = logits.argmax(-1).astype(jnp.int32)
    for i in range(5):
        cache, _ = jkv.branch(params, cache, token.at[0].set(-1) if i else token)
    with pytest.raises(ValueError, match=r"rollback\(2\): 1 tokens of a row"):
        cache.rollback(2)
    assert (cache.rollback(1).seen == cache.seen - 1).all()


def test_extend_with_wrong_row_count_is_refused(params):
    cache, _ = jkv.prefill(params, "snapkv(budget=40, window=8)", PROMPT)
    for rows in (1, 3):
        with pytest.raises(ValueError, match=f"the cache has 2 rows and the prompt {rows}: give one text a row"):
            jkv.extend(params, cache, [[7]] * rows)


def test_extend_is_refused_if_rollback_dropped_its_queries(params):
    before, _ = jkv.prefill(params, "snapkv(budget=40, window=8)", PROMPT)
    after = before
    for _ in range(3):
        after, _ = jkv.branch(params, after, jnp.full(before.rows, 5))
    back = after.rollback(3)
    for n in (1, 2):
        with pytest.raises(ValueError, match="newest 8 tokens, and a rollback took some"):
            jkv.extend(params, back, [[7] * n] * before.rows)
    for n in (3, 12):  # which need no more of the older ones than are there
        got, want = (jkv.extend(params, x, [[7] * n] * before.rows) for x in (back, before))
        np.testing.assert_array_equal(got[1], want[1])
        np.testing.assert_array_equal(got[0].kept(), want[0].kept())


def test_forked_rows_equal_original(params):
    cache, logits = jkv.prefill(params, "snapkv(budget=40, window=8)", PROMPT)
    token = logits.argmax(-1).astype(jnp.int32)
    _, one = steps(params, cache, token, 20)
    _, two = steps(params, cache.fork(2), jnp.repeat(token, 2), 20)
    np.testing.assert_array_equal(np.repeat(one, 2, 0), two)


def test_extend_equals_prefill_of_whole(params):
    cache, _ = jkv.prefill(params, "full", PROMPT, reserve=128)
    more = [[5, 6, 7], [8, 9, 10, 11, 12]]
    _, logits = jkv.extend(params, cache, more)
    whole, want = jkv.prefill(params, "full", [a + b for a, b in zip(PROMPT, more, strict=True)], reserve=128)
    np.testing.assert_allclose(logits, want, atol=1e-5)


def test_extend_beyond_reserve_is_refused(params):
    cache, _ = jkv.prefill(params, "full", PROMPT, reserve=16)
    with pytest.raises(ValueError, match="larger reserve="):
        jkv.extend(params, cache, [[1] * 100, [1] * 100])
