"""The key/value cache: a plain pytree with one row per sequence, each row at its own length.

Slot c of a row holds the token at absolute position c. Nothing here knows lengths: callers pass where to write, and
masks decide what is visible, so stale slots past a row's length are harmless and roll-back costs nothing.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


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

    Slots past the capacity are dropped. `layer` is a Python int for unrolled layers, traced for scanned ones.
    """
    which, inner = (0, layer) if len(cache.keys) == 1 else (layer, 0)
    old_k, old_v = cache.keys[which], cache.values[which]
    keys, values = _scatter((old_k, old_v), (k, v), inner, start)

    def put(arrays: tuple[Array, ...], updated: Array) -> tuple[Array, ...]:
        return (*arrays[:which], updated, *arrays[which + 1 :])

    return KVCache(put(cache.keys, keys), put(cache.values, values)), keys[inner], values[inner]


def chain_mask(start: Int[Array, "B"], num_new: int, capacity: int) -> Bool[Array, "B N C"]:
    """New row n, written at slot start + n, may attend to slots up to and including its own."""
    rows = start[:, None] + jnp.arange(num_new)
    return jnp.arange(capacity) <= rows[..., None]


def append_rows(cache: KVCache, new: NewRows, rows: Int[Array, "B R"], start: Int[Array, "B"]) -> KVCache:
    """Writes R of the new rows, in the order of `rows`, at slots start .. start + R - 1 of every layer.

    Slots past the capacity are dropped.
    """

    def put(old_k: Array, old_v: Array, k: Array, v: Array) -> tuple[Array, Array]:
        picked = (jnp.take_along_axis(x, rows[None, :, :, None, None], axis=2) for x in (k, v))
        return _scatter((old_k, old_v), tuple(jnp.moveaxis(x, 0, 2) for x in picked), slice(None), start)

    return KVCache(*zip(*map(put, cache.keys, cache.values, new.keys, new.values), strict=True))


def _scatter(
    old: tuple[Float[Array, "L B G E C"], Float[Array, "L B G C E"]],
    new: tuple[Float[Array, "B N *L G E"], ...],
    layers: int | Int[Array, ""] | slice,
    start: Int[Array, "B"],
) -> tuple[Array, Array]:
    """Keys and values with N rows of one layer, or of all, replaced from slot `start` on."""
    k, v = (x.astype(o.dtype) for x, o in zip(new, old, strict=True))
    if k.shape[:2] == (1, 1):
        # XLA turns the scatter of a single row into a write that it merges with the reads that follow, and then copies
        # the cache in every step to keep both. Two rows stay a scatter, in place; nothing admits the second one.
        k, v = (jnp.pad(x, ((0, 0), (0, 1), *((0, 0),) * (x.ndim - 2))) for x in (k, v))
    batch, slots = jnp.arange(k.shape[0])[:, None], start[:, None] + jnp.arange(k.shape[1])
    # Advanced indices apart from each other put [B, N] first: the new rows need no transpose.
    keys = old[0].at[layers, batch, :, :, slots].set(k, mode="drop")
    return keys, old[1].at[layers, batch, :, slots].set(v, mode="drop")
