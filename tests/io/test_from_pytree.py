"""Models of trees of arrays."""

import jax
import numpy as np
import pytest

import jkv
from jkv import models
from jkv.models.weights import params as of
from support.tiny import PARAMS

CONFIG = dict(models.TINY, hidden_size=64)
C = models.read_config(CONFIG)
FLAT = {name: read() for name, read in of.seeded(C, models.FAMILIES["llama"].TENSORS, 0).items()}


def nested(flat):
    """The same, a mapping for every level of the names."""
    out = {}
    for name, x in flat.items():
        *path, last = name.split(".")
        here = out
        for key in path:
            here = here.setdefault(key, {})
        here[last] = x
    return out


def test_flat_nested_and_listed_trees_load_equally():
    listed = nested(FLAT)
    listed["model"]["layers"] = [listed["model"]["layers"][str(i)] for i in range(C.layers)]
    for tree in (FLAT, nested(FLAT), jax.tree.map(jax.numpy.asarray, listed)):
        got = jkv.from_tree(CONFIG, tree, dtype="float32")
        jax.tree.map(np.testing.assert_array_equal, got.layers, PARAMS.layers)
        np.testing.assert_array_equal(got.embed, PARAMS.embed)


def test_orbax_checkpoint_loads(tmp_path):
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as saver:
        saver.save(tmp_path / "weights", nested(FLAT))
        saver.wait_until_finished()
        got = jkv.from_tree(CONFIG, saver.restore(tmp_path / "weights"), dtype="float32")
    jax.tree.map(np.testing.assert_array_equal, got.layers, PARAMS.layers)


def test_invalid_trees_are_refused():
    with pytest.raises(ValueError, match="1 tensors unused: model.extra"):
        jkv.from_tree(CONFIG, FLAT | {"model.extra": np.ones(3)})
    with pytest.raises(ValueError, match="model.norm.weight has shape"):
        jkv.from_tree(CONFIG, FLAT | {"model.norm.weight": np.ones(3)})
    with pytest.raises(ValueError, match="model.norm.weight is a float: give arrays"):
        jkv.from_tree(CONFIG, FLAT | {"model.norm.weight": 1.0})
    with pytest.raises(ValueError, match="a tree has none: use int8"):
        jkv.from_tree(CONFIG, FLAT, weights="file")
