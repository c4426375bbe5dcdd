"""Encoding, streaming and chat templates."""

import json

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models

from jkv.io.chat_template import render
from jkv.io.gguf import open_file
from jkv.io.gguf_keys import Metadata
from jkv.io.gguf_vocab import build_tokenizer
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
def test_stream_equals_text_without_partial_characters(tokenizer, text):
    pieces = streamed(tokenizer, tokenizer.encode(text))
    assert "".join(pieces) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


def test_stream_holds_incomplete_characters(tokenizer):
    ids = tokenizer.encode("a🎉b")
    assert len(ids) == 6
    assert streamed(tokenizer, ids) == ["a", "", "", "", "🎉", "b", ""]


def test_stream_emits_invalid_bytes_as_replacement_character(tokenizer):
    ids = tokenizer.encode("a🎉")[:-1]
    pieces = streamed(tokenizer, ids)
    assert pieces[:-1] == ["a", "", "", ""] and set(pieces[-1]) == {"\ufffd"}
    # Bytes that never begin a character must not be held for ever.
    noise = [tokenizer.core.token_to_id(ggufs.BYTES[0xFF])] * 50
    stream = tokenizer.stream()
    assert sum(bool(stream.push(i)) for i in noise) >= 5


@given(st.lists(st.integers(0, ggufs.VOCAB - 1), max_size=60))
def test_stream_accepts_any_tokens(tokenizer, ids):
    assert all(isinstance(piece, str) for piece in streamed(tokenizer, ids))


def test_out_of_range_ids_are_empty_or_refused(tokenizer):
    assert tokenizer.decode([ggufs.VOCAB + 5]) == ""  # Models may have more rows than the tokenizer has tokens.
    for bad in (-1, 2**32):
        with pytest.raises(ValueError, match=str(bad)):
            tokenizer.decode([5, bad])


def test_vocab_size_counts_added_tokens(tokenizer):
    assert tokenizer.vocab_size == ggufs.VOCAB


def test_chat_renders_template(tokenizer):
    text = tokenizer.chat([{"role": "user", "content": "hello"}])
    assert text == "<|im_start|>user\nhello<|im_end|>\n"
    assert tokenizer.encode(text)[0] == 1


def test_chat_passes_special_tokens_to_template(tokenizer):
    template = "{{ bos_token }}|{{ eos_token }}|{{ add_generation_prompt }}|{{ tools is none }}"
    named = Tokenizer(tokenizer.core, bos_id=1, eos_ids=(2, 0), template=template)
    assert named.chat([], add_generation_prompt=False) == "<|im_start|>|<|im_end|>|False|True"


def test_chat_passes_tools_and_options_to_template(tokenizer):
    template = "{% for t in tools %}{{ t.name }}{% endfor %}|{{ enable_thinking }}|{{ messages[0].tool_calls[0].name }}"
    named = Tokenizer(tokenizer.core, template=template)
    calls = [{"role": "assistant", "tool_calls": [{"name": "look"}]}]
    assert named.chat(calls, tools=[{"name": "look"}, {"name": "do"}], enable_thinking=False) == "lookdo|False|look"
    with pytest.raises(ValueError, match="bos_token is the tokenizer's own"):
        named.chat(calls, bos_token="x")
    with pytest.raises(ValueError, match="a tool is 'look'"):
        named.chat(calls, tools=["look"])


def test_null_message_fields_are_dropped(tokenizer):
    """As in transformers: templates print None, or fail at it, where they know what to do without."""
    named = Tokenizer(tokenizer.core, template="{% for m in messages %}{{ m | tojson }}{% endfor %}{{ tools is none }}")
    call = {"function": {"name": "look", "arguments": {"x": None}}}
    said = named.chat([{"role": "assistant", "content": None, "tool_calls": [call], "name": None}], tools=None)
    assert said == json.dumps({"role": "assistant", "tool_calls": [call]}) + "True"


@pytest.mark.peers
def test_chat_tokens_equal_transformers(tokenizer):
    """Begin tokens are the template's own, whether the tokenizer adds one to a text or not."""
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    core = type(tokenizer.core).from_str(tokenizer.core.to_str())
    begin = ggufs.SPECIAL[0]
    core.post_processor = TemplateProcessing(single=f"{begin} $A", special_tokens=[(begin, 0)])
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    messages = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "x", "name": None},
    ]
    body = "{% for m in messages %}{{ m.role }}:{{ m.content }}{{ m.tool_calls | default('') }}{% endfor %}{{ think }}"
    for head in ("", "{{ bos_token }}", "{{ bos_token }}{{ bos_token }}"):
        theirs = PreTrainedTokenizerFast(tokenizer_object=core, bos_token=begin, chat_template=head + body)
        own = Tokenizer(core, bos_id=0, add_bos=True, template=head + body).tell(think=1)
        want = theirs.apply_chat_template(messages, think=1, return_dict=False, add_generation_prompt=True)
        assert own.encode(own.chat(messages)) == want
        assert own.encode(own.chat(messages) + "hello") == want + own.within("hello")
        assert own.encode(own.chat(messages, think=2)) != want
    assert own.encode("hello") == theirs.encode("hello")


@given(TEXT)
def test_pieces_concatenate_to_bytes_of_text(tokenizer, text):
    assert b"".join(map(tokenizer.piece, tokenizer.within(text))) == text.encode()


def test_pieces_with_byte_fallback_concatenate_to_bytes():
    """Of a vocabulary with spaces in its words and bytes for what it has no word for."""
    words = {x: i for i, x in enumerate(["<unk>", "\u2581", "\u2581the", "the", *(f"<0x{b:02X}>" for b in range(256))])}
    core = tokenizers.Tokenizer(models.BPE(words, [], unk_token="<unk>", byte_fallback=True))
    core.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    core.add_special_tokens([AddedToken("<é>", special=True)])
    own = Tokenizer(core)
    ids = [words["\u2581the"], *(words[f"<0x{b:02X}>"] for b in "é😀".encode()), words["the"], core.token_to_id("<é>")]
    assert b"".join(map(own.piece, ids)).decode() == core.decode(ids, skip_special_tokens=False) == " theé😀the<é>"


@given(st.lists(st.integers(0, ggufs.VOCAB - 1), max_size=30), st.sampled_from(ggufs.SPECIAL))
def test_special_token_in_stop_string_is_decoded(tokenizer, ids, special):
    token = tokenizer.core.token_to_id(special)
    others = {i for i, x in enumerate(ggufs.SPECIAL) if x != special}
    want = tokenizer.core.decode([i for i in ids if i not in others], skip_special_tokens=False)
    stream = tokenizer.stream((f"x{special}", "y"))
    assert tokenizer.decode(ids, (f"x{special}", "y")) == want
    assert "".join([*map(stream.push, ids), stream.finish()]).count(special) == ids.count(token)
    assert tokenizer.decode(ids, ("y", special[1:])) == tokenizer.decode(ids)


@pytest.mark.parametrize("half", ["\ud83d", "\ude00", "\udcff"])
def test_lone_surrogates_are_refused_with_position(tokenizer, half):
    says = rf"has half a character \(U\+{ord(half):04X}\) at place 3"
    for text in (f"abc{half}d", f"a😀c{half}"):
        with pytest.raises(ValueError, match=f"the text {says}"):
            tokenizer.encode(text)
        with pytest.raises(ValueError, match=rf"messages\[1\]\.content {says}"):
            tokenizer.chat([{"role": "user", "content": "a"}, {"role": "user", "content": text}])


def test_template_trims_blocks_and_supports_break_and_tojson():
    template = (
        "  {% if true %}\n  x\n  {% endif %}\n{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}"
    )
    assert render(template + "{% endfor %}{{ '<é>' | tojson }}", {}) == '  x\n1"<é>"'


@pytest.mark.parametrize("messages", [["hello"], [{"role": "user"}], [{"content": "x"}], [None]])
def test_malformed_messages_are_refused(tokenizer, messages):
    with pytest.raises(ValueError, match='"role" and "content"'):
        tokenizer.chat(messages)


def test_chat_without_template_is_refused(tokenizer):
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
def test_template_failures_and_escapes_raise_value_error(template):
    with pytest.raises(ValueError, match="chat template failed"):
        render(template, {"messages": [{"role": "user", "content": "x"}]})


@pytest.mark.parametrize("template", ["{{ ''.__class__ }}", "{{ messages.__class__ }}", "{{ render.__globals__ }}"])
def test_template_cannot_read_private_attributes(template):
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
