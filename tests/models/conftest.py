"""Settings of the models' tests."""

import pytest


@pytest.fixture(autouse=True)
def strict():
    """No silent promotion of dtypes or ranks anywhere in the models."""
    import jax

    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield
