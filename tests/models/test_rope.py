"""Rotation there and back, for the ropes of every family; caches that store keys un-rotated, on a model that scales."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from golden.make import CASES as FAMILIES  # noqa: E402
from jkv import models
from jkv.cache.padding import positions
from jkv.methods import parse
from jkv.models.rope import Rope
from support import rig
from support.rig import CASES

READ = [models.read_config(dict(hf)) for hf in FAMILIES.values()]
ROPES = list(dict.fromkeys(rope for model in READ for rope in model.ropes))
YARN = models.random(
    dict(models.TINY, hidden_size=64)
    | dict(rope_theta=1e4, rope_scaling=dict(type="yarn", factor=4.0, original_max_position_embeddings=128)),
    0,
    jnp.float32,
)
SHORT = np.where(np.arange(rig.PROMPT.shape[1]) < 60, -1, rig.PROMPT)  # 30 tokens: fills no budget
MOVED = [
    case
    for case in (case for cases in CASES.values() for case in cases)
    for config in [parse(case.tight)]
    if any(tier.rope != "write" for tier in config.tiers) and not case.slot.lossy
]


def test_families_cover_every_rope_type():
    with pytest.raises(ValueError, match="only default, linear, llama3 and yarn are implemented"):
        models.config.rope({"rope_theta": 1e4, "rope_type": "spiral"}, "llama", 16, 128)
    kinds = {str(value) for hf in FAMILIES.values() for value in _values(hf)}
    assert {"default", "linear", "llama3", "yarn"} <= kinds
    assert sum(rope.scale != 1 for rope in ROPES) >= 2 and sum(rope.scale == 1 for rope in ROPES) >= 4


def _values(hf: dict) -> list:
    return [x for v in hf.values() for x in (_values(v) if isinstance(v, dict) else [v] if isinstance(v, str) else [])]


@pytest.mark.parametrize("part", [False, True], ids=["whole", "part"])
@pytest.mark.parametrize("rope", ROPES, ids=range(len(ROPES)))
def test_rotation_is_invertible(rope: Rope, part: bool):
    channels = 2 * len(rope.inv_freq)
    if part:
        rope = replace(rope, inv_freq=rope.inv_freq[: channels // 4])
    pos = jnp.arange(0, rope.longest, 7)
    x = jnp.asarray(np.random.default_rng(0).standard_normal((len(pos), channels)), jnp.float32)
    np.testing.assert_allclose(rope.rotate(rope.rotate(x, pos), pos, inverse=True), x, atol=2e-6)
    np.testing.assert_allclose(rope.rotate(rope.rotate(x, pos, inverse=True), pos), x, atol=2e-6)


@pytest.mark.parametrize("rope", ROPES, ids=range(len(ROPES)))
def test_tables_equal_float64_or_are_nan(rope: Rope):
    """Of every position that has a table, and of offsets that lead far behind its end; what has none is no number."""
    rope, freq, end = replace(rope, longest=600), np.asarray(rope.inv_freq), 768
    pos = np.array([0, 1, 255, 256, 599, end - 1])
    cos, sin = rope.tables(jnp.asarray(pos))
    np.testing.assert_allclose(cos, np.cos(pos[:, None] * freq) * rope.scale, atol=1e-6)
    np.testing.assert_allclose(sin, np.sin(pos[:, None] * freq) * rope.scale, atol=1e-6)
    assert not rope.inv_freq or np.isnan(rope.tables(jnp.asarray([end, end + 99999]))).all()
    offsets = 2 ** np.arange(17)
    cos, sin = rope.ahead(jnp.asarray(pos), offsets)
    angle = (pos[:, None] + offsets)[..., None] * freq
    np.testing.assert_allclose(cos, np.cos(angle).mean(1) * rope.scale, atol=1e-6)
    np.testing.assert_allclose(sin, np.sin(angle).mean(1) * rope.scale, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("case", MOVED, ids=str)
def test_keys_rotated_at_read_equal_model(case: rig.Case):
    """Nothing leaves, so ranks are positions, and the logits are those of the model without a cache."""
    assert YARN.config.ropes[0].scale > 1.1
    forced = rig.FORCED[:, :3]
    got = rig.run(case.tight, SHORT, forced, params=YARN)
    ids = jnp.asarray(np.concatenate([SHORT, forced], 1))
    want = jax.jit(models.forward)(YARN, ids, positions(ids, jnp.zeros(2, jnp.int32)))
    want = np.asarray(want).transpose(1, 0, 2)[SHORT.shape[1] - 1 :]
    for i, (logits, cache) in enumerate(zip(got.logits, got.caches, strict=True)):
        assert all((tier.pos >= 0).any() for tier in cache.layers[0].tiers)
        np.testing.assert_allclose(logits, want[i], atol=1e-4, rtol=0)
