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


def _logits(hidden: Float[Array, "R D"], head: Float[Array, "D V"]) -> Float[Array, "R V"]:
    return jnp.einsum("rd,dv->rv", hidden, head.astype(hidden.dtype), preferred_element_type=jnp.float32)


def _cross_entropy(log_p: Float[Array, "R V"], labels: Int[Array, "R"]) -> Float[Array, "R"]:
    picked = jnp.take_along_axis(log_p, jnp.maximum(labels, 0)[:, None], axis=-1)[:, 0]
    return jnp.where(labels >= 0, -picked, 0.0)


def _kl(log_p: Array, log_other: Array, direction: str) -> Float[Array, "R"]:
    """forward: KL(other || p); reverse: KL(p || other)."""
    if direction == "forward":
        return jnp.sum(jnp.exp(log_other) * (log_other - log_p), axis=-1)
    return jnp.sum(jnp.exp(log_p) * (log_p - log_other), axis=-1)


def _one_chunk(
    hidden: Float[Array, "R D"],
    inputs: RowInputs,
    head: Float[Array, "D V"],
    kl_direction: str,
    target_kl: bool,
    target_l1: bool,
) -> RowLosses:
    log_p = jax.nn.log_softmax(_logits(hidden, head), axis=-1)
    losses: dict[str, Any] = dict.fromkeys(RowLosses._fields)
    losses["data_ce"] = _cross_entropy(log_p, inputs.labels)
    losses["correct"] = (jnp.argmax(log_p, axis=-1) == inputs.labels) & (inputs.labels >= 0)
    if inputs.hard_labels is not None:
        losses["hard_ce"] = _cross_entropy(log_p, inputs.hard_labels)
    if inputs.teacher_hidden is not None:
        log_t = jax.nn.log_softmax(_logits(jax.lax.stop_gradient(inputs.teacher_hidden), head), axis=-1)
        losses["teacher_kl"] = _kl(log_p, log_t, kl_direction)
    if inputs.target_hidden is not None:
        log_t = jax.nn.log_softmax(_logits(jax.lax.stop_gradient(inputs.target_hidden), head), axis=-1)
        if target_kl:
            losses["target_kl"] = _kl(log_p, log_t, kl_direction)
        if target_l1:
            losses["target_l1"] = jnp.abs(jnp.exp(log_p) - jnp.exp(log_t)).sum(axis=-1)
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
) -> RowLosses:
    """Per-row losses of hidden states under a head, float32; gradients flow to `hidden` only through the chunk.

    Which terms are computed follows from which fields of `inputs` are given.
    """
    function = functools.partial(
        _one_chunk,
        head=jax.lax.stop_gradient(head),
        kl_direction=kl_direction,
        target_kl=target_kl,
        target_l1=target_l1,
    )
    with jax.named_scope("head_loss"):
        return map_rows(lambda h, i: function(h, i), chunk, hidden, inputs)


def greedy_with_confidence(
    hidden: Float[Array, "R D"],
    head: Float[Array, "D V"],
    banned: Bool[Array, "V"],
    chunk: int = DEFAULT_CHUNK,
) -> tuple[Int[Array, "R"], Float[Array, "R"]]:
    """The most likely column of each row, those in `banned` excepted, and its probability."""

    def one(h: Array) -> tuple[Array, Array]:
        logits = jnp.where(banned, -jnp.inf, _logits(h, head))
        best = jnp.argmax(logits, axis=-1)
        return best, jnp.exp(logits.max(axis=-1) - jax.nn.logsumexp(logits, axis=-1))

    return map_rows(one, chunk, hidden)
