"""Products with weights stored [out, in]: any number of rows, batched any way, gives what NumPy gives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dstill_jax.models.layers import RMSNorm, output_first


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


def test_the_gradient_of_a_norm_s_scale_is_summed_in_float32() -> None:
    """3001 rows of ones: a sum in bfloat16 stops growing at 256. The value itself is the product in bfloat16."""
    norm, x = RMSNorm(1e-6), jnp.ones((3001, 8), jnp.bfloat16)

    def loss(scale: jnp.ndarray) -> jnp.ndarray:
        return norm.apply({"params": {"scale": scale}}, x).astype(jnp.float32).sum()

    scale = jnp.linspace(0.3, 1.7, 8)
    text = str(jax.make_jaxpr(jax.grad(loss))(scale))
    assert "f32[8] = reduce_sum" in text and "bf16[8] = reduce_sum" not in text
    np.testing.assert_allclose(jax.grad(loss)(scale), 3001, rtol=2**-8)
    rows = jnp.asarray(np.random.default_rng(0).normal(size=(50, 8)), jnp.bfloat16)
    wide = rows.astype(jnp.float32)
    unit = wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6)
    expected = unit.astype(jnp.bfloat16) * scale.astype(jnp.bfloat16)
    np.testing.assert_array_equal(norm.apply({"params": {"scale": scale}}, rows), expected)
