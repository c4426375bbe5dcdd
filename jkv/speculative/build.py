"""The drafter that a caller names, or gives."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from functools import lru_cache
from typing import Any

from jkv.io.tokenizer import Tokenizer
from jkv.methods.parser import parse
from jkv.methods.registry import CATALOGUE
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


def drafter(what: Any, params: Params) -> Drafter:
    """The drafter for a model that a caller names, or gives.

    A text such as "suffix(p_min=0.2)", or two such as "suffix | recycle", whichever offers more; a text of a cache,
    through which the model's own weights guess: through a part of the cache that verifies, if it only reads a part; a
    smaller model, of another vocabulary too if both have tokenizers; a Drafter. Or several: each verifies what the next
    one guesses.
    Raises ValueError or TypeError for anything else.
    """
    first, *rest = what if isinstance(what, list | tuple) and what else [what]
    if rest:
        one, behind = drafter(first, params), drafter(rest, first if isinstance(first, Params) else params)
        if isinstance(one, Across):
            raise ValueError("draft=: a model of another vocabulary cannot verify what another guesses; give it last")
        if not isinstance(one, Drawing):
            raise ValueError(f"draft={short(what)}: {short(first)} has no model that verifies what another guesses")
        return replace(one, behind=behind)
    if isinstance(first, Params):
        return _model(first, params)
    if isinstance(first, str):
        return _named(first, params)
    if isinstance(first, Drafter):
        return first
    raise TypeError(
        f"draft is {short(first)}: give 'suffix', 'recycle', a cache such as 'triforce(tokens=512)', a smaller model, "
        "or a Drafter"
    )


def of_batch(text: str, params: Params) -> Drafter:
    """A drafter whose rows may change, by its name; ValueError for any other, and for no drafter."""
    made = drafter(text, params)
    if not made.rows_change:
        raise ValueError(f"--draft {text}: rows of a batch come and go; give suffix, recycle or drafter")
    return made


def _named(text: str, params: Params) -> Drafter:
    word = re.split(r"[(|]", text, maxsplit=1)[0].strip()
    if word in CATALOGUE:
        config = parse(text)
        return Excerpts(config) if config.reads_part else Through(params, config)
    one, bar, other = text.partition("|")
    if bar:
        return Either(_named(one.strip(), params), _named(other.strip(), params))
    name, arguments = read_one_of(DRAFTERS, text, "drafter")
    of_model = {"recycle": {"vocab": params.config.vocab}, "drafter": {"params": params}}
    given: dict[str, Any] = of_model.get(name, {})
    try:
        return DRAFTERS[name](**given, **arguments)
    except TypeError:
        known = [f.name for f in fields(DRAFTERS[name]) if f.init and f.name not in given]
        raise ValueError(f"draft={text!r}: {name} takes {', '.join(known) or 'no arguments'}") from None


def _model(small: Params, params: Params) -> Drafter:
    """A model as a drafter: as it is if its tokens are those of the model, else through their text."""
    own, other = params.tokenizer, small.tokenizer
    words = params.config.vocab, small.config.vocab
    if own is None or other is None:
        if words[0] != words[1]:
            raise ValueError(
                f"draft=: its model has {small.config.vocab} words and this one {params.config.vocab}; give one of the "
                "same words, or tokenizers with both"
            )
        return Through(small)
    translation = _translation(own, other, words)
    return Through(small) if translation is None else Across(small, translation)


@lru_cache(maxsize=4)  # what it learns stays
def _translation(own: Tokenizer, other: Tokenizer, words: tuple[int, int]) -> Translation | None:
    """Of two tokenizers, None of those with the same tokens: models may have more words than these."""
    return None if own.core.get_vocab() == other.core.get_vocab() else Translation(own, other, words=words)
