"""Who sees what, as two intervals a row: one of context positions, one of slots of the row's own block.

Documents, sliding windows, causal blocks and dropped blocks all end here; nothing later knows of them. Every
implementation of block attention, the reference included, starts from these intervals.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Visibility(NamedTuple):
    """Half-open intervals, int32 [B, A, R]. A row sees context start..stop and slots own_start..own_stop of its block.

    Empty context intervals are (0, 0). Rows of dropped blocks see nothing.
    """

    start: jax.Array
    stop: jax.Array
    own_start: jax.Array
    own_stop: jax.Array

    def context_mask(self, context_length: int) -> jax.Array:
        """bool [B, A, R, S]: True = may attend."""
        return _inside(self.start, self.stop, context_length)

    def own_mask(self, block_size: int) -> jax.Array:
        """bool [B, A, R, K]: True = may attend."""
        return _inside(self.own_start, self.own_stop, block_size)

    def sighted(self, block_size: int) -> jax.Array:
        """bool [B, A, R]: rows that see anything, given a block of `block_size` own slots (0: context only)."""
        own = jnp.minimum(self.own_stop, block_size) > self.own_start
        return (self.stop > self.start) | own

    def used(self, context_length: int) -> jax.Array:
        """bool [B, S]: positions that some row sees. The others may hold anything, NaN included."""
        B = self.start.shape[0]
        edges = jnp.zeros((B, context_length + 1), jnp.int32)
        row = jnp.arange(B)[:, None]
        edges = edges.at[row, self.start.reshape(B, -1)].add(1).at[row, self.stop.reshape(B, -1)].add(-1)
        return jnp.cumsum(edges, axis=1)[:, :-1] > 0


def _inside(start: jax.Array, stop: jax.Array, length: int) -> jax.Array:
    index = jnp.arange(length)
    return (index >= start[..., None]) & (index < stop[..., None])


def _document_start(anchors: jax.Array, context_documents: jax.Array, block_documents: jax.Array | None) -> jax.Array:
    """First context position of the run of equal ids that ends just before each anchor; without one, max(anchor, 0).

    Documents are contiguous in a packed row. Should an id come back later in the row, that is another document.
    """
    B, S = context_documents.shape
    new = jnp.concatenate([jnp.ones((B, 1), bool), context_documents[:, 1:] != context_documents[:, :-1]], axis=1)
    run_start = jax.lax.cummax(jnp.where(new, jnp.arange(S), 0), axis=1)
    before = jnp.clip(anchors - 1, 0, S - 1)
    if block_documents is None:
        block_documents = jnp.take_along_axis(context_documents, jnp.clip(anchors, 0, S - 1), axis=1)
    same = jnp.take_along_axis(context_documents, before, axis=1) == block_documents
    return jnp.where(same, jnp.take_along_axis(run_start, before, axis=1), jnp.maximum(anchors, 0))


def visible_intervals(
    anchors: jax.Array,
    rows: int,
    block_size: int,
    context_length: int,
    *,
    valid: jax.Array | None,
    context_documents: jax.Array | None,
    block_documents: jax.Array | None,
    slots: jax.Array | None,
    causal: bool,
    window: int | None,
) -> Visibility:
    """The intervals of every row; arguments as in `block_attention`."""
    B, A = anchors.shape
    anchors = anchors.astype(jnp.int32)
    stop = jnp.clip(anchors, 0, context_length)
    start = jnp.zeros_like(stop)
    if context_documents is not None:
        start = _document_start(anchors, context_documents, block_documents)
    slot = jnp.broadcast_to(jnp.arange(rows), (B, A, rows)) if slots is None else slots.astype(jnp.int32)
    start, stop = (jnp.broadcast_to(x[..., None], slot.shape) for x in (start, stop))
    own_start = jnp.zeros_like(slot)
    own_stop = slot + 1 if causal else jnp.full_like(slot, block_size)
    if window is not None:  # the row at position p sees p - window + 1 .. p of what the other rules admit
        start = jnp.maximum(start, anchors[..., None] + slot - window + 1)
        own_start = jnp.maximum(own_start, slot - window + 1)
    if valid is not None:
        stop = jnp.where(valid[..., None], stop, 0)
        own_stop = jnp.where(valid[..., None], own_stop, 0)
    empty = start >= stop
    return Visibility(jnp.where(empty, 0, start), jnp.where(empty, 0, stop), own_start, own_stop)
