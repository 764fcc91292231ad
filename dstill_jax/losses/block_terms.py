"""Losses of whole blocks, from the slots' own numbers; `distill/` adds them to the weighted slots.

Each is one number a block. None needs logits: the head has been applied before.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from dstill_jax.losses.config import BlockTerms
from dstill_jax.losses.weights import before_first_error

_NEVER = 1e9  # the cross-entropy of what cannot be drafted, finite so that gradients are


class Contrasted(NamedTuple):
    """Log-probabilities of two completions of a block, under the student and under the model it started from."""

    real: Float[Array, "B A K"]  # of the teacher's completion, by the student
    fake: Float[Array, "B A K"]  # of the one-pass completion, by the student
    reference_real: Float[Array, "B A K"]
    reference_fake: Float[Array, "B A K"]


def first_error_loss(
    data_ce: Float[Array, "B A K"],
    correct: Bool[Array, "B A K"],
    counted: Bool[Array, "B A K"],
    verified: Bool[Array, "B A K"],
    weights: Float[Array, "B A K"],
) -> Float[Array, "B A"]:
    """The weighted cross-entropy of the first verified slot that the drafter has wrong; 0 without one that counts.

    Focal loss of arXiv 2606.11552: which slot it is carries no gradient.
    """
    at_error = before_first_error(correct, verified) & ~correct & counted
    return jnp.where(at_error, weights * data_ce, 0.0).sum(-1)


def chain_loss(
    data_ce: Float[Array, "B A K"], counted: Bool[Array, "B A K"], verified: Bool[Array, "B A K"]
) -> Float[Array, "B A"]:
    """Mean over counted slots j of 1 - P_j, P_j the chance that a draw from the draft is right up to j: in [0, 1].

    The expected accepted length is the sum of the P_j (chain term of arXiv 2606.11552). Slots that are not
    verified do not break the chain; those that are and do not count, which the drafter cannot have right, end it. Its
    gradient is that of D-PACE without smoothing.
    """
    steps = jnp.where(counted, data_ce, jnp.where(verified, _NEVER, 0.0))
    reached = jnp.exp(-jnp.cumsum(steps, axis=-1))
    return jnp.where(counted, 1.0 - reached, 0.0).sum(-1) / jnp.maximum(counted.sum(-1), 1)


def contrast_loss(
    terms: BlockTerms, log_p: Contrasted, real_weights: Float[Array, "B A K"], fake_weights: Float[Array, "B A K"]
) -> Float[Array, "B A"]:
    """Direct discriminative optimisation (T3D, arXiv 2602.12262): raise one completion, lower the other.

    With d the student's mean log-probability of a completion less the reference's, slots weighed as given:
    -ddo_real log sigma(beta d(real)) - ddo_fake log(1 - sigma(beta d(fake))). A completion without weight costs 0.
    """

    def mean_gain(own: Array, reference: Array, weights: Array) -> tuple[Array, Array]:
        mass = weights.sum(-1)
        gain = (weights * (own - jax.lax.stop_gradient(reference))).sum(-1) / jnp.where(mass > 0, mass, 1.0)
        return terms.ddo_beta * gain, mass > 0

    real, has_real = mean_gain(log_p.real, log_p.reference_real, real_weights)
    fake, has_fake = mean_gain(log_p.fake, log_p.reference_fake, fake_weights)
    raised = jnp.where(has_real, -jax.nn.log_sigmoid(real), 0.0)
    lowered = jnp.where(has_fake, -jax.nn.log_sigmoid(-fake), 0.0)  # 1 - sigma(x) = sigma(-x)
    return terms.ddo_real * raised + terms.ddo_fake * lowered
