"""A tiny model for evaluations: a token is a byte, its context holds a task."""

from __future__ import annotations

from dataclasses import replace

import tokenizers
from tokenizers.decoders import ByteLevel as Bytes
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from jkv import models
from jkv.io.tokenizer import Tokenizer

TEMPLATE = "{% for m in messages %}<{{ m.role[0] }}>{{ m.content }}</>{% endfor %}<a>"


def byte_tokenizer(template=TEMPLATE):
    core = tokenizers.Tokenizer(BPE({c: i for i, c in enumerate(sorted(ByteLevel.alphabet()))}, []))
    core.pre_tokenizer, core.decoder = ByteLevel(add_prefix_space=False, use_regex=False), Bytes()
    return Tokenizer(core, template=template)


TINY = dict(models.TINY, hidden_size=64, vocab_size=256, max_position_embeddings=4096)
PARAMS = replace(models.random(TINY), tokenizer=byte_tokenizer())
