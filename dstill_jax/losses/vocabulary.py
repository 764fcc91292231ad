"""Losses of drafted slots over a vocabulary that devices share: logits and head stay where they are.

Called by `distill/`. Hidden rows travel to the shares of the head, one chunk at a time; maxima and sums over the
vocabulary travel back. Without a mesh these are the functions of `chunked.py`, on flattened slots.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dstill_jax.losses.chunked import (
    DEFAULT_CHUNK,
    RowInputs,
    RowLosses,
    WholeRows,
    greedy_with_confidence,
    row_losses,
)
from dstill_jax.sharding.activations import active_mesh, local_shards, logical_rows

_SHARES = ("fsdp", "tensor")  # of the vocabulary; rows are dealt over fsdp, too, so they are gathered over it


class SharedColumns(WholeRows):
    """Reductions over a vocabulary whose columns lie on the devices of `fsdp` and `tensor`, inside a `shard_map`.

    Logits are [rows of the whole fsdp group, own columns]; each result is for the device's own rows.
    """

    def gather(self, rows: Array) -> Array:
        return _gather_rows(rows)

    def log_softmax(self, logits: Array) -> Array:
        top = jax.lax.pmax(jax.lax.stop_gradient(logits).max(axis=-1, keepdims=True), _SHARES)
        shifted = logits - top
        total = jax.lax.psum(jnp.exp(shifted).sum(axis=-1, keepdims=True), _SHARES)
        return shifted - jnp.log(total)

    def sum(self, terms: Array) -> Array:
        return self._own_sum(jnp.sum(terms, axis=-1))

    def pick(self, log_p: Array, columns: Array) -> Array:
        column = jax.lax.all_gather(columns, "fsdp", axis=0, tiled=True) - self._first(log_p)
        mine = (column >= 0) & (column < log_p.shape[-1])
        picked = super().pick(log_p, jnp.where(mine, column, 0))
        return self._own_sum(jnp.where(mine, picked, 0.0))

    def argmax(self, logits: Array) -> Array:
        """The first of the largest columns, as `jnp.argmax` has it."""
        logits = jax.lax.stop_gradient(logits)
        top = logits.max(axis=-1)
        column = jnp.argmax(logits, axis=-1).astype(jnp.int32) + self._first(logits)
        is_top = top == jax.lax.pmax(top, _SHARES)
        return self._own_rows(jax.lax.pmin(jnp.where(is_top, column, jnp.iinfo(jnp.int32).max), _SHARES))

    def best(self, logits: Array) -> tuple[Array, Array]:
        top = jax.lax.pmax(logits.max(axis=-1), _SHARES)
        total = jax.lax.psum(jnp.exp(logits - top[:, None]).sum(axis=-1), _SHARES)
        return self.argmax(logits), self._own_rows(1.0 / total)

    def _first(self, logits: Array) -> Array:
        share = jax.lax.axis_index("fsdp") * jax.lax.axis_size("tensor") + jax.lax.axis_index("tensor")
        return (share * logits.shape[-1]).astype(jnp.int32)

    def _own_sum(self, partial: Array) -> Array:
        return jax.lax.psum(jax.lax.psum_scatter(partial, "fsdp", scatter_dimension=0, tiled=True), "tensor")

    def _own_rows(self, values: Array) -> Array:
        own = values.shape[0] // jax.lax.axis_size("fsdp")
        return jax.lax.dynamic_slice_in_dim(values, jax.lax.axis_index("fsdp") * own, own)


@jax.custom_vjp
def _gather_rows(rows: Array) -> Array:
    return jax.lax.all_gather(rows, "fsdp", axis=0, tiled=True)


def _gather_rows_backward(_: None, gradient: Array) -> tuple[Array]:
    """Shares of a row's gradient are summed in float32: there are as many of them as shares of the vocabulary."""
    total = jax.lax.psum_scatter(gradient.astype(jnp.float32), "fsdp", scatter_dimension=0, tiled=True)
    return (total.astype(gradient.dtype),)


_gather_rows.defvjp(lambda rows: (_gather_rows(rows), None), _gather_rows_backward)


def slot_losses(
    hidden: Float[Array, "B A J D"],
    inputs: RowInputs,
    head: Float[Array, "D V"],
    *,
    kl_direction: str = "forward",
    target_kl: bool = False,
    target_l1: bool = False,
    chunk: int = DEFAULT_CHUNK,
) -> RowLosses:
    """`chunked.row_losses` of slots; fields of `inputs` and of the result lead with [B, A, J].

    `chunk` is the rows that a device adds to each chunk: on a mesh, `chunk * fsdp` rows meet a share of the vocabulary.
    """

    def local(hidden: Array, inputs: RowInputs, head: Array, columns: WholeRows) -> RowLosses:
        losses = row_losses(
            _flat(hidden, 3),
            jax.tree.map(lambda x: _flat(x, 3), inputs),
            head,
            kl_direction=kl_direction,
            target_kl=target_kl,
            target_l1=target_l1,
            chunk=chunk,
            columns=columns,
        )
        return jax.tree.map(lambda x: x.reshape(hidden.shape[:3]), losses)

    if active_mesh() is None:
        return local(hidden, inputs, head, WholeRows())
    head = jax.lax.stop_gradient(head)
    compared = inputs.target_hidden is not None
    asked = {
        "data_ce": True,
        "hard_ce": inputs.hard_labels is not None,
        "teacher_kl": inputs.teacher_hidden is not None,
        "target_kl": target_kl and compared,
        "target_l1": target_l1 and compared,
        "correct": True,
    }
    axes: dict[str, Any] = {name: logical_rows(3) if is_asked else None for name, is_asked in asked.items()}
    given = (logical_rows(4, None), jax.tree.map(lambda x: logical_rows(x.ndim), inputs), (None, "vocab"))
    return _shared(local, given, RowLosses(**axes))(hidden, inputs, head)


def slot_choices(
    hidden: Float[Array, "B A J D"],
    head: Float[Array, "D V"],
    banned: Bool[Array, "V"],
    chunk: int = DEFAULT_CHUNK,
) -> tuple[Int[Array, "B A J"], Float[Array, "B A J"]]:
    """`chunked.greedy_with_confidence` of slots."""

    def local(hidden: Array, head: Array, banned: Array, columns: WholeRows) -> tuple[Array, Array]:
        best, sure = greedy_with_confidence(_flat(hidden, 3), head, banned, chunk, columns)
        return best.reshape(hidden.shape[:3]), sure.reshape(hidden.shape[:3])

    if active_mesh() is None:
        return local(hidden, head, banned, WholeRows())
    given = (logical_rows(4, None), (None, "vocab"), ("vocab",))
    return _shared(local, given, (logical_rows(3), logical_rows(3)))(hidden, head, banned)


def _shared(local: Any, given: Any, made: Any) -> Any:
    return local_shards(functools.partial(local, columns=SharedColumns()), given, made)


def _flat(x: Array, axes: int) -> Array:
    return x.reshape(-1, *x.shape[axes:])
