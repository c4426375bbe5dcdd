"""The most that any of eight devices has while a model is loaded onto a mesh, and while a job runs on one.

XLA_FLAGS=--xla_force_host_platform_device_count=8 python placing_job.py; prints a JSON line a case.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import jax
import numpy as np
from typer.testing import CliRunner

import jkv
from jkv.aot import memory_estimate
from jkv.aot.targets import Target
from jkv.batch import job
from jkv.batch import run as job_run
from jkv.bench.model_shapes import noise
from jkv.cli import batch as cli
from jkv.cli.app import app
from jkv.core import sharding
from jkv.io import load
from jkv.io.fingerprint import fingerprint
from jkv.io.gguf_model import read_gguf
from jkv.methods import parse
from jkv.training import commands

sys.path.append(str(Path(__file__).parents[1]))
from support import ggufs  # noqa: E402

BASE = dict(vocab_size=512, hidden_size=64, intermediate_size=256, num_attention_heads=16, num_key_value_heads=8)
BASE |= dict(max_position_embeddings=512, num_hidden_layers=4)
MODELS: dict[str, dict[str, Any]] = {
    "llama": BASE | dict(model_type="llama"),
    "qwen2": BASE | dict(model_type="qwen2", tie_word_embeddings=True, sliding_window=None),
    "bamba": BASE
    | dict(model_type="bamba", attn_layer_indices=[1], tie_word_embeddings=False)
    | dict(mamba_n_heads=8, mamba_d_state=16, mamba_n_groups=8),
}
MESHES = ("model=8", "data=2,model=4", "data=2,model=2,context=2")
MOST: dict[Any, int] = {}


def held() -> dict[Any, int]:
    """Bytes of all living arrays on each device."""
    parts = [s for x in jax.live_arrays() for s in x.addressable_shards]
    # A shard is an array too, once it was looked at.
    sizes = {(s.device, s.data.unsafe_buffer_pointer()): s.data.nbytes for s in parts}
    out: dict[Any, int] = {}
    for (device, _), n in sizes.items():
        out[device] = out.get(device, 0) + n
    return out


def watched(function: Any) -> Any:
    """The function, after each call of which all living arrays are counted."""

    def call(*args: Any, **more: Any) -> Any:
        out = function(*args, **more)
        for device, n in held().items():
            MOST[device] = max(MOST.get(device, 0), n)
        return out

    return call


def share(params: Any) -> int:
    """Bytes of a device's part of the weights."""
    return sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(params))


def loaded(name: str, dtype: str, mesh: str, weights: str | None = None) -> dict[str, Any]:
    whole = jkv.load(name, dtype, weights=weights)
    want, values = fingerprint(whole), [np.array(x) for x in jax.tree.leaves(whole)]
    del whole
    MOST.clear()
    before = sum(held().values())
    params = jkv.load(name, dtype, mesh, weights)
    over = sharding.parse_mesh(mesh, jax.devices(), params.config)
    wanted = jax.tree.leaves(sharding.of_params(params, over))
    return {
        "before": before,
        "most": max(MOST.values()),
        "share": share(params),
        "same": fingerprint(params) == want and all(map(np.array_equal, jax.tree.leaves(params), values)),
        "placed": [x.sharding for x in jax.tree.leaves(params)] == wanted and sharding.mesh_of(params).mesh == over,
    }


def at_the_job() -> dict[str, Any]:
    """What `jkv batch --mesh` has on a device when its job begins."""
    found: dict[str, Any] = {}

    def run(what: job.Job, *_: Any) -> SimpleNamespace:
        found.update(share=share(what.params), over=what.over is not None, most=max(MOST.values()))
        return SimpleNamespace(code=0)

    job_run.run = run  # type: ignore[assignment]
    MOST.clear()
    with tempfile.TemporaryDirectory() as folder:
        (source := Path(folder) / "in.jsonl").write_text('{"tokens": [1]}\n')
        cli.batch(source=source, out=Path(folder) / "out", model="llama", mesh="data=2,model=4", batch="2")
    return found


def generated(weights: str | None) -> dict[str, Any]:
    """Rows on a mesh and on one device, and what `jkv plan` says of the mesh beside what is allocated there."""
    rows, cache, mesh, context = (
        [[3, 1, 4] * 21, [5, 9] * 32],
        "snapkv(budget=32, window=8) | int8",
        "data=2,model=4",
        128,
    )
    one = jkv.load("llama", weights=weights)
    alone = jkv.generate(one, cache, rows, max_new_tokens=64).tokens
    after = [row[:24] for row in alone]
    said = [x.logprobs for x in jkv.score(one, cache, rows, after)]
    del one
    MOST.clear()
    params = jkv.load("llama", "float32", mesh, weights)
    out = jkv.generate(params, cache, rows, max_new_tokens=64)
    most = max(MOST.values())
    over = sharding.mesh_of(params)
    shape = memory_estimate.Job(
        model=params.config,
        config=parse(cache),
        batch=2,
        context=context,
        chunk=0,
        dtype=jax.numpy.float32,
        mesh=mesh,
        form=weights,
    )
    target = Target(name="cpu", devices=jax.devices(), memory=None, kernels="xla")
    prefill, decode = memory_estimate.programs(shape, target)
    held = (out.cache.layers, out.cache.states)
    scores = [x.logprobs for x in jkv.score(params, cache, rows, after)]
    return {
        "same": out.tokens == alone and np.allclose(scores, said, atol=1e-4),
        "share": share(params) + share(held),
        "most": most,
        "weights": [decode.weights, share(params)],
        "cache": [decode.cache, share(held)],
        "prefill": [prefill.peak, share(params) + out.receipt.bytes_peak_prefill],
        "decode": [decode.peak, share(params) + out.receipt.bytes_peak_decode],
        "over": over is not None,
    }


def at_the_training() -> dict[str, Any]:
    """What `jkv train` has on a device when its training begins."""
    found: dict[str, Any] = {}

    def run(what: commands.Run, **_: Any) -> None:
        found.update(share=share(what.params), over=sharding.mesh_of(what.params) is not None, most=max(MOST.values()))

    commands.METHODS["trimkv"] = run
    MOST.clear()
    done = CliRunner().invoke(app, ["train", "trimkv", "--model", "llama", "--out", "out"])
    return found or {"failed": done.output}


def evaluated() -> dict[str, Any]:
    """What `jkv eval ppl --mesh` says beside what it says of one device."""
    said = []
    with tempfile.TemporaryDirectory() as folder:
        np.savez(
            tokens := Path(folder) / "tokens.npz", np.random.default_rng(0).integers(0, 512, (2, 96)).astype(np.int32)
        )
        caches = ["--cache", "full", "--cache", "snapkv(budget=40, window=8) | int8"]
        for i, mesh in enumerate([(), ("--mesh", "data=2,model=4")]):
            out = Path(folder) / f"{i}.json"
            asked = ["--tokens", tokens, "--prefix", 64, "--continue", 32, "--batch", 2, *caches, *mesh, "--json", out]
            done = CliRunner().invoke(app, ["eval", "ppl", "--model", "llama", *map(str, asked)])
            if done.exit_code:
                return {"failed": done.output}
            said.append([(row["ppl"], row["kept"], row["bytes"]) for row in json.loads(out.read_text())["rows"]])
    return {"over": True, "most": 0, "share": 0, "said": said}


def file(folder: str) -> Path:
    """A GGUF file in Q8_0."""
    kinds = {name: gguf.GGMLQuantizationType.Q8_0 for name, x in ggufs.weights().items() if x.ndim == 2}
    return ggufs.tiny(Path(folder) / "m.gguf", kinds=kinds)


if __name__ == "__main__":
    source = read_gguf(file(tempfile.mkdtemp()))
    load.read = lambda what: source if what == "gguf" else noise(MODELS[str(what)], 4, 1)
    jax.numpy.array, jax.numpy.asarray = watched(jax.numpy.array), watched(jax.numpy.asarray)
    jax.device_put = watched(jax.device_put)
    jax.make_array_from_callback = watched(jax.make_array_from_callback)
    for name in MODELS:
        for mesh in MESHES:
            for dtype in ("float32", "bfloat16"):
                print(json.dumps({"case": [name, mesh, dtype], **loaded(name, dtype, mesh)}), flush=True)
    for weights in ("int8", "int4"):
        for mesh in MESHES:
            print(json.dumps({"case": [mesh, weights], **loaded("llama", "bfloat16", mesh, weights)}), flush=True)
    for weights in (None, "int8", "int4", "file"):
        case = ["gguf", weights]
        print(json.dumps({"case": case, **loaded("gguf", "float32", "data=4,model=2", weights)}), flush=True)
    for weights in (None, "int8"):
        print(json.dumps({"case": ["jkv.generate", weights], **generated(weights)}), flush=True)
    print(json.dumps({"case": ["jkv batch"], **at_the_job()}), flush=True)
    print(json.dumps({"case": ["jkv train"], **at_the_training()}), flush=True)
    print(json.dumps({"case": ["jkv eval"], **evaluated()}), flush=True)
