"""Fingerprints: every weight of every family counts, and nothing but the weights and their config does."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from golden.make import CASES
from jkv import models
from jkv.io import fingerprint as identity
from jkv.io import load, trained_weights
from jkv.io.fingerprint import fingerprint
from jkv.models.softcap import Capped
from support import ggufs

DTYPES = ("float32", "bfloat16", "float16")


def nudged(x: jax.Array, seed: int) -> jax.Array:
    """The array with one bit of one element turned."""
    bits = np.asarray(x).copy()
    flat, rng = bits.reshape(-1).view(f"u{bits.itemsize}"), np.random.default_rng(seed)
    flat[rng.integers(flat.size)] ^= flat.dtype.type(1 << rng.integers(8 * bits.itemsize - 2))
    return jnp.asarray(bits)


@pytest.mark.parametrize("case", CASES)
def test_any_weight_bit_changes_fingerprint(case: str):
    params = models.random(CASES[case])
    leaves, tree = jax.tree.flatten(params)
    seen = {fingerprint(params)}
    for i, x in enumerate(leaves):
        changed = [nudged(x, seed=i) if j == i else y for j, y in enumerate(leaves)]
        seen.add(fingerprint(jax.tree.unflatten(tree, changed)))
    assert len(seen) == 1 + len(leaves)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_fingerprint_in_another_dtype_equals_model_of_that_dtype(case: str, dtype: str):
    one, two = models.random(CASES[case]), models.random(CASES[case], dtype=jnp.dtype(dtype))
    assert fingerprint(one, dtype) == fingerprint(two) and fingerprint(two) in trained_weights.identities(one)


def test_weight_layout_changes_fingerprint():
    params = models.random(models.TINY)
    layers = (params.layers[1], params.layers[0])
    moved = [
        dataclasses.replace(params, embed=params.embed[::-1]),
        dataclasses.replace(params, embed=params.embed[:, ::-1]),
        dataclasses.replace(params, embed=params.embed.reshape(params.embed.shape[::-1])),
        dataclasses.replace(params, embed=params.head, head=params.embed),
        dataclasses.replace(params, layers=layers),
        dataclasses.replace(params, head=None),
        params.first(1),
    ]
    assert len({fingerprint(p) for p in (params, *moved)}) == 1 + len(moved)


def test_config_numbers_change_fingerprint():
    params = models.random(CASES["mistral"])
    c = params.config
    others = dict(eps=0.1, act="gelu_tanh", scale=2 * c.scale, windows=(2,) * 3, embed_scale=2.0, family="llama")
    others |= dict(head_scale=2.0, residual_scale=2.0)
    others |= dict(ropes=models.read_config(CASES["llama-linear"]).ropes, context=4096)
    made = [dataclasses.replace(params, config=dataclasses.replace(c, **{name: x})) for name, x in others.items()]
    caps = [Capped(by=c.scale, cap=cap) for cap in (50.0, 30.0)]
    made += [dataclasses.replace(params, config=dataclasses.replace(c, scale=x)) for x in caps]
    assert len({fingerprint(p) for p in (params, *made)}) == 1 + len(made)


def test_config_notation_does_not_change_fingerprint():
    """GGUF keeps its numbers in float32, and begin and end ids may come from a tokenizer or not."""
    params = models.random(models.TINY | dict(rms_norm_eps=1e-5))
    again = models.random(models.TINY | dict(rms_norm_eps=float(np.float32(1e-5)), eos_token_id=[2, 5], bos_token_id=1))
    assert params.config != again.config and fingerprint(params) == fingerprint(again)


def test_cached_digests_are_freed_with_arrays():
    before = len(identity._KNOWN)
    params = models.random(models.TINY)
    assert fingerprint(params) == fingerprint(params) and len(identity._KNOWN) > before
    del params
    assert len(identity._KNOWN) == before


DIVIDED = """
import jax
from jkv import models
from jkv.core import sharding
from jkv.io.fingerprint import fingerprint
for hf in (models.TINY, dict(models.TINY, model_type="bamba", num_hidden_layers=2, attn_layer_indices=[1],
           tie_word_embeddings=False, mamba_n_heads=8, mamba_d_state=8, mamba_n_groups=2)):
    params = models.random(hf)
    said = {fingerprint(params)}
    for text in ("model=2", "data=2,model=2,context=2", "data=8"):
        over = sharding.parse_mesh(text, jax.devices(), params.config)
        said.add(fingerprint(jax.device_put(params, sharding.of_params(params, over))))
    print(*said)
"""


def test_sharding_does_not_change_fingerprint():
    env = {**os.environ, "XLA_FLAGS": os.environ["XLA_FLAGS"] + " --xla_force_host_platform_device_count=8"}
    done = subprocess.run([sys.executable, "-c", DIVIDED], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    bamba = dict(models.TINY, model_type="bamba", num_hidden_layers=2, attn_layer_indices=[1])
    bamba |= dict(tie_word_embeddings=False, mamba_n_heads=8, mamba_d_state=8, mamba_n_groups=2)
    assert done.stdout.split() == [fingerprint(models.random(hf)) for hf in (models.TINY, bamba)]


def folder_of(source: Any, folder: Path) -> Path:
    """The model as Hugging Face would keep it, in files of its own."""
    import json

    from safetensors.numpy import save_file

    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(source.config))
    arrays = {name: np.ascontiguousarray(read()) for name, read in source.tensors.items()}
    save_file(arrays, folder / "model.safetensors")
    return folder


def test_gguf_and_folder_of_equal_weights_share_fingerprint(tmp_path: Path):
    whole = ggufs.tiny(tmp_path / "m.gguf")
    folder = folder_of(load.read(whole), tmp_path / "folder")
    for dtype in DTYPES:
        assert fingerprint(load.load(whole, dtype)) == fingerprint(load.load(folder, dtype))
