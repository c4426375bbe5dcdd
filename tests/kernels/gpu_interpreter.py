"""The parameters of Mosaic GPU's interpreter, which jax has under two names."""

from __future__ import annotations

from typing import Any

import pytest


def parameters() -> Any:
    """Skips the test where this jax has no Mosaic GPU without a further package."""
    pytest.importorskip("jax.experimental.mosaic.gpu", reason="before jax 0.11 it imports absl: pip install absl-py")
    from jax.experimental.pallas import mosaic_gpu as plgpu

    try:
        return plgpu.InterpretGPUParams()
    except AttributeError:  # private before jax 0.11
        from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

        return InterpretGPUParams()
