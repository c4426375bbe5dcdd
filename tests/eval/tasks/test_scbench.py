"""Sessions: each question is solved from the text alone, each probe has nothing to be found."""

import ast
import json
import re
import statistics

import pytest

from jkv.eval.tasks import TASKS, none_named
from jkv.eval.tasks.scbench import RULE, SESSIONS, sessions
from jkv.io.load import read
from support.answers import fact, holders


def quarter(text: str) -> int:
    return len(text) // 4


@pytest.fixture(params=list(SESSIONS))
def name(request):
    return request.param


def body(one) -> str:
    return one.context.split("\n\n", 1)[1]


def asked(example) -> str:
    return example.question.strip()


# Solvers: session, question -> everything in the context that answers it.


def kv(one, question):
    table = json.loads(body(one))
    key = re.search('"(.*)"', question)[1]
    return [table[key]] if key in table else []


def prefix_suffix(one, question):
    start, end = re.findall('"(.*?)"', question)
    return [string for string in body(one).split("\n") if string.startswith(start) and string.endswith(end)]


def multi_hop(one, question):
    return holders(body(one), re.search(r"\d{5}", question)[0])


def fact_qa(one, question):
    return fact(body(one), question)


def functions(one, question):
    factor, term, modulus = map(int, re.findall(r"\d+", question))
    found = []
    for node in ast.parse(body(one)).body:
        source = ast.unparse(node)
        scope = {}
        exec(source, scope)  # our own text
        if all(scope[node.name](x) == (factor * x + term) % modulus for x in (0, 1, 2, 977, 12345)):
            found += [node.name, source.split("\n")[1].strip()]
    return found


def math_find(one, question):
    array = sorted(ast.literal_eval(body(one)))
    if limit := re.search(r"above (\d+)", question):
        return [str(i) for i in array if i > int(limit[1])]
    which = re.search("the (.*) number", question)[1]
    assert len(set(array)) == len(array) and len(array) % 2
    return [
        str(
            {
                "largest": array[-1],
                "second largest": array[-2],
                "third largest": array[-3],
                "smallest": array[0],
                "median": statistics.median(array),
            }[which]
        )
    ]


def many_shot(one, question):
    shots = re.findall(r"Thing: (\S+) (\S+)\nLabel: (\w+)", body(one))
    adjective, noun = question.split(": ")[1].split()
    assert (adjective, noun) not in [shot[:2] for shot in shots], "the question is not one of the examples"
    labels = {label for first, _, label in shots if first == adjective}
    # The rule must be visible: one label for an adjective, and not for a noun.
    firsts = {first: {label for f, _, label in shots if f == first} for first, _, _ in shots}
    assert all(len(found) == 1 for found in firsts.values())
    return list(labels)


def needles(one, question):
    key = re.search(r"belongs to (\S+)\?", question)[1]
    return re.findall(rf"magic number of {key} is (\d{{7}})\.", body(one))


def sum_niah(one, question):
    if "Summarise" in question:
        return re.findall(r"main result of the report on \w+ is a figure of (\d{5})\.", body(one))
    return needles(one, question)


SOLVERS = {
    f.__name__: f for f in (kv, prefix_suffix, multi_hop, needles, fact_qa, functions, math_find, many_shot, sum_niah)
}


def test_every_session_has_solver_and_task():
    assert list(SOLVERS) == list(SESSIONS) == [n for n, row in TASKS.items() if row.suite == "shared"]
    assert {row.ability for row in SESSIONS.values()} == {
        "string retrieval",
        "semantic retrieval",
        "global information",
        "multi-tasking",
    }


@pytest.mark.parametrize("length", [1800, 12000])
def test_answers_follow_from_text(name, length):
    for one in sessions(name, length, 3, 21, quarter):
        assert len(one.turns) == 5
        for turn in one.turns:
            assert turn.context == one.context
            assert sorted(SOLVERS[name](one, asked(turn))) == sorted(turn.answers)
            assert SESSIONS[name].score(turn.gold, turn.answers) == 1.0
            assert SESSIONS[name].score("", turn.answers) == 0.0
        assert len({turn.question for turn in one.turns}) == 5


def test_probe_asks_for_absent_item(name):
    for one in sessions(name, 1800, 5, 22, quarter):
        probe = one.probe
        assert probe.context == one.context and RULE in one.context
        assert SOLVERS[name](one, asked(probe)) == []
        assert all(answer in one.context for answer in probe.answers)
        assert none_named("There is no such thing.", probe.answers) == 1.0
        # A turn's answer is never the right one, unless it is of another kind than what the probe asks for.
        same = [t for t in one.turns if name != "sum_niah" or t.meta["kind"] == "needle"]
        if name == "fact_qa":
            same = []
            assert set(probe.answers) == {fact(one.context, asked(probe).replace(*swap))[0] for swap in swaps(one)}
        assert all(none_named(turn.gold, probe.answers) == 0.0 for turn in same)


def swaps(one):
    """Replacements of the stranger's name in the probe by each name that has a note."""
    who = re.search(r"(?:was|does|of) ([A-Z]\w+ [A-Z]\w+) (?:born|work|called)", one.probe.question)[1]
    return [(who, known) for known in re.findall(r"^(\w+ \w+) was born", body(one), re.M)]


# Not math_find: an array has an answer for every rank, so its probe asks for a bound.
@pytest.mark.parametrize("name", [name for name in SESSIONS if name != "math_find"])
def test_probes_are_worded_like_questions(name):
    """A model must not tell a probe by its wording: without names and numbers, it reads like one of the turns."""

    def plain(text):
        text = text.replace("the teacher of ", "")
        bare = re.sub(r'"[^"]*"|\d+|: \S+ \S+$|[A-Z]\w+ [A-Z]\w+|[a-z]+-[a-z]+', "_", text)
        return re.sub("In which town was _ born|For which firm does _ work|What is the animal of _ called", "_", bare)

    for one in sessions(name, 1800, 3, 23, quarter):
        assert plain(asked(one.probe)) in {plain(asked(turn)) for turn in one.turns}


def test_conversation_fits_length(name):
    tokenizer = read("smollm2-135m").tokenizer

    def count(text):
        return len(tokenizer.encode(text))

    for one in sessions(name, 2048, 2, 24, count):
        said = one.context + "".join(turn.question + turn.prefix + turn.gold for turn in one.turns)
        used = count(said + one.probe.question + one.probe.prefix)
        assert 0.94 * 2048 <= used <= 2048
        assert all(count(turn.gold) <= SESSIONS[name].new for turn in one.turns)


def test_sessions_are_determined_by_seed(name):
    made = sessions(name, 1800, 3, 5, quarter)
    assert made == sessions(name, 1800, 3, 5, quarter)
    assert made[:1] == sessions(name, 1800, 1, 5, quarter)
    assert len({one.context for one in [*made, *sessions(name, 1800, 3, 6, quarter)]}) == 6
    where = [(t.meta["sample"], t.meta["turn"], t.meta["seed"], t.meta["length"]) for t in made[2].turns]
    assert where == [(2, i, 5, 1800) for i in range(5)]
    assert made[2].probe.meta["turn"] == -1 and made[2].probe.meta["kind"] == "probe"


def test_kv_keys_and_values_are_distinct():
    for one in sessions("kv", 1800, 3, 28, quarter):
        table = json.loads(body(one))
        strings = [*table, *table.values()]
        assert len(set(strings)) == 2 * len(table) and all(re.fullmatch("[0-9a-f]{32}", s) for s in strings)


def test_decoys_share_prefix_or_suffix():
    for one in sessions("prefix_suffix", 1800, 3, 25, quarter):
        strings = body(one).split("\n")
        for example in [*one.turns, one.probe]:
            start, end = re.findall('"(.*?)"', example.question)
            assert any(s.startswith(start) and not s.endswith(end) for s in strings)
            assert any(s.endswith(end) and not s.startswith(start) for s in strings)


def test_shots_repeat_adjectives_and_show_four_labels():
    for one in sessions("many_shot", 1200, 3, 26, quarter):
        shots = re.findall(r"Thing: (\S+) \S+\nLabel: (\w+)", body(one))
        firsts = [first for first, _ in shots]
        assert len(set(firsts)) == 16 and min(map(firsts.count, firsts)) >= 2
        assert len({label for _, label in shots}) == 4


def test_summary_has_figure_per_report():
    for one in sessions("sum_niah", 2500, 3, 27, quarter):
        titles = re.findall(r"^Report on (\w+)$", body(one), re.M)
        figures = dict(re.findall(r"report on (\w+) is a figure of (\d{5})\.", body(one)))
        assert len(titles) == 6 and set(figures) == set(titles)
        (summary,) = (turn for turn in one.turns if turn.meta["kind"] == "summary")
        assert SESSIONS["sum_niah"].score(" ".join(list(figures.values())[:3]), summary.answers) == 0.5


def test_unknown_and_too_short_sessions_are_refused(name):
    with pytest.raises(ValueError, match="unknown task 'match_find': did you mean 'math_find'"):
        sessions("match_find", 1000, 1, 0, quarter)
    with pytest.raises(ValueError, match=rf"{name}: 30 tokens are too few.*give a length of \d+") as caught:
        sessions(name, 30, 1, 0, quarter)
    enough = int(str(caught.value).split()[-1])
    assert quarter(sessions(name, enough, 1, 0, quarter)[0].text) <= enough
