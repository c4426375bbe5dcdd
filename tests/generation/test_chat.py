"""A conversation on one cache: read once, rendered as the template renders it whole."""

from dataclasses import replace

import pytest

import jkv
from jkv.prompts import prefill as prompts
from support.speaking import PARAMS, byte_tokenizer

OPTIONS: dict = dict(max_new_tokens=20, stop_ids=())


def test_a_conversation_is_read_once_and_as_the_template_renders_it(monkeypatch):
    """The tokens given to the cache, joined, are those of the whole conversation, whose system prompt is said once."""
    read = []
    for name in ("prefilled", "extended"):
        own = getattr(prompts, name)

        def recorded(params, cache, rows, *args, own=own, **given):
            read.append(list(rows[0]))
            return own(params, cache, rows, *args, **given)

        monkeypatch.setattr(f"jkv.generation.api.{name}", recorded)
        monkeypatch.setattr(f"jkv.generation.generate.{name}", recorded)
    chat = jkv.Chat(PARAMS, "full", system="Tides.", **OPTIONS)
    answers = [chat.ask(question) for question in ("When?", "And where?")]
    text = [*read[0], *read[1], *answers[0].tokens, *read[2]]
    want = PARAMS.tokenizer.chat(chat.messages[:-1])
    assert PARAMS.tokenizer.decode(text) == want and want.count("Tides.") == 1
    assert [m["role"] for m in chat.messages] == ["system", "user", "assistant", "user", "assistant"]
    whole = jkv.generate(PARAMS, "full", text, **OPTIONS)
    assert answers[1].tokens == whole.tokens and int(chat.cache.seen[0]) == int(whole.cache.seen[0])


def test_a_stop_token_in_the_cache_is_not_written_again():
    chat = jkv.Chat(PARAMS, "full", **OPTIONS)
    chat.ask("When?")
    tail = chat._tokens("And?")
    chat._last = tail[0]
    assert chat._tokens("And?") == tail[1:]


def test_a_context_is_compressed_before_its_questions_and_asked_from_copies():
    context = "The ferry is named Marigold. " * 8
    document = jkv.Chat(PARAMS, "snapkv(budget=60, window=8)", context=context, **OPTIONS)
    before = document.cache
    assert before.kept().max() <= 60 < before.seen[0]
    first, second = (document.copy().ask(question) for question in ("Name?", "Colour?"))
    assert document.cache is before and document.messages == []
    head, tail = PARAMS.tokenizer.chat([{"role": "user", "content": f"{context}\n\n|"}]).split("|")
    cache, _ = jkv.prefill(PARAMS, "snapkv(budget=60, window=8)", PARAMS.tokenizer.encode(head), reserve=1024)
    for out, question in ((first, "Name?"), (second, "Colour?")):
        assert out.tokens == jkv.generate(PARAMS, cache, PARAMS.tokenizer.encode(question + tail), **OPTIONS).tokens
    assert "ferry" in repr(document) and "<table>" in document._repr_html_()


def test_what_follows_a_stop_string_is_not_part_of_the_conversation():
    free = jkv.Chat(PARAMS, "full", **OPTIONS).ask("When?")
    chat = jkv.Chat(PARAMS, "full", **OPTIONS)
    out = chat.ask("When?", stop=(free.text[3:5],))
    prompt = PARAMS.tokenizer.encode(PARAMS.tokenizer.chat([{"role": "user", "content": "When?"}]))
    assert len(out.tokens) < 20 and int(chat.cache.seen[0]) == len(prompt) + len(out.tokens)


def test_a_chat_without_a_template_is_refused():
    with pytest.raises(ValueError, match="chat template: use jkv.prefill"):
        jkv.Chat(replace(PARAMS, tokenizer=byte_tokenizer(None)))
    with pytest.raises(ValueError, match="the question is 5: give a text"):
        jkv.Chat(PARAMS).ask(5)


def test_a_question_that_fails_leaves_the_chat_as_it_was():
    chat = jkv.Chat(PARAMS, "full", **OPTIONS)
    with pytest.raises(ValueError, match="seed"):
        chat.ask("When?", seed="x")
    assert chat.cache is None and chat.messages == []
