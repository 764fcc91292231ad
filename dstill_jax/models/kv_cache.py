"""The key/value cache: a plain pytree with one row per sequence, each row at its own length.

Slot c of a row holds the token at absolute position c. Nothing here knows lengths: callers pass where to write, and
masks decide what is visible, so stale slots past a row's length are harmless and roll-back costs nothing.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dstill_jax.sharding.activations import active_mesh, local_shards, on_tpu


class KVCache(NamedTuple):
    """Keys and values of all layers.

    Each field is a tuple of arrays: one with L' = L when layers are scanned, or L arrays with L' = 1 when they are
    unrolled. The batch axis is 1 either way, so rows are gathered with one `jax.tree.map`. Keys have their slots last;
    `attention.py` says why.
    """

    keys: tuple[Float[Array, "L B G E C"], ...]
    values: tuple[Float[Array, "L B G C E"], ...]


class NewRows(NamedTuple):
    """Keys and values of N tokens that a pass has kept apart from the cache; tuples as in `KVCache`."""

    keys: tuple[Float[Array, "L B N G E"], ...]
    values: tuple[Float[Array, "L B N G E"], ...]


def init_cache(
    num_layers: int,
    batch: int,
    num_kv_heads: int,
    capacity: int,
    head_dim: int,
    dtype: jnp.dtype,
    stacked: bool,
) -> KVCache:
    """An empty cache; content is zero and never visible before it is written."""
    leading = (num_layers if stacked else 1, batch, num_kv_heads)
    count = 1 if stacked else num_layers

    def zeros(*shape: int) -> tuple[Array, ...]:
        return tuple(jnp.zeros((*leading, *shape), dtype) for _ in range(count))

    return KVCache(zeros(head_dim, capacity), zeros(capacity, head_dim))


def capacity_of(cache: KVCache) -> int:
    return cache.values[0].shape[3]


def write_layer(
    cache: KVCache,
    layer: int | Int[Array, ""],
    k: Float[Array, "B N G E"],
    v: Float[Array, "B N G E"],
    start: Int[Array, "B"],
) -> tuple[KVCache, Float[Array, "B G E C"], Float[Array, "B G C E"]]:
    """Writes N new rows at slots start .. start + N - 1 of one layer; returns the cache and that layer's keys, values.

    The rows must fit (`write_slots`). `layer` is a Python int for unrolled layers, traced for scanned ones.
    """
    which, inner = (0, layer) if len(cache.keys) == 1 else (layer, 0)
    old_k, old_v = cache.keys[which], cache.values[which]
    keys, values = write_slots((old_k, old_v), (k, v), start, inner)

    def put(arrays: tuple[Array, ...], updated: Array) -> tuple[Array, ...]:
        return (*arrays[:which], updated, *arrays[which + 1 :])

    return KVCache(put(cache.keys, keys), put(cache.values, values)), keys[inner], values[inner]


def chain_mask(start: Int[Array, "B"], num_new: int, capacity: int) -> Bool[Array, "B N C"]:
    """New row n, written at slot start + n, may attend to slots up to and including its own."""
    rows = start[:, None] + jnp.arange(num_new)
    return jnp.arange(capacity) <= rows[..., None]


def append_rows(cache: KVCache, new: NewRows, rows: Int[Array, "B R"], start: Int[Array, "B"]) -> KVCache:
    """Writes R of the new rows, in the order of `rows`, at slots start .. start + R - 1 of every layer.

    They must fit (`write_slots`).
    """

    def put(old_k: Array, old_v: Array, k: Array, v: Array) -> tuple[Array, Array]:
        picked = (jnp.take_along_axis(x, rows[None, :, :, None, None], axis=2) for x in (k, v))
        return write_slots((old_k, old_v), tuple(jnp.moveaxis(x, 0, 2) for x in picked), start, slice(None))

    return KVCache(*zip(*map(put, cache.keys, cache.values, new.keys, new.values), strict=True))


def write_slots(
    old: tuple[Float[Array, "*L B G E C"], Float[Array, "*L B G C E"]],
    new: tuple[Float[Array, "B N *L G E"], ...],
    start: Int[Array, "B"],
    layers: int | Int[Array, ""] | slice | None = None,
) -> tuple[Array, Array]:
    """Keys and values with N rows replaced from slot `start` on: of one layer, of all, or (None) of arrays of one.

    The rows must fit, start + N <= C: on TPUs a row that does not would be moved over what lies before it, elsewhere its
    slots past the capacity are dropped. Sessions have that much room (`Session.capacity`).
    """
    k, v = (x.astype(o.dtype) for x, o in zip(new, old, strict=True))
    if on_tpu():
        return _write_row_by_row(old, (k, v), start, layers)
    if k.shape[:2] == (1, 1):
        # XLA turns the scatter of a single row into a write that it merges with the reads that follow, and then copies
        # the cache in every step to keep both. Two rows stay a scatter, in place; nothing admits the second one.
        k, v = (jnp.pad(x, ((0, 0), (0, 1), *((0, 0),) * (x.ndim - 2))) for x in (k, v))
    batch, slots = jnp.arange(k.shape[0])[:, None], start[:, None] + jnp.arange(k.shape[1])
    # Advanced indices apart from each other put [B, N] first: the new rows need no transpose.
    first = (batch,) if layers is None else (layers, batch)
    keys = old[0].at[*first, :, :, slots].set(k, mode="drop")
    return keys, old[1].at[*first, :, slots].set(v, mode="drop")


def _write_row_by_row(
    old: tuple[Array, Array], new: tuple[Array, Array], start: Int[Array, "B"], layers: int | Array | slice | None
) -> tuple[Array, Array]:
    """A scatter would have its slots outermost on TPUs, and the kernels theirs innermost: the whole cache was copied from
    one layout to the other and back in every round."""
    if layers is None:
        return tuple(x[0] for x in _write_row_by_row((old[0][None], old[1][None]), new, start, 0))  # type: ignore[return-value]
    every = isinstance(layers, slice)
    k, v = (x if every else x[:, :, None] for x in new)
    fresh = k.transpose(2, 0, 3, 4, 1), v.transpose(2, 0, 3, 1, 4)

    def local(keys: Array, values: Array, k: Array, v: Array, layer: Array, start: Array) -> tuple[Array, Array]:
        def put(carry: tuple[Array, Array], row: tuple[Array, ...]) -> tuple[tuple[Array, Array], None]:
            keys, values = carry
            number, first, k, v = row
            keys = jax.lax.dynamic_update_slice(keys, k[:, None], (layer, number, 0, 0, first))
            return (keys, jax.lax.dynamic_update_slice(values, v[:, None], (layer, number, 0, first, 0))), None

        rows = jnp.arange(keys.shape[1]), start, jnp.moveaxis(k, 1, 0), jnp.moveaxis(v, 1, 0)
        return jax.lax.scan(put, (keys, values), rows)[0]

    arguments = (*old, *fresh, jnp.int32(0 if every else layers), start)
    if active_mesh() is None:
        return local(*arguments)
    cache = (None, "batch", "kv_heads", None, None)
    return local_shards(local, (cache,) * 4 + ((), ("batch",)), (cache, cache))(*arguments)
