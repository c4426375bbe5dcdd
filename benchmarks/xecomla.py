"""SmolLM2-135M with latents for keys and values, before any training and after some: perplexity and KL to the model.

python -m benchmarks.xecomla results/xecomla.json [FOLDER ...]. FOLDER: of `jkv train xecomla`, ended or not, as far as
its last checkpoint is. Held-back prose of Python's manual, each text in one pass, in float32.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jkv import models
from jkv.bench.environment import meta
from jkv.io.load import load, read
from jkv.models import Params
from jkv.training.checkpoints import Folder
from jkv.training.data import corpora
from jkv.training.distillation import kl as kl_distillation
from jkv.training.optimizer import create
from jkv.training.recipes import xecomla
from jkv.training.trainer import tx

MODEL, TEXTS, LENGTH = "smollm2-135m", 4, 256
LATENTS = ((288, 32), (128, 32), (64, 32))  # rank and rotated channels; 288 is the rank of keys and values


@jax.jit
def through(one: Params, x: jax.Array) -> jax.Array:
    pos = jnp.broadcast_to(jnp.arange(x.shape[1], dtype=jnp.int32)[None], x.shape[:2])
    return models.layer(one, 0, x, pos, models.plain(one.config, pos), models.fresh(one.config, pos))[0]


@jax.jit
def last(ends: Params, x: jax.Array) -> jax.Array:
    return jax.nn.log_softmax(models.family(ends.config).head(ends, x))


def said(params: Params, ids: np.ndarray) -> np.ndarray:
    """log p f32[T, V] of one text, block by block: all are one program."""
    x = models.family(params.config).embed(params, jnp.asarray(ids[None]))
    for i in range(params.config.depth):
        x = through(params.block(i), x)
    return np.asarray(last(params.ends, x))[0]


def row(params: Params, texts: np.ndarray, model: list[np.ndarray], **about: Any) -> dict[str, Any]:
    found = [said(params, ids) for ids in texts]
    surprise = [-x[np.arange(LENGTH - 1), ids[1:]].mean() for x, ids in zip(found, texts, strict=True)]
    kl = [(np.exp(p) * (p - q)).sum(-1).mean() for p, q in zip(model, found, strict=True)]
    numbers = params.config.heads * params.config.cached
    return about | {"numbers": numbers, "ppl": float(np.exp(np.mean(surprise))), "kl": float(np.mean(kl))}


def write(rows: list[dict[str, Any]], about: dict[str, Any]) -> None:
    print(rows[-1], flush=True)
    Path(sys.argv[1]).write_text(json.dumps({"meta": about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    params, hf = load(MODEL, "float32"), read(MODEL).config
    texts, source = corpora.held_back(params, "pydoc", LENGTH, TEXTS, 0)
    about = meta(MODEL, 1, dtype="float32", source=source, texts=TEXTS, length=LENGTH)
    model = [said(params, ids) for ids in texts]
    rows = [row(params, texts, model, rank=None, rope_dim=None, steps=0, tokens=0)]
    write(rows, about)
    for rank, turned in LATENTS:
        made = xecomla.converted(params, xecomla.config_of(hf, rank, turned, None))
        rows.append(row(made, texts, model, rank=rank, rope_dim=turned, steps=0, tokens=0))
        write(rows, about)
    for path in map(Path, sys.argv[2:]):
        told = json.loads((path / "training.json").read_text())
        student = xecomla.converted(
            params, xecomla.config_of(hf, told["rank"], told["rope_dim"], told["query_rank"] or None)
        )
        begun = create(xecomla.trained(student), tx(kl_distillation.Recipe(**told["recipe"])))
        with Folder(path, told, resume=True) as folder:
            state = folder.last(begun)
        steps, (_, length, _) = int(state.step), told["texts"]
        tokens = steps * told["recipe"]["batch"] * told["recipe"]["accumulate"] * length
        own = {"rank": told["rank"], "rope_dim": told["rope_dim"], "steps": steps, "tokens": tokens}
        made = kl_distillation.student_params(student, jax.tree.map(jnp.asarray, state.score))
        rows.append(row(made, texts, model, **own))
        write(rows, about)
