"""lm-evaluation-harness through caches: the three kinds of requests, what is said of them, and its own evaluation."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jkv
from jkv import models
from jkv.bench import model_shapes
from jkv.eval import harness
from jkv.io.tokenizer import Stream, Tokenizer
from support.speaking import TINY, byte_tokenizer
from support.tiny import PARAMS


class Words:
    """Tokens are words "w7"; a space begins the next one."""

    bos_id, eos_ids, template = 1, (2,), None

    def within(self, text: str) -> list[int]:
        return [int(word[1:]) for word in text.split()]

    def encode(self, text: str) -> list[int]:
        return self.within(text)

    def decode(self, ids, stop=()) -> str:
        return "".join(f" w{i}" for i in ids)

    def stream(self, stop=()) -> Stream:
        return Stream(self, stop)


TEXTS = replace(PARAMS, tokenizer=Words())
_rng = np.random.default_rng(0)


def words(n: int) -> str:
    return " ".join(f"w{i}" for i in _rng.integers(3, 90, n))


CONTEXTS = [words(n) for n in (60, 41, 8)]
CACHE = "snapkv(budget=24, window=8)"


def request(*args, task: str = "t"):
    return SimpleNamespace(args=args, task_name=task)


@jax.jit
def logs(ids):
    return jax.nn.log_softmax(models.forward(TEXTS, ids, jnp.arange(ids.shape[1])[None])[0])


def whole(before, after) -> float:
    """log p(after | before), all of it in one pass of the model."""
    ids = [*before, *after]
    found = np.asarray(logs(jnp.asarray([ids + [0] * (64 - len(ids))])))
    return sum(float(found[i - 1, ids[i]]) for i in range(len(before), len(ids)))


def backend(cache: str = CACHE, **more) -> harness.Backend:
    given = dict(batch=2, chunk=None, question="seen", marker=" w5 w5") | more
    return harness.Backend(TEXTS, jkv.parse(cache), **given)


def test_empty_context_without_bos_or_eos_is_refused():
    class Endless(Words):
        bos_id, eos_ids = None, ()

    params = replace(TEXTS, tokenizer=Endless(), config=replace(TEXTS.config, eos=()))
    lm = harness.Backend(params, jkv.parse("full"), batch=1, chunk=None, question="seen", marker="")
    with pytest.raises(ValueError, match="begin or end with, and this model has neither"):
        lm.loglikelihood([request("", " w7 w8")])


def test_loglikelihood_equals_score_and_reads_contexts_once():
    lm = backend()
    asked = [request(c, f" {words(n)} ") for c in CONTEXTS for n in (1, 3)] + [request("", " w7 w8")]
    got = lm.loglikelihood([*asked, request(" \n", "w7 w8")])
    assert got.pop() == pytest.approx(got[-1])  # spaces are the continuation's
    for (context, after), (logprob, greedy) in zip([r.args for r in asked], got, strict=True):
        want = jkv.score(TEXTS, CACHE, Words().encode(context) or [1], Words().within(after))
        assert logprob == pytest.approx(want.logprob, abs=1e-3) and greedy == want.greedy
    receipt = lm.receipts["t"]
    assert (receipt.contexts, receipt.answers, receipt.seen, receipt.touched) == (4, 8, 60 + 41 + 8 + 1, 2)
    assert receipt.kept == 24 + 24 + 8 + 1 and receipt.used


def test_task_within_budget_is_flagged():
    lm = backend()
    lm.loglikelihood([request(CONTEXTS[2], " w3", task="short"), request(CONTEXTS[0], " w3", task="long")])
    said = {name: harness._said(own) for name, own in lm.receipts.items()}
    assert [line.split(":")[0] for line in harness.flagged(said)] == ["short"]
    lm.loglikelihood([request(CONTEXTS[2], " " + words(60), task="short")])
    assert lm.receipts["short"].touched == 1  # what was evicted is of the answer


def test_unseen_question_is_read_after_compression():
    context, question = CONTEXTS[0], " w5 w5 w9 w11"
    seen, unseen = backend(), backend(question="unseen")
    asked = [request(context + question, " w7 w8"), request(context + question, " w9")]
    got = unseen.loglikelihood(asked)
    cache, _ = jkv.prefill(TEXTS, CACHE, Words().encode(context), reserve=64)
    want = jkv.score(TEXTS, cache, Words().within(question), [[7, 8], [9]])
    assert [x for x, _ in got] == pytest.approx([x.logprob for x in want], abs=1e-3)
    assert [x for x, _ in got] != pytest.approx([x for x, _ in seen.loglikelihood(asked)], abs=1e-3)
    assert unseen.receipts["t"].seen == 60
    both = unseen.loglikelihood([asked[0], request("", " w7 w8")])
    assert both[0][0] == pytest.approx(got[0][0], abs=1e-3)
    assert both[1][0] == pytest.approx(jkv.score(TEXTS, CACHE, [1], [7, 8]).logprob, abs=1e-3)
    with pytest.raises(ValueError, match="has no ' w5 w5' behind its beginning"):
        unseen.loglikelihood([request(context, " w7")])


def test_rolling_loglikelihood_uses_harness_windows():
    utils = pytest.importorskip("lm_eval.utils")
    small = replace(TEXTS, config=replace(TEXTS.config, context=40))
    lm = harness.Backend(small, jkv.parse("full"), 2, None, "seen", "")
    ids = Words().within(CONTEXTS[0])
    texts = [ids, ids[:41], ids[:40], ids[:7]]
    got = lm.loglikelihood_rolling([request(" ".join(f"w{i}" for i in x)) for x in texts])
    for text, found in zip(texts, got, strict=True):
        windows = map(utils.make_disjoint_window, utils.get_rolling_token_windows(text, 1, 40, 1))
        assert found == pytest.approx(sum(whole(*x) for x in windows), abs=1e-3)


class Joined(Words):
    """Two of a letter are one token, wherever they meet."""

    def within(self, text: str) -> list[int]:
        return [3 + ord(x[0]) % 80 + 9 * len(x) for x in re.findall("aa|bb|.", text)]


def test_continuation_spanning_token_is_scored_alone():
    """Where one token spans the border the continuation is scored by itself, and one without a token is refused."""
    params = replace(TEXTS, tokenizer=Joined())
    lm = harness.Backend(params, jkv.parse("full"), 2, None, "seen", "")
    (spans, part), own = lm.loglikelihood([request("cda", "a"), request("cda", "ab")]), Joined().within
    assert spans[0] == pytest.approx(whole(own("cda"), own("a")), abs=1e-4) and spans[0] < 0
    assert part[0] == pytest.approx(whole(own("cda"), own("b")), abs=1e-4)
    for context in ("cda", ""):
        with pytest.raises(ValueError, match="t: the continuation '' has no token"):
            lm.loglikelihood([request(context, "")])
    for token, after in ((own("c")[0], "cb"), (1, "b")):  # an empty context is the token that texts begin with, once
        lm.params = replace(params, tokenizer=type("Begun", (Joined,), {"bos_id": token})())
        ((got, _),) = lm.loglikelihood([request("", after)])
        assert got == pytest.approx(whole([token], own("b")), abs=1e-4)


def test_generate_until_equals_generate():
    lm = backend()
    way = {"until": ["\n"], "max_gen_toks": 6, "do_sample": False, "temperature": 0.7}
    got = lm.generate_until([request(c, way) for c in CONTEXTS])
    for context, text in zip(CONTEXTS, got, strict=True):
        assert text == jkv.generate(TEXTS, CACHE, Words().encode(context), max_new_tokens=6).text
    with pytest.raises(ValueError, match="'beams' of a task is not known here"):
        lm.generate_until([request(CONTEXTS[0], {"beams": 4})])


def test_overlong_context_is_left_truncated_and_counted():
    small = replace(TEXTS, config=replace(TEXTS.config, context=50))
    lm = harness.Backend(small, jkv.parse("full"), 2, None, "seen", "")
    got = lm.loglikelihood([request(CONTEXTS[0], " w7 w8"), request(CONTEXTS[0], " w9 w8")])
    want = whole(Words().encode(CONTEXTS[0])[-49:], [7, 8])
    assert got[0][0] == pytest.approx(want, abs=1e-3) and lm.receipts["t"].truncated == 1


def test_invalid_harness_arguments_are_refused(monkeypatch):
    with pytest.raises(ValueError, match="no tokenizer"):
        harness.harness(PARAMS)
    with pytest.raises(ValueError, match="question='both': seen or unseen"):
        harness.harness(TEXTS, question="both")
    with pytest.raises(ValueError, match="batch=0"):
        harness.harness(TEXTS, batch=0)
    monkeypatch.setitem(__import__("sys").modules, "lm_eval.api.model", None)
    with pytest.raises(
        ImportError, match=r"lm-evaluation-harness is not installed; run pip install -e '\.\[lm-eval\]'"
    ):
        harness.harness(TEXTS)


TASK = """
task: {name}
dataset_path: json
dataset_kwargs:
  data_files: {{test: {data}}}
test_split: test
output_type: {kind}
doc_to_text: "{{{{context}}}}"
{rest}
"""
CHOICE = """doc_to_choice: "{{choices}}"
doc_to_target: gold
metric_list: [{metric: acc}]
"""
ROLLING = """doc_to_target: "{{context}}"
metric_list: [{metric: word_perplexity}]
"""


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """A folder with two tasks of prose of this repository: which sentence follows, and whole texts."""
    pytest.importorskip("lm_eval")
    folder = tmp_path_factory.mktemp("tasks")
    text = " ".join(__import__("this").s.split()) + " " + " ".join((harness.__doc__ or "").split())
    docs = [*(str(getattr(jkv, n).__doc__) for n in ("generate", "prefill", "load")), text]
    sentences = [" ".join(sentence.split()[:10]) for sentence in " ".join(docs).split(". ")]
    rows = [
        {"context": ". ".join(sentences[i : i + 8]), "gold": 0}
        | {"choices": [" " + sentences[i + 8], " " + sentences[i]]}
        for i in range(4)
    ]
    data = folder / "rows.json"
    data.write_text("\n".join(map(json.dumps, rows)))
    for name, kind, rest in (("follows", "multiple_choice", CHOICE), ("prose", "loglikelihood_rolling", ROLLING)):
        (folder / f"{name}.yaml").write_text(TASK.format(name=name, data=data, kind=kind, rest=rest))
    return folder


@pytest.mark.peers
@pytest.mark.filterwarnings("default")
def test_full_cache_matches_transformers_in_harness(tasks, tmp_path, monkeypatch):
    """Equal log-likelihoods to 1e-3 on the same weights; compressed caches say that they were used."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    from lm_eval.models.huggingface import HFLM
    from transformers import PreTrainedTokenizerFast

    from benchmarks.engines import Transformers

    source = model_shapes.noise(TINY, 4, 1)
    core = byte_tokenizer().core
    params = models.build(source.config, source.tensors, jnp.float32)
    params = replace(params, tokenizer=Tokenizer(core, eos_ids=[core.token_to_id("!")]))
    theirs = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="!")
    peer = HFLM(pretrained=Transformers(source, 1).model, tokenizer=theirs, backend="causal", batch_size=1)
    rows = [json.loads(line) for line in (tasks / "rows.json").read_text().splitlines()]
    asked = [request(row["context"], after) for row in rows for after in row["choices"]]
    lm = jkv.harness(params, None, batch=4)
    for own, other in zip(lm.loglikelihood(asked), peer.loglikelihood(asked), strict=True):
        assert own[0] == pytest.approx(other[0], abs=1e-3) and own[1] == other[1]
    lm.params, peer._max_length = replace(params, config=replace(params.config, context=64)), 64
    texts = [request(row["context"][:n]) for row, n in zip(rows, (150, 64, 65, 300), strict=True)]
    assert lm.loglikelihood_rolling(texts) == pytest.approx(peer.loglikelihood_rolling(texts), abs=1e-3)
    lm.params = params
    for cache, used in (("full", False), ("int4", True), ("snapkv(budget=48, window=16) | int4", True)):
        found, receipts = harness.evaluated(
            jkv.harness(params, cache, batch=4), ["follows", "prose"], include=str(tasks), bootstrap_iters=0
        )
        assert receipts["follows"]["used"] == used and 0 <= found["follows"]["acc,none"] <= 1
        assert found["prose"]["word_perplexity,none"] > 1
    with pytest.raises(ValueError, match="no task 'follow' here"):
        harness.evaluated(lm, ["follow"], include=str(tasks))
