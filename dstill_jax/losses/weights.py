"""How slots are weighed: functions of ranks, correctness and probabilities; none carries a gradient."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dstill_jax.losses.config import LossConfig, TermWeights


def decay_weights(rank: Int[Array, "*batch K"], gamma: float) -> Float[Array, "*batch K"]:
    """exp(-rank / gamma): an early error wastes every later slot (arXiv 2602.06036, eq. 4)."""
    return jnp.exp(-rank.astype(jnp.float32) / gamma)


def dpace_weights(
    label_probability: Float[Array, "*batch K"],
    counted: Bool[Array, "*batch K"],
    verified: Bool[Array, "*batch K"],
    alpha: float,
) -> Float[Array, "*batch K"]:
    """D-PACE: w_k = sum over j >= k of P_j, P_j = product over i <= j of ((1 - alpha) p_i + alpha).

    Slots that are not verified do not shorten the survival of later ones; those not counted do not add to the sum.
    """
    smoothed = jnp.where(verified, (1 - alpha) * label_probability + alpha, 1.0)
    survival = jnp.cumprod(smoothed, axis=-1) * counted
    return jax.lax.stop_gradient(jnp.cumsum(survival[..., ::-1], axis=-1)[..., ::-1])


def before_first_error(correct: Bool[Array, "*batch K"], verified: Bool[Array, "*batch K"]) -> Bool[Array, "*batch K"]:
    """True up to and including the first verified slot that is wrong."""
    wrong = (verified & ~correct).astype(jnp.int32)
    return jnp.cumsum(wrong, axis=-1) - wrong == 0


def auf_weights(
    correct: Bool[Array, "*batch K"], verified: Bool[Array, "*batch K"], residual: Float[Array, ""] | float
) -> Float[Array, "*batch K"]:
    """1 while the drafter's own prefix is right, `residual` after its first error: the slots a verifier never reaches."""
    return jnp.where(before_first_error(correct, verified), 1.0, residual)


def auf_residual(config: LossConfig, progress: Float[Array, ""]) -> Float[Array, ""]:
    """From 1 to `auf_residual`, linearly over the first `auf_anneal_fraction` of training."""
    if config.auf_anneal_fraction == 0:
        return jnp.float32(config.auf_residual)
    share = jnp.clip(progress / config.auf_anneal_fraction, 0, 1)
    return 1 + (config.auf_residual - 1) * share


def slot_weights(
    config: LossConfig,
    rank: Int[Array, "B A K"],
    counted: Bool[Array, "B A K"],
    verified: Bool[Array, "B A K"],
    correct: Bool[Array, "B A K"],
    label_probability: Float[Array, "B A K"],
    progress: Float[Array, ""],
) -> Float[Array, "B A K"]:
    """The weight of each slot; zero where not counted. `progress` is the share of training done.

    Args:
      verified: slots at which the drafter can be wrong: those that count, and those whose token it cannot draft.
      label_probability: 0 there.
    """
    if config.weighting == "decay":
        weights = decay_weights(rank, config.gamma)
    elif config.weighting == "uniform":
        weights = jnp.ones(rank.shape, jnp.float32)
    elif config.weighting == "dpace":
        weights = dpace_weights(label_probability, counted, verified, config.dpace_alpha)
    else:
        weights = auf_weights(correct, verified, auf_residual(config, progress))
    return jax.lax.stop_gradient(jnp.where(counted, weights, 0.0))


def term_weights(config: LossConfig, term: str, num_slots: int) -> Float[Array, "K"]:
    """How much a term counts on slots 0 .. K - 1."""

    def pick(weights: TermWeights) -> float:
        return getattr(weights, term)

    return jnp.full(num_slots, pick(config.rest), jnp.float32).at[1].set(pick(config.first)).at[0].set(0.0)
