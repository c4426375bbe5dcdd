"""The command line in this process, with a tiny model that speaks: a token is a byte."""

from __future__ import annotations

from dataclasses import replace

import tokenizers
from tokenizers.decoders import ByteLevel as Bytes
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from typer.testing import CliRunner

import jkv
from jkv.cli.app import app
from jkv.io.tokenizer import Tokenizer

ALPHABET = sorted(ByteLevel.alphabet())
RUNNER = CliRunner()


def tokenizer(template="{% for m in messages %}[{{ m.content }}]{% endfor %}"):
    core = tokenizers.Tokenizer(BPE({c: i for i, c in enumerate(ALPHABET)}, []))
    core.pre_tokenizer, core.decoder = ByteLevel(add_prefix_space=False, use_regex=False), Bytes()
    return Tokenizer(core, template=template)


PARAMS = replace(jkv.models.random(dict(jkv.models.TINY, vocab_size=256)), tokenizer=tokenizer())


def call(*args, stdin=None):
    return RUNNER.invoke(app, list(map(str, args)), input=stdin)


def refused(result, *says, code=1):
    """One line, the exit code, no traceback, the way out named."""
    assert result.exit_code == code, (result.exit_code, result.output, result.exception)
    assert isinstance(result.exception, SystemExit)
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1 and result.stderr.startswith("error: "), result.stderr
    for text in says:
        assert text in result.stderr
