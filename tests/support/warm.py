"""Layers whose tokens are asked for later by a known rule."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from jkv import models
from jkv.training.distillation.layerwise import Layer

T, E, H, G, D, N = 96, 8, 2, 2, 4, 3
MODEL = models.read_config(dict(models.TINY, hidden_size=E, num_attention_heads=4, num_hidden_layers=2, head_dim=D))


def data(seed: int) -> Layer:
    """Every 8th token, marked in x, is what all later queries look for; the others are seen by their neighbours."""
    rng = np.random.default_rng(seed)
    x, k = rng.standard_normal((N, T, E)), 0.1 * rng.standard_normal((N, H, T, D))
    q = 0.1 * rng.standard_normal((N, H, G, T, D))
    x[..., 0] = np.arange(T) % 8 == 5
    k[..., 0], q[..., 0] = 3 * x[:, None, :, 0], 3
    x, q, k = (jnp.asarray(a, jnp.float32) for a in (x, q, k))
    return Layer(x=x, q=q, k=k, v=x[:, None, :, :D] * jnp.ones((1, H, 1, 1)), size=jnp.full(N, T))
