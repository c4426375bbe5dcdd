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

from golden.make import CASES, OURS, batch, reference, torch_logits, weights  # noqa: E402
from jkv import models  # noqa: E402

pytestmark = pytest.mark.peers

forward = jax.jit(models.forward)


def both(hf, dtype, seed=7):
    tensors, (ids, pos) = weights(hf, seed), batch(hf, seed)
    ours = models.build(hf, {n: (lambda a=a: a) for n, a in tensors.items()}, getattr(jnp, dtype))
    theirs = torch_logits(reference(hf, tensors, dtype), ids, pos)
    return np.asarray(forward(ours, ids, pos))[pos >= 0], theirs[pos >= 0]


@pytest.mark.filterwarnings("default")  # of torch and transformers, not ours
@pytest.mark.parametrize("name", CASES)
def test_logits_equal_transformers_in_float32(name):
    """To 1e-4, or where float32 is not that exact in either, as near to float64 as transformers is."""
    hf, seed = CASES[name], 7
    got, want = both(hf, "float32", seed)
    if abs(got - want).max() <= 1e-4:
        return
    ids, pos = batch(hf, seed)
    exact = torch_logits(reference(hf, weights(hf, seed)).double(), ids, pos)[pos >= 0]
    ours, theirs = (abs(x - exact).max() for x in (got, want))
    assert ours < 1.5 * theirs < 1e-3


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", CASES)
def test_bfloat16_error_is_bounded_by_transformers(name):
    exact, _ = both(CASES[name], "float32")
    got, want = both(CASES[name], "bfloat16")
    # of the token in the middle: one whose experts are as good as equal may go through others, on either side
    ours, theirs = (np.median(np.linalg.norm(x - exact, axis=-1)) for x in (got, want))
    assert ours < 1.5 * theirs


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", [name for name, hf in CASES.items() if hf["model_type"] not in OURS])
def test_config_saved_by_transformers_reads_equal(name):
    from transformers import AutoConfig

    hf = CASES[name]
    saved = json.loads(AutoConfig.for_model(**json.loads(json.dumps(hf))).to_json_string(use_diff=False))
    assert models.read_config(saved) == models.read_config(hf)
