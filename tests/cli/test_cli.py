"""The command line: text to stdout, receipts and one clear line of trouble to stderr."""

import json
import os
import socket
import subprocess
import sys
from dataclasses import replace

import pytest

import jkv
from jkv.bench.model_shapes import SHAPES
from jkv.cli.app import app, one_line, read_prompt
from jkv.cli.options import ADVICE, default_cache
from jkv.cli.serve import read_token
from jkv.eval import corpora, kvpress_dataset, store_replay
from jkv.io import load as loading
from jkv.io.errors import FetchError
from jkv.methods.compatibility import check
from jkv.prompts.tokenization import encode
from support.commands import PARAMS, RUNNER, call, refused, tokenizer

CACHE = "snapkv(budget=40, window=8) | int8"
TEXT = "the quick brown fox jumps over the lazy dog " * 3  # a token a byte: 132


@pytest.fixture
def tiny(monkeypatch):
    """Any model name loads the tiny model."""
    monkeypatch.setattr(loading, "load", lambda *_: PARAMS)


def generate(*args, cache=CACHE, new=4, stdin=None):
    return call("generate", *args, "--cache", cache, "--max-new-tokens", new, stdin=stdin)


@pytest.mark.slow
def test_text_goes_to_stdout_and_receipt_to_stderr(tiny):
    result = generate(TEXT)
    assert result.exit_code == 0, result.output
    expected = jkv.generate(PARAMS, CACHE, [{"role": "user", "content": TEXT}], max_new_tokens=4)
    assert result.stdout == expected.text + "\n"
    assert f"cache        {CACHE}" in result.stderr and "x smaller" in result.stderr
    assert "error" not in result.stderr


def test_generate_json_is_one_document(tiny):
    result = generate(TEXT, "--json", "--compare", "--no-chat")
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert result.stderr == ""
    assert len(told["tokens"]) == 4 and told["report"]["config"] == CACHE
    assert told["report"]["tokens_prompt"] == len(TEXT)
    assert told["report"]["kl"] > 0 and told["report"]["ratio"] > 1


def test_options_reach_runtime(tiny, monkeypatch):
    seen = {}

    def stream(params, cache, prompt, **options):
        seen.update(options, cache=cache, prompt=prompt)
        yield "a"
        return type("Out", (), {"receipt": "receipt"})

    monkeypatch.setattr(jkv, "stream", stream)
    flags = "--temperature 0.5 --top-k 7 --top-p 0.9 --min-p 0.1 --repetition-penalty 1.2 --seed 3"
    result = generate("hi", *flags.split(), "--stop", "x", "--stop", "y z", "--chunk", 16, "--compare", "--no-chat")
    assert result.exit_code == 0 and result.stdout == "a\n" and "receipt" in result.stderr
    assert seen == dict(
        cache=CACHE, prompt="hi", max_new_tokens=4, temperature=0.5, top_k=7, top_p=0.9, min_p=0.1,
        repetition_penalty=1.2, seed=3, stop=("x", "y z"), chunk=16, compare=True, n=1, drafter=None, prefix_cache=None,
        chat=False,
    )  # fmt: skip


def test_chat_template_kwargs_reach_template(tiny, monkeypatch):
    own = replace(PARAMS, tokenizer=tokenizer("{{ messages[0].content }}{{ enable_thinking }}"))
    monkeypatch.setattr(loading, "load", lambda *_: own)
    said = []

    def stream(params, cache, prompt, **options):
        yield said.append(params.tokenizer.decode(encode(params, prompt, options["chat"])[0][0])) or ""
        return type("Out", (), {"receipt": "receipt"})

    monkeypatch.setattr(jkv, "stream", stream)
    for value in ('{"enable_thinking": false}', "{}"):
        assert generate("hi", "--chat-template-kwargs", value).exit_code == 0
    assert said == ["hiFalse", "hi"]
    for value in ("[]", "x", "3"):
        refused(generate("hi", "--chat-template-kwargs", value), f"--chat-template-kwargs {value}: give a JSON object")
    monkeypatch.setattr(loading, "load", lambda *_: replace(PARAMS, tokenizer=None))
    refused(generate("hi", "--chat-template-kwargs", '{"a": 1}'), "has no chat template")


def test_byte_order_mark_is_ignored(tmp_path):
    """In whatever file of text a user gives."""
    row = dict.fromkeys(kvpress_dataset.TEXTS, "a") | {"answer": ["b"], "max_new_tokens": 3, "task": "qa_1"}
    for name, text, read in (
        ("prompt.txt", "hello wörld", lambda path: read_prompt(None, str(path))),
        ("corpus.txt", "hello wörld", lambda path: corpora.text(str(path))),
        ("token", "hello-world", read_token),
        ("rows.jsonl", json.dumps(row), kvpress_dataset.read),
        ("rows.json", json.dumps([row]), kvpress_dataset.read),
        ("trace.jsonl", '{"time": 1, "prompt": [5, 6]}', lambda path: [x.ids for x in store_replay.trace(path, list)]),
    ):
        path = tmp_path / name
        path.write_text(text, "utf-8")
        want = read(path)
        path.write_text(text, "utf-8-sig")
        assert read(path) == want, name


def test_several_answers_are_printed_in_order(tiny):
    result = generate(TEXT, "-n", 2, "--temperature", 1, "--seed", 3)
    assert result.exit_code == 0, result.output
    asked = [{"role": "user", "content": TEXT}]
    first, second = jkv.generate(PARAMS, CACHE, asked, max_new_tokens=4, n=2, temperature=1.0, seed=3).text
    assert result.stdout == f"[0] {first}\n\n[1] {second}\n" and "x smaller" in result.stderr


def test_prompt_is_read_from_file_or_stdin(tiny, tmp_path):
    (tmp_path / "p.txt").write_text(TEXT)
    outs = [
        generate(TEXT, "--json"),
        generate("--file", tmp_path / "p.txt", "--json"),
        generate("--file", "-", "--json", stdin=TEXT),
    ]
    assert [o.exit_code for o in outs] == [0, 0, 0]
    assert len({json.loads(o.stdout)["text"] for o in outs}) == 1
    assert {json.loads(o.stdout)["report"]["tokens_prompt"] for o in outs} == {len(TEXT) + 2}  # the template's brackets


def test_methods_command_lists_catalogue():
    told = json.loads(call("methods", "--json").stdout)
    assert {r["name"] for r in told} == set(jkv.METHODS)
    assert all(r["exactness"] and r["summary"] and r["axes"] for r in told)
    assert "16 long-context sets" in next(r["claim"] for r in told if r["name"] == "snapkv")
    table = call("methods").stdout
    assert all(name in table for name in jkv.METHODS) and "2404.14469" in table


def test_methods_command_shows_arguments_and_parts():
    text = call("methods", "snapkv").stdout
    assert text.startswith("snapkv(budget=None, keep=None, bytes=None, window=") and "16 long-context sets" in text
    assert "window_attention: " in text and "2404.14469" in text
    told = json.loads(call("methods", "pyramidkv", "--json").stdout)
    assert told["arguments"]["keep"] is None and {"Pyramid", "window_attention"} <= {*told["parts"]}
    assert "did you mean 'snapkv'" in call("methods", "snapvk").stderr
    assert call("methods", "SnapKV").stdout == text
    assert "write snapkv(keep=0.5)" in call("methods", "SnapKVPress").stderr


def test_the_catalogue_can_be_searched_and_is_fitted_to_the_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "70")
    every = call("methods").stdout
    assert max(map(len, every.splitlines())) <= 100 and len([x for x in every.splitlines() if len(x) > 70]) < 3
    families = [x for x in every.splitlines() if x and x[0] != " "][:-1]
    assert [x.split()[0] for x in families][:2] == ["the", "eviction"] and "trained" in families[-1]
    assert [x.split()[0] for x in call("methods", "2404.14469").stdout.splitlines()[2:3]] == ["snapkv"]
    told = json.loads(call("methods", "hadamard", "matrix", "--json").stdout)
    assert {"int4", "int8"} <= {row["name"] for row in told} < set(jkv.METHODS)


def test_a_composition_is_explained_method_by_method():
    text = call("methods", "SnapKV(budget=512) | int4").stdout
    assert text.startswith("snapkv(budget=512)\n    SnapKV: ") and "fills codec" in text
    assert text.endswith("these go together\n")
    result = call("methods", "snapkv(budget=512) | palu")
    assert result.exit_code == 1 and "refused: " in result.stdout and "take a score of all heads" in result.stdout
    assert "joined by |" in call("methods", "snapkv(budget=512), int4").stderr
    told = json.loads(call("methods", "int4 | quest", "--json").stdout)
    assert [row["name"] for row in told["methods"]] == ["int4", "quest"] and told["refused"] == ""


def test_pairs_table_marks_refused_combinations():
    told = {(r["score"], r["with"]): r["refused"] for r in json.loads(call("methods", "--pairs", "--json").stdout)}
    assert told["snapkv", "int8"] == "" and "its own codecs" in told["zipvl", "int8"]
    text = " ".join(call("methods", "--pairs").stdout.split())
    assert "zipvl with" in text and told["zipvl", "int8"].split(": ", 1)[1] in text
    assert call("methods", "--pairs", "SnapKV", "int8").stdout == "snapkv | int8 go together\n"
    assert call("methods", "--pairs", "zipvl", "int8").stdout.strip() == told["zipvl", "int8"]
    assert {pair for pair in told if "int8" in pair} == {
        (r["score"], r["with"]) for r in json.loads(call("methods", "--pairs", "int8", "--json").stdout)
    }
    assert "two names at most" in call("methods", "--pairs", "a", "b", "c").stderr


def test_inspect_reports_tokens_and_bytes(tiny, tmp_path):
    result = call("inspect", "--cache", CACHE, "--prompt", TEXT, "--plot", tmp_path / "kept.png")
    assert result.exit_code == 0, result.output
    assert "8 bits" in result.stdout and "133" in result.stdout  # the last position
    assert (tmp_path / "kept.png").read_bytes().startswith(b"\x89PNG")
    told = json.loads(call("inspect", "--cache", CACHE, "--prompt", TEXT, "--json").stdout)
    assert [layer["kept"] for layer in told["layers"]] == [[40.0, 40.0]] * 2


def test_fetch_prints_path(monkeypatch, tmp_path):
    monkeypatch.setattr("jkv.io.hub.fetch", lambda name: tmp_path / name)
    assert call("fetch", "m").stdout.replace("\n", "") == str(tmp_path / "m")


@pytest.mark.parametrize(
    "cache, says",
    [
        ("snapvk(budget=40)", "did you mean 'snapkv'"),
        ("zzz", "see `jkv methods`"),
        ("snapkv(budgt=40)", "did you mean 'budget'"),
        ("snapkv(budget=0)", "1 or more"),
        ("snapkv", "give exactly one of budget="),
        ("snapkv(budget=40", "write name or name(argument=value)"),
        ("snapkv(budget=40) | h2o(budget=40)", "keep one of them"),
    ],
)
def test_invalid_cache_is_refused_before_loading_model(monkeypatch, cache, says):
    monkeypatch.setattr(loading, "load", lambda *a: pytest.fail("loaded"))
    refused(generate(TEXT, cache=cache), says)
    refused(call("inspect", "--prompt", TEXT, "--cache", cache), says)


def test_too_small_budget_is_refused(tiny):
    refused(generate(TEXT, cache="snapkv(budget=20)"), "raise the budget")


@pytest.mark.parametrize("text", ["", " \n"])
def test_empty_prompt_is_refused(tiny, tmp_path, text):
    (tmp_path / "p.txt").write_text(text)
    refused(generate(text), "the prompt is empty", "--file PATH")
    refused(generate("--file", tmp_path / "p.txt"), "the prompt is empty", "p.txt has no text")
    refused(generate("--file", "-", stdin=text), "the prompt is empty")
    refused(call("inspect"), "the prompt is empty")


def test_overlong_prompt_is_refused(tiny):
    refused(generate("x" * 600), "context is 512", "Shorten one of them")


def test_unreadable_prompt_files_are_refused(tiny, tmp_path):
    refused(generate("--file", tmp_path / "none.txt"), "none.txt: No such file", "give a text file")
    refused(generate("--file", tmp_path), "Is a directory", "give a text file")
    (tmp_path / "p.bin").write_bytes(b"\xff\xfe\x00")
    refused(generate("--file", tmp_path / "p.bin"), "not UTF-8", "iconv")


def test_damaged_and_unknown_models_are_refused(tmp_path):
    (tmp_path / "m.gguf").write_bytes(b"GGUF, but not really")
    refused(generate(TEXT, "--model", tmp_path / "m.gguf"), "m.gguf")
    refused(generate(TEXT, "--model", "smollm2-135n"), "did you mean smollm2-135m?")
    refused(call("fetch", "nothing"), "names are: smollm2-135m")


def test_missing_chat_template_is_refused(monkeypatch):
    monkeypatch.setattr(loading, "load", lambda *a: replace(PARAMS, tokenizer=tokenizer(None)))
    refused(generate(TEXT, "--chat"), "no chat template; use plain text")
    assert generate(TEXT, new=1).exit_code == 0  # without the flag it is plain text


@pytest.mark.parametrize("flags", [["--max-new-tokens", "0"], ["--temperature", "-1"], ["--top-p", "-0.1"]])
def test_invalid_generation_settings_are_refused(tiny, flags):
    refused(call("generate", TEXT, "--cache", CACHE, *flags), flags[0].strip("-").replace("-", "_"))


@pytest.mark.parametrize(
    "args, says, way_out",
    [
        ("--nope", "No such option", "(see jkv --help)"),
        ("generat", "No such command 'generat'", "(see jkv --help)"),
        ("generate --nope", "No such option", "(see jkv generate --help)"),
        ("generate --model", "Option '--model' requires an argument", "--help)"),
        ("generate --max-new-tokens x", "'--max-new-tokens'", "(see jkv generate --help)"),
        ("fetch a b", "unexpected extra argument", "(see jkv fetch --help)"),
    ],
)
def test_usage_errors_exit_with_2(args, says, way_out):
    refused(RUNNER.invoke(app, args.split(), prog_name="jkv"), says, way_out, code=2)


def test_missing_command_prints_help():
    assert call().stdout == call("--help").stdout != ""


def test_version_is_printed():
    said = call("--version").stdout
    assert said.startswith(f"jkv {jkv.__version__}, jax ") and f"python {sys.version.split()[0]}" in said


@pytest.mark.parametrize(
    "error, says",
    [
        (FetchError("no network;\n\ntry later"), "no network; try later"),
        (RuntimeError("nothing was evicted"), "nothing was evicted"),
        (RuntimeError("RESOURCE_EXHAUSTED: 9 GB"), "use --chunk 512"),
        (MemoryError(), "a smaller budget"),
        (PermissionError(13, "Permission denied", "/m"), "/m: Permission denied; check the path"),
    ],
)
def test_runtime_failures_print_one_line(monkeypatch, error, says):
    def fail(*a):
        raise error

    monkeypatch.setattr(loading, "load", fail)
    refused(generate(TEXT), says)
    monkeypatch.setenv("JKV_DEBUG", "1")
    assert generate(TEXT).exception is error


def test_internal_error_keeps_traceback(monkeypatch):
    monkeypatch.setattr(loading, "load", lambda *a: {}["x"])
    assert isinstance(generate(TEXT).exception, KeyError)


@pytest.mark.parametrize("error, code", [(KeyboardInterrupt(), 130), (BrokenPipeError(), 141)])
def test_interrupt_and_broken_pipe_exit_silently(monkeypatch, error, code):
    def fail(*a):
        raise error

    monkeypatch.setattr(loading, "load", fail)
    result = generate(TEXT)
    assert (result.exit_code, result.output) == (code, "")


SHORT = "from jkv.cli import app; from jkv.io import hub; hub.fetch = str; app.main()"  # still in the buffer at the end


@pytest.mark.parametrize("args", [["-m", "jkv.cli", "methods"], ["-c", SHORT, "fetch"]], ids=["long", "short"])
def test_closed_stdout_exits_silently(args):
    """A real pipe, closed at the other end before the first byte."""
    env = {name: x for name, x in os.environ.items() if name != "PYTHONUNBUFFERED"}
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, *args], stdout=write, stderr=subprocess.PIPE, text=True, timeout=120, env=env
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


def test_one_line_passes_success():
    with one_line():
        pass


@pytest.mark.parametrize("name", ["generate", "inspect", "batch", "serve"])
def test_every_command_has_the_default_cache_that_loses_nothing(name):
    """And `jkv generate --help` says which cache to take for what; all of them can be read."""
    told = " ".join(call(name, "--help").stdout.replace("│", " ").split())
    assert "efault: int8 (full, if" in told or "Default cache (int8; full, if" in told
    if name == "generate":
        assert all(wish in told for wish in ADVICE)
        assert [str(jkv.parse(cache.split(", with")[0])) for cache in ADVICE.values()]
    attends, recurs = (jkv.models.read_config(SHAPES[x]) for x in ("llama-3.2-1b", "mamba2-130m"))
    assert (default_cache(attends), default_cache(recurs)) == ("int8", "full")
    for model in (attends, recurs):
        check(jkv.parse(default_cache(model)), model)


def test_a_server_finds_a_taken_port_before_it_loads(monkeypatch):
    pytest.importorskip("uvicorn")
    monkeypatch.setattr(loading, "load", None)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        refused(call("serve", "--port", port), f"port {port} is taken: give another --port, or --port 0 for a free one")
    refused(call("serve", "--host", "192.0.2.1"), "it needs a token; give --token-file or JKV_TOKEN")
