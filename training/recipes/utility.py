"""Recipe of `utility`: weigh tokens that questions may look up against tokens that the next lines need.

A token of age n has the score

    s = log(exp(r) + exp(level) beta^n)

in nats at a kv head, with r from KVzap and beta from TRIM-KV. Each was trained alone, so their nats are not comparable
between heads or with each other. Suffix distillation learns that: the hidden layers of both stay fixed, and the output
weights of each kv head, the offsets and the levels are trained.
"""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
from jax import Array

from jkv.arrays.pytree import part
from jkv.io import trained_weights
from jkv.methods.eviction.author_gates import Repeated, of_another
from jkv.methods.eviction.trained_gates import Retention
from jkv.methods.eviction.utility import Utility
from jkv.models import Params
from jkv.nn.gates import UtilityGate
from jkv.nn.network import Network
from jkv.training.distillation import suffix


@part
class Recipe(suffix.Recipe):
    """Recipe of the output weights, offsets and levels of both gates."""

    quick = ("foreseen.out.bias", "level")

    def worth(self, score: Utility, held: suffix.Prefix, live: Array) -> Array:
        size, at = live.sum(1, keepdims=True), jnp.cumsum(live, 1) - 1
        age = jnp.maximum(size + 1 - at, 1).astype(jnp.float32)[:, None]
        gate = _weighed(score.weights)

        def nats(i: int) -> Array:
            own, x = gate.part(i).module, held.x[:, i]
            return own.worth(own.foreseen(x), own.fading(x), age)

        return jnp.stack([nats(i) for i in range(held.x.shape[1])])


def _weighed(gate: Network) -> Network:
    """Return the gate with its hidden layers excluded from the gradient."""
    return gate.update(jax.lax.stop_gradient, *(name for name in gate.arrays if "hidden" in name))


def join(foreseen: Network, fading: Network) -> Network:
    """Combine surrogates and retention gates, with a level of 0."""
    parts = {"foreseen": foreseen, "fading": fading}
    arrays = {f"{part}.{name}": x for part, gate in parts.items() for name, x in gate.arrays.items()}
    return Network(arrays=arrays | {"level": jnp.zeros_like(foreseen.arrays["out.bias"])}, kind=UtilityGate)


def starting_gates(params: Params, foreseen: Path | None, fading: Path | None) -> Network:
    """Load the gates of two folders, of `jkv train kvzap` and `jkv train trimkv`.

    Args:
        params: The model.
        foreseen: Folder of KVzap's surrogates.
        fading: Folder of TRIM-KV's gate, or None for the one that comes with jkv.

    Raises:
        ValueError: `foreseen` is None, or a folder has another kind of gate or is for another model.
    """
    if foreseen is None:
        raise ValueError("utility begins with what was learned before: give --foreseen FOLDER of `jkv train kvzap`")
    c, looks = params.config, Repeated().of(str(foreseen)).bound(params).weights
    if "hidden.0.kernel" not in looks.arrays:
        raise ValueError(
            f"{foreseen}: surrogates of one layer, and utility takes those of two, as `jkv train kvzap` makes them"
        )
    found = looks.arrays["hidden.0.kernel"].shape[:2] + looks.arrays["out.bias"].shape[1:]
    own = c.layers, c.width, c.heads
    if found != own:
        raise of_another(f"{foreseen} (layers, width, kv heads)", found, c, own)
    lasts = trained_weights.trained(None if fading is None else str(fading), Retention()).bound(params)
    return join(looks, lasts.weights)
