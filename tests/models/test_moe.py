"""Experts: routing and products against plain loops in float64, what is read of the weights, and files of codes."""

import dataclasses
import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

import jkv
from golden.make import CASES, weights
from jkv import models
from jkv.core import sharding
from jkv.models import gpt_oss
from jkv.models.layers import moe
from jkv.models.moe_router import Experts, route

E, F = 12, 20


def picked(e: Experts, logits: np.ndarray, bias: np.ndarray | None) -> list[dict[int, float]]:
    """Of each token, the weight of each of its experts."""
    out = []
    for x in logits.astype(np.float64):
        scores = np.exp(x - x.max()) / np.exp(x - x.max()).sum() if e.score == "softmax" else 1 / (1 + np.exp(-x))
        ranked = scores + (0 if bias is None else bias)
        size = e.count // e.groups
        of = [sorted(ranked[g * size : (g + 1) * size])[-e.best :] for g in range(e.groups)]
        groups = (
            sorted(range(e.groups), key=lambda g: sum(of[g]))[-e.chosen :] if e.chosen < e.groups else range(e.groups)
        )
        allowed = [n for n in range(e.count) if n // size in groups]
        mine = sorted(allowed, key=lambda n: ranked[n])[-e.active :]
        total = sum(scores[n] for n in mine) if e.normed else 1
        out.append({n: e.gain * scores[n] / total for n in mine})
    return out


def base(**more) -> Experts:
    return Experts(**({"at": (0,), "count": 8, "active": 3, "hidden": F} | more))


ROUTES = {
    "normed": base(),
    "plain": base(normed=False),
    "groups by their best": base(normed=False, gain=16.0, groups=4, chosen=2),
    "sigmoid, groups by two": base(score="sigmoid", gain=2.5, groups=2, chosen=1, best=2),
}


@pytest.mark.parametrize("e", ROUTES.values(), ids=list(ROUTES))
@pytest.mark.parametrize("shift", [False, True])
def test_routing_equals_reference(e, shift):
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 2, (40, 8)).astype("f")
    bias = rng.normal(0, 1, 8).astype("f") if shift else None
    index, weight = route(e, jnp.asarray(logits), None if bias is None else jnp.asarray(bias))
    for i, w, want in zip(np.asarray(index), np.asarray(weight), picked(e, logits, bias), strict=True):
        assert set(i.tolist()) == set(want)
        np.testing.assert_allclose(w, [want[n] for n in i.tolist()], rtol=1e-5)


def one(w, x):
    return jnp.tanh(x @ w["up"].T) @ w["down"].T


through = jax.jit(moe.through, static_argnums=0)


@pytest.mark.parametrize("tokens", [1, 2, 19, 300])
@pytest.mark.parametrize("skew", ["even", "all to one", "one a token"])
def test_expert_sum_equals_plain_loops(tokens, skew):
    """Tiles of one token, of eight and of more; experts with no token, whose weights are NaN, are never read."""
    rng = np.random.default_rng(tokens)
    up, down = rng.normal(size=(7, F, E)) / 4, rng.normal(size=(7, E, F)) / 4
    x, k = rng.normal(size=(tokens, E)), 1 if skew == "one a token" else 3
    index = np.stack([rng.choice(5, k, replace=False) for _ in range(tokens)])  # nobody goes to 5 and 6
    if skew == "all to one":
        index[:, 0], index[:, 1:] = 4, [[0, 1]]
    weight = rng.uniform(size=(tokens, k))
    want = np.stack(
        [
            sum(g * np.tanh(y @ up[n].T) @ down[n].T for n, g in zip(i, w, strict=True))
            for y, i, w in zip(x, index, weight, strict=True)
        ]
    )
    unread = np.setdiff1d(np.arange(7), index)
    up[unread] = down[unread] = np.nan
    own = {"up": jnp.asarray(up, jnp.float32), "down": jnp.asarray(down, jnp.float32)}
    got = through(one, own, jnp.asarray(x, jnp.float32), jnp.asarray(index), jnp.asarray(weight, jnp.float32))
    np.testing.assert_allclose(got, want, atol=2e-5)


def test_expert_matmul_makes_no_copy_of_experts():
    """Beside the sorted results there is one expert, of 64."""
    m, k, n, wide = 256, 2, 64, 128
    own = {
        "up": jax.ShapeDtypeStruct((n, wide, wide), "float32"),
        "down": jax.ShapeDtypeStruct((n, wide, wide), "float32"),
    }
    args = (jax.ShapeDtypeStruct(s, t) for s, t in (((m, wide), "float32"), ((m, k), "int32"), ((m, k), "float32")))
    made = through.lower(one, own, *args).compile().memory_analysis().temp_size_in_bytes
    results = 4 * m * k * wide
    assert made < 4 * results + 2 * 4 * wide * wide < n * 4 * wide * wide


def test_every_mxfp4_code_decodes_by_definition():
    """Against the format's definition: sign, two bits of exponent and one of mantissa, scaled by a power of two."""
    blocks = np.arange(256, dtype=np.uint8).reshape(1, 16, 16)
    scales = np.arange(120, 136, dtype=np.uint8).reshape(1, 16)

    def number(code: int, scale: int) -> float:
        exponent, mantissa = code >> 1 & 3, code & 1
        size = mantissa / 2 if exponent == 0 else 2 ** (exponent - 1) * (1 + mantissa / 2)
        return (-1 if code & 8 else 1) * size * 2.0 ** (scale - 127)

    want = [number(c, int(scales[0, b >> 4])) for b in range(256) for c in (b & 15, b >> 4)]
    np.testing.assert_array_equal(gpt_oss.mxfp4(blocks, scales)[0], want)


def coded(folder, hf, tensors, broken=None):
    """A folder whose experts are MXFP4, and what they are in floats."""
    rng, floats, stored = np.random.default_rng(3), dict(tensors), dict(tensors)
    for name, x in tensors.items():
        if name.endswith((".gate_up_proj", ".down_proj")):
            n, wide, rows = x.shape
            blocks = rng.integers(0, 256, (n, rows, wide // 32, 16), np.uint8)
            scales = rng.integers(122, 126, (n, rows, wide // 32), np.uint8)
            del stored[name]
            stored |= {name + "_blocks": blocks, name + "_scales": scales}
            floats[name] = np.stack([gpt_oss.mxfp4(b, s).T for b, s in zip(blocks, scales, strict=True)])
    if broken:
        stored[broken] = stored[broken][:, 1:]
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(hf | {"quantization_config": {"quant_method": "mxfp4"}}))
    save_file({name: np.ascontiguousarray(x) for name, x in stored.items()}, folder / "model.safetensors")
    return floats


def test_mxfp4_folder_equals_model_of_its_floats(tmp_path):
    hf = CASES["gpt_oss"] | dict(hidden_size=64, intermediate_size=96)
    floats = coded(tmp_path / "m", hf, weights(hf, 1))
    want = models.build(hf, {n: (lambda x=x: x) for n, x in floats.items()}, jnp.float32)
    got = jkv.load(tmp_path / "m")
    assert got.config == want.config
    jax.tree.map(np.testing.assert_array_equal, got, want)
    coded(tmp_path / "broken", hf, weights(hf, 1), "model.layers.1.mlp.experts.down_proj_scales")
    with pytest.raises(ValueError, match=r"layers.1.mlp.experts.down_proj_scales has shape \(4, 63, 3\)"):
        jkv.load(tmp_path / "broken")


def test_unexpected_byte_tensors_are_refused():
    c, hf = models.read_config(models.TINY), models.TINY
    tensors = {n: (lambda s=s: np.ones(s, np.uint8)) for n, s in models.params.names(c, models.llama.TENSORS).items()}
    with pytest.raises(ValueError, match="embed_tokens.weight holds bytes"):
        models.build(hf, tensors, jnp.float32)


def test_expert_of_wrong_shape_or_count_is_named():
    hf = CASES["mixtral"]
    tensors = {n: (lambda x=x: x) for n, x in weights(hf, 0).items()}
    name = "model.layers.2.block_sparse_moe.experts.3.w2.weight"
    with pytest.raises(ValueError, match=rf"{name} has shape \(1, 80\), the config needs \(48, 80\)"):
        models.build(hf, tensors | {name: lambda: np.ones((1, 80), "f")}, jnp.float32)
    with pytest.raises(ValueError, match=r"9 tensors unused.*experts\.3\."):
        models.build(hf | {"num_local_experts": 3}, tensors, jnp.float32)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_equal_layers_share_config_and_draft_keeps_its_experts(name):
    p = models.random(CASES[name])
    alike = {i: p.block(i).config for i in range(3)}
    assert alike[0] == alike[2] and (alike[0] == alike[1]) == (name == "mixtral")
    draft = p.first(2)
    assert draft.config.experts.at == tuple(i for i in p.config.experts.at if i < 2)
    ids, pos = jnp.ones((1, 4), int), jnp.arange(4)[None]
    cut = dataclasses.replace(p, layers=p.layers[:2], config=draft.config)
    np.testing.assert_array_equal(models.forward(draft, ids, pos), models.forward(cut, ids, pos))


def test_mesh_not_dividing_expert_is_refused():
    c = models.read_config(CASES["qwen3_moe"] | dict(moe_intermediate_size=25))
    with pytest.raises(ValueError, match="model=2 cannot share the 25 hidden units of an expert"):
        sharding.parse_mesh("model=2", jax.devices() * 2, c)


DIVIDED = """
import re, sys
import jax, jax.numpy as jnp, numpy as np
from golden.make import CASES, weights
from jkv import models
from jkv.core import sharding
ids, pos = jnp.arange(12).reshape(2, 6), jnp.arange(6)[None].repeat(2, 0)
for name in ("gpt_oss", "mixtral"):
    tensors = {n: (lambda x=x: x) for n, x in weights(CASES[name], 0).items()}
    whole = models.build(CASES[name], tensors, jnp.float32)
    over = sharding.parse_mesh("data=2,model=2", jax.devices(), whole.config)
    parts = models.build(CASES[name], tensors, jnp.float32, sharding.placing(over))
    with jax.set_mesh(over):
        program = jax.jit(models.forward).lower(parts, ids, pos).compile()
    apart = abs(np.asarray(program(parts, ids, pos)) - np.asarray(jax.jit(models.forward)(whole, ids, pos))).max()
    w = parts.layers[0]
    held = [x.addressable_shards[0].data.nbytes / x.nbytes for x in (w["each_gate_up"], w["each_down"])]
    gathered = [x for x in re.findall(r"f32\\[([0-9,]*)\\][^=]* all-gather\\(", program.as_text())]
    most = max([0, *(int(np.prod([int(n) for n in x.split(",")])) for x in gathered)])
    print(name, apart, *held, most < w["each_down"].size // w["each_down"].shape[0])
"""


def test_sharded_experts_equal_unsharded():
    """Each has its part of every expert's hidden units, and none is gathered."""
    env = {**os.environ, "XLA_FLAGS": os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"}
    env["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = subprocess.run([sys.executable, "-c", DIVIDED], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    for line in done.stdout.splitlines():
        _, apart, up, down, whole = line.split()
        assert (float(apart) < 1e-5, up, down, whole) == (True, "0.5", "0.5", "True"), line
    assert len(done.stdout.splitlines()) == 2
