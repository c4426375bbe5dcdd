"""A prompt that attends to what will be stored."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jkv import models
from jkv.cache.codec_map import decode, encode
from jkv.cache.padding import positions
from jkv.methods import parse
from jkv.methods.compatibility import check
from support import rig
from support.rig import LENGTHS, MODEL, PARAMS, PROMPT


def dense(text: str, row: int) -> np.ndarray:
    """The next logits f[V] of a prompt whose older tokens, in whole units, attention sees as their codes decode."""
    config, ids = parse(text), PROMPT[row, -LENGTHS[row] :][None]
    (k_codec, v_codec), n = config.codec, LENGTHS[row]
    first = config.num_sinks
    coded = (n - config.exact) // config.unit * config.unit
    pos = positions(jnp.asarray(ids), jnp.zeros(1, jnp.int32))
    at, inside = jnp.arange(n), slice(first, first + coded)
    old = ((at >= first) & (at < first + coded))[:, None]
    pads = (0, 0), (0, 0), (first, n - coded - first), (0, 0)

    def attend(i, new):
        turn, before = MODEL.ropes[i].rotate, config.tiers[0].rope == "read"
        q, k, v = turn(new.q, pos[:, None, None]), turn(new.k, pos[:, None]), new.v
        held = (new.k if before else k)[:, :, inside]
        held = jnp.pad(decode(k_codec, encode(k_codec, held)), pads)
        k = jnp.where(old, turn(held, pos[:, None]) if before else held, k)
        held = decode(v_codec, encode(v_codec, v[:, :, inside]))
        v = jnp.where(old, jnp.pad(held, pads), v)
        p = jnp.einsum("bhgtd,bhsd->bhgts", q, k) * MODEL.scale
        p = jax.nn.softmax(jnp.where(np.tri(n, dtype=bool), p, -jnp.inf), -1)
        return jnp.einsum("bhgts,bhsd->bhgtd", p, v), None

    net = models.family(MODEL)
    x = net.embed(PARAMS, jnp.asarray(ids))
    for i in range(MODEL.depth):
        x, _ = models.layer(PARAMS, i, x, pos, attend, None)
    return np.asarray(net.head(PARAMS, x))[0, -1]


@pytest.mark.slow
@pytest.mark.parametrize("text", ["kivi(group=16, recent=8)", "nsnquant(window=16)"])
def test_coded_prefill_attends_to_codes_and_exact_recent(text: str):
    plain, (_, coded) = rig.begun(text)[1], rig.begun(f"{text} | coded")
    for row in range(2):
        want = dense(text, row)
        np.testing.assert_allclose(coded[row], want, atol=5e-4)  # a number at a border may get either code
        assert abs(plain[row] - want).max() > 0.01


@pytest.mark.parametrize("text", ["mikv | coded", "kvmerger(budget=64) | coded"])
def test_unsupported_coded_compositions_are_refused(text: str):
    with pytest.raises(ValueError, match="coded"):
        check(parse(text), MODEL)
