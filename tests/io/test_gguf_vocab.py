"""Tokenizers rebuilt from GGUF metadata."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from jkv.io.errors import FormatError
from jkv.io.gguf import open_file
from jkv.io.gguf_keys import Metadata
from jkv.io.gguf_vocab import build_tokenizer
from jkv.io.pretokenizers import CUTS
from support import ggufs


def build(tmp_path, meta):
    entries = {key: value for key, value in meta.items() if value is not None}
    path = ggufs.write(tmp_path / "t.gguf", {"a": np.ones(3, np.float32)}, entries)
    return build_tokenizer(Metadata(open_file(path)))


def tokens(tokenizer, text):
    return [tokenizer.core.id_to_token(i) for i in tokenizer.encode(text)]


def test_smollm_splits_digits(tmp_path):
    smollm = build(tmp_path, ggufs.bpe("smollm"))
    assert tokens(smollm, "hello world 12") == ["hello", "Ġw", "o", "r", "l", "d", "Ġ", "1", "2"]
    gpt2 = build(tmp_path, ggufs.bpe("default"))
    assert tokens(gpt2, "hello 12") == ["hello", "Ġ", "12"]


TEXT = "It's 12345 DON'T helloWorld,\n\n 1/\n =[$2]`^ 漢字１２ ½\t\tz #go"
# TEXT's words in llama.cpp, which merged all the pairs there are in it. Where its deepseek-llm keeps numbers whole, the
# family's own tokenizer takes digits one by one.
WORDS = {
    "llama-bpe llama3 llama-v3 falcon3 dbrx smaug-bpe": "It¦'s¦ ¦123¦45¦ DON¦'T¦ helloWorld¦,\n\n¦ ¦1¦/\n¦ =[$¦2¦]`^¦ "
    "漢字¦１２¦ ¦½¦\t¦\tz¦ #¦go",
    "qwen2 deepseek-r1-qwen megrez": "It¦'s¦ ¦1¦2¦3¦4¦5¦ DON¦'T¦ helloWorld¦,\n\n¦ ¦1¦/\n¦ =[$¦2¦]`^¦ 漢字¦１¦２¦ ¦½"
    "¦\t¦\tz¦ #¦go",
    "seed-coder": "It¦'s¦ ¦1¦2¦3¦4¦5¦ DON¦'T¦ helloWorld¦,¦\n\n¦ ¦1¦/¦\n¦ =[$¦2¦]`^¦ 漢字¦１¦２¦ ¦½¦\t¦\tz¦ #¦go",
    "smollm refact starcoder codeshell minerva-7b": "It¦'s¦ ¦1¦2¦3¦4¦5¦ DON¦'¦T¦ helloWorld¦,¦\n\n ¦1¦/¦\n¦ =[$¦2¦]`^¦ "
    "漢字¦１¦２¦ ¦½¦\t¦\t¦z¦ #¦go",
    "gpt-2 phi-2 olmo trillion mellum a.x-4.0 granite-docling": "It¦'s¦ 12345¦ DON¦'¦T¦ helloWorld¦,¦\n\n¦ 1¦/¦\n¦ "
    "=[$¦2¦]`^¦ 漢字¦１２¦ ½¦\t¦\t¦z¦ #¦go",
    "tekken": "It¦'s¦ ¦1¦2¦3¦4¦5¦ DON¦'T¦ hello¦World¦,\n\n¦ ¦1¦/\n¦ =[$¦2¦]`^¦ 漢字¦１¦２¦ ¦½¦\t¦\tz¦ #¦go",
    "gpt-4o": "It's¦ ¦123¦45¦ DON'T¦ hello¦World¦,\n\n¦ ¦1¦/\n¦ =[$¦2¦]`^¦ 漢字¦１２¦ ¦½¦\t¦\tz¦ #¦go",
    "deepseek-llm": "It¦'¦s¦ ¦1¦2¦3¦4¦5¦ DON¦'¦T¦ helloWorld¦,¦\n¦\n¦ ¦1¦/¦\n¦ =[$¦2¦]`^¦ ¦漢字¦１¦２¦ ¦½¦\t¦\tz¦ #¦go",
    "deepseek-coder": "It¦'¦s¦ ¦1¦2¦3¦4¦5¦ DON¦'¦T¦ helloWorld¦,¦\n¦\n¦ ¦1¦/¦\n¦ =¦[¦$¦2¦]¦`^¦ ¦漢字¦１¦２¦ ¦½¦\t¦\tz¦ "
    "#¦go",
    "deepseek-v3": "It¦'s¦ ¦123¦45¦ DON¦'T¦ helloWorld¦,\n\n¦ ¦1¦/\n¦ =[$¦2¦]`^¦ ¦漢字¦１２¦ ¦½¦\t¦\tz¦ #¦go",
    "falcon": "It¦'¦s¦ ¦123¦45¦ DON¦'¦T¦ helloWorld¦,¦\n\n¦ 1¦/¦\n ¦=[$¦2¦]`^¦ 漢字¦１２¦ ½¦\t¦\t¦z¦ ¦#¦go",
    "viking": "It's¦ ¦1¦2¦3¦4¦5¦ DON'T¦ helloWorld¦,\n\n¦ ¦1¦/¦\n¦ =[$¦2¦]`^¦ 漢字¦１¦２¦ ¦½¦\t\t¦z¦ #go",
    "default": "It¦'¦s¦ ¦123¦45¦ DON¦'¦T¦ helloWorld¦,¦\n\n¦ ¦1¦/¦\n ¦=[$¦2¦]¦`¦^¦ 漢字¦１２¦ ¦½¦\t¦\t¦z¦ ¦#¦go",
}


@pytest.mark.parametrize("names", WORDS)
def test_pre_tokenizer_splits_words_like_its_family(tmp_path, names):
    for pre in names.split():
        core = build(tmp_path, ggufs.bpe(pre)).core
        cut = [TEXT[a:b] for _, (a, b) in core.pre_tokenizer.pre_tokenize_str(TEXT)]
        assert "¦".join(cut) == WORDS[names], pre


def test_every_pre_tokenizer_has_llama_cpp_reference():
    assert sorted(CUTS) == sorted(" ".join(WORDS).split())
    assert "".join(WORDS["tekken"].split("¦")) == TEXT


@pytest.mark.parametrize("pre, why", [(None, "is missing"), ("", "is missing"), ("default", "names no family")])
def test_guessed_pre_tokenizer_is_reported(tmp_path, capsys, pre, why):
    tokenizer = build(tmp_path, ggufs.bpe(pre))
    said = capsys.readouterr().err
    assert f"tokenizer.ggml.pre {why}, so words are cut by llama.cpp's default, which is a guess" in said
    assert tokenizer.core.pre_tokenizer.pre_tokenize_str("12345")[0][0] == "123" and not tokenizer.add_bos
    build(tmp_path, ggufs.bpe("gpt-2") | {"tokenizer.ggml.add_space_prefix": False})
    build(tmp_path, spm() | {"tokenizer.ggml.pre": "default"})
    assert not capsys.readouterr().err


@pytest.mark.parametrize("pre, begins", [("llama-bpe", True), ("tekken", True), ("smaug-bpe", False), ("dbrx", False)])
def test_default_add_bos_follows_family(tmp_path, pre, begins):
    assert build(tmp_path, ggufs.bpe(pre) | {"tokenizer.ggml.add_bos_token": None}).add_bos == begins


@pytest.mark.parametrize("pre", ["smollm", "default", "llama-bpe", "qwen2"])
def test_special_tokens_and_texts_round_trip(tmp_path, pre):
    tokenizer = build(tmp_path, ggufs.bpe(pre))
    ids = tokenizer.encode("<|im_start|>hello\n<|im_end|>")
    assert ids[0] == 1 and ids[-1] == 2 and tokenizer.decode(ids) == "hello\n"
    assert tokenizer.eos_ids == (2, 0) and tokenizer.bos_id == 1
    for text in ("", " ", "  a\n\n b\t", "naïve Ünïcødé 漢字 🎉", "x" * 1000):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_bos_token_is_added_once(tmp_path):
    plain = ggufs.bpe("llama-bpe")
    assert build(tmp_path, plain).encode("he")[0] != 1
    for value in (True, None):  # Files of Llama 3 often leave the key out.
        tokenizer = build(tmp_path, plain | {"tokenizer.ggml.add_bos_token": value})
        assert tokenizer.encode("he")[0] == 1
        assert tokenizer.encode("<|im_start|>he").count(1) == 1


PIECES = ["<unk>", "<s>", "</s>"] + [f"<0x{b:02X}>" for b in range(256)]
PIECES += ["▁", "h", "e", "l", "o", "▁h", "el", "lo", "ell", "▁hello", "▁he", "llo", "ello"]


def spm(**changes):
    scores = [0.0] * 259 + [-float(i) for i in range(len(PIECES) - 259)]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": PIECES,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * (len(PIECES) - 259),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    } | changes


def test_sentencepiece_merges_best_score_first(tmp_path):
    tokenizer = build(tmp_path, spm())
    # "▁h" has the best score of all joins, then "el", then "lo".
    assert tokens(tokenizer, "hello") == ["<s>", "▁hello"]
    assert tokens(tokenizer, "hellhe") == ["<s>", "▁h", "ell", "h", "e"]
    assert tokenizer.decode(tokenizer.encode("hello hello")) == "hello hello"


@given(st.text(max_size=30))
@example("▁")
@example("a ▁ b")
def test_sentencepiece_falls_back_to_bytes(spm_tokenizer, text):
    if not any(special in text for special in ("<unk>", "<s>", "</s>")):
        # "▁" is how SentencePiece writes a space: the two are one text to it.
        assert spm_tokenizer.decode(spm_tokenizer.encode(text)) == text.replace("▁", " ")


@pytest.fixture(scope="module")
def spm_tokenizer(tmp_path_factory):
    return build(tmp_path_factory.mktemp("spm"), spm())


REFUSED = {
    "pre": (ggufs.bpe("superbpe"), "pre is 'superbpe', a pre-tokenizer that is not known"),
    "model": (ggufs.bpe() | {"tokenizer.ggml.model": "bert"}, "'bert'"),
    "no merges": (ggufs.bpe() | {"tokenizer.ggml.merges": None}, "merges is missing"),
    "merge of one": (ggufs.bpe() | {"tokenizer.ggml.merges": ["he"]}, "not of two tokens"),
    "merge of strangers": (ggufs.bpe() | {"tokenizer.ggml.merges": ["a b"]}, "not of two tokens"),
    "tokens twice": (ggufs.bpe() | {"tokenizer.ggml.tokens": ["a", "a"]}, "distinct"),
    "types": (ggufs.bpe() | {"tokenizer.ggml.token_type": [1]}, "token_type"),
    "eos": (ggufs.bpe() | {"tokenizer.ggml.eos_token_id": 10**6}, "eos_token_id"),
    "scores": (spm() | {"tokenizer.ggml.scores": [0.0]}, "scores"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_broken_tokenizers_are_refused(tmp_path, case):
    meta, cause = REFUSED[case]
    with pytest.raises(FormatError, match=cause):
        build(tmp_path, meta)


def test_no_tokenizer_is_none(tmp_path):
    assert build(tmp_path, {}) is None
