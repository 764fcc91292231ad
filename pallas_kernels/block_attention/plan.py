"""What the kernels are told of the rows: blocks sorted by anchor, and which key tiles each query tile visits."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.block_attention.blocks import Tiling
from pallas_kernels.block_attention.visibility import Visibility

ROW_FIELDS = 4  # start, stop, own_start, own_stop: rows of `Plan.rows`
TILE_FIELDS = 5  # first, interior_first, interior_last, last, blind: of `Plan.tiles`


class Plan(NamedTuple):
    """Index arrays of one call. The last query tile is filled up with copies of the last block, which are not written.

    Key tiles first..last are visited; interior_first..interior_last, seen whole by every row, need no mask. A query tile is
    blind when a row of it sees nothing at all: that row may hold anything.
    """

    order: jax.Array  # int32 [B * query_tiles * blocks]: block at each sorted place
    tiles: jax.Array  # int32 [B * query_tiles * TILE_FIELDS]
    unused: jax.Array  # int32 [B * key_tiles]: 1 if the key tile holds a position that no row of the batch row sees
    rows: jax.Array  # int32 [B, query_tiles, ROW_FIELDS, rows]; own columns count from the tile's first block


def _to_rows(x: jax.Array, heads: int, t: Tiling) -> jax.Array:
    """[B, A, R] -> [B, A, N]: heads of a group one after another, the padding like the last row."""
    x = jnp.tile(x, (1, 1, heads))
    return jnp.pad(x, ((0, 0), (0, 0), (0, t.block_rows - x.shape[2])), mode="edge")


def make_plan(sees: Visibility, group_heads: int, context_length: int, t: Tiling) -> Plan:
    """Sorts the blocks of each batch row by where their context ends, which is also the order of the documents."""
    B, A, _ = sees.start.shape
    places = t.query_tiles * t.blocks
    order = jnp.argsort(sees.stop[:, :, 0], axis=1, stable=True).astype(jnp.int32)
    order = jnp.pad(order, ((0, 0), (0, places - A)), mode="edge")

    def sort(x: jax.Array) -> jax.Array:
        rows = jnp.take_along_axis(_to_rows(x, group_heads, t), order[..., None], axis=1)
        return rows.reshape(B, t.query_tiles, t.rows)

    start, stop, own_start, own_stop = (sort(x) for x in sees)
    empty = start >= stop
    first = jnp.where(empty, context_length, start).min(-1) // t.keys
    last = -(-stop.max(-1) // t.keys)
    first = jnp.minimum(first, last)
    interior_first = jnp.clip(-(-start.max(-1) // t.keys), first, last)
    interior_last = jnp.clip(stop.min(-1) // t.keys, interior_first, last)
    blind = (empty & (own_start >= own_stop)).any(-1)
    tiles = jnp.stack([first, interior_first, interior_last, last, blind], axis=-1)
    offset = jnp.repeat(jnp.arange(t.blocks) * t.block_keys, t.block_rows)
    rows = jnp.stack([start, stop, own_start + offset, own_stop + offset], axis=2)
    used = jnp.pad(sees.used(context_length), ((0, 0), (0, t.key_tiles * t.keys - context_length)))
    unused = ~used.reshape(B, t.key_tiles, t.keys).all(-1)
    return Plan(*(x.astype(jnp.int32) for x in (order.reshape(-1), tiles.reshape(-1), unused.reshape(-1), rows)))


def visited_and_needed(plan: Plan, batch: int, t: Tiling) -> tuple[jax.Array, jax.Array]:
    """Key tiles that are visited, and those with any visible pair, summed over query tiles: for tests and reports."""
    tiles = plan.tiles.reshape(batch, t.query_tiles, TILE_FIELDS)
    edges = jnp.arange(t.key_tiles)[:, None] * t.keys
    start, stop = plan.rows[:, :, 0, None, :], plan.rows[:, :, 1, None, :]
    seen = ((start < edges + t.keys) & (stop > edges) & (start < stop)).any(-1)
    return (tiles[..., 3] - tiles[..., 0]).sum(), seen.sum()
