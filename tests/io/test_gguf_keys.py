"""Every key that llama.cpp knows is read, known to change nothing, or refused."""

import dataclasses

import gguf
import pytest
from test_gguf_model import ARCHS, EXTRA
from test_gguf_vocab import spm

from jkv.io.errors import FormatError
from jkv.io.gguf import open_file
from jkv.io.gguf_keys import HARMLESS, NONE, OPTIONAL
from jkv.io.gguf_model import describe
from jkv.io.gguf_vocab import UNUSED
from support import ggufs

KNOWN = sorted(
    key
    for group in vars(gguf.Keys).values()
    if isinstance(group, type)
    for key in vars(group).values()
    if isinstance(key, str) and key.startswith(("{arch}.", "split.", "tokenizer."))
)
OWN = [key.removeprefix("{arch}.") for key in KNOWN if key.startswith("{arch}.") and "{dense}" not in key]
SHARED = [key.format(name="tool_use") for key in KNOWN if not key.startswith("{arch}.")]
ODD = (7, 0.37, "odd", [1, 2], True, False)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """An open file of each architecture, with yarn where that is read, and of each kind of tokenizer."""
    folder, out = tmp_path_factory.mktemp("keys"), {}
    for arch in ARCHS:
        meta = EXTRA.get(arch, {}) | {f"{arch}.rope.scaling.factor": 4.0}
        more = {"attention.sliding_window_pattern": 2} if arch == "gemma3" else {"rope.scaling.type": "yarn"}
        meta |= {f"{arch}.{key}": x for key, x in more.items()}
        out[arch] = open_file(ggufs.tiny(folder / f"{arch}.gguf", arch, meta))
    out["gpt2"] = out["llama"]
    no_bpe = dict.fromkeys(ggufs.bpe()) | {"tokenizer.chat_template": "{{ messages }}"}
    out["spm"] = open_file(ggufs.tiny(folder / "spm.gguf", "llama", no_bpe | spm()))
    return out


def outcome(file, capsys, **changes):
    """All that comes of a file's metadata: a config, a tokenizer and what was said; or the refusal."""
    file = dataclasses.replace(file, meta=file.meta | changes)
    try:
        source = describe(file)
    except FormatError as error:
        return str(error)
    t = source.tokenizer
    held = t and (t.core.to_str(), t.bos_id, t.eos_ids, t.add_bos, t.template, t.tool_template)
    return repr(sorted(source.config.items())), sorted(source.tensors), held, capsys.readouterr().err


def unheard(file, key, capsys):
    """The odd values of a key that change nothing."""
    plain = outcome(file, capsys)
    assert not isinstance(plain, str), plain
    return [x for x in ODD if outcome(file, capsys, **{key: x}) == plain]


@pytest.mark.parametrize("arch", ARCHS)
def test_architecture_keys_are_not_silently_ignored(files, arch, capsys):
    file = dataclasses.replace(files[arch], meta={k: x for k, x in files[arch].meta.items() if "tokenizer" not in k})
    keys = set(OWN) | {"rope.scale_linear", "invented"}
    if arch == "granite":  # where it switches rotation off
        assert "rope.scaling.finetuned is False" in outcome(file, capsys, **{"granite.rope.scaling.finetuned": False})
        keys.remove("rope.scaling.finetuned")
    if arch == "gemma3":  # which has no yarn, whose key it is
        keys.remove("rope.scaling.original_context_length")
    for key in keys:
        dropped = unheard(file, f"{arch}.{key}", capsys)
        # One of true and false may be what a file says that lacks the key.
        assert dropped == list(ODD) if key in HARMLESS else dropped in ([], [True], [False]), (key, dropped)


@pytest.mark.parametrize("kind, unused", [("gpt2", UNUSED["gpt2"]), ("spm", UNUSED["llama"])])
def test_tokenizer_keys_are_not_silently_ignored(files, kind, unused, capsys):
    for key in {*SHARED, "tokenizer.ggml.invented"}:
        dropped = unheard(files[kind], key, capsys)
        assert dropped == list(ODD) if key in HARMLESS or key in unused else dropped in ([], [True], [False]), key


@pytest.mark.parametrize("key", ["llama.invented", "tokenizer.ggml.invented", "split.invented"])
def test_unknown_key_is_refused_with_remedy(files, key, capsys):
    said = outcome(files["llama"], capsys, **{key: 3})
    assert f"metadata {key} is 3" in said and f"--remove-metadata {key}" in said
    assert outcome(files["llama"], capsys, **{"other.invented": 3}) == outcome(files["llama"], capsys)


def test_zero_and_largest_number_mean_absent(files, capsys):
    plain = outcome(files["llama"], capsys)
    for value in (0, NONE):
        keys = ["expert_count", "attention.sliding_window", *(key for key in OPTIONAL if "tokenizer" not in key)]
        assert outcome(files["llama"], capsys, **{f"llama.{key}": value for key in keys}) == plain
    for key in ("eot", "eom", "padding"):
        assert outcome(files["llama"], capsys, **{f"tokenizer.ggml.{key}_token_id": NONE}) == plain
    assert "mixture of experts" in outcome(files["llama"], capsys, **{"llama.expert_count": 8})


def test_tool_template_is_read_and_unused_ones_are_reported(files, capsys):
    named = {f"tokenizer.chat_template.{name}": "{{ tools }}" for name in ("tool_use", "rag")}
    *_, held, told = outcome(files["llama"], capsys, **named)
    assert held[-1] == "{{ tools }}"
    assert "has tokenizer.chat_template.rag too, which nothing here reads" in told


def test_adapter_file_is_refused(files, capsys):
    assert "general.type is 'adapter'" in outcome(files["llama"], capsys, **{"general.type": "adapter"})
