"""Rows over meshes of eight devices beside the same rows on one, as a program of its own; prints a JSON line a case.

XLA_FLAGS=--xla_force_host_platform_device_count=8 python eight_devices.py [CACHE...]
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jkv
from jkv import methods
from jkv.aot.collectives import collectives
from jkv.cache.cache import Cache
from jkv.core import decode_loop, sampling, sharding
from jkv.core.compilation import Cost, compiled
from jkv.engine.continuous_batch import Running
from jkv.engine.request import Request
from jkv.engine.scheduler import arrange
from jkv.engine.spec import Shapes
from jkv.generation.sampling_params import SamplingParams
from jkv.methods.config import CacheConfig, TierSpec
from jkv.methods.quantization.integer import Affine
from jkv.methods.quantization.lowrank import LowRank
from jkv.models import Params
from jkv.prompts.allocation import CacheShape

sys.path.insert(0, str(Path(__file__).parents[1]))
from support.codebook import Codebook  # noqa: E402

# two tiers, one of a fixed size, keys by channel and turned at read; a pool, that the heads' devices divide too; pages;
# survivors that take shares of the evicted where they lie; codecs with arrays of heads, and of all of them; one code of
# all heads, and arrays of each row
CACHES = (
    "streaming(budget=48) | kivi(group=8, recent=8)",
    "adakv(budget=80, window=8) | int4",
    "quest(page=8, pages=3, dense_layers=0) | int8",
    "kvmerger(budget=56)",
    "codebooks",
    "together",
)
PARAMS = jkv.models.random(jkv.models.TINY | dict(num_hidden_layers=1), 0, jnp.float32)
# a block that attends behind one that recurs
HYBRID = jkv.models.random(
    dict(jkv.models.TINY, model_type="bamba", num_hidden_layers=2, attn_layer_indices=[1], tie_word_embeddings=False)
    | dict(mamba_n_heads=8, mamba_d_state=8, mamba_n_groups=2)
)
# one that follows the delta rule in front of one that attends; a layer that recurs and attends side by side
RECURRING = {
    "delta": dict(jkv.models.TINY, model_type="qwen3_5_text", layer_types=["linear_attention", "full_attention"])
    | dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=12)
    | dict(partial_rotary_factor=0.5, rms_norm_eps=1e-3),
    "beside": dict(jkv.models.TINY, model_type="falcon_h1", num_hidden_layers=1, mamba_d_ssm=64)
    | dict(mamba_n_heads=8, mamba_d_state=8, mamba_n_groups=2),
}
RNG = np.random.default_rng(0)
TOKENS = RNG.integers(0, 100, (4, 96)).astype(np.int32)
BOOKS = tuple(Codebook(table=jnp.asarray(RNG.normal(size=(1, heads, 8)), jnp.float32)) for heads in (2, 1))
TOGETHER = LowRank(
    inner=Affine(bits=8), share=0.5, basis=jnp.asarray(np.linalg.qr(RNG.normal(size=(1, 1, 16, 16)))[0][..., :8]),
    size=jnp.asarray(RNG.uniform(0.5, 2, (1, 1, 8))),
)  # fmt: skip
OWN = {
    "codebooks": CacheConfig(codec=BOOKS),  # type: ignore[arg-type]
    "together": CacheConfig(tiers=(TierSpec(k=TOGETHER, v=TOGETHER, rope="read"),)),
}


def rows_that_come_and_go() -> dict[str, Any]:
    """Rows of a job with a common beginning, through states and tiers."""
    params, head = HYBRID, RNG.integers(0, 100, 40)
    over = sharding.MeshPlan(sharding.parse_mesh("data=2,model=2,context=2", jax.devices(), params.config))
    prompts = [np.append(head, RNG.integers(0, 100, 3 + i)).astype(np.int32) for i in range(10)]
    new = [1 + 7 * i % 30 for i in range(10)]
    rows = [
        Request(line=i, id=i, tokens=p, settings=SamplingParams(max_new_tokens=n))
        for i, (p, n) in enumerate(zip(prompts, new, strict=True))
    ]
    (bucket,) = arrange(rows, True)
    shapes = Shapes(
        config=methods.parse("full"), model=params.config, bucket=bucket, rows=8, several=4, dtype=jnp.float32,
        greedy=True, penalised=False,
    )  # fmt: skip
    running = Running(jax.device_put(params, over.shardings(params)), shapes, Cost(over=over))
    got = {a.request.line: a.tokens for ended in running.answers(()) for a in ended}
    alone = jkv.generate(params, "full", [p.tolist() for p in prompts], max_new_tokens=30).tokens
    return {
        "same": [got[i] == alone[i][:n] for i, n in enumerate(new)],
        "shared": bool(bucket.shared),
        "codes": parts(running.state.cache),
        "states": [divided(x.state) for x in running.state.cache.states],
    }


def rows_that_recur(kind: str) -> dict[str, Any]:
    """Prompts of one stretch and of two, and some steps."""
    params = jkv.models.random(RECURRING[kind])
    over = sharding.MeshPlan(sharding.parse_mesh("data=2,model=2,context=2", jax.devices(), params.config))
    prompts, cache = [TOKENS[i, : 96 - 40 * i].tolist() for i in range(2)], "h2o(budget=40) | int8"
    alone = jkv.generate(params, cache, prompts, max_new_tokens=20)
    there = jkv.generate(jax.device_put(params, over.shardings(params)), cache, prompts, max_new_tokens=20)
    return {
        "same": there.tokens == alone.tokens,
        "apart": max(
            float(abs(np.asarray(a.state) - np.asarray(b.state)).max())
            for a, b in zip(there.cache.states, alone.cache.states, strict=True)
        ),
        "codes": parts(there.cache),
        "states": [divided(x.state) for x in there.cache.states],
    }


# a score that asks the queries of the whole prompt, a pool, and a prompt in pieces behind what is kept of it
PROMPTS = ("h2o(budget=41) | int8", 0), ("adakv(budget=80, window=8) | int4", 0), ("streaming(budget=48) | int4", 64)


def prompts(cache: str, chunk: int) -> dict[str, Any]:
    """What is kept of prompts, whose tokens are divided too, the logits after them, and after more text."""
    texts = [RNG.integers(0, 100, n).tolist() for n in (300, 250, 256, 299)]
    over = sharding.MeshPlan(sharding.parse_mesh("data=2,model=2,context=2", jax.devices(), PARAMS.config))
    weights = PARAMS, jax.device_put(PARAMS, over.shardings(PARAMS))
    (one, here), (all_, there) = (jkv.prefill(x, cache, texts, chunk=chunk) for x in weights)
    kept = [[np.sort(t.pos, -1).tolist() for t in x.layers[0].tiers] for x in (one, all_)]
    more = [RNG.integers(0, 100, n).tolist() for n in (33, 32, 30, 7)]
    (one, then), (all_, thence) = (jkv.extend(*x, more) for x in zip(weights, (one, all_), strict=True))
    return {
        "same": kept[0] == kept[1] and np.asarray(one.kept()).tolist() == np.asarray(all_.kept()).tolist(),
        "apart": float(abs(np.asarray(here) - np.asarray(there)).max()),
        "extended": float(abs(np.asarray(then) - np.asarray(thence)).max()),
        "read": [float(abs(np.asarray(x) - np.asarray(y)).max()) for x, y in filed(weights, all_, cache)],
    }


def filed(weights: tuple[Params, Params], cache: Cache, text: str) -> list[tuple[jax.Array, jax.Array]]:
    """Logits after more text of a cache on a mesh, and of what its file gives on the mesh and on one device; what else
    lies elsewhere than the model is refused, and one device goes on as before."""
    one, mesh = weights
    with tempfile.TemporaryDirectory() as folder:
        jkv.save_cache(cache, f"{folder}/cache", mesh)
        there, here = (jkv.load_cache(f"{folder}/cache", x) for x in (mesh, one))
    assert there.counts.seen.sharding.is_equivalent_to(cache.counts.seen.sharding, 1)
    more, token = [[n] * n for n in (4, 3, 2, 1)], jnp.ones(4, jnp.int32)
    refused(lambda: jkv.extend(one, cache, more), "lies on a mesh of devices")
    refused(lambda: jkv.step(one, cache, token), "lies on a mesh of devices")
    refused(lambda: jkv.extend(mesh, cache.pick(jnp.array([0])), [[1]]), "1 rows on a mesh of data=2")
    uneven = jkv.prefill(one, "h2o(budget=41)", [[5] * 60] * 4)[0]
    refused(lambda: jkv.extend(mesh, uneven, more), "which this mesh cannot share")
    want = jkv.extend(mesh, cache, more)[1]
    return [(want, jkv.extend(x, y, more)[1]) for x, y in ((mesh, there), (one, here))]


def refused(run: Callable[[], Any], why: str) -> None:
    try:
        run()
    except ValueError as error:
        assert why in str(error), error
    else:
        raise AssertionError(why)


def products() -> list[float]:
    """Of a prompt of 512 tokens on each of 4 devices, and of 8, which divide its tokens."""
    found, wide = [], jkv.models.random(jkv.models.TINY | dict(num_hidden_layers=1, hidden_size=256), 0, jnp.float32)
    for text in ("data=2,model=2", "data=2,model=2,context=2"):
        over = sharding.MeshPlan(sharding.parse_mesh(text, jax.devices(), wide.config))
        config, params = methods.parse("full").over(over), jax.device_put(wide, over.shardings(wide))
        cache, ids = CacheShape(config, params.config, 4, 512, 16, jnp.float32).empty(), jnp.ones((4, 512), jnp.int32)
        program, _ = compiled(decode_loop.prefill_own.whole, params, cache, ids, over=over, fresh=True)
        found.append(program.program.cost_analysis()["flops"])
    return found


def parts(cache: Cache) -> list[int]:
    """`divided` of all arrays of codes."""
    return [divided(x) for x in jax.tree.leaves([(tier.k, tier.v) for layer in cache.layers for tier in layer.tiers])]


def divided(x: jax.Array) -> int:
    """How many times smaller than the whole what a device has of it is."""
    return x.nbytes // x.addressable_shards[0].data.nbytes


def forced(cache: str, over: sharding.MeshPlan | None) -> tuple[decode_loop.Decoding, str]:
    """The state after TOKENS, which all go through decode steps and their flushes, and the text of the program."""
    config = OWN[cache] if cache in OWN else methods.parse(cache)
    (n, steps), model, params = TOKENS.shape, PARAMS.config, PARAMS
    if over is not None:
        config, params = config.over(over), jax.device_put(params, over.shardings(params))
    cache = CacheShape(config, model, n, steps, steps, jnp.float32).empty()
    logits = jnp.zeros((n, model.vocab))
    state = decode_loop.Decoding.start(cache, logits, steps, forced=jnp.asarray(TOKENS), traced=True)
    draws = sampling.make(n, model.vocab, seeds=range(n), stop_ids=())
    program, _ = compiled(decode_loop.run_blocks.whole, params, state, draws, jnp.int32(0), over=over)
    return program(params, state, draws, jnp.int32(steps)), program.program.as_text()


def slots(cache: str) -> dict[str, Any]:
    """Rows, heads and slots: what each step would draw, and how far its logits are from those of one device."""
    over = sharding.MeshPlan(sharding.parse_mesh("data=2,model=2,context=2", jax.devices(), PARAMS.config))
    (here, _), (there, text) = forced(cache, None), forced(cache, over)
    a, b = np.asarray(here.trace), np.asarray(there.trace)
    second, first = np.moveaxis(np.sort(a, -1)[..., -2:], -1, 0)
    tied = first - second < 1e-4 * a.std()  # either may be drawn
    assert tied.mean() < 0.02  # the first step of a row among them: it has no logits
    tiers = there.cache.layers[0].tiers
    return {
        "same": (tied | (a.argmax(-1) == b.argmax(-1))).mean(),
        "apart": float(abs(a - b).max() / a.std()),
        "codes": parts(there.cache),
        "slots": max(x.pos.addressable_shards[0].data.shape[2] for x in tiers),
        "sent": sent(text),
    }


def messages() -> list[list[Any]]:
    """Those of a program that sums three times in a loop, in the scope of a step, and gathers once in a flush's."""
    mesh = sharding.parse_mesh("data=8", jax.devices(), PARAMS.config)

    def run(x: jax.Array) -> jax.Array:
        with jax.named_scope("step"):
            x = jax.lax.fori_loop(0, 3, lambda i, x: jax.lax.psum(jnp.sin(x), "data"), x)
        with jax.named_scope("flush"):
            return jax.lax.all_gather(x, "data", tiled=True).astype(jnp.bfloat16)

    rows, every = jax.sharding.PartitionSpec("data"), jax.sharding.PartitionSpec()
    mapped = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=rows, out_specs=every, check_vma=False))
    return sent(mapped.lower(jnp.zeros((16, 6))).compile().as_text())


def sent(text: str) -> list[list[Any]]:
    return [[x.place, x.kind, x.shape, x.count, x.bytes] for x in collectives(text)]


if __name__ == "__main__":
    if len(sys.argv) == 1:
        print(json.dumps(messages()))
        print(json.dumps(rows_that_come_and_go()))
        for kind in RECURRING:
            print(json.dumps(rows_that_recur(kind)))
        print(json.dumps({"products": products(), "prompts": [prompts(*x) for x in PROMPTS]}))
    for cache in sys.argv[1:] or CACHES:
        print(json.dumps({"cache": cache, **slots(cache)}))
