"""Plots with matplotlib, if it is installed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from jkv.utils.optional_deps import install

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def blank(width: float, height: float, layout: Literal["constrained"] | None = "constrained") -> Figure:
    """Create a figure of `width` x `height` inches without a window; ImportError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(f"drawing needs matplotlib; {install('plot')}") from error
    return Figure(figsize=(width, height), layout=layout)
