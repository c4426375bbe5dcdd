"""One token at a time: the given cache's memory is used again, or the cache stays as it was."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jkv
from jkv.core import decode_loop
from jkv.core.compilation import compiled
from support import tiny

PARAMS = jkv.models.random(jkv.models.TINY, 0, jnp.float32)
PROMPT = [[(7 * i) % 97 for i in range(60)], [(11 * i) % 89 for i in range(45)]]
TOKEN = jnp.array([3, 4], jnp.int32)
TEXT = "snapkv(budget=384, window=8) | int4"  # tiers that are larger than anything else


@pytest.fixture(scope="module")
def cache() -> jkv.Cache:
    return jkv.prefill(PARAMS, TEXT, PROMPT, reserve=430)[0]


def test_step_copies_no_tier(cache):
    """Every array of the cache lies where the given one lay, and no instruction but a flush's makes a tier anew."""
    program, _ = compiled(decode_loop.step_own, PARAMS, cache.plan, cache.bare, TOKEN)
    memory, text = program.program.memory_analysis(), program.program.as_text()
    assert memory.alias_size_in_bytes == sum(x.nbytes for x in jax.tree.leaves(cache.bare))
    tier = cache.layers[0].tiers[0]
    sizes = {",".join(map(str, x.shape)) for x in jax.tree.leaves((tier.k, tier.v))}
    copies = [x for x in text.splitlines() if (m := re.search(r"= \w+\[([\d,]+)\]\S* copy\(", x)) and m[1] in sizes]
    assert not copies
    kept = compiled(decode_loop.step, PARAMS, cache, TOKEN)[0].program.memory_analysis()
    assert kept.alias_size_in_bytes == 0  # or the above would say nothing


@pytest.mark.parametrize("text", ["full", TEXT, "h2o(budget=40)", "streaming(budget=40)", "kivi(recent=0, group=8)"])
def test_step_equals_branch(text: str):
    """Over a flush; a cache that came of the given one, and shares arrays with it, does not take it along."""
    cache, logits = jkv.prefill(PARAMS, text, PROMPT)
    before = jax.tree.map(np.asarray, cache)
    own, _ = jkv.extend(PARAMS, cache, [[1, 2], [3, 4]])
    kept = own
    for _ in range(20):
        token = logits.argmax(-1).astype(jnp.int32)
        kept, want = jkv.branch(PARAMS, kept, token)
        own, logits = jkv.step(PARAMS, own, token)
        np.testing.assert_array_equal(logits, want)
    jax.tree.map(np.testing.assert_array_equal, cache, before)
    jax.tree.map(np.testing.assert_array_equal, own, kept)


def test_step_does_not_donate_shared_codec_arrays():
    """`extend` gives the new cache the bases of the old one."""
    text = f"turboquant(bits=2, values=1, center=True, moments={tiny.MOMENTS!r})"
    cache, _ = jkv.prefill(tiny.PARAMS, text, PROMPT)
    own, _ = jkv.extend(tiny.PARAMS, cache, [[1], [2]])
    jkv.step(tiny.PARAMS, own, TOKEN)
    jkv.branch(tiny.PARAMS, cache, TOKEN)


def test_step_after_rollback_leaves_original_cache_intact(cache):
    after = jkv.branch(PARAMS, cache, TOKEN)[0]
    before = jax.tree.map(np.asarray, after)
    jkv.step(PARAMS, after.rollback(1), TOKEN)
    jkv.branch(PARAMS, after, TOKEN)
    jax.tree.map(np.testing.assert_array_equal, after, before)


def test_donated_cache_is_refused(cache, tmp_path):
    given = jkv.branch(PARAMS, cache, TOKEN)[0]
    after, _ = jkv.step(PARAMS, given, TOKEN)
    for use in (
        lambda: jkv.step(PARAMS, given, TOKEN),
        lambda: jkv.branch(PARAMS, given, TOKEN),
        lambda: jkv.extend(PARAMS, given, [[1], [2]]),
        lambda: jkv.generate(PARAMS, given, [[1], [2]], max_new_tokens=1),
        lambda: jkv.save_cache(given, tmp_path / "c", PARAMS),
    ):
        with pytest.raises(ValueError, match="given to jkv.step.*or call jkv.branch"):
            use()
    assert after.seen.tolist() == [62, 47]


def test_step_can_be_jitted(cache):
    stepped = jax.jit(lambda cache, token: jkv.step(PARAMS, cache, token)[1])(cache, TOKEN)
    np.testing.assert_allclose(stepped, jkv.branch(PARAMS, cache, TOKEN)[1], atol=1e-5)


@pytest.mark.parametrize("text", ["full", "int4", "h2o(budget=90)", "snapkv(budget=32, window=8) | append"])
def test_step_beyond_reserve_is_refused(text: str):
    """What holds every token would lose one, and say nothing; a row that pauses needs no room."""
    cache, _ = jkv.prefill(PARAMS, text, [PROMPT[0][:40], PROMPT[1][:38]], reserve=20)
    with pytest.raises(
        ValueError, match=r"(room for 20 tokens|made for \d+ tokens) .*would hold \d+: .*larger reserve="
    ):
        for _ in range(61):
            cache, _ = jkv.step(PARAMS, cache, TOKEN)
    steps = int(cache.seen[0]) - 40  # nothing was taken from the caller
    assert 20 <= steps < 60 and cache.seen.tolist() == [40 + steps, 38 + steps]
    with pytest.raises(ValueError, match="larger reserve="):
        jkv.branch(PARAMS, cache, TOKEN)
    if "append" not in text:  # both rows have as many tokens on top
        after, _ = jkv.branch(PARAMS, cache, jnp.array([-1, 4]))
        assert after.seen.tolist() == [40 + steps, 39 + steps]
        assert (np.asarray(after.kept()).min((0, 2)) == after.seen).all()


def test_only_relative_positions_step_past_context():
    """There they go on as `generate` does, which knows beforehand how far it goes."""
    short = jkv.models.random({**jkv.models.TINY, "max_position_embeddings": 64}, 0, jnp.float32)
    rows, text = [PROMPT[0][:40]], "streaming(budget=24)"
    cache, _ = jkv.prefill(short, "streaming(budget=24, relative=False)", rows)
    with pytest.raises(ValueError, match="64 tokens and 1 more are asked for, 65 in all; the model's context is 64"):
        for _ in range(25):
            cache, _ = jkv.step(short, cache, TOKEN[:1])
    cache, logits = jkv.prefill(short, text, rows, reserve=24)
    found = []
    for _ in range(60):
        found.append(int(logits[0].argmax()))
        cache, logits = jkv.step(short, cache, jnp.array(found[-1:], jnp.int32))
    assert found == jkv.generate(short, text, rows, max_new_tokens=60, stop_ids=()).tokens[0]


def test_paused_row_has_nan_logits():
    cache, _ = jkv.prefill(PARAMS, "full", PROMPT)
    _, logits = jkv.branch(PARAMS, cache, jnp.array([-1, 4]))
    assert np.isnan(logits[0]).all() and np.isfinite(logits[1]).all()


@pytest.mark.parametrize("text", ["snapkv(budget=40, window=8)", "tova(budget=40)", "h2o(budget=40)"])
@pytest.mark.parametrize("steps", [5, 20])
def test_paused_row_keeps_its_queries(text: str, steps: int):
    """Those of the row alone, of as many of its tokens: another row's steps, and the flushes between, take none."""
    rng = np.random.default_rng(5)
    said = rng.integers(3, 90, (2, 60))
    cache, _ = jkv.prefill(PARAMS, text, [PROMPT[0], PROMPT[0][:50]], reserve=80)
    alone, _ = jkv.prefill(PARAMS, text, [PROMPT[0]], reserve=80)
    for i in range(40):
        token = np.where([i < steps, True], said[:, i], -1)
        cache, _ = jkv.step(PARAMS, cache, jnp.asarray(token, jnp.int32))
        if i < steps:
            alone, _ = jkv.step(PARAMS, alone, jnp.asarray(token[:1], jnp.int32))
    for got, want in zip(cache.layers, alone.layers, strict=True):
        got, want = got.queries.aged(), want.queries.aged()
        assert (want.pos[0] >= 0).all() and want.pos[0, -1] == len(PROMPT[0]) + steps - 1
        np.testing.assert_array_equal(got.pos[0], want.pos[0])
        np.testing.assert_allclose(got.q[0], want.q[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("text", ["snapkv(budget=40, window=8)", "tova(budget=40)", "h2o(budget=40)"])
def test_shorter_row_of_extend_keeps_older_queries(text: str):
    """And what is asked after a pause is found: a row's cache after it is that of the row alone."""
    more = [[7, 8, 9], list(range(20, 60))]
    both, _ = jkv.extend(PARAMS, jkv.prefill(PARAMS, text, [PROMPT[0], PROMPT[0][:50]], reserve=80)[0], more)
    one, _ = jkv.extend(PARAMS, jkv.prefill(PARAMS, text, [PROMPT[0]], reserve=80)[0], more[:1])
    for got, want in zip(both.layers, one.layers, strict=True):
        np.testing.assert_array_equal(got.queries.aged().pos[0], want.queries.aged().pos[0])
        np.testing.assert_array_equal(np.sort(got.tiers[0].pos[0]), np.sort(want.tiers[0].pos[0]))


def test_paused_row_queries_are_counted_once():
    """A flush adds the attention of what came since the last one, and the ring has older queries too."""
    cache, _ = jkv.prefill(PARAMS, "h2o(budget=100)", PROMPT, reserve=80)
    sums = []
    for i in range(60):
        cache, _ = jkv.step(PARAMS, cache, jnp.array([5 if i < 5 else -1, 7], jnp.int32))
        sums.append([np.asarray(x.tiers[0].columns["mass"])[0].sum() for x in cache.layers])
    flushes = sorted({i for i in range(1, 60) if not np.allclose(sums[i], sums[i - 1])})
    assert len(flushes) == 1, flushes  # the one that came after its five tokens


@pytest.mark.parametrize("token", [5, [5], [[5, 6]], [5, 6, 7]])
def test_a_step_takes_one_token_per_row(cache, token):
    with pytest.raises(ValueError, match=r"the cache 2 rows: give i32\[2\], one token per row, such as \[5, 5\]"):
        jkv.branch(PARAMS, cache, token)
