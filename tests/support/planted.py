"""A model in which one layer needs more bits than the others."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from jkv import models


def planted(size: float, layer: int = 2):
    """A model of four layers; in one of them two channels that turn together are `size` times larger in keys, and as
    many times smaller in queries: it says what it said."""
    params = models.random(dict(models.TINY, num_hidden_layers=4))
    model, layers = params.config, list(params.layers)
    scale, pair = np.ones((model.groups + 2, model.head_dim, 1), np.float32), [1, 1 + model.head_dim // 2]
    scale[: model.groups, pair], scale[model.groups, pair] = 1 / size, size
    layers[layer] = dict(layers[layer], qkv=layers[layer]["qkv"] * scale[None])
    return replace(params, layers=tuple(layers))
