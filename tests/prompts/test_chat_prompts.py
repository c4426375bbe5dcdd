"""What a text prompt means: a user's message if the model has a chat template, and the text itself if not."""

from dataclasses import replace

import numpy as np
import pytest

import jkv
from jkv.engine.formats import TEXT, from_openai
from jkv.engine.request import Limits, request
from jkv.generation import api, text_stream
from jkv.prompts.tokenization import encode
from support.speaking import PARAMS, byte_tokenizer

TEMPLATE = (
    "{% if messages[0].role != 'system' %}<s>be brief</>\n{% endif %}"
    "{% for m in messages %}<{{ m.role[0] }}>{{ m.content }}</>\n{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)
CHAT = replace(PARAMS, tokenizer=byte_tokenizer(TEMPLATE))
PLAIN = replace(PARAMS, tokenizer=byte_tokenizer(None))
ASKED = "<s>be brief</>\n<u>hello</>\n<a>"


def said(params, *args, **options):
    return params.tokenizer.decode(encode(params, *args, **options)[0][0])


@pytest.mark.parametrize("chat", [None, False, True])
def test_a_text_is_a_message_of_a_model_with_a_template(chat):
    assert said(CHAT, "hello", chat=chat) == ("hello" if chat is False else ASKED)
    assert said(CHAT, [{"role": "user", "content": "hello"}], chat=chat) == ASKED
    assert said(CHAT, CHAT.tokenizer.chat([{"role": "user", "content": "hello"}]), chat=chat) == ASKED
    if chat:
        with pytest.raises(ValueError, match="prompt 0: this model has no chat template; use plain text"):
            encode(PLAIN, "hello", chat)
        with pytest.raises(ValueError, match="prompt 0 is token ids, which go through no chat template"):
            encode(CHAT, [5, 6], chat)
    else:
        assert said(PLAIN, "hello", chat=chat) == "hello" and encode(CHAT, [5, 6], chat)[0] == [[5, 6]]
    with pytest.raises(ValueError, match="chat='yes': give True, False, or None"):
        encode(CHAT, "hello", "yes")


def test_generate_stream_prefill_and_a_job_read_a_text_alike(monkeypatch):
    read = []

    def stops(params, asked, rows, *_, **__):
        read.extend(rows)
        raise InterruptedError

    for module in (api, text_stream):
        monkeypatch.setattr(module, "Generation", stops)
    monkeypatch.setattr(api, "prefilled", stops)
    for chat in (None, True, False):
        for run in (jkv.generate, lambda *x, **how: list(jkv.stream(*x, **how)), jkv.prefill):
            with pytest.raises(InterruptedError):
                run(CHAT, "full", "hello", chat=chat)
        row = request(1, {"prompt": "hello", "chat": chat}, CHAT, jkv.parse("full"), jkv.SamplingParams(), Limits())
        read.append(row.tokens.tolist())
    texts = [CHAT.tokenizer.decode(x) for x in read]
    assert texts == 8 * [ASKED] + 4 * ["hello"]
    body = from_openai(TEXT, {"prompt": "hello"})  # OpenAI's completions have no template
    row = request(1, body, CHAT, jkv.parse("full"), jkv.SamplingParams(), Limits())
    assert CHAT.tokenizer.decode(row.tokens) == "hello"


def test_a_chat_on_a_cache_repeats_no_system_prompt():
    turn = [{"role": "user", "content": "and now?"}]
    assert said(CHAT, turn, later=True) == "</>\n<u>and now?</>\n<a>"
    assert said(CHAT, "and now?", None, later=True) == "</>\n<u>and now?</>\n<a>"
    assert said(CHAT, "and now?", later=True) == "and now?"
    begin = byte_tokenizer(TEMPLATE.replace("</>", "~"))
    end = begin.core.token_to_id("~")
    begin.eos_ids, begin.bos_id, begin.add_bos = (end,), 65, True
    ends = replace(CHAT, tokenizer=begin)  # an answer that has ended holds its stop token, and the chat its begin token
    assert said(ends, turn, later=True) == "\n<u>and now?~\n<a>"
    assert said(ends, "and", later=True) == "and" and encode(ends, "and")[0][0][0] == 65


def test_a_role_is_one_that_templates_know():
    with pytest.raises(ValueError, match="the role 'alien'; give system, developer, user, assistant, tool or function"):
        jkv.generate(CHAT, "full", [{"role": "alien", "content": "hello"}])
    own = replace(CHAT, tokenizer=byte_tokenizer("{% if messages[0].role == 'alien' %}hello{% endif %}"))
    assert said(own, [{"role": "alien", "content": "x"}]) == "hello"


def test_the_receipt_of_a_continued_cache_knows_what_was_seen():
    first = jkv.generate(PLAIN, "streaming(budget=40, recent=8)", "hello " * 20, max_new_tokens=8, stop_ids=())
    out = jkv.generate(PLAIN, first.cache, "and now?", max_new_tokens=8, stop_ids=())
    assert out.receipt.tokens_seen == int(out.cache.seen[0]) == 120 + 8 + 8 + 8
    assert np.mean(out.receipt.tokens_kept) <= out.receipt.tokens_seen
    assert "of 144 seen" in str(out.receipt) and out.receipt.config == "streaming(budget=40, recent=8)"
    assert first.receipt.tokens_seen == 128


def test_an_unknown_option_of_a_stream_is_named():
    with pytest.raises(TypeError, match="unknown option 'max_tokens': did you mean 'max_new_tokens'"):
        jkv.stream(CHAT, "full", "hello", max_tokens=4)
