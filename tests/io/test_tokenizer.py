"""Encoding, streaming and chat templates."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jkv.io.gguf import open_file
from jkv.io.gguf_keys import Metadata
from jkv.io.gguf_vocab import build_tokenizer
from jkv.io.templates import render
from jkv.io.tokenizer import Tokenizer
from support import ggufs

# Special tokens written out are special, so they do not come back.
TEXT = st.text(max_size=40).filter(lambda text: not any(special in text for special in ggufs.SPECIAL))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "t.gguf"
    return build_tokenizer(Metadata(open_file(ggufs.write(path, {"a": np.ones(3, np.float32)}, ggufs.bpe()))))


def streamed(tokenizer, ids):
    stream = tokenizer.stream()
    return [stream.push(i) for i in ids] + [stream.finish()]


@given(TEXT)
def test_round_trip(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


@given(TEXT)
def test_stream_gives_the_text_and_no_half_characters(tokenizer, text):
    pieces = streamed(tokenizer, tokenizer.encode(text))
    assert "".join(pieces) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


def test_stream_holds_a_character_until_it_is_whole(tokenizer):
    ids = tokenizer.encode("a🎉b")
    assert len(ids) == 6
    assert streamed(tokenizer, ids) == ["a", "", "", "", "🎉", "b", ""]


def test_stream_shows_what_never_became_a_character(tokenizer):
    ids = tokenizer.encode("a🎉")[:-1]
    pieces = streamed(tokenizer, ids)
    assert pieces[:-1] == ["a", "", "", ""] and set(pieces[-1]) == {"\ufffd"}
    # Bytes that never begin a character must not be held for ever.
    noise = [tokenizer.core.token_to_id(ggufs.BYTES[0xFF])] * 50
    stream = tokenizer.stream()
    assert sum(bool(stream.push(i)) for i in noise) >= 5


@given(st.lists(st.integers(0, ggufs.VOCAB - 1), max_size=60))
def test_stream_takes_any_tokens(tokenizer, ids):
    assert all(isinstance(piece, str) for piece in streamed(tokenizer, ids))


def test_ids_out_of_range(tokenizer):
    assert tokenizer.decode([ggufs.VOCAB + 5]) == ""  # Models may have more rows than the tokenizer has tokens.
    for bad in (-1, 2**32):
        with pytest.raises(ValueError, match=str(bad)):
            tokenizer.decode([5, bad])


def test_vocabulary_counts_added_tokens(tokenizer):
    assert tokenizer.vocab_size == ggufs.VOCAB


def test_chat(tokenizer):
    text = tokenizer.chat([{"role": "user", "content": "hello"}])
    assert text == "<|im_start|>user\nhello<|im_end|>\n"
    assert tokenizer.encode(text)[0] == 1


def test_chat_gives_the_template_its_names(tokenizer):
    template = "{{ bos_token }}|{{ eos_token }}|{{ add_generation_prompt }}|{{ tools is none }}"
    named = Tokenizer(tokenizer.core, bos_id=1, eos_ids=(2, 0), template=template)
    assert named.chat([], add_generation_prompt=False) == "<|im_start|>|<|im_end|>|False|True"


def test_tools_and_options_reach_the_template(tokenizer):
    template = "{% for t in tools %}{{ t.name }}{% endfor %}|{{ enable_thinking }}|{{ messages[0].tool_calls[0].name }}"
    named = Tokenizer(tokenizer.core, template=template)
    calls = [{"role": "assistant", "tool_calls": [{"name": "look"}]}]
    assert named.chat(calls, tools=[{"name": "look"}, {"name": "do"}], enable_thinking=False) == "lookdo|False|look"
    with pytest.raises(ValueError, match="bos_token is the tokenizer's own"):
        named.chat(calls, bos_token="x")
    with pytest.raises(ValueError, match="a tool is 'look'"):
        named.chat(calls, tools=["look"])


def test_template_dialect():
    template = (
        "  {% if true %}\n  x\n  {% endif %}\n{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}"
    )
    assert render(template + "{% endfor %}{{ '<é>' | tojson }}", {}) == '  x\n1"<é>"'


@pytest.mark.parametrize("messages", [["hello"], [{"role": "user"}], [{"content": "x"}], [None]])
def test_chat_refuses_what_is_no_message(tokenizer, messages):
    with pytest.raises(ValueError, match='"role" and "content"'):
        tokenizer.chat(messages)


def test_chat_without_template(tokenizer):
    with pytest.raises(ValueError, match="no chat template"):
        Tokenizer(tokenizer.core).chat([])


FAILING = [
    "{{ raise_exception('roles must alternate') }}",
    "{% for %}",
    "{{ messages[0].nothing.more }}",
    "{{ 1 / 0 }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}",
    "{% for i in range(10 ** 9) %}{% endfor %}",
    "{% for i in range(1000000000) %}{% endfor %}",
    "{{ 'x' * 10000000000 }}",
    "{{ [0] * 10000000000 }}",
    "{{ (9 ** 99999) ** 9 }}",
    "{{ messages.append(1) }}",
    "{{ ''.__class__.__mro__ }}",
    "{{ messages.__init__.__globals__ }}",
    "{{ raise_exception.__globals__['os'].system('touch /tmp/x') }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ ''|attr('__class__')|attr('__mro__')|last }}{{ (''|attr('__class__')).mro() }}",
    "{{ '{0.__class__.__mro__[1]}'.format('').x }}",
    "{{ lipsum.__globals__.os.popen('id').read() }}",
]


@pytest.mark.parametrize("template", FAILING)
def test_failures_and_escapes_become_value_errors(template):
    with pytest.raises(ValueError, match="chat template failed"):
        render(template, {"messages": [{"role": "user", "content": "x"}]})


@pytest.mark.parametrize("template", ["{{ ''.__class__ }}", "{{ messages.__class__ }}", "{{ render.__globals__ }}"])
def test_nothing_private_is_shown(template):
    try:
        text = render(template, {"messages": []})
    except ValueError:
        return
    assert "class" not in text and "{" not in text


@settings(max_examples=100, deadline=2000)
@given(st.text(alphabet="{}%|()[]._'\"* abmessages0159if for", max_size=40))
def test_fuzz_templates(template):
    try:
        render("{{ " + template + " }}", {"messages": []})
    except ValueError:
        pass
