"""The key/value cache: a plain pytree with one row per sequence, each row at its own length.

Slot c of a row holds the token at absolute position c. Nothing here knows lengths: callers pass where to write, and
masks decide what is visible, so stale slots past a row's length are harmless and roll-back costs nothing.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


class KVCache(NamedTuple):
    """Keys and values of all layers.

    Each field is a tuple of arrays [L', B, G, C, E]: one array with L' = L when layers are scanned, or L arrays with
    L' = 1 when they are unrolled. The batch axis is 1 either way, so rows are gathered with one `jax.tree.map`.
    """

    keys: tuple[Float[Array, "L B G C E"], ...]
    values: tuple[Float[Array, "L B G C E"], ...]


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
    shape = (num_layers if stacked else 1, batch, num_kv_heads, capacity, head_dim)
    return KVCache(*(tuple(jnp.zeros(shape, dtype) for _ in range(1 if stacked else num_layers)) for _ in range(2)))


def capacity_of(cache: KVCache) -> int:
    return cache.keys[0].shape[3]


def write_layer(
    cache: KVCache,
    layer: int | Int[Array, ""],
    k: Float[Array, "B N G E"],
    v: Float[Array, "B N G E"],
    start: Int[Array, "B"],
) -> tuple[KVCache, Float[Array, "B G C E"], Float[Array, "B G C E"]]:
    """Writes N new rows at slots start .. start + N - 1 of one layer; returns the cache and that layer's keys, values.

    Slots past the capacity are dropped. `layer` is a Python int for unrolled layers, traced for scanned ones.
    """
    B, N = k.shape[:2]
    batch = jnp.arange(B)[:, None]
    slots = start[:, None] + jnp.arange(N)

    def write(arrays: tuple[Array, ...], new: Array) -> tuple[tuple[Array, ...], Array]:
        which, inner = (0, layer) if len(arrays) == 1 else (layer, 0)
        # Advanced indices apart from each other put [B, N] first: the values need no transpose.
        updated = arrays[which].at[inner, batch, :, slots].set(new.astype(arrays[which].dtype), mode="drop")
        return (*arrays[:which], updated, *arrays[which + 1 :]), updated[inner]

    keys, layer_k = write(cache.keys, k)
    values, layer_v = write(cache.values, v)
    return KVCache(keys, values), layer_k, layer_v


def chain_mask(start: Int[Array, "B"], num_new: int, capacity: int) -> Bool[Array, "B N C"]:
    """New row n, written at slot start + n, may attend to slots up to and including its own."""
    rows = start[:, None] + jnp.arange(num_new)
    return jnp.arange(capacity) <= rows[..., None]
