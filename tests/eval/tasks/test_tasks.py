"""Laws of every task: it fits, it is the same again, its answers are in it, and the scores tell right from wrong."""

import re
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jkv.eval.tasks import TASKS, examples, fit
from jkv.eval.tasks import registry as tasks
from jkv.io.load import read


def quarter(text: str) -> int:
    return len(text) // 4


@pytest.fixture(scope="module")
def count():
    tokenizer = read("smollm2-135m").tokenizer
    return lambda text: len(tokenizer.encode(text))


@pytest.fixture(params=list(TASKS))
def name(request):
    return request.param


def unit(text: str, count) -> int:
    """Tokens of the largest piece of a context that is added as one: a paragraph, a line or, in one line, 24 marks."""
    parts = [part for block in text.split("\n\n")[2:] for part in block.split("\n")]
    return max(count(part) for part in parts if len(part) < 400) if len(parts) > 5 else 40


@pytest.mark.parametrize("length", [1100, 4096])
def test_prompts_fit_and_fill_length(name, length, count):
    for example in examples(name, length, 2, 7, count):
        used = count(example.context + example.question + example.prefix)
        assert used <= length
        assert used >= 0.97 * length or used + 2 * unit(example.context, count) > length
        assert count(example.gold) <= TASKS[name].new, "the right answer does not fit the tokens it may take"


@pytest.mark.parametrize("length", [900, 1500, 20000])
def test_any_token_count_function_works(name, length):
    for example in examples(name, length, 3, 1, quarter):
        assert quarter(example.prompt) <= length
        assert quarter(example.prompt) >= 0.94 * length


def test_examples_are_determined_by_seed(name):
    made = examples(name, 1500, 3, 5, quarter)
    assert made == examples(name, 1500, 3, 5, quarter)
    assert made[:2] == examples(name, 1500, 2, 5, quarter)
    other = examples(name, 1500, 3, 6, quarter)
    assert len({example.prompt for example in [*made, *other]}) == 6
    assert [example.meta["sample"] for example in other] == [0, 1, 2]
    assert {(example.meta["seed"], example.meta["length"]) for example in other} == {(6, 1500)}


def test_gold_scores_one_and_empty_scores_zero(name):
    task = TASKS[name]
    for example in examples(name, 1500, 3, 2, quarter):
        for said in (example.gold, " ".join(example.answers)):
            assert task.score(said, example.answers) == 1.0
        assert task.score("", example.answers) == 0.0
        assert task.score("I do not know.", example.answers) == 0.0


def test_answer_of_another_sample_is_wrong(name):
    one, two = examples(name, 1500, 2, 3, quarter)
    assert TASKS[name].score(two.gold, one.answers) < 1.0


def test_answers_are_in_context_only(name):
    for example in examples(name, 1500, 3, 4, quarter):
        assert example.answers
        for answer in example.answers:
            assert answer in example.context
            assert answer not in example.question + example.prefix


def test_prompt_parts_concatenate(name):
    example = examples(name, 1500, 1, 0, quarter)[0]
    assert example.prompt == example.context + example.question + example.prefix
    assert example.context == example.context.strip()
    assert re.fullmatch(r"\n\n\S.*\S\n", example.question)
    assert example.prefix == example.prefix.strip() and example.gold.startswith(" ")


def test_too_short_length_is_refused_with_sufficient_one(name):
    with pytest.raises(ValueError, match=rf"{name}: 30 tokens are too few.*give a length of \d+") as caught:
        examples(name, 30, 1, 0, quarter)
    enough = int(str(caught.value).split()[-1])
    assert quarter(examples(name, enough, 1, 0, quarter)[0].prompt) <= enough


def test_unknown_task_suggests_nearest_name():
    with pytest.raises(ValueError, match="unknown task 'niah_singel_1': did you mean 'niah_single_1'"):
        examples("niah_singel_1", 1000, 1, 0, quarter)
    with pytest.raises(ValueError, match="there are .*vt, cwe"):
        examples("?", 1000, 1, 0, quarter)


@pytest.mark.parametrize("wrong", [{"length": 0}, {"samples": 0}, {"seed": -1}])
def test_invalid_numbers_are_refused(wrong):
    (what,) = wrong
    with pytest.raises(ValueError, match=f"{what}={wrong[what]}"):
        examples(**({"name": "vt", "length": 2000, "samples": 1, "seed": 0, "count": quarter} | wrong))


def test_task_decorator_registers_function(monkeypatch):
    monkeypatch.setattr(tasks, "TASKS", {})

    @tasks.task("niah", new=3, score=tasks.string_match_part)
    def parrot(rng, length, count):
        """Says it again.

        More.
        """
        return tasks.Example(context="say x", question="?", prefix="", answers=("x",), meta={"kind": "bird"})

    row = tasks.TASKS["parrot"]
    assert (row.name, row.suite, row.new, row.about) == ("parrot", "niah", 3, "Says it again.")
    made = examples("parrot", 9, 1, 0, quarter)[0]
    assert made.meta == {"kind": "bird", "seed": 0, "sample": 0, "length": 9}


def test_task_table_is_complete():
    assert [row.suite for row in TASKS.values()].count("ruler") == 13
    assert all(row.name == key and row.about.endswith(".") and row.new > 0 for key, row in TASKS.items())


def test_modules_import_in_any_order():
    script = """
import importlib, sys
names = ["tasks", "tasks.ruler", "tasks.niah", "tasks.scbench", "tasks.words", "corpora"]
for name in names:
    for other in [n for n in sys.modules if n.startswith("jkv.eval")]:
        del sys.modules[other]
    importlib.import_module(f"jkv.eval.{name}")
    from jkv.eval.tasks import TASKS
    assert len(TASKS) == int(sys.argv[1]), (name, len(TASKS))
"""
    subprocess.run([sys.executable, "-c", script, str(len(TASKS))], check=True)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(60, 5000), st.integers(1, 40), st.integers(0, 40))
def test_fit_finds_largest_size_within_one_percent(seed, length, size, head):
    """Units of 1 to `size` tokens after `head` tokens of text."""
    calls = []

    def build(rng, n):
        return head + int(rng.integers(1, size + 1, n).sum())

    def count(tokens):
        calls.append(tokens)
        return tokens

    rng = np.random.default_rng(seed)
    if build(np.random.default_rng(int(np.random.default_rng(seed).integers(2**63))), 1) > length:
        return
    used = fit(build, rng, length, count, least=1, text=lambda tokens: tokens)
    assert used <= length
    assert used >= 0.99 * length or used + size > length
    assert len(calls) <= 16


def test_fit_handles_jumps_in_unit_cost():
    calls = []

    def count(n):
        calls.append(n)
        return n if n < 5000 else 10**6

    assert fit(lambda rng, n: n, np.random.default_rng(0), 10_000, count, least=1, text=lambda n: n) == 4999
    assert len(calls) < 30


def test_string_match():
    letters = ["a", "b", "c", "d"]
    assert tasks.string_match_all("a, c", letters) == 0.5
    assert tasks.string_match_all("A b C D", letters) == 1.0
    assert tasks.string_match_part("xx C", letters) == 1.0
    assert tasks.string_match_part("xx", letters) == 0.0
    assert tasks.string_match_all("seven", ["SEVEN"]) == 1.0


def test_first_integer_and_first_word():
    assert tasks.first_integer(" 12345, or 7", ["12345"]) == 1.0
    assert tasks.first_integer(" 7 or 12345", ["12345"]) == 0.0
    assert tasks.first_integer("123456", ["12345"]) == 0.0
    assert tasks.first_integer("-12345", ["12345"]) == 0.0
    assert tasks.first_word("\n Torabu. Label: x", ["torabu"]) == 1.0
    assert tasks.first_word("x torabu", ["torabu"]) == 0.0
    assert tasks.first_word("", ["torabu"]) == 0.0


def test_token_f1():
    assert tasks.token_f1("the Blue, house", ["a blue house"]) == 1.0
    assert tasks.token_f1("blue", ["green", "blue sky"]) == pytest.approx(2 / 3)
    assert tasks.token_f1("blue blue", ["blue"]) == pytest.approx(2 / 3)
    assert tasks.token_f1("red", ["blue"]) == 0.0


@given(st.lists(st.sampled_from("xyz"), min_size=1), st.lists(st.sampled_from("xyz"), min_size=1))
def test_token_f1_is_symmetric(one, two):
    one, two = " ".join(one), " ".join(two)
    assert tasks.token_f1(one, [two]) == pytest.approx(tasks.token_f1(two, [one]))
    assert tasks.token_f1(one, [one]) == 1.0
