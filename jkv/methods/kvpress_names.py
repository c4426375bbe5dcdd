"""Answers to the class names of kvpress: the composition that does the same here."""

from __future__ import annotations

import re

# Press -> composition. {keep} is 1 - compression_ratio, {gone} the ratio, {inner} the composition of the press inside.
PRESSES = {
    "RandomPress": "random(keep={keep})",
    "KnormPress": "knorm(keep={keep})",
    "SnapKVPress": "snapkv(keep={keep})",
    "ExpectedAttentionPress": "expected_attention(keep={keep})",
    "StreamingLLMPress": "streaming(keep={keep})",
    "TOVAPress": "tova(keep={keep})",
    "ObservedAttentionPress": "h2o(keep={keep})",
    "QFilterPress": "qfilters(keep={keep})",
    "PyramidKVPress": "pyramidkv(keep={keep})",
    "LagKVPress": "lagkv(keep={keep})",
    "KeyDiffPress": "keydiff(keep={keep})",
    "CompactorPress": "compactor(keep={keep})",
    "CURPress": "curdkv(keep={keep})",
    "KVzapPress": "kvzap(keep={keep})",
    "FastKVzipPress": "fastkvzip(keep={keep})",
    "FinchPress": "finch(keep={keep})",
    "KVzipPress": "kvzip(keep={keep})",
    "KVgradPress": "kvgrad(keep={keep})",
    "DMSPress": "dms(keep={keep})",
    "ThinKPress": "think(share={gone})",
    "SimLayerKVPress": "simlayerkv(local=1024)",
    "DuoAttentionPress": "duoattention(share={gone})",
    "ChunkKVPress": "chunkkv(keep={keep})",
    "CriticalKVPress": "criticalkv(keep={keep})",
    "CriticalAdaKVPress": "criticalkv(keep={keep}) | pooled",
    "AdaKVPress": "{inner} | pooled",
    "KeyRerotationPress": "{inner}",
    "ComposedPress": "{inner}",
}
DEFAULT = "snapkv(keep={keep})"  # stands for a press inside another that is not named


def kvpress_error(text: str) -> str | None:
    """Return the error message for a text that names a press of kvpress, or None for other texts.

    >>> kvpress_error("SnapKVPress(compression_ratio=0.25)")
    'SnapKVPress is a name of kvpress: write snapkv(keep=0.75) (keep = 1 - compression_ratio)'
    >>> kvpress_error("AdaKVPress(ExpectedAttentionPress(0.5))")
    'AdaKVPress is a name of kvpress: write expected_attention(keep=0.5) | pooled (keep = 1 - compression_ratio)'
    >>> kvpress_error("snapkv(budget=512)")
    """
    ours = {name.lower(): name for name in PRESSES}
    named = re.findall(r"\b(\w+press)\b", text, re.IGNORECASE)
    if not named:
        return None
    first, *inside = (ours.get(name.lower(), "") for name in named)
    if not first:
        return f"{named[0]} is no method of jkv, nor a press of kvpress that jkv has: see `jkv methods`"
    ratio = re.search(r"(?:ratio\s*=\s*|\(\s*)(0?\.\d+)", text)
    gone = float(ratio[1]) if ratio else 0.5
    inner = " | ".join(PRESSES[name] for name in inside if name) or DEFAULT
    made = PRESSES[first].replace("{inner}", inner).format(keep=f"{1 - gone:g}", gone=f"{gone:g}")
    why = " (keep = 1 - compression_ratio)" if "keep=" in made else ""
    return f"{first} is a name of kvpress: write {made}{why}"
