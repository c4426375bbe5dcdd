"""Pre-tokenizers of model families, by the names that GGUF files use.

No token spans a cut, so another pre-tokenizer gives other tokens. The expressions are those of the families' own
tokenizers; each match is a word, and so is the text between two matches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import tokenizers


@dataclass(frozen=True)
class Cut:
    """How a family splits text into words before BPE merges.

    Attributes:
        patterns: Expressions applied in turn, each to the words that the previous ones left.
        whole: A word that is itself a token is used as is, even if no merges lead to it.
        begins: Texts start with the begin token unless the file says otherwise.
        composed: The text is normalized to NFC first.
    """

    patterns: tuple[str, ...]
    whole: bool = False
    begins: bool = False
    composed: bool = False

    def build(self) -> tokenizers.pre_tokenizers.PreTokenizer:
        """Build the pre-tokenizer for `tokenizers`, with bytes spelled as in GPT-2."""
        from tokenizers import Regex, pre_tokenizers

        cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in self.patterns]
        return pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


_ENDINGS = "'s|'t|'re|'ve|'m|'ll|'d"
_ANY_CASE = f"(?i:{_ENDINGS})"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = rf"{_ENDINGS}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)|\s+"
_DIGIT, _DIGITS = r"\p{N}", r"\p{N}{1,3}"


def _words(digits: str, signs: str = r"[^\s\p{L}\p{N}]+[\r\n]*") -> str:
    """Return the expression for letters after at most one sign, numbers, signs with following line ends, spaces."""
    return rf"{_ANY_CASE}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?{signs}|{_SPACES}"


def _capitals(digits: str, ending: str) -> str:
    """Return the expression of `_words` with words that also begin at capitals, and slashes kept with signs."""
    high, low, before = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]", r"[^\r\n\p{L}\p{N}]?"
    words = f"{before}{high}*{low}+{ending}|{before}{high}+{low}*{ending}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"


_SIGN = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"""
_DEEPSEEK_3 = rf"{_SIGN}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
_HAN_AND_KANA = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_EAST_ASIAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
# Letters with case, except the Unicode blocks that the family's own list lacks.
_LACKING = "0560-0588 10C7-10FF 1C80-1C8F 2D00-2D2F A790-A7FF AB30-AB6F 10570-105BF 10D50-10D8F 16E40-16E7F 1D400-1D7FF"
_BLOCKS = "".join(rf"\x{{{a}}}-\x{{{b}}}" for a, b in (x.split("-") for x in f"{_LACKING} 1DF00-1DFFF".split()))
_LATIN = rf"[[\p{{Lu}}\p{{Ll}}\p{{Lt}}]&&[^{_BLOCKS}]]"
_FULL_WIDTH = "[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]"

_BY_GPT2, _BY_DIGITS = Cut((_GPT2,)), Cut((_DIGIT, _GPT2))
_BY_LLAMA3 = Cut((_words(_DIGITS),), whole=True, begins=True)
_BY_CL100K, _BY_QWEN = Cut((_words(_DIGITS),)), Cut((_words(_DIGIT),), composed=True)
DEFAULT = "default"
CUTS: dict[str, Cut] = {
    "llama-bpe": _BY_LLAMA3,
    "llama3": _BY_LLAMA3,
    "llama-v3": _BY_LLAMA3,
    "falcon3": _BY_LLAMA3,
    "dbrx": _BY_CL100K,
    "smaug-bpe": _BY_CL100K,
    "qwen2": _BY_QWEN,
    "deepseek-r1-qwen": _BY_QWEN,
    "megrez": Cut((_words(_DIGIT),)),
    "seed-coder": Cut((_words(_DIGIT, signs=r"[^\s\p{L}\p{N}\r\n]+"),)),
    "smollm": _BY_DIGITS,
    "refact": _BY_DIGITS,
    "starcoder": _BY_DIGITS,
    "codeshell": _BY_DIGITS,
    "minerva-7b": _BY_DIGITS,
    "gpt-2": _BY_GPT2,
    "phi-2": _BY_GPT2,
    "olmo": _BY_GPT2,
    "trillion": _BY_GPT2,
    "mellum": _BY_GPT2,
    "a.x-4.0": _BY_GPT2,
    "granite-docling": _BY_GPT2,
    "tekken": Cut((_capitals(_DIGIT, ""),), whole=True, begins=True),
    "gpt-4o": Cut((_capitals(_DIGITS, f"{_ANY_CASE}?"),)),
    "deepseek-llm": Cut(("[\r\n]", rf"\s?{_LATIN}+", rf"\s?{_FULL_WIDTH}+", r"\s+$", _EAST_ASIAN, _DIGIT)),
    "deepseek-coder": Cut(("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _EAST_ASIAN, _DIGIT)),
    "deepseek-v3": Cut((_DIGITS, _HAN_AND_KANA, _DEEPSEEK_3)),
    "falcon": Cut((r"[\p{P}$+<=>^~|`]+", _GPT2, "[0-9][0-9][0-9]")),
    "viking": Cut((r" ?[^(\s|.,!?…。，、।۔،)]+", _DIGIT)),
    DEFAULT: Cut((r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
}
