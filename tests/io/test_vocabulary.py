"""The tokenizer of a folder: every file that says something of it is read, as transformers reads them."""

import json
import struct

import numpy as np
import pytest
import tokenizers
from tokenizers import AddedToken, decoders, pre_tokenizers
from tokenizers.models import BPE

from jkv.io.errors import FormatError
from jkv.io.vocabulary import NAMED, read_tokenizer

LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
SIZE = len(LETTERS) + 2


def core(specials=("<s>", "</s>")):
    made = tokenizers.Tokenizer(BPE({x: i for i, x in enumerate([*specials, *LETTERS])}, []))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in specials])
    return made


def folder(path, files=None, **config):
    """A folder with a vocabulary of bytes, and other files."""
    path.mkdir(parents=True, exist_ok=True)
    core().save(str(path / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>"} | config
    for name, content in ({"tokenizer_config.json": config} | (files or {})).items():
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def flags(content, **more):
    return dict(content=content, lstrip=False, rstrip=False, normalized=False, single_word=False, special=True) | more


DECODER = {str(SIZE): flags("<|im_end|>"), str(SIZE + 1): flags("<fn>", special=False)}
WHERE = {
    "tokenizer_config.json": dict(added_tokens_decoder=DECODER, eos_token="<|im_end|>"),
    "as a dict": dict(added_tokens_decoder=DECODER, eos_token=flags("<|im_end|>") | {"__type": "AddedToken"}),
    "special_tokens_map.json": {
        "special_tokens_map.json": {"eos_token": "<|im_end|>"},
        "added_tokens.json": {"<fn>": SIZE + 1, "<|im_end|>": SIZE},
    },
    "the map and its flags": {
        "special_tokens_map.json": {"eos_token": flags("<|im_end|>"), "additional_special_tokens": ["<x>"]},
        "added_tokens.json": {"<|im_end|>": SIZE, "<fn>": SIZE + 1},
    },
}


@pytest.mark.parametrize("where", WHERE)
def test_added_token_is_read_from_every_location(tmp_path, where):
    said = WHERE[where]
    files = {name: x for name, x in said.items() if name.endswith(".json")}
    tokenizer = read_tokenizer(folder(tmp_path, files, **{} if files else said), {})
    assert tokenizer.eos_ids == (SIZE,) and tokenizer.within("a<|im_end|>")[1:] == [SIZE]
    assert tokenizer.within("<fn>") == [SIZE + 1] and tokenizer.decode([SIZE, SIZE + 1]) == "<fn>"


def test_added_token_with_mismatched_id_is_refused(tmp_path):
    path = folder(tmp_path, added_tokens_decoder={str(SIZE + 3): flags("<x>")})
    with pytest.raises(FormatError, match=f"token '<x>' has id {SIZE + 3} there, and {SIZE} by its vocabulary"):
        read_tokenizer(path, {})


@pytest.mark.parametrize("said", [[1], {"x": {}}, {"300": 5}, {"300": {"content": 5}}, {"300": {"new": 1}}])
def test_malformed_added_tokens_are_refused(tmp_path, said):
    with pytest.raises(FormatError, match="its added tokens cannot be read"):
        read_tokenizer(folder(tmp_path, added_tokens_decoder=said), {})


@pytest.mark.parametrize("name", NAMED)
def test_template_sees_every_named_token(tmp_path, name):
    tokenizer = read_tokenizer(folder(tmp_path, **{name: "<fn>"}, chat_template="{{ " + name + " }}"), {})
    assert tokenizer.chat([]) == "<fn>" and tokenizer.within("<fn>") == [SIZE]
    assert json.loads(json.dumps(tokenizer.saved()[1]))[name] == "<fn>"


DEFAULT, TOOLS = "of {{ messages | length }}", "tools {{ tools | length }}"
PLACES = {
    "a list": ({}, [{"name": "default", "template": DEFAULT}, {"name": "tool_use", "template": TOOLS}]),
    "files": ({"chat_template.jinja": DEFAULT, "additional_chat_templates/tool_use.jinja": TOOLS}, "neither"),
}


@pytest.mark.parametrize("place", PLACES)
def test_tools_select_tool_template(tmp_path, place):
    files, entry = PLACES[place]
    tokenizer = read_tokenizer(folder(tmp_path, files, chat_template=entry), {})
    assert tokenizer.chat([], tools=[{}]) == "tools 1" and tokenizer.chat([]) == "of 0"
    saved = folder(tmp_path / "again", {"tokenizer_config.json": tokenizer.saved()[1]})
    again = read_tokenizer(saved, {})
    assert (again.template, again.tool_template) == (DEFAULT, TOOLS)


def drawn(seed):
    """Files and config with random tokens in random places, with random flags."""
    rng = np.random.default_rng(seed)
    flip = lambda: bool(rng.integers(2))  # noqa: E731
    texts = [str(t) for t in rng.permutation(["<a>", "<b>", "be", " c ", "<|d|>", "漢", "x y"])[: rng.integers(1, 7)]]
    kinds = ("lstrip", "rstrip", "normalized", "single_word", "special")
    names = {str(n): str(rng.choice([*texts, "<new>", "<s>"])) for n in rng.permutation(NAMED)[: rng.integers(4)]}
    if flip():
        decoder = {str(SIZE + i): flags(t, **{kind: flip() for kind in kinds}) for i, t in enumerate(texts)}
        extra = [str(x) for x in rng.permutation([*texts, "<more>"])[:2]]
        return {}, names | {"added_tokens_decoder": decoder, "additional_special_tokens": extra}
    # transformers 5 takes an added token that the map calls additional for a plain one; it is special here, as in 4
    placed = {"added_tokens.json": {t: SIZE + i for i, t in enumerate(texts)}}
    said = {"special_tokens_map.json": names | {"additional_special_tokens": ["<more>"]}}
    return {n: x for n, x in (placed | said).items() if flip()}, names


@pytest.mark.peers
@pytest.mark.parametrize("seed", range(24))
def test_tokens_equal_transformers(tmp_path, seed):
    transformers = pytest.importorskip("transformers")
    files, config = drawn(seed)
    path = folder(tmp_path, files, **config)
    want, got = transformers.PreTrainedTokenizerFast.from_pretrained(str(path)), read_tokenizer(path, {})
    for text in ("<a> <b>be be c  c d<|d|>", "x y漢<new>abe 漢 <more><s>", "<a>be<b> x y</s> E\u0301"):
        assert got.within(text) == want(text, add_special_tokens=False)["input_ids"]
        assert got.decode(got.within(text)) == want.decode(got.within(text), skip_special_tokens=True)
    assert {**got.texts} == want.special_tokens_map and got.vocab_size == len(want)


def field(number, value):
    """A field of a protobuf message."""

    def varint(n):
        return bytes([n & 127 | 128]) + varint(n >> 7) if n > 127 else bytes([n])

    if isinstance(value, bytes):
        return varint(number << 3 | 2) + varint(len(value)) + value
    if isinstance(value, float):
        return varint(number << 3 | 5) + struct.pack("<f", value)
    return varint(number << 3) + varint(value % 2**64)


PIECES = [("<unk>", 2), ("<s>", 3), ("</s>", 3), *((f"<0x{b:02X}>", 6) for b in range(256))]
PIECES += [(text, 1) for text in ("▁", "h", "e", "l", "o", "el", "▁h", "lo", "▁hel", "▁hello")] + [("<user>", 4)]


def model(trainer=(), normalizer=((3, 1), (4, 0))):
    pieces = (field(1, text.encode()) + field(2, -float(i)) + field(3, kind) for i, (text, kind) in enumerate(PIECES))
    spec = {3: 2, 35: 1} | dict(trainer)
    return (
        b"".join(field(1, piece) for piece in pieces)
        + field(2, b"".join(field(n, x) for n, x in spec.items()) + field(43, -1))  # which has no token of padding
        + field(3, b"".join(field(n, x) for n, x in normalizer))
    )


def bare(path, content, **config):
    (folder(path, **config) / "tokenizer.json").unlink()
    (path / "tokenizer.model").write_bytes(content)
    return path


def test_tokenizer_is_built_from_sentencepiece_model_alone(tmp_path):
    tokenizer = read_tokenizer(bare(tmp_path, model()), {})
    texts = [tokenizer.core.id_to_token(i) for i in tokenizer.encode("hello<user>ello\n</s>")]
    assert texts == ["<s>", "▁hello", "<user>", "▁", "el", "lo", "<0x0A>", "</s>"]
    assert read_tokenizer(bare(tmp_path, model(), bos_token=None, eos_token=None), {}).encode("</s>") == [1, 2]
    assert tokenizer.eos_ids == (2,) and tokenizer.decode(tokenizer.encode("hello é\n")) == "hello é\n"
    assert read_tokenizer(bare(tmp_path, model(), add_bos_token=False), {}).encode("hello") == [
        PIECES.index(("▁hello", 1))
    ]


REFUSED = {
    "unigram": model({3: 1}),
    "suffix": model({24: 1}),
    "table": model(normalizer=((2, b"x"), (4, 0))),
    "spaces": model(normalizer=()),
    "apart": model(normalizer=((4, 0), (5, 0))),
    "cut": model()[:-3],
    "tiktoken": b"IQ== 0\nIg== 1\n" * 100,
    "empty": b"",
}


@pytest.mark.parametrize("case", REFUSED)
def test_unsupported_sentencepiece_models_are_refused_with_remedy(tmp_path, case):
    with pytest.raises(FormatError, match="tokenizer.model: .*; write tokenizer.json.*AutoTokenizer.from_pretrained"):
        read_tokenizer(bare(tmp_path, REFUSED[case]), {})


@pytest.mark.parametrize("name", ["vocab.json", "tekken.json", "qwen.tiktoken", "spiece.model"])
def test_unsupported_vocabulary_file_is_refused(tmp_path, name):
    (folder(tmp_path) / "tokenizer.json").unlink()
    (tmp_path / name).write_text("{}")
    with pytest.raises(FormatError, match=f"its vocabulary is in {name} alone.*; write tokenizer.json"):
        read_tokenizer(tmp_path, {})


ODD = [
    "",
    " ",
    "  a",
    "a  b ",
    "\ta\n\nb",
    "naïve Ünïcødé 漢字 🎉",
    "aaaaaaaaa",
    "the the  thethe",
    "\u00a0\u200d",
    "e\u0301",
]
ODD += ["12345 67", "x" * 300, "▁a▁", "don't", "\x00\x01", "👩‍👩‍👧", "a\u2028b", "مرحبا", "lolololol", "  \n  "]


@pytest.mark.peers
@pytest.mark.parametrize("prefix", [True, False])
def test_tokens_equal_sentencepiece(tmp_path, prefix):
    package = pytest.importorskip("sentencepiece")
    text = ["the tide turns twice a day aaa aaaa because lolo 12345 don't naïve", "hello world  the sea lolol"] * 20
    (tmp_path / "text").write_text("\n".join(text))
    options = dict(normalization_rule_name="identity", remove_extra_whitespaces=False, add_dummy_prefix=prefix)
    package.SentencePieceTrainer.train(
        input=str(tmp_path / "text"), model_prefix=str(tmp_path / "m"), vocab_size=380, model_type="bpe",
        byte_fallback=True, character_coverage=1.0, minloglevel=2, **options,
    )  # fmt: skip
    truth = package.SentencePieceProcessor(model_file=str(tmp_path / "m.model"))
    got = read_tokenizer(bare(tmp_path / "folder", (tmp_path / "m.model").read_bytes()), {})
    for odd in ODD + text[:2]:
        assert got.within(odd) == truth.encode(odd), odd
        assert got.decode(got.within(odd)) == truth.decode(truth.encode(odd)), odd
