"""The tokenizer of a model folder, which several files tell of: those that transformers reads, in its order."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from jkv.io.errors import FormatError, refusing
from jkv.io.files import AGAIN, TEMPLATES, read_json, read_small, read_text
from jkv.io.tokenizer import Tokenizer

if TYPE_CHECKING:
    import tokenizers

NAMED = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
# Vocabularies in other forms, which are read where there is a tokenizer.json or tokenizer.model beside them.
_OTHERS = ("vocab.json", "vocab.txt", "merges.txt", "tekken.json", "*.tiktoken", "spiece.model", "*.bpe.model")


def read_tokenizer(folder: Path, config: dict[str, Any]) -> Tokenizer | None:
    """The folder's tokenizer with the end ids of all its configurations; None where it has no vocabulary.

    Raises FormatError for a file that is broken, and for a vocabulary that only other programs read.
    """
    if (known := _vocabulary(folder)) is None:
        return None
    core, named = known.core, _named(folder)
    _add_tokens(folder, core, named)
    generation = read_json(folder / "generation_config.json") or {}
    texts = {name: text for name in NAMED if (text := _text(named.get(name))) is not None}
    bos, eos = (core.token_to_id(texts.get(name, "")) for name in ("bos_token", "eos_token"))
    ends = [i for source in (config, generation) for i in _ids(source.get("eos_token_id"))]
    if bos is None:
        bos = next(iter(_ids(config.get("bos_token_id"))), known.bos_id)
    # What the tokenizer puts around an empty text tells whether it begins every text.
    around = core.encode("", add_special_tokens=True).ids
    templates = _templates(folder, named)
    return Tokenizer(
        core,
        bos_id=bos,
        eos_ids=[*([] if eos is None else [eos]), *ends, *known.eos_ids],
        add_bos=around[:1] == [bos] or (known.add_bos and named.get("add_bos_token") is not False),
        template=templates.get("default"),
        tool_template=templates.get("tool_use"),
        texts=texts,
    )


def _vocabulary(folder: Path) -> Tokenizer | None:
    """A tokenizer by the file of its vocabulary alone."""
    path = folder / "tokenizer.json"
    if (content := read_small(path)) is not None:
        from tokenizers import Tokenizer as Core

        with refusing(path, "it is no tokenizer", AGAIN):
            core = Core.from_buffer(content)
            # A tokenizer saved in training may cut or fill texts to a length.
            core.no_truncation()
            core.no_padding()
        return Tokenizer(core)
    way_out = (
        "write tokenizer.json, where transformers is installed: "
        f"AutoTokenizer.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r})"
    )
    if (content := read_small(folder / "tokenizer.model")) is not None:
        from jkv.io.sentencepiece import build

        return build(folder / "tokenizer.model", content, way_out)
    if others := sorted(path.name for pattern in _OTHERS for path in folder.glob(pattern)):
        raise FormatError(folder, f"its vocabulary is in {others[0]} alone, which is not read here", way_out)
    return None


def _named(folder: Path) -> dict[str, Any]:
    """tokenizer_config.json; in older folders, without added_tokens_decoder, special_tokens_map.json goes over it."""
    named = read_json(folder / "tokenizer_config.json") or {}
    return named if "added_tokens_decoder" in named else named | (read_json(folder / "special_tokens_map.json") or {})


def _add_tokens(folder: Path, core: tokenizers.Tokenizer, named: dict[str, Any]) -> None:
    """Adds the tokens that only the files beside the vocabulary know; raises FormatError where their ids do not fit."""
    from tokenizers import AddedToken

    with refusing(folder, "its added tokens cannot be read", AGAIN):
        extra = named.get("extra_special_tokens") or named.get("additional_special_tokens") or []
        extra = extra.values() if isinstance(extra, dict) else extra
        roles = (*NAMED, *(name for name in named if name.endswith("_token")))
        called = {text: _flags(x) for name in roles if (text := _text(x := named.get(name)))}
        special = called | {text: _flags(x) for x in extra if (text := _text(x))}
        if "added_tokens_decoder" in named:
            placed = {int(i): _flags(token) for i, token in named["added_tokens_decoder"].items()}
        else:
            texts = read_json(folder / "added_tokens.json") or {}
            placed = {
                i: {"content": text, "normalized": text not in special, "special": text in special}
                for text, i in texts.items()
            }
        known = {token.content for token in core.get_added_tokens_decoder().values()}
        for i, token in sorted(placed.items()):
            if (text := token["content"]) in known:
                continue
            core.add_tokens([AddedToken(**{**token, "special": token.get("special", False) or text in called})])
            if (got := core.token_to_id(text)) != i:
                raise FormatError(folder, f"token {text!r} has id {i:,} there, and {got:,} by its vocabulary", AGAIN)
        known |= {token["content"] for token in placed.values()}
        missing = [token for text, token in special.items() if text not in known]
        core.add_tokens([AddedToken(**{**token, "special": True}) for token in missing])


def _flags(token: Any) -> dict[str, Any]:
    """How a token is found in a text, as files write it."""
    return {k: x for k, x in token.items() if k != "__type"} if isinstance(token, dict) else {"content": token}


def _text(token: Any) -> str | None:
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _ids(value: Any) -> list[int]:
    return [i for i in (value if isinstance(value, list) else [value]) if isinstance(i, int) and i >= 0]


def _templates(folder: Path, named: dict[str, Any]) -> dict[str, str]:
    """The chat templates by name, of files of their own, else of an entry."""
    files = {path.stem: path for path in sorted((folder / TEMPLATES).glob("*.jinja"))}
    texts = {name: read_text(path) for name, path in files.items()}
    value: Any = {"default": read_text(folder / "chat_template.jinja")} | texts
    if not any(value.values()):
        value = named.get("chat_template")
    if isinstance(value, list):
        value = {v.get("name"): v.get("template") for v in value if isinstance(v, dict)}
    if not isinstance(value, dict):
        value = {"default": value}
    return {name: text for name, text in value.items() if isinstance(text, str)}
