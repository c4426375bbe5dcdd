"""The whole model as plain attention, which is told what tokens a step may see: the oracle of the laws."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jkv import models
from jkv.arrays.online_softmax import softmax
from jkv.cache.padding import positions
from jkv.models import Params, rule
from jkv.models.layers.recurrent_state import State
from support.tiny import PARAMS


@jax.jit
def dense_prompt(ids: jax.Array, params: Params = PARAMS) -> tuple[jax.Array, list[Any], list[State]]:
    """Logits [B,T,V], per layer q [B,H,G,T,D], k, v [B,H,T,D] rotated, p [B,H,G,T,T] of plain attention, and states."""
    model = params.config
    pos = positions(ids, jnp.zeros(ids.shape[0], jnp.int32))
    see = (pos[:, None, :] <= pos[:, :, None]) & (pos[:, None, :] >= 0)
    taps = []

    def attend(i: int, a: Any) -> tuple[jax.Array, None]:
        q, k = model.ropes[i].rotate(a.q, pos[:, None, None]), model.ropes[i].rotate(a.k, pos[:, None])
        p = jnp.einsum("bhgtd,bhsd->bhgts", q, k) * model.scale
        p = softmax(jnp.where(see[:, None, None], p, -1e30), a.sinks)
        p = p * (pos >= 0)[:, None, None, :, None].astype(jnp.float32)
        taps.append((q, k, a.v, p))
        return jnp.einsum("bhgts,bhsd->bhgtd", p, a.v), None

    logits, states = _dense(params, jnp.maximum(ids, 0), pos, attend, models.fresh(model, pos))
    return logits, taps, states


@jax.jit
def dense_step(
    token: jax.Array,
    pos: jax.Array,
    ks: list[Any],
    vs: list[Any],
    sees: list[Any],
    states: list[State],
    params: Params = PARAMS,
) -> tuple[Any, ...]:
    """Logits [B,V], new q, k, v, p per layer, and states; ks, vs [B,H,S,D] by position, sees bool[B,H,S].

    A state reads the token as it reads a prompt: nothing waits.
    """
    taps, model = [], params.config

    def attend(i: int, a: Any) -> tuple[jax.Array, None]:
        q, k = model.ropes[i].rotate(a.q, pos[:, None, None, None]), model.ropes[i].rotate(a.k, pos[:, None, None])
        at = (jnp.arange(ks[i].shape[2])[None] == pos[:, None])[:, None, :, None]
        keys, values = jnp.where(at, k, ks[i]), jnp.where(at, a.v, vs[i])
        see = sees[i] | at[..., 0]
        p = jnp.einsum("bhgtd,bhsd->bhgts", q, keys) * model.scale
        p = softmax(jnp.where(see[:, :, None, None], p, -jnp.inf), a.sinks)
        taps.append((q, k, a.v, p))
        return jnp.einsum("bhgts,bhsd->bhgtd", p, values), None

    def mix(m: int, w: Any, x: jax.Array) -> tuple[jax.Array, State]:
        return rule(model.mixers).read(w, model.mixers, model.eps, x, jnp.ones((x.shape[0], 1), bool), states[m])

    logits, states = _dense(params, token[:, None], pos[:, None], attend, mix)
    return logits[:, 0], taps, states


def _dense(params: Params, ids: jax.Array, pos: jax.Array, attend: Any, mix: Any) -> tuple[jax.Array, list[State]]:
    net, states = models.family(params.config), []
    x = net.embed(params, ids)
    for i in range(params.config.depth):
        x, state = models.layer(params, i, x, pos, attend, mix)
        states += [] if params.config.attends(i) else [state]
    return net.head(params, x), states
