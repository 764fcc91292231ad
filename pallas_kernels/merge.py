"""Joining partial attentions over disjoint sets of keys by their logsumexps.

A partial attention is a pair: `out`, softmax-weighted values over its own keys, and `lse`, the natural logsumexp of its
scaled scores. A row that had no key has `lse = -inf`; whatever its `out` holds, NaN included, is not read.
"""

import jax
import jax.numpy as jnp
from jax import Array


def merge_attention(
    out_a: Array,  # [*rows, E]
    lse_a: Array,  # [*rows]
    out_b: Array,  # [*rows, E]
    lse_b: Array,  # [*rows]
) -> tuple[Array, Array]:
    """(out [*rows, E] in the dtype of `out_a`, lse [*rows] float32) over the union of two disjoint sets of keys.

    Computed in float32, differentiable in all four. Rows that are empty on both sides give zeros and -inf, with zero gradients
    (the cascade of arXiv 2501.01005, section 3.1.2).

    Raises:
      ValueError: shapes that do not match.
    """
    if out_a.shape != out_b.shape or lse_a.shape != lse_b.shape or out_a.shape[:-1] != lse_a.shape:
        raise ValueError(
            f"merge_attention needs out [*rows, E] and lse [*rows] on both sides, got {out_a.shape=} {lse_a.shape=} "
            f"{out_b.shape=} {lse_b.shape=}"
        )
    lse_a, lse_b = lse_a.astype(jnp.float32), lse_b.astype(jnp.float32)
    seen_a, seen_b = lse_a > -jnp.inf, lse_b > -jnp.inf
    seen = seen_a | seen_b
    # The largest exponent cancels in value and in gradient; 0 stands in where there is none, and -inf never meets -inf.
    top = jax.lax.stop_gradient(jnp.where(seen, jnp.maximum(lse_a, lse_b), 0.0))
    weight_a = jnp.where(seen_a, jnp.exp(jnp.where(seen_a, lse_a, 0.0) - top), 0.0)
    weight_b = jnp.where(seen_b, jnp.exp(jnp.where(seen_b, lse_b, 0.0) - top), 0.0)
    total = jnp.where(seen, weight_a + weight_b, 1.0)
    part_a = jnp.where(seen_a[..., None], out_a.astype(jnp.float32), 0.0) * (weight_a / total)[..., None]
    part_b = jnp.where(seen_b[..., None], out_b.astype(jnp.float32), 0.0) * (weight_b / total)[..., None]
    return (part_a + part_b).astype(out_a.dtype), jnp.where(seen, top + jnp.log(total), -jnp.inf)
