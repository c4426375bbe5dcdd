"""Cache inspection: tokens, bytes and kept positions per layer, as numbers and as plots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jkv.cache.cache import Cache, LayerCache, tree_bytes
from jkv.cache.offload import Pages, is_far
from jkv.protocols import Code, Codec
from jkv.utils.plotting import blank

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLUMNS = 1000  # maximum columns of the position map; longer sequences are averaged into them
LETTER, LINE = 0.08, 0.2  # inches per letter and line, DejaVu Sans Mono at 9.57 points: whole pixels at 100 per inch


@dataclass(frozen=True, kw_only=True)
class Part:
    """One store of a layer: the recent window, a tier, the kept queries, or the merge's residual. Sizes are bytes.

    Attributes:
        name: "recent", "tier 0", ..., "queries" or "residual".
        codec: how keys and values are stored.
        tokens: tokens per kv head, mean over rows.
        codes: encoded keys and values.
        scales: what decoding needs besides the codes.
        metadata: positions, score columns, selector indices, queries.
    """

    name: str
    codec: str
    tokens: list[float]
    codes: int
    scales: int
    metadata: int

    @property
    def nbytes(self) -> int:
        """Total bytes."""
        return self.codes + self.scales + self.metadata


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One layer's contents.

    Attributes:
        kept: tokens per kv head, mean over rows, rounded to 0.1.
        first: lowest position kept; -1: none.
        last: highest position kept; -1: none.
        parts: its stores.
    """

    kept: list[float]
    first: int
    last: int
    parts: list[Part]

    @property
    def nbytes(self) -> int:
        """Total bytes."""
        return sum(part.nbytes for part in self.parts)


@dataclass(frozen=True, kw_only=True)
class Summary:
    """A cache in numbers; the bytes add up to `Cache.nbytes`.

    Attributes:
        seen: tokens of each row.
        layers: the attention layers.
        states: bytes of each recurrent layer's state.
    """

    seen: list[int]
    layers: list[Layer]
    states: list[int]

    @property
    def nbytes(self) -> int:
        """Total bytes."""
        return sum(layer.nbytes for layer in self.layers) + sum(self.states)


def summary(cache: Cache) -> Summary:
    """Summarize tokens, positions and bytes (codes, scales, metadata) of every layer of a cache.

    >>> import jkv
    >>> params = jkv.models.random(jkv.models.TINY)
    >>> cache, _ = jkv.prefill(params, "snapkv(budget=40, window=8) | int8", [5, 6, 7] * 40)
    >>> found = summary(cache)
    >>> found.layers[0].kept, found.layers[0].last, found.nbytes == cache.nbytes
    ([40.0, 40.0], 119, True)
    """
    layers = []
    for layer, plan in zip(cache.layers, cache.plan, strict=True):
        heads = layer.recent.k.shape[1]
        window = layer.recent
        parts = [
            Part(
                name="recent",
                codec=str(window.k.dtype),
                tokens=_tokens(window.pos[:, None], heads),
                codes=tree_bytes((window.k, window.v)),
                scales=0,
                metadata=tree_bytes((window.pos, window.columns)),
            )
        ]
        # The tiers.
        for i, (tier, config) in enumerate(zip(layer.tiers, plan.tiers, strict=True)):
            codes = _first(tier.k) + _first(tier.v)
            parts.append(
                Part(
                    name=f"tier {i}",
                    codec=_spoken(config.k, config.v, str(window.k.dtype)),
                    tokens=_tokens(tier.seen_by(heads), heads),
                    codes=codes,
                    scales=tree_bytes((tier.k, tier.v)) - codes,
                    metadata=tree_bytes(
                        (tier.pos, tier.columns, tier.at, tier.head, tier.summary, tier.memo, tier.taught)
                    ),
                )
            )
        # What score and merge keep besides tokens.
        if layer.queries is not None:
            size = tree_bytes(layer.queries)
            parts.append(Part(name="queries", codec="float", tokens=[0.0] * heads, codes=0, scales=0, metadata=size))
        if layer.residual is not None:
            size = tree_bytes([x for x in jax.tree.leaves(layer.residual) if x.ndim > 2])
            metadata = tree_bytes(layer.residual) - size
            none = [0.0] * heads
            parts.append(Part(name="residual", codec="float32", tokens=none, codes=size, scales=0, metadata=metadata))
        # Total tokens, and the range of positions.
        live = _positions(layer)
        live = live[live >= 0]
        layers.append(
            Layer(
                kept=[round(sum(x), 1) for x in zip(*(p.tokens for p in parts), strict=True)],
                first=int(live.min()) if live.size else -1,
                last=int(live.max()) if live.size else -1,
                parts=parts,
            )
        )
    return Summary(seen=np.asarray(cache.seen).tolist(), layers=layers, states=[tree_bytes(x) for x in cache.states])


def _first(code: Code | Pages) -> int:
    """Return the bytes of a code's first slot array; other arrays count as scales. Offloaded pages count whole."""
    if is_far(code):
        return code.lines.on_host + code.lines.on_disk
    return tree_bytes(jax.tree.leaves(code.slots)[:1])


def _spoken(k: Codec, v: Codec, dtype: str) -> str:
    """Return a readable name for two codecs: "float32", "4 bits", "2 bits per channel / 2 bits"."""

    def one(codec: Codec) -> str:
        return dtype if codec.exact else codec.label

    return one(k) if one(k) == one(v) else f"{one(k)} / {one(v)}"


def _tokens(pos: Any, heads: int) -> list[float]:
    """Return the live entries per head, mean over rows, of positions i32[B,Hs,n]."""
    count = (np.asarray(pos) >= 0).sum(-1)
    return np.broadcast_to(count, (count.shape[0], heads)).mean(0).round(1).tolist()


def _positions(layer: LayerCache) -> np.ndarray:
    """Return i32[B,H,n], the positions in all parts of a layer, concatenated; -1 in empty slots."""
    heads = layer.recent.k.shape[1]
    return _together([layer.recent.pos[:, None], *(tier.seen_by(heads) for tier in layer.tiers)], heads)


def _together(parts: Sequence[Any], heads: int) -> np.ndarray:
    """Concatenate a layer's parts [B,H or 1,m] to [B,H,n]."""
    return np.concatenate([np.broadcast_to(x, (x.shape[0], heads, x.shape[2])) for x in map(np.asarray, parts)], 2)


def _spread(cache: Cache, layer: LayerCache, x: np.ndarray, empty: Any) -> np.ndarray:
    """Scatter x [B,H,n], the values of all parts, to their positions: [B,H,P], `empty` where nothing is kept."""
    at = _positions(layer)
    out = np.full((*at.shape[:2], int(np.asarray(cache.seen).max()) + 1), empty, x.dtype)
    np.put_along_axis(out, at, x, 2)  # position -1 (empty slots) writes to the last entry, dropped below
    return out[..., :-1]


def mask(cache: Cache) -> np.ndarray:
    """Return bool[L,B,H,P], the positions that each layer, row and kv head keeps; P: tokens of the longest row.

    >>> import jkv
    >>> params = jkv.models.random(jkv.models.TINY)
    >>> cache, _ = jkv.prefill(params, "streaming(budget=40)", [5, 6, 7] * 40)
    >>> mask(cache).shape, mask(cache)[0, 0, 1, [0, 3, 4, 60, 119]].tolist()
    ((2, 1, 2, 120), [True, True, False, False, True])
    """
    return np.stack([_spread(cache, x, np.ones(_positions(x).shape, bool), False) for x in cache.layers])


def column(cache: Cache, name: str) -> np.ndarray:
    """Return f32[L,B,H,P], a score column such as "k_norm" at each position; NaN where no token is kept.

    Raises:
        ValueError: for a column that the score does not have.
    """
    known = cache.plan[0].columns
    if name not in known:
        raise ValueError(
            f"{cache.name}: its score remembers {', '.join(known) or 'nothing'} of a token, and no {name!r}; ask for "
            "one of these, or take a cache whose score has it"
        )
    heads = cache.model.heads
    parts = ([part.columns[name] for part in (layer.recent, *layer.tiers)] for layer in cache.layers)
    return np.stack(
        [_spread(cache, x, _together(values, heads), np.nan) for x, values in zip(cache.layers, parts, strict=True)]
    )


def kept_share(cache: Cache) -> np.ndarray:
    """Return f32[L,P], the share of rows and heads that keep each position, per layer.

    >>> import jkv
    >>> params = jkv.models.random(jkv.models.TINY)
    >>> cache, _ = jkv.prefill(params, "streaming(budget=40)", [5, 6, 7] * 40)
    >>> kept_share(cache).shape, kept_share(cache)[0, [0, 3, 4, 60, 119]].tolist()
    ((2, 120), [1.0, 1.0, 0.0, 0.0, 1.0])
    """
    return mask(cache).mean((1, 2), dtype=np.float32)


def check_path(path: str | Path) -> None:
    """Raise the errors that `plot` would raise for this path, before any work."""
    known = sorted(blank(1, 1).canvas.get_supported_filetypes())
    path = Path(path)
    if path.suffix[1:].lower() not in known:
        raise ValueError(f"cannot draw {path}: its ending must be one of {', '.join(known)}; such as kept.png")
    if not path.parent.is_dir():
        raise ValueError(f"cannot draw {path}: there is no folder {path.parent}; make it, or give another path")


def plot(cache: Cache, path: str | Path) -> None:
    """Plot the tokens kept per layer and head, the positions that each layer keeps, and the share that keeps each.

    Several rows are averaged.

    Args:
        path: its suffix selects the format (.png, .svg, .pdf, ...).

    Raises:
        ImportError: without matplotlib (the extra `plot`).
        ValueError: for an unknown suffix or a missing folder.
        OSError: if the file cannot be written.

    >>> import jkv, pathlib, tempfile
    >>> params = jkv.models.random(jkv.models.TINY)
    >>> cache, _ = jkv.prefill(params, "snapkv(budget=40, window=8)", [5, 6, 7] * 40)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     plot(cache, pathlib.Path(folder) / "kept.png")
    ...     (pathlib.Path(folder) / "kept.png").stat().st_size > 10_000
    True
    """
    check_path(path)
    figure(cache).savefig(path, dpi=150)


def figure(cache: Cache) -> Figure:
    """Return the figure that `plot` writes; raises ImportError without matplotlib."""
    share = kept_share(cache)
    layers, seen = share.shape
    kept = np.asarray(cache.kept(), np.float32).mean(1)
    heads = kept.shape[1]
    fig = blank(12.5, min(max(3.4 + 0.15 * layers, 4.6), 12))
    wide = min(2 + 0.28 * heads, 5)
    grid = fig.add_gridspec(2, 2, width_ratios=(wide, 11 - wide), height_ratios=(4.5, 1))
    fig.suptitle(
        f"{cache.model.family}, {layers} layers: {kept.mean():,.0f} of {seen:,} tokens kept per head, "
        f"{cache.nbytes / 2**20:,.2f} MiB",
        fontsize=13,
    )

    # Left: tokens kept, layer by kv head.
    left = fig.add_subplot(grid[:, 0])
    image = left.imshow(kept, cmap="viridis", vmin=0, vmax=max(seen, 1), aspect="auto", interpolation="nearest")
    left.set(title="Tokens kept", xlabel="kv head", ylabel="layer")
    left.set_xticks(range(0, heads, -(-heads // 12)))
    left.set_yticks(range(0, layers, -(-layers // 16)))
    if heads <= 8 and layers <= 48:
        for (y, x), n in np.ndenumerate(kept):
            left.text(x, y, f"{n:.0f}", ha="center", va="center", fontsize=7, color="k" if n > 0.6 * seen else "w")
    fig.colorbar(image, ax=left, label="tokens (top: all that were seen)", pad=0.04)

    # Right: kept positions per layer. Neighbours are averaged, not sampled, so that an isolated position stays visible.
    n = min(seen, COLUMNS)
    edges = np.linspace(0, seen, n + 1).astype(int)
    shown = np.add.reduceat(share, edges[:-1], 1) / np.diff(edges)
    right = fig.add_subplot(grid[0, 1])
    frame = (0, seen, layers - 0.5, -0.5)
    image = right.imshow(shown, cmap="viridis", vmin=0, vmax=1, aspect="auto", interpolation="nearest", extent=frame)
    right.set(title="Which positions are kept", ylabel="layer")
    right.set_yticks(range(0, layers, -(-layers // 16)))
    right.tick_params(labelbottom=False)

    # Below: the share of all heads that keeps each position.
    below = fig.add_subplot(grid[1, 1], sharex=right)
    below.fill_between(edges[:-1], shown.mean(0), step="post", color="#31688e", linewidth=0)
    below.set(xlabel="position in the text", ylabel="share of\nall heads", xlim=(0, seen), ylim=(0, 1.05))
    below.grid(axis="y", alpha=0.3)
    for side in ("top", "right"):
        below.spines[side].set_visible(False)
    fig.colorbar(image, ax=[right, below], label="share of the layer's heads that keep it", pad=0.01)
    return fig


def page(pieces: Sequence[str], weight: Any, label: str, width: int = 100) -> Figure:
    """Render a text with each piece shaded by its weight.

    Args:
        pieces: the n pieces of the text.
        weight: f[n], 0 to 1; higher is darker.
        label: what the weights are, for the color bar.
        width: letters per line.

    Raises:
        ValueError: if weights and pieces differ in number.
        ImportError: without matplotlib.

    >>> drawn = page(["The tide ", "turns."], [0.1, 0.9], "share that keeps it", width=12)
    >>> [text.get_text() for text in drawn.axes[0].texts]
    ['The tide ', 'tur', 'ns.']
    """
    weight = np.asarray(weight, float)
    if len(pieces) != len(weight):
        raise ValueError(f"{len(pieces)} pieces of text and {len(weight)} weights: give one a piece")
    # Break the text into runs of one line and one weight.
    runs, line, at = [], 0, 0
    for piece, w in zip(pieces, weight, strict=True):
        for i, part in enumerate(piece.split("\n")):
            line, at = (line + 1, 0) if i else (line, at)
            while part:
                line, at = (line + 1, 0) if at == width else (line, at)
                runs.append((line, at, part[: width - at], w))
                part, at = part[width - at :], min(at + len(part), width)
    # Size the figure in whole letters, then draw the runs and the color bar.
    tall, wide = LINE * (line + 1), LETTER * width
    fig = blank(wide + 0.2, tall + 0.7, None)
    from matplotlib.cm import ScalarMappable
    from matplotlib.patches import Rectangle

    scale = ScalarMappable(cmap="YlOrBr")
    scale.set_clim(0, 1.6)  # up to 1.6, so that black letters stay legible at weight 1
    size = fig.get_size_inches()
    axes = fig.add_axes((0.1 / size[0], 0.6 / size[1], wide / size[0], tall / size[1]))
    axes.set(xlim=(0, width), ylim=(line + 1, 0))
    axes.axis("off")
    for y, x, part, w in runs:
        axes.add_patch(Rectangle((x, y + 0.06), len(part), 0.88, color=scale.to_rgba(w), linewidth=0))
        axes.text(x, y + 0.5, part, family="DejaVu Sans Mono", fontsize=9.57, va="center", parse_math=False)
    below = fig.add_axes((0.1 / size[0], 0.4 / size[1], min(3.0, wide) / size[0], 0.12 / size[1]))
    fig.colorbar(scale, cax=below, orientation="horizontal", label=label)
    below.set_xlim(0, 1)
    return fig
