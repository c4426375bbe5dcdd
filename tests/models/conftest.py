"""Lets the tests here import `make`, which sits beside the golden files that it wrote."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "golden"))


@pytest.fixture(autouse=True)
def strict():
    """No silent promotion of dtypes or ranks anywhere in the models."""
    import jax

    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield
