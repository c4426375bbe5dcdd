"""Drafts by models of another vocabulary: tokens as other tokens, and generation with them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, normalizers
from tokenizers.models import BPE

import jkv
from jkv.generation import generate
from jkv.io.tokenizer import Tokenizer
from jkv.models import TINY, random
from jkv.speculative.autoregressive import Odds
from jkv.speculative.build import build_drafter
from jkv.speculative.cross_vocab import Across
from jkv.speculative.decoding import Drafting, drafts
from jkv.speculative.draft_model import Through
from jkv.speculative.proposer import Guess
from jkv.speculative.vocab_mapping import Translation, pieces, split_partial
from support import commands

ALPHABET = commands.ALPHABET
TEXT = "the lamp of the tower, the lamp of the tow"


def of_bytes(order=None, merges=(), **more) -> Tokenizer:
    """A token a byte, in an order, and one for each merge."""
    core = commands.tokenizer().core
    words = ALPHABET if order is None else [ALPHABET[i] for i in order]
    core.model = BPE({c: i for i, c in enumerate([*words, *(a + b for a, b in merges)])}, list(merges))
    return Tokenizer(core, **more)


def of_spaces(words: list[str], merges=(), prefix: bool = True) -> Tokenizer:
    """Tokens that write a space as U+2581, and bytes alone as <0x0A>; prefix: a space before every text."""
    letters = sorted({"\u2581", *"".join(words)})
    every = dict.fromkeys([*(f"<0x{b:02X}>" for b in range(256)), *letters, *(a + b for a, b in merges)])
    core = tokenizers.Tokenizer(BPE({c: i for i, c in enumerate(every)}, list(merges), byte_fallback=True))
    steps = [normalizers.Prepend("\u2581")] if prefix else []
    core.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "\u2581")])
    core.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    core.add_special_tokens(["<s>", "</s>"])
    return Tokenizer(core, bos_id=core.token_to_id("<s>"), eos_ids=[core.token_to_id("</s>")])


def test_token_bytes_join_to_their_text():
    text = "a b\n\u00e9\u20ac~"
    for tokenizer in (of_bytes(), of_spaces(["ab~"], prefix=False)):
        found = pieces(tokenizer)
        assert b"".join(found[i] for i in tokenizer.within(text)) == text.encode()
    assert found[-1] is None and found[10] == b"\n"  # </s>, and a byte alone


def test_same_vocabulary_translates_to_itself():
    merges = [("t", "h"), ("th", "e")]
    one, ids = (
        Translation(of_bytes(merges=merges), of_bytes(merges=merges)),
        of_bytes(merges=merges).within("the other"),
    )
    assert one.translate(ids, [0.5] * len(ids)) == (ids, [0.5] * len(ids))
    one.read(ids)
    assert one.translate(ids, [0.5] * len(ids)) == (ids, [0.5] * len(ids)) and not one.grams


def test_merged_tokens_are_learned_from_model_output():
    """st + amps, as in the paper: two tokens before, one after, of the product of their probabilities."""
    own = of_bytes(merges=[("s", "t"), ("a", "m"), ("am", "p"), ("amp", "s"), ("st", "amps"), ("o", "w")])
    other = of_bytes(np.roll(np.arange(256), 7), merges=[("s", "t"), ("a", "m"), ("am", "p"), ("amp", "s")])
    one = Translation(own, other)
    draft, chance = other.within("stamps!"), [0.5, 0.4, 0.9]
    assert [own.core.id_to_token(i) for i in one.translate(draft, chance)[0]] == ["st", "amps", "!"]
    one.read(own.within("stamps"))
    one.read(own.within("stamps"))
    ids, each = one.translate(draft, chance)
    assert ids == own.within("stamps!") and each == pytest.approx([0.2, 0.9]) and len(one.grams) == 1
    assert one.translate(draft[:1], chance[:1])[0] == own.within("st")
    few = Translation(own, other, limit=1)
    few.read(own.within("stamps"))
    few.read(own.within("ow"))
    assert [*few.grams.values()] == own.within("ow")


def test_unknown_tokens_split_into_model_tokens():
    own, other = of_bytes(), of_bytes(merges=[("a", "b")])
    ids, each = Translation(own, other).translate(other.within("xab"), [0.5, 0.25])
    assert ids == own.within("xab") and each == [0.5, 0.25, 1.0]
    half = of_spaces(["x"], prefix=False)  # a part of a character ends a draft
    assert Translation(of_spaces(["x\u00e9"], prefix=False), half).translate(half.within("x"), [1.0])[0]


def test_continuation_gets_no_leading_space():
    own, other = of_bytes(), of_spaces(["the lamp"])
    one = Translation(own, other)
    assert one.begins and one.text_of(one.within("the lamp")) == b"the lamp"
    assert one.text_of(other.within("the")) == b" the"
    assert split_partial("a\u20ac".encode()[:-1]) == ("a", "\u20ac".encode()[:2]) and split_partial(b"a") == ("a", b"")


def test_vocabulary_padding_maps_to_no_token():
    one = Translation(of_bytes(), of_bytes(), words=(320, 300))
    assert one.read([*one.model.within("a"), 319]) == b"a" and one.text_of([299]) == b""
    assert one.translate([*one.drafter.within("a"), 299], [0.5, 0.5]) == (one.model.within("a"), [0.5])
    assert pieces(Tokenizer(tokenizers.Tokenizer(BPE({"a": 0, "b": 9}, [])))) == [b"a", *[None] * 8, b"b"]


def test_continuation_keeps_leading_newline():
    one = Translation(of_bytes(), of_spaces(["\nab0"], [("\n", "\n"), ("0", "\n")]))
    assert one.begins and [one.text_of(one.within(x)) for x in ("\nab", "ab", "\n\n")] == [b"\nab", b"ab", b"\n\n"]


class Asked:
    """What stands for the model behind an Across: it guesses the same tokens after every row."""

    def __init__(self) -> None:
        self.read, self.rows, self.ahead, self.guess = [], [], 0, []

    def begin(self, rows, new):
        self.read, self.ahead = [len(row) for row in rows], new

    def branch(self, rows):
        return self

    def draw(self, rows, most):
        self.rows = rows
        return [(self.guess[:most], [0.9] * len(self.guess[:most])) for _ in rows]


def asking(own: Tokenizer, other: Tokenizer) -> tuple[Across, Asked]:
    one, asked = Across(random(dict(TINY, num_hidden_layers=1)), Translation(own, other)), Asked()
    one.model = asked  # type: ignore
    return one, asked


def test_multi_token_characters_stay_whole():
    own = of_bytes()
    text = "\u65e5\u672c\u8a9e\u65e5\u672c\u8a9eabc\U0001f600\U0001f600"
    ids = own.within(text)
    for begun in (1, 3, 6, 9):
        one, _ = asking(own, own)
        at = one._begun(ids[:begun])
        for n in range(begun + 1, len(ids) + 1):
            one._follow(at, ids[:n])
            assert at.sure and len(at.open) <= 7
        marks = [0] * (begun < 3)  # what is read where there is no text yet
        assert at.sure + at.open == [*marks, *ids]


def test_no_guess_without_new_text_or_context():
    own = of_bytes()
    one, asked = asking(own, own)
    a = own.within("a")
    asked.guess = own.within("bcd")
    one.begin([a], 40)
    assert one.propose([[*a, *own.within("\u20ac")[:1]]], 4)[0].ids == [] and not asked.rows  # a part of a character
    assert one.propose([[*a, *own.within("\u20acx")]], 4)[0].ids == asked.guess
    one.begin([a * 60], 2000)  # of a context of 512 or fewer
    room = one.params.config.context
    assert 0 < asked.ahead == room - 56 and one.room == room
    row = a * (room - 3)
    assert one.propose([row[:-4]], 4)[0].ids and one.newest
    assert one.propose([row], 4)[0].ids == [] and not one.newest  # or odds would learn of it again


def test_guess_continues_known_tokens_or_is_empty():
    """A row that has drawn "b" while others were behind; nothing, if the guess says other tokens."""
    own = of_bytes()
    one, asked = asking(own, own)
    a, asked.guess = own.within("a"), own.within("bcd")
    one.begin([a, a], 40)
    texts, known = [[*a, *own.within(x)] for x in ("xb", "xc")], [own.within("b"), own.within("c")]
    got = one.propose(texts, 4, SimpleNamespace(known=known))  # type: ignore
    assert [guess.ids for guess in got] == [own.within("cd"), []]
    assert asked.rows == [own.within("ax")] * 2 and one.newest[0][:2] == (2, asked.guess)


def test_branch_continues_from_drafter_state():
    own = of_bytes()
    one, asked = asking(own, own)
    row = own.within("the lamp")
    one.begin([row], 40)
    one.model.begin = None  # type: ignore  # no prompt is read again
    branch = one.branch([[*row, *own.within(" of")]])
    branch.propose([[*row, *own.within(" of the tower")]], 4)
    assert asked.rows == [own.within("the lamp of the tower")]
    assert one.rows[0].of == len("the lamp of") and branch.odds is one.odds and branch.room == one.room


@pytest.mark.parametrize("cut", [1, 3, 8, 20])
def test_drafter_tokens_spell_text_at_any_split(cut: int):
    """Its tokens make the text, of characters that are whole."""
    own, other = of_bytes(), of_spaces(["the lamp \u00e9\u20ac"], [("t", "h"), ("th", "e"), ("\u2581", "the")])
    one, ids = Across(random(TINY), Translation(own, other)), own.within("lamp \u00e9\u20ac the the lamp \u20ac" * 3)
    at, row = one._begun(ids[:5]), ids[:5]
    while len(row) < len(ids):
        row = ids[: len(row) + cut]
        one._follow(at, row)
        text = one.translation.text_of(at.sure + at.open) + at.begun
        assert text.removeprefix(b" ") == one.translation.read(row) and len(at.open) <= 4 and at.of == len(row)
    assert not at.begun


@pytest.mark.slow
def test_permuted_vocabulary_drafts_are_all_accepted(monkeypatch):
    """The same weights: all guesses come, as the map is exact. Text alone is generated: other tokens have no logit."""
    monkeypatch.setattr(generate, "Drafting", partial(Drafting, clock=lambda: 0.0))
    order = np.random.default_rng(1).permutation(256)
    made = random(dict(TINY, vocab_size=256, num_hidden_layers=1), 3)
    text = np.asarray([x is not None and x.isascii() for x in pieces(of_bytes())])
    made = replace(made, head=jnp.where(text[:, None], made.head, 0))
    params = replace(made, tokenizer=of_bytes())
    other = replace(made, embed=made.embed[order], head=made.head[order], tokenizer=of_bytes(order))
    assert isinstance(build_drafter(other, params), Across) and isinstance(build_drafter(params, params), Through)
    how = {"max_new_tokens": 40, "stop_ids": ()}
    for prompt in (TEXT, [TEXT, TEXT[:9]]):
        want = jkv.generate(params, None, prompt, **how)
        got = jkv.generate(params, None, prompt, drafter=other, **how)
        assert got.tokens == want.tokens and got.receipt.drafted_taken == got.receipt.drafted > 20
    want = jkv.generate(params, None, TEXT, temperature=0.9, seed=2, **how)
    wrong = replace(other, tokenizer=of_spaces([TEXT], [("t", "h")]))  # of as many tokens or more: random guesses
    twice = {name: jnp.tile(getattr(wrong, name), (2, 1)) for name in ("embed", "head")}
    wrong = replace(wrong, **twice, config=replace(wrong.config, vocab=512))
    got = jkv.generate(params, None, TEXT, drafter=wrong, temperature=0.9, seed=2, **how)
    assert got.tokens == want.tokens


def test_odds_calibrate_draft_probabilities():
    odds, rng = Odds(), np.random.default_rng(0)
    for _ in range(2000):
        q = rng.random()
        odds.learn(q, rng.random() < q * q)  # it is too sure
    assert odds.of(0.95) > 0.7 and odds.of(0.5) < 0.4 and odds.of(0.05) < 0.15
    one, other = Odds(), Odds()
    one.saw([0.9, 0.8, 0.7], [1, 2, 3], [1, 9, 3])  # one that came, one that did not; of the third nothing is known
    other.learn(0.9, True)
    other.learn(0.8, False)
    assert one == other and one.along([0.9, 0.9])[1] == pytest.approx(one.of(0.9) ** 2)


def test_padded_models_of_one_tokenizer_share_tokens():
    hf = dict(TINY, num_hidden_layers=1)
    own, padded = (replace(random(dict(hf, vocab_size=n)), tokenizer=of_bytes()) for n in (256, 320))
    for one, other in ((own, padded), (padded, own)):
        assert isinstance(build_drafter(other, one), Through)
    assert Through(own)._known([7, 319]) == [7, 255]
    assert drafts([Guess([7, 319], [-1, 0], [1.0, 1.0])], 4, 256).ids.tolist() == [[0, 7, 255, 0]]
    other = replace(own, tokenizer=of_bytes(np.roll(np.arange(256), 7)))
    assert build_drafter(other, padded).translation is build_drafter(other, padded).translation  # type: ignore
    assert len(build_drafter(other, padded).translation.model_bytes) == 320  # type: ignore


def test_unsuitable_drafters_are_refused():
    params = replace(random(dict(TINY, vocab_size=256)), tokenizer=of_bytes())
    with pytest.raises(ValueError, match="its model has 300 words and this one 256; give one of the same words, or"):
        build_drafter(random(dict(TINY, vocab_size=300)), params)
    strange = tokenizers.Tokenizer(BPE({chr(0x4E00 + i): i for i in range(300)}, []))
    small = replace(random(dict(TINY, vocab_size=300)), tokenizer=Tokenizer(strange))
    with pytest.raises(ValueError, match="0 of its model's 300 tokens are tokens of this one"):
        build_drafter(small, params)
    other = replace(params, tokenizer=of_bytes(np.roll(np.arange(256), 7)))
    with pytest.raises(ValueError, match="of another vocabulary cannot verify what another guesses; give it last"):
        build_drafter([other, "suffix"], params)
    with pytest.raises(ValueError, match="its model's context is 32; give a model that reads more, a shorter text"):
        Through(random(dict(TINY, num_hidden_layers=1, max_position_embeddings=32))).begin([[1] * 32], 1)
    with pytest.raises(ValueError, match="threshold=1.5"):
        Across(params, Translation(of_bytes(), of_bytes()), threshold=1.5)
