"""The list of context tiles that a call reads, one grid step each. Tiles past a row's length are not on it."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

TILE_BITS = 16  # a step is packed as row << TILE_BITS | tile


class Steps(NamedTuple):
    """Steps [S] int32, of which the first `count` run; S is what full rows would need.

    A row without context has one step, for its tree alone. It fetches nothing: its `fetched` entry repeats that of the
    step before, and a block whose index does not change is not fetched again.
    """

    visited: Array  # [S]: row and tile that the step computes
    fetched: Array  # [S]: row and tile that its blocks hold
    count: Array  # []


def list_steps(lengths: Array, capacity: int, tile: int) -> Steps:
    """Steps over rows of `lengths` [B] in tiles of `tile` slots; lengths are clipped to 0..capacity.

    Raises:
      ValueError: more rows or tiles than a step can name.
    """
    B, longest = lengths.shape[0], -(-capacity // tile)
    if B >= 1 << (31 - TILE_BITS) or longest > 1 << TILE_BITS:
        raise ValueError(f"batch={B} must be below {1 << (31 - TILE_BITS)} and {capacity=} at most {tile << TILE_BITS}")
    tiles = (jnp.clip(lengths.astype(jnp.int32), 0, capacity) + tile - 1) // tile
    visits = jnp.maximum(tiles, 1)
    ends = jnp.cumsum(visits)
    step = jnp.arange(B * longest, dtype=jnp.int32)
    row = jnp.minimum(jnp.searchsorted(ends, step, side="right").astype(jnp.int32), B - 1)
    visited = (row << TILE_BITS) | (step - (ends - visits)[row]).astype(jnp.int32)
    has_tile = (tiles[row] > 0) & (step < ends[-1])
    last = jax.lax.cummax(jnp.where(has_tile, step, -1))
    first = jnp.argmax(has_tile).astype(jnp.int32)  # rows without context at the start hold the first real tile early
    return Steps(visited, visited[jnp.where(last >= 0, last, first)], ends[-1])
