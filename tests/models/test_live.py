"""The same comparison with transformers itself, on fresh weights: runs where torch and transformers are installed.

The CI job `parity` installs both, so a skip here is a developer's machine without them, never a hidden failure.
"""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from golden.make import CASES, batch, torch_logits, torch_model, weights  # noqa: E402
from jkv import models  # noqa: E402

pytestmark = pytest.mark.peers

forward = jax.jit(models.forward)


def both(hf, dtype, seed=7):
    tensors, (ids, pos) = weights(hf, seed), batch(hf, seed)
    ours = models.build(hf, {n: (lambda a=a: a) for n, a in tensors.items()}, getattr(jnp, dtype))
    return np.asarray(forward(ours, ids, pos))[pos >= 0], torch_logits(torch_model(hf, tensors, dtype), ids, pos)[
        pos >= 0
    ]


@pytest.mark.filterwarnings("default")  # of torch and transformers, not ours
@pytest.mark.parametrize("name", CASES)
def test_logits_match_in_float32(name):
    got, want = both(CASES[name], "float32")
    np.testing.assert_allclose(got, want, atol=1e-4, rtol=0)


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", CASES)
def test_bfloat16_errs_no_more_than_transformers_does(name):
    exact, _ = both(CASES[name], "float32")
    got, want = both(CASES[name], "bfloat16")
    # of the token in the middle: one whose experts are as good as equal may go through others, on either side
    ours, theirs = (np.median(np.linalg.norm(x - exact, axis=-1)) for x in (got, want))
    assert ours < 1.5 * theirs


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", CASES)
def test_the_config_as_transformers_saves_it_reads_the_same(name):
    from transformers import AutoConfig

    hf = CASES[name]
    saved = json.loads(AutoConfig.for_model(**json.loads(json.dumps(hf))).to_json_string(use_diff=False))
    assert models.read_config(saved) == models.read_config(hf)
