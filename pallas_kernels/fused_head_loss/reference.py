"""Losses of hidden states under a head, with whole rows of logits: plain, dense JAX. This file is the specification."""

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.fused_head_loss.terms import HeadChoice, HeadLosses, Term


def head_losses_reference(
    hidden: Array,  # [R, D]
    head: Array,  # [D, V]
    labels: tuple[Array, ...],  # int [R] each
    others: tuple[Array, ...],  # [R, D] each
    terms: tuple[Term, ...],
) -> HeadLosses:
    """Every term in float32. Gradients flow to `hidden`, and to `head` through the logits of `hidden` alone."""

    def log_softmax(x: Array, matrix: Array) -> tuple[Array, Array]:
        logits = jnp.dot(x, matrix.astype(x.dtype), preferred_element_type=jnp.float32)
        return jax.nn.log_softmax(logits, axis=-1), logits

    log_p, logits = log_softmax(hidden, head)
    frozen = jax.lax.stop_gradient((others, head))
    log_others = [log_softmax(other, frozen[1])[0] for other in frozen[0]]
    values = []
    for kind, operand in terms:
        if kind == "ce":
            label = labels[operand]
            picked = jnp.take_along_axis(log_p, jnp.maximum(label, 0)[:, None], axis=-1)[:, 0]
            values.append(jnp.where(label >= 0, -picked, 0.0))
            continue
        log_q = log_others[operand]
        if kind == "kl_forward":
            values.append(jnp.sum(jnp.exp(log_q) * (log_q - log_p), axis=-1))
        elif kind == "kl_reverse":
            values.append(jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1))
        else:
            values.append(jnp.abs(jnp.exp(log_p) - jnp.exp(log_q)).sum(axis=-1))
    return HeadLosses(tuple(values), jnp.argmax(logits, axis=-1).astype(jnp.int32))


def head_choice_reference(hidden: Array, head: Array, banned: Array) -> HeadChoice:
    """Shapes as in `fused_head_choice`."""
    logits = jnp.dot(hidden, head.astype(hidden.dtype), preferred_element_type=jnp.float32)
    p = jax.nn.softmax(jnp.where(banned, -jnp.inf, logits), axis=-1)
    return HeadChoice(jnp.argmax(p, axis=-1).astype(jnp.int32), p.max(axis=-1))
