"""Groups of rows, tiles of columns, and running logsumexps over them: what every head operation is made of."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.fused_head_loss.shares import HeadShares

_LOW = -1e30  # where running maxima start, and the logit of columns that do not count


def over_groups(size: int, function: Any, rows: Any, carry: Any = None) -> tuple[Any, Any]:
    """(carry, results [R, ...]) of carry, result = function(carry, group) over groups of at most `size` rows.

    `rows` is a pytree of [R, ...]; the last group is padded with zeros. No loop for a single group.
    """
    R = jax.tree.leaves(rows)[0].shape[0]
    if size >= R:
        return function(carry, rows)
    count = -(-R // size)

    def split(x: Array) -> Array:
        padded = jnp.pad(x, ((0, count * size - R), *((0, 0),) * (x.ndim - 1)))
        return padded.reshape(count, size, *x.shape[1:])

    carry, out = jax.lax.scan(function, carry, jax.tree.map(split, rows))
    return carry, jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:R], out)


class Softmax(NamedTuple):
    """A running logsumexp and the weighted sums that belong to it, relative to `top`; all [R]."""

    top: Array
    total: Array
    sums: tuple[Array, ...]


def start(rows: int, sums: int = 0) -> Softmax:
    """Of no columns yet."""
    zero = jnp.zeros(rows, jnp.float32)
    return Softmax(jnp.full(rows, _LOW), zero, (zero,) * sums)


def sweep(head: Array, columns: int, visit: Any, carry: Any) -> Any:
    """carry = visit(carry, tile [D, columns], first column, new [columns]) over the vocabulary.

    The last tile begins early rather than reach past the end; `new` is False where an earlier one has been.
    """
    V = head.shape[1]
    if columns >= V:
        return visit(carry, head, 0, jnp.ones(V, bool))

    def one(i: Array, carry: Any) -> Any:
        first = jnp.minimum(i * columns, V - columns)
        tile = jax.lax.dynamic_slice_in_dim(head, first, columns, axis=1)
        return visit(carry, tile, first, first + jnp.arange(columns) >= i * columns)

    return jax.lax.fori_loop(0, -(-V // columns), one, carry)


def logits(x: Array, tile: Array, counted: Array) -> Array:
    """[R, columns], float32; very low where a column does not count."""
    products = jnp.dot(x, tile.astype(x.dtype), preferred_element_type=jnp.float32)
    return jnp.where(counted, products, _LOW)


def advance(state: Softmax, logits: Array, factors: tuple[Array, ...]) -> Softmax:
    """The running logsumexp with one tile more; each sum gains exp(logits) times its factor."""
    top = jnp.maximum(state.top, logits.max(axis=-1))
    shrink, weights = jnp.exp(state.top - top), jnp.exp(logits - top[:, None])
    sums = tuple(old * shrink + (weights * f).sum(axis=-1) for old, f in zip(state.sums, factors, strict=True))
    return Softmax(top, state.total * shrink + weights.sum(axis=-1), sums)


def better(best: Array, state: Softmax, logits: Array, first: Array) -> Array:
    """The most likely column with one tile more, before `advance`; of equals the first.

    Two plain reductions: on a CPU both vectorise, and the paired one of `jnp.argmax` takes ten times as long.
    """
    top, columns = logits.max(axis=-1), jnp.arange(logits.shape[-1], dtype=jnp.int32)
    here = first + jnp.where(logits == top[:, None], columns, len(columns) - 1).min(axis=-1)
    return jnp.where(top > state.top, here, best)


def merged(shares: HeadShares, states: tuple[Softmax, ...]) -> tuple[Softmax, ...]:
    """The logsumexps of all columns from those of each device's."""
    if not shares.columns:
        return states
    tops = shares.max(tuple(state.top for state in states))
    shrunk = [
        jax.tree.map(lambda x, factor=jnp.exp(state.top - top): x * factor, (state.total, state.sums))
        for state, top in zip(states, tops, strict=True)
    ]
    return tuple(Softmax(top, *sums) for top, sums in zip(tops, shares.sum(shrunk), strict=True))
