"""Models whose blocks recur, all of them or most: the states go through everything that a cache goes through.

The laws of test_laws.py run over such a model too. Prompts, room and chunk are the same in most tests: so are programs.
"""

import json
import math
import re
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jkv
from jkv import methods
from jkv.aot.hlo import PLACES, lines
from jkv.cache.cache import tree_bytes
from jkv.cache.padding import bucket
from jkv.core import compilation, decode_loop
from jkv.generation import inspect
from jkv.io import load as loading
from jkv.models.layers.mamba2_ssd import STRETCH
from jkv.prompts.allocation import CacheShape
from jkv.prompts.greedy import greedy
from support.tiny import GATED

SIZES = dict(vocab_size=160, hidden_size=48, num_hidden_layers=4)
PURE = jkv.models.random(SIZES | dict(model_type="mamba2", num_heads=12, head_dim=8, state_size=8, n_groups=2))
HYBRID = jkv.models.random(
    SIZES
    | dict(model_type="bamba", attn_layer_indices=[0, 2], num_attention_heads=4, num_key_value_heads=2)
    | dict(intermediate_size=80, max_position_embeddings=512, mamba_n_heads=12, mamba_d_state=8, mamba_n_groups=2)
)
# attention and a mixer side by side in each layer
BESIDE = jkv.models.random(
    SIZES
    | dict(model_type="falcon_h1", num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    | dict(intermediate_size=80, max_position_embeddings=512, mamba_n_heads=12, mamba_d_ssm=96, mamba_d_state=8)
    | dict(mamba_n_groups=2, mamba_norm_before_gate=False)
)
EACH = {"mamba2": PURE, "bamba": HYBRID, "qwen3_next": GATED, "falcon_h1": BESIDE}
SLOW = pytest.mark.slow
KINDS = pytest.mark.parametrize("params", [PURE, HYBRID, GATED, pytest.param(BESIDE, marks=SLOW)], ids=EACH)
BOTH = pytest.mark.parametrize(
    "params", [PURE, HYBRID, pytest.param(GATED, marks=SLOW), pytest.param(BESIDE, marks=SLOW)], ids=EACH
)
PROMPTS = [[(5 * i * i + 3 * i) % 151 for i in range(STRETCH + 40)], [(11 * i) % 89 for i in range(41)]]
NEW = 40


@cache
def answered(family):
    """What a model generates after the prompts, and the program that did it."""
    out = jkv.generate(EACH[family], "full", PROMPTS, max_new_tokens=NEW, stop_ids=())
    found = {key[0]: program for key, program in compilation.PROGRAMS.items()}
    return out, (found[decode_loop.steps], found[decode_loop.entering])


forward = jax.jit(jkv.models.forward)


def check_greedy(params, prompts, answers):
    """Each token is the argmax after those before it: one pass of the whole model over prompts and answers."""
    longest = 32 * -(-max(len(a) + len(b) for a, b in zip(prompts, answers, strict=True)) // 32)
    ids = np.full((len(prompts), longest), -1)
    for row, (a, b) in zip(ids, zip(prompts, answers, strict=True), strict=True):
        row[longest - len(a) - len(b) :] = [*a, *b]
    pos = np.where(ids >= 0, np.cumsum(ids >= 0, 1) - 1, -1)
    best = np.asarray(forward(params, np.maximum(ids, 0), pos)).argmax(-1)
    for row, b in zip(best, answers, strict=True):
        assert row[longest - len(b) - 1 : -1].tolist() == list(b)


def same(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        x, y = np.asarray(x, np.float32), np.asarray(y, np.float32)
        np.testing.assert_allclose(x, y, atol=1e-5 * max(1, abs(y).max()), rtol=0)


@pytest.mark.slow
@KINDS
def test_generation_matches_model_argmax(params):
    out, _ = answered(params.config.family)
    assert [len(x) for x in out.tokens] == [NEW, NEW]
    check_greedy(params, PROMPTS, out.tokens)


@KINDS
def test_step_does_not_write_states(params):
    """As compiled: arguments are taken over, steps ask the host nothing, and no state is made but once in a block."""
    out, programs = answered(params.config.family)
    for program, kind in zip(programs, ("steps", "entering"), strict=True):
        check_states(program, kind, out, params)


def check_states(program, kind, out, params):
    text, m = program.program.as_text(), params.config.mixers
    assert not re.search(r"\b(infeed|outfeed|send|recv)(-start|-done)?\(|callback|xla_(ffi_)?python", text)
    shape = out.cache.states[0].state.shape
    state = f"f32[{','.join(map(str, shape))}]"
    taken = {int(n) for n in re.findall(r"\{\d+\}: \((\d+), \{\}, (?:may|must)-alias\)", text.splitlines()[0])}
    given = re.findall(r"(\S+) parameter\((\d+)\)", text[text.index("\nENTRY") :])
    places = [int(n) for kind, n in given if kind.startswith(state)]
    assert len(places) == (len(m.at) if kind == "steps" else 1) and taken.issuperset(places)
    made = {place: [] for place in PLACES}
    for place, _, line in lines(text):
        hit = re.search(r" = f32\[([\d,]+)\]\S* ([\w-]+)\(", line)
        dims = [int(n) for n in hit[1].split(",")] if hit else []
        if dims[-1:] == [m.state] and math.prod(dims) == math.prod(shape):
            made[place].append(hit[2])
    if kind == "steps":
        assert {"bitcast"} <= set(made["step"]) <= {"get-tuple-element", "bitcast", "parameter"} and set(
            made["once"]
        ) <= {"parameter"}
    else:
        assert made["once"].count("fusion") == 2 and not made["step"]
    assert not made["flush"] and "copy" not in made["once"]


@pytest.mark.slow
@BOTH
def test_chunked_prefill_and_extend_give_same_state(params):
    whole, want = jkv.prefill(params, "full", PROMPTS, reserve=64)
    parts, got = jkv.prefill(params, "full", PROMPTS, reserve=64, chunk=48)
    np.testing.assert_allclose(got, want, atol=1e-4)
    same(parts.states, whole.states)
    begun, _ = jkv.prefill(params, "full", [PROMPTS[0][:150], PROMPTS[1][:3]], reserve=64)
    for i in range(3):  # some tokens wait when the rest comes, and of one row fewer than of the other
        begun, _ = decode_loop.step(params, begun, jnp.asarray([PROMPTS[0][150 + i], PROMPTS[1][2 + i] if i else -1]))
    assert begun.states[0].count.tolist() == [3, 2]
    ended, got = jkv.extend(params, begun, [PROMPTS[0][153:], PROMPTS[1][5:]])
    np.testing.assert_allclose(got, want, atol=1e-4)
    same(ended.states, whole.states)


@BOTH
def test_single_steps_equal_blocks(params):
    """Over several blocks, a row pausing in between."""
    cache, logits = jkv.prefill(params, "full", PROMPTS, reserve=64)
    out, _ = answered(params.config.family)
    for i in range(NEW):
        token = jnp.asarray([row[i] for row in out.tokens])
        if i % 7 == 3:
            cache, _ = decode_loop.step(params, cache, token.at[1].set(-1))
            cache, _ = decode_loop.step(params, cache, token.at[0].set(-1))
        else:
            cache, logits = decode_loop.step(params, cache, token)
    np.testing.assert_allclose(logits, out.logits, atol=1e-4)


@BOTH
def test_rollback_restores_states(params):
    cache, _ = jkv.prefill(params, "full", PROMPTS, reserve=64)
    kept = [cache]
    for i in range(6):
        kept.append(decode_loop.step(params, kept[-1], jnp.asarray([i, i + 1]))[0])
    back = kept[6].rollback(4)
    again, was = (decode_loop.step(params, x, jnp.asarray([9, 8]))[1] for x in (back, kept[2]))
    np.testing.assert_allclose(again, was, atol=1e-6)
    assert back.seen.tolist() == kept[2].seen.tolist()
    with pytest.raises(ValueError, match="rollback.7.: 6 tokens of a row were added since the last flush"):
        kept[6].rollback(7)


@BOTH
def test_save_fork_and_pick_keep_states(params, tmp_path):
    cache, logits = jkv.prefill(params, "full", PROMPTS, reserve=64)
    cache, _ = decode_loop.step(params, cache, logits.argmax(-1).astype(jnp.int32))
    jkv.save_cache(cache, tmp_path / "cache", params)
    again = jkv.load_cache(tmp_path / "cache", params)
    for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(cache), strict=True):
        np.testing.assert_array_equal(a, b)
    forked = cache.fork(2).pick(jnp.asarray([3, 0]))
    alone = decode_loop.step(params, forked, jnp.asarray([5, 6]))[1]
    both = decode_loop.step(params, cache, jnp.asarray([6, 5]))[1]
    np.testing.assert_allclose(alone, both[::-1], atol=1e-5)
    assert inspect.summary(cache).nbytes == cache.nbytes


@KINDS
def test_state_bytes_are_constant_and_reported(params):
    c, m, block = params.config, params.config.mixers, 16
    state = m.heads * m.head_dim * m.state * 4
    written = block * m.inner * 4 if m.rule == "delta" else 0
    waits = (m.kernel - 1 + block) * m.channels * 4 + block * m.heads * 4 + 4 + written
    want = 2 * len(m.at) * (state + waits)
    assert [
        tree_bytes(CacheShape(methods.parse("full"), c, 2, n, 16, jnp.float32).empty().states) for n in (32, 512)
    ] == [want] * 2
    out, _ = answered(params.config.family)
    assert out.receipt.bytes_kept == out.cache.nbytes == out.receipt.bytes_predicted
    assert out.receipt.bytes_states == want and f"states       {want:,} of these bytes" in str(out.receipt)
    full = CacheShape(
        methods.parse("full"), c, 2, bucket(max(map(len, PROMPTS))) + -(-NEW // 64) * 64, 64, jnp.float32
    ).empty()
    assert out.receipt.bytes_full == full.nbytes


def test_byte_budget_includes_states():
    cache = CacheShape(methods.parse("knorm(bytes='60kB')"), HYBRID.config, 1, 400, 32, jnp.float32).empty()
    assert tree_bytes(cache.states) < cache.nbytes <= 60_000


def test_draft_layers_end_before_next_attention_layer():
    draft = HYBRID.first(1)  # the block that attends, and the one behind it, which recurs
    assert (draft.config.layers, draft.config.mixers.at, len(draft.layers)) == (1, (1,), 2)
    assert HYBRID.first(2).config == HYBRID.config and len(HYBRID.first(2).layers) == 4
    with pytest.raises(ValueError, match="layers=3, and the model has 2"):
        methods.parse("speckv(budget=40, layers=3)").prefill.probe.texts(HYBRID, PROMPTS, greedy)


def test_unsupported_recurrent_compositions_are_refused():
    with pytest.raises(ValueError, match="no block of this mamba2 model attends.*use full"):
        jkv.prefill(PURE, "h2o(budget=40)", PROMPTS)
    with pytest.raises(ValueError, match="blocks that recur, which read every token"):
        jkv.prefill(HYBRID, "fastkv(budget=40, layer=0)", PROMPTS)


@pytest.mark.slow
def test_batch_job_matches_model_argmax(tmp_path, monkeypatch):
    """Rows come and go, and some begin alike: their state is taken where the common part ends."""
    from support.commands import call

    monkeypatch.setattr(loading, "load", lambda *_: HYBRID)
    rng = np.random.default_rng(0)
    head = rng.integers(0, 100, 40).tolist()
    asked = [head * (i % 2) + rng.integers(0, 100, 3 + 2 * i).tolist() for i in range(9)]
    new = [1 + 5 * i % 24 for i in range(9)]
    rows = [{"id": i, "tokens": asked[i], "max_new_tokens": new[i]} for i in range(9)]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, rows)))
    result = call("batch", tmp_path / "in.jsonl", tmp_path / "out", "--batch", 3, "--cache", "full")
    assert result.exit_code == 0, result.output
    lines = [json.loads(x) for path in (tmp_path / "out").glob("rows-*.jsonl") for x in path.read_text().splitlines()]
    assert sorted(x["id"] for x in lines) == list(range(9))
    lines.sort(key=lambda x: x["id"])
    assert [len(x["tokens"]) for x in lines] == new
    check_greedy(HYBRID, asked, [x["tokens"] for x in lines])


def test_training_refuses_recurrent_models(tmp_path, monkeypatch):
    from support.commands import call

    monkeypatch.setattr(loading, "load", lambda *_: HYBRID)
    result = call("train", "trimkv", "--out", tmp_path / "gate", "--length", 64, "--budget", 8)
    assert result.exit_code and "blocks that recur" in result.output and not (tmp_path / "gate").exists()
