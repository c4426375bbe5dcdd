"""Every argument beside a list of what it cannot be: each is refused by its name; and what numpy and jax give works."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

import jkv
from jkv import models
from jkv.prompts.tokenization import LONGEST, encode


class Letters:
    """A tokenizer: a letter is a token."""

    eos_ids, template = (), None

    def encode(self, text):
        return [ord(c) % 100 for c in text]

    within = encode

    def decode(self, ids, stop=()):
        return "".join(chr(97 + t % 26) for t in ids)

    def chat(self, messages):
        if not all({"role", "content"} <= m.keys() for m in messages):
            raise ValueError("a message lacks its content")
        return messages[0]["content"]

    def stream(self, stop=()):
        return self

    def push(self, token):
        return chr(97 + token % 26)

    def finish(self):
        return ""


PARAMS = replace(models.random(dict(models.TINY, num_hidden_layers=1)), tokenizer=Letters())
IDS = [3, 1, 4]
NO_NUMBER = [
    None,
    "1",
    b"1",
    True,
    np.True_,
    {},
    [True],
    [True, 1],
    (1, np.False_),
    [[1]],
    [[1], [1, 2]],
    float("nan"),
    1j,
    object(),
    10**30,
]
OFF = -1
NO_COUNT = [*NO_NUMBER, 1.5, 2.0, np.float32(2), OFF, [1.0]]
WRONG = {
    "params": [None, "smollm2-135m", 5],
    "cache": [5, b"full", ["full"], 1.5, PARAMS],
    "prompt": [
        None, 5, 1.5, {"role": "user", "content": "a"}, b"abc", [], [[]], np.array(5), jnp.array(5), np.array([1.5]),
        jnp.ones(3), [1, 2.0], [1.5], [True, False], [[1, True]], [np.True_], [None], [[None]], [1, "a"], ["a", 5],
        [[[1]]], np.ones((1, 1, 1), int), {1, 2}, (x for x in IDS), [{"a": 1}], [[{"role": "user"}]], [-1], [100],
        [1, {"role": "user"}], np.zeros((0,), int), np.array([True]), object(),
    ],
    "max_new_tokens": [*(x for x in NO_COUNT if x is not False), 0, [1, 2]],
    "temperature": [*NO_NUMBER, -1, np.float32(-1), float("inf"), [0.5, 0.5]],
    "top_k": [*(x for x in NO_COUNT if x is not OFF), -2, 1.7, 1 << 31, [1, 2]],
    "top_p": [*NO_NUMBER, -0.1, 1.01, [0.5, 0.5]],
    "min_p": [*NO_NUMBER, -0.1, 1, [0.5, 0.5]],
    "repetition_penalty": [*NO_NUMBER, 0, -1, float("inf"), [1.0, 1.0]],
    "seed": [*(x for x in NO_COUNT if x is not OFF), 1 << 64, [1, 2], [], -(1 << 63) - 1],
    "stop": [None, 5, b"END", "", "\ud83d", ("",), ["a", ""], [1], [None], (x for x in "ab"), {"a": 1}],
    "stop_ids": [x for x in NO_COUNT if x is not None] + [[100], [10**9], [-2], [[1]], "ab", (x for x in IDS)],
    "chat": [5, "yes", 1.5, [True]],
    "chunk": [x for x in NO_COUNT if x is not None] + [[1]],
    "n": [*NO_COUNT, 0, [2]],
    "drafter": [5, "prefix", [], ["suffix", "recycle"]],
    "prefix_cache": [5, "folder", True],
    "sampling": [5, "greedy", {"temperature": 1.0}],
    "compare": [None, 1, "yes", [True]],
    "stop_fn": [5, "f", [None]],
    "reserve": [x for x in NO_COUNT if x is not None] + [[1]],
}  # fmt: skip
OPTIONS = [name for name in WRONG if name not in ("params", "cache", "prompt", "reserve")]


def refused(name, call, *args, **options):
    with pytest.raises((ValueError, TypeError)) as error:
        call(*args, **options)
    assert name in str(error.value), f"{options} {repr(args[1:])[:200]}: {error.value}"


@pytest.mark.parametrize("call", [jkv.generate, jkv.stream], ids=["generate", "stream"])
@pytest.mark.parametrize("name", [*OPTIONS, "params", "cache", "prompt"])
def test_invalid_arguments_are_refused_by_name(call, name, monkeypatch):
    """Before anything is read: no model runs."""
    monkeypatch.setattr("jkv.core.decode_loop.prefill_own", None)
    for x in WRONG[name]:
        given = {"params": PARAMS, "cache": "full", "prompt": IDS} | {name: x}
        refused(name, call, given.pop("params"), given.pop("cache"), given.pop("prompt"), **given)


@pytest.mark.parametrize("name", ["params", "cache", "prompt", "reserve", "chunk"])
def test_prefill_and_extend_refuse_invalid_arguments_by_name(name):
    for x in WRONG[name]:
        given = {"params": PARAMS, "cache": "full", "prompt": IDS} | {name: x}
        refused(name, jkv.prefill, given.pop("params"), given.pop("cache"), given.pop("prompt"), **given)
    if name in ("params", "cache", "prompt"):
        cache, _ = jkv.prefill(PARAMS, None, IDS)
        for x in [*WRONG[name], *(["full"] if name == "cache" else [])]:
            given = {"params": PARAMS, "cache": cache, "prompt": IDS} | {name: x}
            refused(name, jkv.extend, *given.values())


@pytest.mark.parametrize("call", [jkv.generate, jkv.stream], ids=["generate", "stream"])
def test_compare_with_prefilled_cache_is_refused(call):
    """It may have lost what the full one would have been made of."""
    cache, _ = jkv.prefill(PARAMS, None, IDS)
    refused("compare=", call, PARAMS, cache, IDS, max_new_tokens=4, compare=True)


def test_sampling_params_equal_keywords():
    drawn = dict(temperature=0.8, top_k=20, seed=3, n=2, max_new_tokens=6)
    want = jkv.generate(PARAMS, "int8", IDS, **drawn)
    assert jkv.generate(PARAMS, "int8", IDS, sampling=jkv.SamplingParams(**drawn)).tokens == want.tokens
    for name, x in drawn.items():
        refused(
            f"{name}= and sampling= are both given",
            jkv.generate,
            PARAMS,
            "int8",
            IDS,
            sampling=jkv.SamplingParams(),
            **{name: x},
        )


def test_table_covers_every_option():
    import inspect

    assert set(WRONG) - {"reserve"} == set(inspect.signature(jkv.generate).parameters)
    refused("temprature", jkv.stream, PARAMS, None, IDS, temprature=1.0)


def test_numpy_and_jax_numbers_are_accepted():
    """One program, whatever the numbers are written as; the same tokens."""
    kinds = [int, np.int8, np.int64, np.uint32, np.array, jnp.int32, jnp.uint8]
    reals = [float, np.float16, np.float32, np.float64, jnp.float32, jnp.bfloat16, np.array]
    want = None
    for whole, real in zip(kinds, reals, strict=True):
        got = jkv.generate(
            PARAMS, None, [whole(x) for x in IDS], max_new_tokens=whole(4), seed=whole(7), top_k=whole(9),
            temperature=real(1), top_p=real(0.5), min_p=real(0.125), stop_ids=[whole(99)], chunk=whole(0),
            compare=np.False_,
        ).tokens  # fmt: skip
        want = want or got
        assert got == want
    for prompt in (
        np.array(IDS),
        jnp.array(IDS, jnp.uint8),
        tuple(IDS),
        range(1, 4),
        np.array([IDS, IDS]),
        ["ab", "c"],
    ):
        assert all(isinstance(t, int) for row in encode(PARAMS, prompt)[0] for t in row)
    assert encode(PARAMS, np.array([IDS, IDS])) == ([IDS, IDS], False)
    assert encode(PARAMS, [np.array(IDS), "ab"]) == ([IDS, [97, 98]], False)


@pytest.mark.parametrize("call", ["generate", "stream"])
def test_stop_string_is_not_split_into_letters(call):
    """Not its letters; the same as a list of it."""

    def text(stop):
        if call == "generate":
            return jkv.generate(PARAMS, None, IDS, max_new_tokens=24, stop_ids=(), temperature=1.5, stop=stop).text
        return "".join(jkv.stream(PARAMS, None, IDS, max_new_tokens=24, stop_ids=(), temperature=1.5, stop=stop))

    free = text(())
    three = free[8:11]
    assert free.index(three[0]) < 8 or free.index(three[1]) < 8 or len(set(three)) == 3
    assert text(three) == text([three]) == text({three}) == free[: free.index(three)]


@pytest.mark.parametrize("call", [jkv.generate, jkv.stream], ids=["generate", "stream"])
def test_huge_max_new_tokens_and_reserve_are_refused(call):
    for new in (LONGEST, 10**6 + 10**5, 10**9, 1 << 40):
        refused("max_new_tokens", call, PARAMS, "streaming(budget=40)", IDS, max_new_tokens=new)
    refused("reserve", jkv.prefill, PARAMS, "streaming(budget=40)", IDS, reserve=10**9)
    cache, _ = jkv.prefill(PARAMS, "streaming(budget=40)", IDS)
    refused("max_new_tokens", jkv.generate, PARAMS, cache, IDS, max_new_tokens=10**9)


def test_only_relative_positions_continue_past_context():
    """One that is bound to the context is refused beyond it, and another gets positions for what comes."""
    ids = [(7 * i) % 97 for i in range(100)]
    bound, _ = jkv.prefill(PARAMS, "h2o(budget=48)", ids)
    refused("context is 512", jkv.generate, PARAMS, bound, IDS, max_new_tokens=450)
    cache, _ = jkv.prefill(PARAMS, "streaming(budget=40)", ids[:97], reserve=0)
    on = jkv.generate(PARAMS, cache, ids[97:], max_new_tokens=500, stop_ids=())
    longer = models.random(dict(models.TINY, num_hidden_layers=1, max_position_embeddings=1024))
    cache, _ = jkv.prefill(longer, "streaming(budget=40)", ids[:97], reserve=0)
    want = jkv.generate(longer, cache, ids[97:], max_new_tokens=500, stop_ids=())
    assert on.tokens == want.tokens
    np.testing.assert_allclose(on.logits, want.logits, atol=1e-5)
