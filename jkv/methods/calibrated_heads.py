"""Folders of calibrated attention heads, as `jkv calibrate compresskv` and `razorattention` write them."""

from __future__ import annotations

from math import ceil

import numpy as np

from jkv.io import trained_weights

CHOICE, SPLIT = "compresskv", "razorattention"  # methods of the calibration folders
# Arrays of each folder: CompressKV's scores of query heads and layers; RazorAttention's scores of kv heads.
ARRAYS = {CHOICE: {"heads": "LHG", "layers": "L"}, SPLIT: {"echo": "LH", "induction": "LH"}}


def read_heads(folder: str, method: str) -> tuple[dict[str, np.ndarray], tuple[str, ...]]:
    """Read the arrays f32 and the model fingerprints of a folder.

    Raises:
        FormatError: `jkv calibrate` did not write the folder for this method.
    """
    arrays, card = trained_weights.read(folder, method)
    if not trained_weights.fit(arrays, ARRAYS[method]):
        raise trained_weights.unlike(folder, arrays, method)
    return {name: x.astype(np.float32) for name, x in arrays.items()}, tuple(card["model"])


def whole_heads(folder: str, induction: float, echo: float) -> tuple[np.ndarray, tuple[str, ...]]:
    """Read RazorAttention's heads that keep everything.

    Args:
        induction: Share of all heads that are kept because they score highest as induction heads.
        echo: Share of all heads that are kept because they score highest as echo heads.

    Returns:
        bool[L,H] of the kv heads, and the model fingerprints.
    """
    arrays, models = read_heads(folder, SPLIT)

    def best(x: np.ndarray, share: float) -> np.ndarray:
        out = np.zeros(x.size, bool)
        out[np.argsort(-x, axis=None, kind="stable")[: ceil(share * x.size)]] = True
        return out.reshape(x.shape)

    return best(arrays["induction"], induction) | best(arrays["echo"], echo), models
