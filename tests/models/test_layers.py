"""Products with weights stored [out, in]: any number of rows, batched any way, gives what NumPy gives."""

import jax.numpy as jnp
import numpy as np
import pytest

from dstill_jax.models.layers import output_first


@pytest.mark.parametrize("batch", [(), (1,), (4,), (5,), (3, 3), (1, 8), (2, 1, 5), (17,)])
def test_rows_that_are_filled_up_leave_no_trace(batch: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    weight, x = rng.normal(size=(24, 12)), rng.normal(size=(*batch, 12))
    got = output_first(jnp.asarray(weight, jnp.float32), jnp.asarray(x, jnp.float32))
    assert got.shape == (*batch, 24)
    np.testing.assert_allclose(got, x @ weight.T, rtol=1e-5, atol=1e-5)


def test_accumulates_in_the_dtype_asked_for() -> None:
    ones = jnp.ones((6, 301), jnp.bfloat16)
    got = output_first(ones, ones[:5], jnp.float32)
    assert got.dtype == jnp.float32
    np.testing.assert_array_equal(got, 301.0)  # which bfloat16 would round to 300 or 302
