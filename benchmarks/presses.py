"""The methods that kvpress and jkv share, with the arguments that make them equivalent.

A name in brackets is a variant that removes one difference.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jkv.methods.budgets.layers import pyramid
from jkv.methods.prefill.probes import Graded, Rebuilt

Press = Callable[[Any, float, int], Any]  # (kvpress module, share of the prompt to drop, tokens kept) -> press
WINDOW = 32  # observation window of snapkv, pyramidkv, chunkkv, criticalkv and finch, in both
BLOCK = 128  # chunk size of keydiff, in both
PIECE = 256  # chunk size of kvgrad's repetition, in both


def lagged(kv: Any, gone: float, n: int) -> Any:
    """Build kvpress's LagKV with the block and sink sizes that jkv uses to keep n tokens."""
    return kv.LagKVPress(gone, lag_size=min(128, max(n // 4, 1)), n_sink=min(16, max(n // 4, 1)))


def guided(kv: Any, gone: float, n: int) -> Any:
    """Build kvpress's FINCH for a question of WINDOW tokens, without the delimiter token."""
    inner = kv.FinchPress(gone)
    inner.window_size = WINDOW

    class Guided(kv.KnormPress):
        def score(self, *args: Any) -> Any:
            return inner.score(*args)

    return kv.KeyRerotationPress(Guided(gone))


PRESSES: dict[str, Press] = {
    "streaming": lambda kv, gone, n: kv.KeyRerotationPress(kv.StreamingLLMPress(gone, n_sink=4)),
    "knorm": lambda kv, gone, n: kv.KnormPress(gone),
    "snapkv": lambda kv, gone, n: kv.SnapKVPress(gone, window_size=WINDOW),
    "pyramidkv": lambda kv, gone, n: kv.PyramidKVPress(gone, window_size=WINDOW),
    "keydiff": lambda kv, gone, n: kv.KeyDiffPress(gone),
    "tova": lambda kv, gone, n: kv.TOVAPress(gone),
    "expected_attention": lambda kv, gone, n: kv.ExpectedAttentionPress(gone),
    "h2o": lambda kv, gone, n: kv.ObservedAttentionPress(gone),
    "random": lambda kv, gone, n: kv.RandomPress(gone),
    "chunkkv": lambda kv, gone, n: kv.ChunkKVPress(
        kv.SnapKVPress(gone, window_size=WINDOW, kernel_size=1), chunk_length=10
    ),
    "criticalkv": lambda kv, gone, n: kv.CriticalKVPress(kv.SnapKVPress(gone, window_size=WINDOW)),
    "finch": guided,
    "lagkv": lagged,
    "curdkv": lambda kv, gone, n: kv.CURPress(gone),
    "compactor": lambda kv, gone, n: kv.CompactorPress(gone, blending=0.35),
}


def shared(cache: str, tokens: int) -> tuple[str, int]:
    """Return the kvpress method of a cache, and how many of `tokens` it keeps; "full" keeps all.

    Raises:
        ValueError: Only jkv has this method, argument or composition.

    >>> shared("snapkv(keep=0.25)", 1024), shared("full", 1024)
    (('snapkv', 256), ('full', 1024))
    """
    if cache == "full":
        return cache, tokens
    found = re.fullmatch(r"(\w+)\((?:budget=(\d+)|keep=([0-9.]+))\)", cache)
    if found is None or found[1] not in PRESSES:
        both = ", ".join(PRESSES)
        raise ValueError(f"--vs kvpress: it has no {cache}; both have full, and with budget= or keep= alone {both}")
    return found[1], min(int(found[2] or float(found[3]) * tokens), tokens)


@dataclass(frozen=True, kw_only=True)
class Peer:
    """One comparison.

    Attributes:
        method: Name of the method.
        spec: jkv's cache, with {n} for the tokens to keep.
        press: Builds kvpress's press.
        chunk: Prefill chunk of jkv; 0 for the whole prompt.
        relative: Whether keys act at their rank among the kept ones.
        probe: What both read after the prompt; the press then compresses all layers at once.
        note: Remark in the table.
    """

    method: str
    spec: str
    press: Press
    chunk: int = 0
    relative: bool = False  # positions are ranks among kept tokens
    probe: Rebuilt | None = None  # tokens that both read after the prompt
    note: str = ""

    def text(self, n: int) -> str:
        return self.spec.format(n=n)

    def key(self, n: int) -> str:
        return self.text(n) + (" in chunks" if self.chunk else "")


def observed(kv: Any, gone: float, n: int) -> Any:
    """Build kvpress's observed attention with two changes: sums, and protection of the newest n / 2 tokens."""

    class Summed(kv.ObservedAttentionPress):
        def score(self, module: Any, hidden: Any, keys: Any, values: Any, attentions: Any, kwargs: Any) -> Any:
            mean = super().score(module, hidden, keys, values, attentions, kwargs)
            total = mean.shape[-1]
            sums = mean * mean.new_tensor(range(total, 0, -1))
            sums[..., total - n // 2 :] = float("inf")
            return sums

    return Summed(gone)


def sized(kv: Any, gone: float, n: int) -> Any:
    """Build kvpress's PyramidKV with jkv's budgets per layer."""

    class Sized(kv.PyramidKVPress):
        def get_layer_budget(self, module: Any, q_len: int) -> int:
            return WINDOW + pyramid(n - WINDOW, module.config.num_hidden_layers, 20)[module.layer_idx]

    return Sized(gone, window_size=WINDOW)


def latest(kv: Any, gone: float, n: int) -> Any:
    """Build kvpress's CUR, changed to keep the newest 16 tokens too."""

    class Latest(kv.CURPress):
        def score(self, *args: Any) -> Any:
            scores = super().score(*args)
            scores[..., -16:] = float("inf")
            return scores

    return Latest(gone)


class Wordless:
    """A tokenizer without text for chats and requests, in place of the one that kvpress loads."""

    chat_template = None

    @classmethod
    def from_pretrained(cls, *args: Any, **options: Any) -> Wordless:
        return cls()

    def encode(self, text: str, **options: Any) -> Any:
        import torch  # pyright: ignore[reportMissingImports]  an extra

        return torch.zeros((1, 0), dtype=torch.long)


def rebuilt(kv: Any, kind: Any, gone: float, piece: int) -> Any:
    """Build kvpress's KVzip or KVgrad with token ids from its field `asked` as the repetition prompts."""

    class Asked(kind):
        asked: list[list[int]]

        def prepare(self, *args: Any) -> Any:
            own = super().prepare(*args)
            return [(a, a.new_tensor([ids])) for (a, _), ids in zip(own, self.asked, strict=True)]

    kv.presses.kvzip_press.AutoTokenizer = Wordless
    return Asked(gone, chunk_size=piece)


PEERS = (
    Peer(
        method="streaming",
        spec="streaming(budget={n}, relative=False, recent=0)",
        press=lambda kv, gone, n: kv.StreamingLLMPress(gone, n_sink=4),
    ),
    Peer(
        method="streaming (ranks)",
        spec="streaming(budget={n}, recent=0)",
        press=PRESSES["streaming"],
        relative=True,
        note="positions within the cache, as in the paper: in kvpress that is KeyRerotationPress",
    ),
    Peer(
        method="knorm",
        spec="knorm(budget={n}, recent=0)",
        press=PRESSES["knorm"],
        note="recent=0 to match; by default jkv keeps the newest 16 too. What differs is in layer 0: keys of one token "
        "have one norm wherever it stands, and rounding breaks the tie",
    ),
    Peer(
        method="snapkv",
        spec=f"snapkv(budget={{n}}, window={WINDOW})",
        press=PRESSES["snapkv"],
        note="window 32 in both, the default of jkv and of the authors; kvpress's is 64",
    ),
    Peer(
        method="pyramidkv",
        spec=f"pyramidkv(budget={{n}}, window={WINDOW})",
        press=PRESSES["pyramidkv"],
        note="other sizes: kvpress's pyramid includes the window (jkv adds it to each layer, as the authors do), and "
        "is uniform where its smallest layer would be below the window, which predicts better here",
    ),
    Peer(
        method="pyramidkv (jkv's sizes)",
        spec=f"pyramidkv(budget={{n}}, window={WINDOW})",
        press=sized,
        note="kvpress is given jkv's sizes of the layers",
    ),
    Peer(
        method="keydiff",
        spec="keydiff(budget={n})",
        press=PRESSES["keydiff"],
        note="after the whole prompt, in both",
    ),
    Peer(
        method="keydiff (blocks)",
        spec="keydiff(budget={n})",
        press=lambda kv, gone, n: kv.BlockPress(kv.KeyDiffPress(gone), block_size=BLOCK),
        chunk=BLOCK,
        note="in jkv a chunk attends to what the cache holds, as in the paper; kvpress replays the blocks after a full "
        "prefill, so hidden states differ above layer 0",
    ),
    Peer(
        method="tova",
        spec="tova(budget={n})",
        press=PRESSES["tova"],
        note="kvpress forces the newest token in; the paper's rule, and jkv, do not",
    ),
    Peer(
        method="tova (newest forced)",
        spec="tova(budget={n}, recent=1)",
        press=PRESSES["tova"],
        note="jkv forces the newest token in too",
    ),
    Peer(
        method="expected_attention",
        spec="expected_attention(budget={n}, recent=0)",
        press=PRESSES["expected_attention"],
        note="recent=0 to match; by default jkv keeps the newest 16 too",
    ),
    Peer(
        method="random",
        spec="random(budget={n}, recent=0)",
        press=PRESSES["random"],
        note="two draws: what they have in common is what chance gives. Perplexity hangs on how many heads hold the "
        "first token: at a half 59% in jkv's draw, which is one for all texts, 51% in kvpress's",
    ),
    Peer(
        method="chunkkv",
        spec=f"chunkkv(budget={{n}}, window={WINDOW})",
        press=PRESSES["chunkkv"],
        note="no pooling, chunks of 10, in both; kvpress keeps whole chunks alone, and fewer tokens for it: "
        "8, 12 and 14, nearly all that differs",
    ),
    Peer(
        method="criticalkv",
        spec=f"criticalkv(budget={{n}}, window={WINDOW})",
        press=PRESSES["criticalkv"],
        note="of snapkv with window 32, in both",
    ),
    Peer(
        method="adakv",
        spec=f"snapkv(budget={{n}}, window={WINDOW}) | pooled",
        press=lambda kv, gone, n: kv.AdaKVPress(kv.SnapKVPress(gone, window_size=WINDOW)),
        note="of snapkv with window 32; jkv's row adakv pools by maximum, as its authors; floor 0.2: jkv mixes what a "
        "head wins with an equal share, as its authors, kvpress gives each a fifth of one and lets the rest be won",
    ),
    Peer(
        method="adakv (no floor)",
        spec=f"snapkv(budget={{n}}, window={WINDOW}) | pooled(floor=0.0)",
        press=lambda kv, gone, n: kv.AdaKVPress(kv.SnapKVPress(gone, window_size=WINDOW), alpha_safeguard=0.0),
        note="the same, where heads are sure of nothing",
    ),
    Peer(
        method="simlayerkv",
        spec="simlayerkv(local={n}, recent=0)",
        press=lambda kv, gone, n: kv.SimLayerKVPress(0.9, n_recent=n + 1),
        note="lazy above 0.9 of the last token's attention, in both; kvpress leaves out what it pays to itself",
    ),
    Peer(
        method="kvzip",
        spec="kvzip(budget={n})",
        press=lambda kv, gone, n: rebuilt(kv, kv.KVzipPress, gone, Rebuilt().piece),
        probe=Rebuilt(),
        note="the request to repeat is jkv's, in both",
    ),
    Peer(
        method="kvgrad",
        spec=f"kvgrad(budget={{n}}, piece={PIECE})",
        press=lambda kv, gone, n: rebuilt(kv, kv.KVgradPress, gone, PIECE),
        probe=Graded(piece=PIECE),
        note="the request to repeat is jkv's, and pieces of 256 tokens, in both",
    ),
    Peer(
        method="finch",
        spec=f"finch(budget={{n}}, window={WINDOW})",
        press=PRESSES["finch"],
        relative=True,
        note="a question of 32 tokens, in both; kvpress counts one token less for each query",
    ),
    Peer(
        method="lagkv",
        spec="lagkv(budget={n})",
        press=PRESSES["lagkv"],
        note="blocks of at most 128 tokens, a quarter of what is kept; jkv keeps the newest 2 lag - 1, kvpress the "
        "last block and what follows it: 15 tokens of 1,024, all that differs",
    ),
    Peer(
        method="curdkv",
        spec="curdkv(budget={n})",
        press=PRESSES["curdkv"],
        note="jkv keeps the newest 16, which is all that differs, and most of the loss",
    ),
    Peer(
        method="curdkv (newest 16)",
        spec="curdkv(budget={n})",
        press=latest,
        note="kvpress keeps the newest 16 too",
    ),
    Peer(
        method="compactor",
        spec="compactor(budget={n})",
        press=PRESSES["compactor"],
        note="exact leverage in jkv, of keys projected to 48 random channels in kvpress; blend 0.35 in both",
    ),
    Peer(
        method="h2o",
        spec="h2o(budget={n}, recent=0)",
        press=PRESSES["h2o"],
        note="jkv is the paper's: sums over all queries, half of the budget for the newest tokens; kvpress divides "
        "each sum by the number of queries that see the token, and protects none",
    ),
    Peer(
        method="h2o (newest=0)",
        spec="h2o(budget={n}, newest=0.0, recent=0)",
        press=PRESSES["h2o"],
        note="what is left: sums against means over the queries that see a token",
    ),
    Peer(
        method="h2o (sums, newest half)",
        spec="h2o(budget={n}, recent=0)",
        press=observed,
        note="kvpress's score times the number of queries, the newest half protected",
    ),
)
