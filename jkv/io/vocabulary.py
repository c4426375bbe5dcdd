"""The tokenizer of a model folder, from the files that transformers reads, with the same precedence."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from jkv.io.errors import FormatError, refusing
from jkv.io.files import AGAIN, TEMPLATES, read_json, read_small, read_text
from jkv.io.tokenizer import Tokenizer

if TYPE_CHECKING:
    import tokenizers

NAMED = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
# Vocabularies in other formats, which are not read; such a folder also needs tokenizer.json or tokenizer.model.
_OTHERS = ("vocab.json", "vocab.txt", "merges.txt", "tekken.json", "*.tiktoken", "spiece.model", "*.bpe.model")


def read_tokenizer(folder: Path, config: dict[str, Any]) -> Tokenizer | None:
    """Read a folder's tokenizer with the end ids of all its configs; None if the folder has no vocabulary.

    Raises:
        FormatError: A file is broken, or the vocabulary has a format that is not supported.
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
    # Encoding an empty text shows whether the tokenizer adds the begin token.
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
    """Build a tokenizer from the vocabulary file alone."""
    path = folder / "tokenizer.json"
    if (content := read_small(path)) is not None:
        from tokenizers import Tokenizer as Core

        with refusing(path, "it is no tokenizer", AGAIN):
            core = Core.from_buffer(content)
            # A tokenizer saved in training may truncate or pad.
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
    """Read tokenizer_config.json; in older folders, special_tokens_map.json overrides it.

    Older means that tokenizer_config.json has no added_tokens_decoder.
    """
    named = read_json(folder / "tokenizer_config.json") or {}
    return named if "added_tokens_decoder" in named else named | (read_json(folder / "special_tokens_map.json") or {})


def _add_tokens(folder: Path, core: tokenizers.Tokenizer, named: dict[str, Any]) -> None:
    """Add the tokens that only the other files of the folder know; FormatError if their ids do not fit."""
    from tokenizers import AddedToken

    with refusing(folder, "its added tokens cannot be read", AGAIN):
        # Collect special tokens by role and from the list of extra ones.
        extra = named.get("extra_special_tokens") or named.get("additional_special_tokens") or []
        extra = extra.values() if isinstance(extra, dict) else extra
        roles = (*NAMED, *(name for name in named if name.endswith("_token")))
        called = {text: _flags(x) for name in roles if (text := _text(x := named.get(name)))}
        special = called | {text: _flags(x) for x in extra if (text := _text(x))}
        # Collect the tokens that have ids.
        if "added_tokens_decoder" in named:
            placed = {int(i): _flags(token) for i, token in named["added_tokens_decoder"].items()}
        else:
            texts = read_json(folder / "added_tokens.json") or {}
            placed = {
                i: {"content": text, "normalized": text not in special, "special": text in special}
                for text, i in texts.items()
            }
        # Add them in the order of their ids, then the special tokens without ids.
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
    """Return a token's text and matching flags as keyword arguments of `AddedToken`."""
    return {k: x for k, x in token.items() if k != "__type"} if isinstance(token, dict) else {"content": token}


def _text(token: Any) -> str | None:
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _ids(value: Any) -> list[int]:
    return [i for i in (value if isinstance(value, list) else [value]) if isinstance(i, int) and i >= 0]


def _templates(folder: Path, named: dict[str, Any]) -> dict[str, str]:
    """Return the chat templates by name, from separate files if any, else from tokenizer_config.json."""
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
