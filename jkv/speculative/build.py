"""Construction of drafters from a name, a model or an instance."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from functools import lru_cache
from typing import Any

from jkv.io.tokenizer import Tokenizer
from jkv.methods.parser import parse
from jkv.methods.registry import METHODS
from jkv.models import Params
from jkv.speculative.autoregressive import Drawing
from jkv.speculative.combined import Either
from jkv.speculative.cross_vocab import Across
from jkv.speculative.draft_model import Through
from jkv.speculative.proposer import Drafter, Recycling, Suffix
from jkv.speculative.redrafter import Distilled
from jkv.speculative.self_draft import Excerpts
from jkv.speculative.vocab_mapping import Translation
from jkv.utils.call_syntax import read_one_of
from jkv.utils.validation import short

DRAFTERS = {"suffix": Suffix, "recycle": Recycling, "drafter": Distilled}


def build_drafter(what: Any, params: Params) -> Drafter:
    """Build a drafter for a model.

    Args:
        what: a name such as "suffix(p_min=0.2)", or two such as "suffix | recycle" (per row, the proposal with more
            expected tokens); a cache composition, through which the model drafts for itself (through a part of the
            verifier's cache if the composition only selects); a smaller model, which may have another vocabulary if
            both have tokenizers; or a Drafter. In a list, each drafter verifies the draft tokens of the next one.
        params: the model that verifies.

    Raises:
        ValueError: for a drafter that does not fit the model, or cannot verify in a list.
        TypeError: for any other type.
    """
    first, *rest = what if isinstance(what, list | tuple) and what else [what]
    if rest:
        one, behind = build_drafter(first, params), build_drafter(rest, first if isinstance(first, Params) else params)
        if isinstance(one, Across):
            raise ValueError("drafter=: a model of another vocabulary cannot verify what another guesses; give it last")
        if not isinstance(one, Drawing):
            raise ValueError(f"drafter={short(what)}: {short(first)} has no model that verifies what another guesses")
        return replace(one, behind=behind)
    if isinstance(first, Params):
        return _model(first, params)
    if isinstance(first, str):
        return _named(first, params)
    if isinstance(first, Drafter):
        return first
    raise TypeError(
        f"drafter={short(first)}: give 'suffix', 'recycle', a cache such as 'triforce(tokens=512)', a smaller model, "
        "or a Drafter"
    )


def build_batch_drafter(text: str, params: Params) -> Drafter:
    """Build a drafter whose rows may change between calls, by name; ValueError for any other."""
    made = build_drafter(text, params)
    if not made.rows_change:
        raise ValueError(f"--drafter {text}: rows of a batch come and go; give suffix, recycle or drafter")
    return made


def _named(text: str, params: Params) -> Drafter:
    """Build a drafter by its text form."""
    word = re.split(r"[(|]", text, maxsplit=1)[0].strip()
    if word in METHODS:
        config = parse(text)
        return Excerpts(config) if config.reads_part else Through(params, config)
    one, bar, other = text.partition("|")
    if bar:
        return Either(_named(one.strip(), params), _named(other.strip(), params))
    # Drafters that need the model get it as an argument.
    name, arguments = read_one_of(DRAFTERS, text, "drafter")
    of_model = {"recycle": {"vocab": params.config.vocab}, "drafter": {"params": params}}
    given: dict[str, Any] = of_model.get(name, {})
    try:
        return DRAFTERS[name](**given, **arguments)
    except TypeError:
        known = [f.name for f in fields(DRAFTERS[name]) if f.init and f.name not in given]
        raise ValueError(f"drafter={text!r}: {name} takes {', '.join(known) or 'no arguments'}") from None


def _model(small: Params, params: Params) -> Drafter:
    """Build a drafter from a smaller model: directly if the vocabularies agree, else by translating tokens."""
    own, other = params.tokenizer, small.tokenizer
    words = params.config.vocab, small.config.vocab
    if own is None or other is None:
        if words[0] != words[1]:
            raise ValueError(
                f"drafter=: its model has {small.config.vocab} words and this one {params.config.vocab}; give one of "
                "the same words, or tokenizers with both"
            )
        return Through(small)
    translation = _translation(own, other, words)
    return Through(small) if translation is None else Across(small, translation)


@lru_cache(maxsize=4)  # keeps learned n-grams
def _translation(own: Tokenizer, other: Tokenizer, words: tuple[int, int]) -> Translation | None:
    """Return the translation between two tokenizers, or None if their tokens agree.

    Vocabularies may still differ in size, because models pad them.
    """
    return None if own.core.get_vocab() == other.core.get_vocab() else Translation(own, other, words=words)
