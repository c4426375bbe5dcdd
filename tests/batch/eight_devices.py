"""Rows over a mesh of eight devices beside the same rows on one, as a program of its own; prints what differs.

XLA_FLAGS=--xla_force_host_platform_device_count=8 python eight_devices.py [CACHE...]
"""

from __future__ import annotations

import sys

import jax
import jax.numpy as jnp
import numpy as np

import jkv
from jkv import methods, sharding
from jkv.batch.arrange import arrange
from jkv.batch.requests import Request, Settings
from jkv.batch.running import Running, Shapes
from jkv.generate import Cost

# dense; two tiers, the second coded by channel and by token; a pool, which no two devices share
CACHES = "full", "streaming(budget=48) | kivi(group=8, recent=8)", "adakv(budget=48, window=8) | int4"


def main(caches: tuple[str, ...]) -> None:
    params = jkv.models.random(jkv.models.TINY | dict(num_hidden_layers=1), 0, jnp.float32)
    over = sharding.Over(sharding.named("data=4,model=2", jax.devices(), params.config))
    divided, rng = jax.device_put(params, over.shardings(params)), np.random.default_rng(0)
    head = rng.integers(0, 100, 40)
    prompts = [np.append(head, rng.integers(0, 100, 3 + i)).astype(np.int32) for i in range(10)]
    new = [1 + 7 * i % 30 for i in range(10)]
    for cache in caches:
        config, cost = methods.parse(cache), Cost(over=over)
        rows = [
            Request(line=i, id=i, tokens=p, settings=Settings(max_new_tokens=n))
            for i, (p, n) in enumerate(zip(prompts, new, strict=True))
        ]
        (bucket,) = arrange(rows, cache == "full")
        shapes = Shapes(
            config=config, model=params.config, bucket=bucket, rows=8, several=4, dtype=jnp.float32, greedy=True,
            penalised=False,
        )  # fmt: skip
        running = Running(divided, shapes, cost)
        got = {a.request.line: a.tokens for ended in running.answers(()) for a in ended}
        alone = jkv.generate(params, cache, [p.tolist() for p in prompts], max_new_tokens=30).tokens
        where = {x.sharding.spec for x in jax.tree.leaves(running.state.cache.layers) if x.ndim > 2}
        same = [got[i] == alone[i][:n] for i, n in enumerate(new)]
        print(cache, all(same), bool(bucket.shared), cost.programs, *sorted(map(str, where)), sep="; ")


if __name__ == "__main__":
    main(tuple(sys.argv[1:]) or CACHES)
