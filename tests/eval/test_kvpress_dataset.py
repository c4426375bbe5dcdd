"""Tasks from files: read, cut and scored as kvpress does, and written as its evaluation writes them."""

import ast
import csv
import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from jkv.cli.app import app
from jkv.eval import kvpress_dataset, leaderboard, quality
from jkv.eval.experiments import Setting
from jkv.eval.kvpress_dataset import DatasetRow, read
from jkv.eval.results import Results
from jkv.io import load as loading
from support.speaking import PARAMS, byte_tokenizer

VT = {
    "context": " Some text: VAR X1 = 5 and so on. " * 12,
    "question": "Which variables? ",
    "answer_prefix": "They are",
    "answer": ["X1", "Y2"],
    "task": "vt",
    "max_new_tokens": 3,
}
QA = VT | {"context": "A long document. " * 25, "task": "qa_1", "answer": ["Paris"], "max_new_tokens": 2}
LONG = {name: x for name, x in VT.items() if name != "answer"} | {"answers": ["a b"], "task": "qasper", "length": 7}
CLASSES = ("Location", "Human", "Human being", "Hum")
SAID = [  # by kvpress 0.5.5's calculate_metrics of each data set
    ("qasper", " The red-house, an old one.\n", ["red house", "old one"], 80.0),
    ("gov_report", "The cat sat on the mat. It slept.\nA dog came. ", ["The dog sat on a mat. The cat slept."], 70.0),
    ("multi_news", "", ["something"], 0.0),
    ("trec", "Human being\nLocation", ["Human being"], 100.0),
    ("trec", "Hum or Human being or Location", ["Human being"], 50.0),
    ("triviaqa", "\n Paris \nQuestion: next", ["paris, France", "Paris"], 100.0),
    ("samsum", "Amanda baked cookies.\nDialogue: more", ["Amanda baked cookies and will bring Jerry some."], 54.55),
    ("passage_count", "7 or 12, so 7", ["7"], 66.67),
    ("passage_retrieval_en", "Paragraph 12 and 3", ["Paragraph 12"], 50.0),
    ("lcc", "# a comment\nreturn x + y\n", ["return x+y"], 91.0),
    ("repobench-p", "```\n// c", ["x"], 0.0),
    ("vt", "AB\nCD EF", ["abcd", "ef", "XX"], 66.67),
    ("qa_2", "it is\x07 Paris", ["London", "paris"], 100.0),
    ("niah_single_1", " none ", ["7"], 0.0),
]


@pytest.mark.parametrize("task, said, answers, percent", SAID)
def test_scores_match_kvpress(task, said, answers, percent):
    row = DatasetRow("", "", "", task, 1, tuple(answers), CLASSES)
    assert round(100 * row.score(said), 2) == percent


def written(path, rows):
    if path.suffix == ".csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    else:
        text = json.dumps(rows) if path.suffix == ".json" else "\n".join(map(json.dumps, rows)) + "\n"
        path.write_text(text)
    return path


def test_rows_are_equal_across_file_formats(tmp_path):
    found = [read(written(tmp_path / f"x.{kind}", [VT, QA])) for kind in ("jsonl", "json", "csv")]
    assert found[0] == found[1] == found[2] and [row.answers for row in found[0]] == [("X1", "Y2"), ("Paris",)]
    assert len(read(tmp_path)) == 6 and read(written(tmp_path / "one.jsonl", [LONG]))[0].suite == "longbench"


@pytest.mark.parametrize("answer", ['["X1","Y2"]', '["X1", "Y2"]', "['X1', 'Y2']", '[ "X1", "\\u00592" ]'])
def test_csv_lists_are_json_or_python_literals(answer, tmp_path):
    assert read(written(tmp_path / "x.csv", [VT | {"answer": answer}]))[0].answers == ("X1", "Y2")


def test_negative_sample_count_is_refused():
    with pytest.raises(ValueError, match="samples=-1: rows of a task, 1 or more, or 0 for all"):
        kvpress_dataset.first([kvpress_dataset._asked(VT, "")], -1, [])


def test_parquet_rows_equal_jsonl_rows(tmp_path):
    from pyarrow import Table, parquet

    parquet.write_table(Table.from_pylist([VT, QA]), tmp_path / "x.parquet")
    assert read(tmp_path / "x.parquet") == read(written(tmp_path / "x.jsonl", [VT, QA]))


@pytest.mark.parametrize(
    "change, said",
    [
        ({"answer_prefix": None}, "row 1 has no answer_prefix; a row has context, question"),
        ({"answer": "['a' 'b']"}, "should be texts, none empty, in CSV a list of them"),
        ({"answer": [5]}, "should be texts"),
        ({"answer": ["X1", ""]}, "should be texts, none empty"),
        ({"max_new_tokens": "0"}, "should be 1 or more"),
        ({"task": "loogle"}, "scores are known of RULER's (niah, vt"),
        ({"task": "trec"}, "has no all_classes, the names that trec chooses from"),
        ({"task": "trec", "all_classes": ""}, "has no all_classes"),
        ({"task": "trec", "all_classes": "['a' 'b']"}, "its all_classes is \"['a' 'b']\", and should be texts"),
    ],
)
def test_invalid_row_is_named(tmp_path, change, said):
    with pytest.raises(ValueError) as error:
        read(written(tmp_path / "x.jsonl", [VT, VT | change]))
    assert said in str(error.value) and "x.jsonl, row 1" in str(error.value)


def test_invalid_row_files_are_refused(tmp_path):
    broken = (("a.jsonl", "{", "is no JSONL"), ("c.json", "[]", "no rows"))
    broken += tuple(("b.json", x, "b.json holds a .*, and should hold a list") for x in ("5", "null", '{"rows": [{}]}'))
    for name, text, said in broken:
        (tmp_path / name).write_text(text)
        with pytest.raises(ValueError, match=said):
            read(tmp_path / name)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="no file there ends in"):
        read(tmp_path / "empty")


def test_prompts_are_cut_like_kvpress():
    row = DatasetRow(VT["context"], VT["question"], VT["answer_prefix"], "vt", 3, ("x",))
    head, rest = row.ids(PARAMS, None)
    decode = PARAMS.tokenizer.decode
    assert decode(head) == f"<u>{VT['context']}" and decode(rest) == "Which variables? </><a>They are"
    plain = replace(PARAMS, tokenizer=byte_tokenizer(template=None))
    assert [decode(x) for x in row.ids(plain, 5)] == [" Some", "Which variables? \nThey are"]


def test_kvpress_output_is_written_and_reruns_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(loading, "load", lambda *_: PARAMS)
    data, out, result = written(tmp_path / "4096.jsonl", [VT, QA, VT]), tmp_path / "out", tmp_path / "x.json"
    written(data.with_name("more.jsonl"), [LONG])
    given = ["eval", "dataset", "--cache", "int8", "--kvpress", str(out), "--model", "a/b", "--question", "both"]

    def run(path, *more, code=0):
        done = CliRunner().invoke(app, [*given[:2], str(path), *given[2:], *map(str, more)])
        assert done.exit_code == code, done.output
        return done

    def answered(params, config, prompts, new, seen, batch):
        held = quality.CacheUsage(kept=1.0, context=400, bytes=25 + seen, bytes_full=100, bits=(8.0, 8.0))
        return [f" X1 of {len(head)}, {len(tail)}, {new}" for head, tail in prompts], [held] * len(prompts)

    monkeypatch.setattr(quality, "answer", answered)
    run(data, "--json", result, "--samples", 1)
    monkeypatch.setattr(quality, "answer", None)  # nothing is asked again
    run(data, "--json", result, "--samples", 1)
    (seen,) = out.glob("*__query_aware")
    (unseen,) = (x for x in out.iterdir() if x != seen)
    assert unseen.name == "ruler__4096__a--b__int8__0.75__fraction0.667"
    assert seen.name == "ruler__4096__a--b__int8__0.74__fraction0.667__query_aware"
    assert (unseen / "1" / "metrics.json").exists()
    config = dict(line.split(": ", 1) for line in (unseen / "config.yaml").read_text().splitlines())
    config = {name: json.loads(x) for name, x in config.items()}
    held = config["jkv"]["held"]["ruler/vt"]
    assert config["press_name"] == "int8" and config["query_aware"] is False and config["fraction"] == 0.6667
    assert held == {"kept": 1.0, "context": 400, "bytes": 25, "bytes_full": 100} and config["compression_ratio"] == 0.75
    with (unseen / "predictions.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["task"] for row in rows] == ["vt", "qa_1"] and ast.literal_eval(rows[0]["answer"]) == ["X1", "Y2"]
    assert [row["compression_ratio"] for row in rows] == ["0.75", "0.75"]
    scores = {
        row["task"]: kvpress_dataset._asked(row | {"context": ""}, "").score(row["predicted_answer"]) for row in rows
    }
    metrics = json.loads((unseen / "metrics.json").read_text())
    assert metrics == {"qa_1": {"string_match": 0.0}, "vt": {"string_match": 50.0}}
    assert metrics == {task: {"string_match": round(100 * x, 2)} for task, x in scores.items()}
    said = [row["said"] for row in json.loads(result.read_text())["rows"] if row["question"] == "unseen"]
    assert [row["predicted_answer"] for row in rows] == [text for some in said for text in some]


def test_answers_use_row_limits_and_changed_rows_are_refused(tmp_path, monkeypatch):
    asked = [kvpress_dataset._asked(VT | {"max_new_tokens": new, "question": f"{new}? "}, "") for new in (3, 9, 3)]

    def answered(params, config, prompts, new, seen, batch):
        held = quality.CacheUsage(kept=1.0, context=400, bytes=10 * new, bytes_full=100, bits=(8.0, 8.0))
        said = [PARAMS.tokenizer.decode(tail).split("?")[0] for _, tail in prompts]
        return [f"{question} in {new}" for question in said], [held] * len(prompts)

    monkeypatch.setattr(quality, "answer", answered)
    setting = Setting("m", PARAMS, ["full"], 2, tmp_path / "x.json")
    (row,) = kvpress_dataset.ask(setting, asked, None, [True], str).rows
    assert row["said"] == ["3 in 3", "9 in 9", "3 in 3"] and row["bytes"] == 50
    for change in ({"answers": ("3",)}, {"max_new_tokens": 9}):
        with pytest.raises(ValueError, match="another experiment, with other prompts"):
            kvpress_dataset.ask(setting, [replace(asked[0], **change), *asked[1:]], None, [True], str)


def test_longbench_has_folder_and_number_per_task(tmp_path):
    meta = {"model": "m", "dtype": "float32", "seed": 0, "versions": {}}
    found = Results(None, meta)
    held = {"kept": 0.5, "context": 9, "bytes": 1, "bytes_full": 4}
    cache = {"cache": "snapkv(keep=0.25) | int4", "question": "unseen", "samples": 1}
    found.add({**cache, "task": "longbench/qasper", "score": 0.8, "said": ["b"], **held})
    asked = kvpress_dataset.grouped([kvpress_dataset._asked(LONG, "")])
    where = {"dataset": "longbench", "data_dir": "qasper"}
    (folder,) = leaderboard.publish(tmp_path, found, asked, leaderboard.task_score, **where)
    assert folder.name == "longbench__qasper__m__snapkv(keep=0.25)_int4__0.75"
    assert json.loads((folder / "metrics.json").read_text()) == 80.0
    assert "answers" in (folder / "predictions.csv").read_text().splitlines()[0].split(",")
    assert leaderboard.publish(tmp_path, found, {**asked, "longbench/lcc": []}, leaderboard.task_score, **where) == []


def test_prompt_beyond_context_is_refused_before_running(tmp_path, monkeypatch):
    monkeypatch.setattr(loading, "load", lambda *_: PARAMS)
    data = written(tmp_path / "x.jsonl", [VT | {"context": "word " * 900}])
    done = CliRunner().invoke(app, ["eval", "dataset", str(data), "--tasks", "cwe"])
    assert done.exit_code == 1 and "no task 'cwe' there: vt" in done.stderr
    done = CliRunner().invoke(app, ["eval", "dataset", str(data)])
    most = PARAMS.config.context
    assert done.exit_code == 1 and f"the model's context is {most}: give --length" in done.stderr
