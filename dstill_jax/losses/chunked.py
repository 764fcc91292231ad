"""The head and everything that needs whole rows of logits, a chunk of rows at a time.

No [rows, vocabulary] array outlives a chunk, forward or backward: each chunk is recomputed in the backward pass.
With 8192 rows and a vocabulary of 151,936 the dense form would hold 5 GB of float32 per distribution.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

DEFAULT_CHUNK = 512


class RowLosses(NamedTuple):
    """One number a row; terms that were not asked for are None."""

    data_ce: Float[Array, "R"]
    hard_ce: Float[Array, "R"] | None
    teacher_kl: Float[Array, "R"] | None
    target_kl: Float[Array, "R"] | None
    target_l1: Float[Array, "R"] | None
    correct: Bool[Array, "R"]  # argmax is the label


class RowInputs(NamedTuple):
    """What a row of hidden states is compared with. Labels below 0 cannot be predicted: their loss is 0."""

    labels: Int[Array, "R"]
    hard_labels: Int[Array, "R"] | None = None
    teacher_hidden: Float[Array, "R D"] | None = None  # the head turns it into the teacher's distribution
    target_hidden: Float[Array, "R D"] | None = None  # and this one into the target's


class WholeRows:
    """How a chunk is reduced over the vocabulary when each device holds all of it. `vocabulary.py` has the other way."""

    def gather(self, rows: Array) -> Array:
        """The rows whose logits this device computes a part of."""
        return rows

    def log_softmax(self, logits: Float[Array, "R V"]) -> Float[Array, "R V"]:
        return jax.nn.log_softmax(logits, axis=-1)

    def sum(self, terms: Float[Array, "R V"]) -> Float[Array, "R"]:
        return jnp.sum(terms, axis=-1)

    def pick(self, log_p: Float[Array, "R V"], columns: Int[Array, "R"]) -> Float[Array, "R"]:
        return jnp.take_along_axis(log_p, columns[:, None], axis=-1)[:, 0]

    def argmax(self, logits: Float[Array, "R V"]) -> Int[Array, "R"]:
        return jnp.argmax(logits, axis=-1)

    def best(self, logits: Float[Array, "R V"]) -> tuple[Int[Array, "R"], Float[Array, "R"]]:
        """The largest column and its probability."""
        return self.argmax(logits), jnp.exp(logits.max(axis=-1) - jax.nn.logsumexp(logits, axis=-1))


_WHOLE_ROWS = WholeRows()


def _logits(hidden: Float[Array, "R D"], head: Float[Array, "D V"]) -> Float[Array, "R V"]:
    return jnp.einsum("rd,dv->rv", hidden, head.astype(hidden.dtype), preferred_element_type=jnp.float32)


def _cross_entropy(log_p: Float[Array, "R V"], labels: Int[Array, "R"], columns: WholeRows) -> Float[Array, "R"]:
    return jnp.where(labels >= 0, -columns.pick(log_p, jnp.maximum(labels, 0)), 0.0)


def _kl(log_p: Array, log_other: Array, direction: str, columns: WholeRows) -> Float[Array, "R"]:
    """forward: KL(other || p); reverse: KL(p || other)."""
    if direction == "forward":
        return columns.sum(jnp.exp(log_other) * (log_other - log_p))
    return columns.sum(jnp.exp(log_p) * (log_p - log_other))


def _one_chunk(
    hidden: Float[Array, "R D"],
    inputs: RowInputs,
    head: Float[Array, "D V"],
    kl_direction: str,
    target_kl: bool,
    target_l1: bool,
    columns: WholeRows,
) -> RowLosses:
    def log_softmax(rows: Array) -> Array:
        return columns.log_softmax(_logits(columns.gather(rows), head))

    log_p = log_softmax(hidden)
    losses: dict[str, Any] = dict.fromkeys(RowLosses._fields)
    losses["data_ce"] = _cross_entropy(log_p, inputs.labels, columns)
    losses["correct"] = (columns.argmax(log_p) == inputs.labels) & (inputs.labels >= 0)
    if inputs.hard_labels is not None:
        losses["hard_ce"] = _cross_entropy(log_p, inputs.hard_labels, columns)
    if inputs.teacher_hidden is not None:
        log_t = log_softmax(jax.lax.stop_gradient(inputs.teacher_hidden))
        losses["teacher_kl"] = _kl(log_p, log_t, kl_direction, columns)
    if inputs.target_hidden is not None:
        log_t = log_softmax(jax.lax.stop_gradient(inputs.target_hidden))
        if target_kl:
            losses["target_kl"] = _kl(log_p, log_t, kl_direction, columns)
        if target_l1:
            losses["target_l1"] = columns.sum(jnp.abs(jnp.exp(log_p) - jnp.exp(log_t)))
    return RowLosses(**losses)


def map_rows(function: Callable[..., Any], chunk: int, *arrays: Any) -> Any:
    """Applies `function` to chunks of rows, one after the other, and joins the results; rows are padded with zeros.

    The backward pass recomputes each chunk.
    """
    rows = jax.tree.leaves(arrays)[0].shape[0]
    count = -(-rows // chunk)

    def split(x: Array) -> Array:
        padded = jnp.pad(x, ((0, count * chunk - rows), *((0, 0),) * (x.ndim - 1)))
        return padded.reshape(count, chunk, *x.shape[1:])

    if count == 1:
        return jax.checkpoint(function)(*arrays)
    out = jax.lax.map(jax.checkpoint(lambda args: function(*args)), jax.tree.map(split, arrays))
    return jax.tree.map(lambda x: x.reshape(count * chunk, *x.shape[2:])[:rows], out)


def row_losses(
    hidden: Float[Array, "R D"],
    inputs: RowInputs,
    head: Float[Array, "D V"],
    *,
    kl_direction: str = "forward",
    target_kl: bool = False,
    target_l1: bool = False,
    chunk: int = DEFAULT_CHUNK,
    columns: WholeRows = _WHOLE_ROWS,
) -> RowLosses:
    """Per-row losses of hidden states under a head, float32; gradients flow to `hidden` only through the chunk.

    Which terms are computed follows from which fields of `inputs` are given; `columns`, who holds the vocabulary.
    """
    function = functools.partial(
        _one_chunk,
        head=jax.lax.stop_gradient(head),
        kl_direction=kl_direction,
        target_kl=target_kl,
        target_l1=target_l1,
        columns=columns,
    )
    with jax.named_scope("head_loss"):
        return map_rows(lambda h, i: function(h, i), chunk, hidden, inputs)


def greedy_with_confidence(
    hidden: Float[Array, "R D"],
    head: Float[Array, "D V"],
    banned: Bool[Array, "V"],
    chunk: int = DEFAULT_CHUNK,
    columns: WholeRows = _WHOLE_ROWS,
) -> tuple[Int[Array, "R"], Float[Array, "R"]]:
    """The most likely column of each row, those in `banned` excepted, and its probability."""

    def one(h: Array) -> tuple[Array, Array]:
        return columns.best(jnp.where(banned, -jnp.inf, _logits(columns.gather(h), head)))

    return map_rows(one, chunk, hidden)
