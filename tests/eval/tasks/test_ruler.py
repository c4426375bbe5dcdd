"""RULER and the classic needle: parsers that know only the text find the answer, and no other."""

import re
from collections import Counter, defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jkv.eval.tasks import TASKS, examples
from jkv.eval.tasks.niah import needle
from jkv.eval.tasks.ruler import DEPTHS
from jkv.eval.tasks.words import LINE, chains, coined, keys, letters, people, prose, uuids, vocabulary
from support.answers import fact, holders

NEEDLE = re.compile(r"Remember: a magic (number|code) of (\S+) is (\S+)\.")
UUID = r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"
WORD = r"[a-z]+-[a-z]+"

# The table of the specification: task -> haystack, form of a key, form of a value, keys, values of each, keys asked.
NEEDLES = {
    "niah_single_1": ("line", WORD, r"\d{7}", 1, 1, 1),
    "niah_single_2": ("prose", WORD, r"\d{7}", 1, 1, 1),
    "niah_single_3": ("prose", WORD, UUID, 1, 1, 1),
    "niah_multikey_1": ("prose", WORD, r"\d{7}", 4, 1, 1),
    "niah_multikey_2": ("needles", WORD, r"\d{7}", None, 1, 1),
    "niah_multikey_3": ("needles", UUID, UUID, None, 1, 1),
    "niah_multivalue": ("prose", WORD, r"\d{7}", 1, 4, 1),
    "niah_multiquery": ("prose", WORD, r"\d{7}", 4, 1, 4),
}
OTHERS = ["vt", "cwe", "fwe", "qa_1", "qa_2"]


def quarter(text: str) -> int:
    return len(text) // 4


def made(name: str, length: int = 1500, samples: int = 4):
    return examples(name, length, samples, 11, quarter)


def test_ruler_has_all_thirteen_tasks():
    assert [name for name, row in TASKS.items() if row.suite == "ruler"] == [*NEEDLES, *OTHERS]
    assert [TASKS[name].new for name in OTHERS] == [30, 120, 50, 32, 32]
    assert {TASKS[name].new for name in NEEDLES} == {128}


@pytest.mark.parametrize("name", NEEDLES)
def test_needles_are_found_by_key(name):
    hay, key_form, value_form, many, each, asked = NEEDLES[name]
    for example in made(name):
        body = example.context.split("\n\n", 1)[1]
        held = defaultdict(list)
        for _, key, value in NEEDLE.findall(body):
            assert re.fullmatch(key_form, key) and re.fullmatch(value_form, value)
            held[key].append(value)
        assert {len(values) for values in held.values()} == {each}
        assert len(held) == many if many else len(held) > 15
        wanted = [key for key in held if re.search(rf"(?<![\w-]){key}(?![\w-])", example.question)]
        assert len(wanted) == asked
        assert all(key in example.prefix for key in wanted)
        assert sorted(v for key in wanted for v in held[key]) == sorted(example.answers)
        rest = NEEDLE.sub("", body)
        if hay == "needles":
            assert not rest.strip()
        if hay == "line":
            sentences = re.findall(r"[A-Z][^.]*\.", rest)
            assert sentences == [LINE[i % 5] for i in range(len(sentences))] and len(sentences) > 20


@pytest.mark.parametrize("name", NEEDLES)
def test_needle_depths_match_metadata(name):
    for example in made(name, 8000):
        body = example.context.split("\n\n", 1)[1]
        for depth, line in zip(example.meta["depths"], example.meta["needles"], strict=True):
            assert body.index(line) / (len(body) - len(line)) == pytest.approx(depth, abs=0.02)


def test_prose_depths_are_even_and_distinct():
    seen = set()
    for example in made("niah_multivalue", samples=30):
        grid = [depth * (DEPTHS - 1) for depth in example.meta["depths"]]
        assert grid == pytest.approx(np.round(grid)) and len(set(grid)) == 4
        seen |= set(np.round(grid).astype(int).tolist())
    assert len(seen) > 35 and {0, 39} <= seen


@given(st.floats(0, 1), st.integers(0, 1000))
@settings(max_examples=40, deadline=None)
def test_classic_needle_is_at_given_depth(depth, seed):
    example = needle(np.random.default_rng(seed), 3000, depth, quarter)
    body = example.context.split("\n\n", 1)[1]
    (line,) = example.meta["needles"]
    assert body.count(line) == 1 and example.meta["depth"] == depth
    assert body.index(line) / (len(body) - len(line)) == pytest.approx(depth, abs=0.05)
    if depth in (0, 1):
        assert body.startswith(line) if depth == 0 else body.endswith(line)
    (town,) = re.findall(r"keeper of (\w+) open", example.question)
    assert re.findall(rf"keeper of {town} opens the door with the code (\d{{6}})\.", body) == list(example.answers)


@pytest.mark.parametrize("depth", [-0.1, 50, float("nan")])
def test_depth_must_be_fraction(depth):
    with pytest.raises(ValueError, match="a fraction from 0"):
        needle(np.random.default_rng(0), 3000, depth, quarter)


def test_niah_samples_cover_all_depths():
    assert {example.meta["depth"] for example in made("niah", samples=60)} == {i / 10 for i in range(11)}


def test_vt_traces_one_chain_after_worked_example():
    for example in made("vt"):
        shown, text = example.context.split("\n\nThe text:\n\n")
        (value,) = re.findall(r"number (\d{5})", example.question)
        assert holders(text, value) == list(example.answers) and len(example.answers) == 5
        assert all(re.fullmatch("[A-Z]{5}", name) for name in example.answers)
        (sample,) = re.findall(r"hold the number (\d{5}) are", shown)
        assert " ".join(holders(shown, sample)) == shown.split(f"hold the number {sample} are ")[1]
        assert sample != value and len(shown) < 2000
        assert "VAR" not in re.sub(r"VAR \w+ = (VAR )?\w+", "", text)
    assert len({example.context.split("VAR ")[1] for example in made("vt")}) == 4, "every sample has its own example"


@pytest.mark.parametrize(
    "length, often, seldom, shown",
    [(1500, 6, 1, (20, 3, 1)), (4095, 6, 1, (20, 3, 1)), (4096, 30, 3, (40, 10, 3)), (40000, 30, 3, (40, 10, 3))],
)
def test_cwe_asks_for_ten_most_common(length, often, seldom, shown):
    def counted(text: str) -> Counter:
        entries = re.findall(r"(\d+)\. ([a-z]+)", text)
        assert [int(number) for number, _ in entries] == list(range(1, len(entries) + 1))
        return Counter(word for _, word in entries)

    for example in made("cwe", length, 2):
        head, text = example.context.split("\n\nThe list:\n\n")
        found = counted(text)
        assert {word for word, n in found.items() if n == often} == set(example.answers) and len(example.answers) == 10
        assert set(found.values()) == {often, seldom} and len(found) >= 20
        assert not [w for w in found for a in example.answers if a in w and a != w], "credited for another word"
        sample = counted(head)
        words, many, few = shown
        assert len(sample) == words and not set(sample) & set(found)
        assert {word for word, n in sample.items() if n == many} == set(head.split(" are ")[-1].split())
        assert Counter(sample.values()) == {many: 10, few: words - 10}


def test_cwe_answers_are_no_substrings():
    for example in made("cwe", 900, 40):
        words = set(re.findall(r"\d+\. ([a-z]+)", example.context.split("The list:")[1]))
        assert not [word for word in words for answer in example.answers if answer in word and answer != word]


def test_smallest_fwe_has_no_ties():
    with pytest.raises(ValueError, match="give a length of") as caught:
        made("fwe", 30)
    for example in made("fwe", int(str(caught.value).split()[-1])):
        counts = Counter(re.findall(r"\b[a-z]{6}\b", example.context.split("\n\n", 1)[1])).most_common(4)
        assert [n for _, n in counts] == sorted({n for _, n in counts}, reverse=True) and len(counts) == 4


@pytest.mark.parametrize("length", [700, 1500, 20000])
def test_fwe_follows_zipf_after_noise(length):
    for example in made("fwe", length):
        body = example.context.split("\n\n", 1)[1].split()
        noise = body.count("...")
        counts = Counter(word for word in body if word != "...")
        assert all(re.fullmatch("[a-z]{6}", word) for word in counts)
        top = [word for word, _ in counts.most_common(3)]
        assert top == list(example.answers)
        second, third, fourth, fifth = (n for _, n in counts.most_common(4))
        assert noise > second > third > fourth > fifth
        size = max(8, length // 50)
        ranked = [noise, *(n for _, n in counts.most_common())]
        zeta = 1.6449340668482264
        fits = [
            n
            for n in range(int(noise * zeta), int((noise + 1) * zeta) + 2)
            if [c for c in (int(n / k**2 / zeta) for k in range(1, size + 1)) if c] == ranked
        ]
        assert fits, "no n gives these counts"


def test_zipf_counts_match_specification():
    import math

    assert [int(1000 * k**-2 * 6 / math.pi**2) for k in (1, 2, 3, 4)] == [607, 151, 67, 37]


@pytest.mark.parametrize("name, hops", [("qa_1", 0), ("qa_2", 1)])
def test_qa_questions_have_one_answer(name, hops):
    kinds = set()
    for example in made(name, samples=12):
        assert fact(example.context, example.question) == list(example.answers)
        assert example.question.count("the teacher of") == hops
        assert example.context.count(example.answers[0]) == 1, "the answer is a word of its own"
        numbered = re.findall(r"^Document (\d+): ", example.context, re.M)
        assert [int(i) for i in numbered] == list(range(1, len(numbered) + 1)) and len(numbered) > 8
        kinds.add(example.meta["kind"])
    assert kinds == {"town", "firm", "pet"}


def test_two_hop_questions_need_two_documents():
    for example in made("qa_2"):
        who = re.search("teacher of (.+?) (born|work|called)", example.question)[1]
        documents = example.context.split("\n\n")[1:]
        (first,) = (d for d in documents if re.search(rf": {who} was born", d))
        assert example.answers[0] not in first


@given(st.integers(0, 2**32), st.integers(2, 60))
@settings(max_examples=30, deadline=None)
def test_people_are_distinct_and_mentors_form_one_cycle(seed, n):
    crowd = people(np.random.default_rng(seed), n)
    assert len(crowd) == n
    values = [v for p in crowd for v in (p.name, p.town, p.firm, p.pet)]
    assert len(set(values)) == 4 * n
    mentors = {p.name: p.mentor for p in crowd}
    name, seen = crowd[0].name, set()
    while name not in seen:
        seen.add(name)
        name = mentors[name]
    assert len(seen) == n and all(p.mentor != p.name for p in crowd)


@given(st.integers(0, 2**32), st.integers(1, 2000))
@settings(max_examples=25, deadline=None)
def test_strings_are_distinct(seed, n):
    rng = np.random.default_rng(seed)
    for made in (keys(rng, n), coined(rng, n), uuids(rng, n), vocabulary(rng, n)):
        assert len(set(made)) == n
    names = [name for chain in chains(rng, 5) for name in chain.names]
    assert len(set(names)) == 25


def test_letters_exhausts_alphabet_then_refuses():
    rng = np.random.default_rng(0)
    assert sorted(letters(rng, 4, 1, "abcd")) == list("abcd")
    with pytest.raises(ValueError, match="there are no 5 different strings"):
        letters(rng, 5, 1, "abcd")


def test_too_many_keys_are_refused():
    with pytest.raises(ValueError, match="different keys, 98001 are needed"):
        keys(np.random.default_rng(0), 98001)


@given(st.integers(0, 2**32), st.integers(1, 3000), st.lists(st.floats(0, 1), max_size=4))
@settings(max_examples=40, deadline=None)
def test_prose_has_requested_words_and_inserts(seed, n, depths):
    inserts = [(depth, f"Insert {i} is here.") for i, depth in enumerate(depths)]
    text = prose(np.random.default_rng(seed), n, inserts)
    assert all(text.count(sentence) == 1 for _, sentence in inserts)
    assert len(text.split()) == n + 4 * len(inserts)
    order = sorted(range(len(depths)), key=lambda i: text.index(inserts[i][1]))
    assert [depths[i] for i in order] == sorted(depths)
    for _, sentence in inserts:
        before = text[: text.index(sentence)].rstrip()
        assert not before or before[-1] in ".!?:", "a needle is between sentences"


def test_prose_repeats_after_corpus_end():
    text = prose(np.random.default_rng(0), 60_000)
    assert len(text.split()) == 60_000
    assert text.count(text[:200]) == 2, "the corpus has some 43,000 words"
