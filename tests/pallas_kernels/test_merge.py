"""Merging two halves of an attention gives the attention over both, whatever is empty."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.merge import merge_attention


def attend(scores, values):
    """Dense partial attention of scores [R, C] over values [C, E]."""
    lse = jax.nn.logsumexp(scores, axis=-1)
    return jnp.exp(scores - lse[:, None]) @ values, lse


def test_halves_merge_to_the_whole_in_value_and_gradient():
    random = np.random.default_rng(0)
    scores, values = random.normal(size=(3, 9)) * 20, random.normal(size=(9, 4))
    scores, values = scores.astype(np.float32), values.astype(np.float32)
    directions = [random.normal(size=s).astype(np.float32) for s in ((3, 4), (3,))]

    def whole(scores, values):
        out, lse = attend(scores, values)
        return (out * directions[0]).sum() + (lse * directions[1]).sum()

    def merged(scores, values):
        out, lse = merge_attention(*attend(scores[:, :5], values[:5]), *attend(scores[:, 5:], values[5:]))
        return (out * directions[0]).sum() + (lse * directions[1]).sum()

    expected = jax.value_and_grad(whole, (0, 1))(scores, values)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5),
        jax.value_and_grad(merged, (0, 1))(scores, values),
        expected,
    )


@pytest.mark.parametrize("far", [0.0, 1e4, -1e4])
def test_a_side_without_keys_changes_nothing_and_gets_no_gradient(far):
    out, lse = jnp.ones((2, 3)), jnp.array([far, -jnp.inf])
    nothing, empty = jnp.full((2, 3), jnp.nan), jnp.full(2, -jnp.inf)

    def total(out_a, lse_a, out_b, lse_b):
        merged, both = merge_attention(out_a, lse_a, out_b, lse_b)
        return merged.sum() + jnp.where(jnp.isfinite(both), both, 0).sum(), (merged, both)

    for arguments in ((out, lse, nothing, empty), (nothing, empty, out, lse)):
        gradients, (merged, both) = jax.grad(total, (0, 1, 2, 3), has_aux=True)(*arguments)
        np.testing.assert_array_equal(merged, [[1.0] * 3, [0.0] * 3])
        np.testing.assert_array_equal(both, [far, -np.inf])
        assert all(np.isfinite(g).all() for g in gradients)


def test_shapes_that_do_not_match_are_named():
    with pytest.raises(ValueError, match=r"lse_a.shape=\(3,\)"):
        merge_attention(jnp.zeros((2, 4)), jnp.zeros(3), jnp.zeros((2, 4)), jnp.zeros(3))
