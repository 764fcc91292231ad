"""From partly to fully masked: which state of a trajectory a student is shown."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dstill_jax.distill.config import CurriculumConfig


def state_log_weights(
    config: CurriculumConfig, masked: Float[Array, "B A S"], progress: Float[Array, ""]
) -> Float[Array, "B A S"]:
    """Unnormalised log-probability of showing each state.

    Args:
      masked: share of masked slots of each state; state 0 is fully masked (share 1).
      progress: share of training done, in [0, 1).
    """
    states = masked.shape[-1]
    fully = jnp.where(jnp.arange(states) == 0, 0.0, -jnp.inf)
    log_m = jnp.log(jnp.maximum(masked, 1e-9))
    share = jnp.clip(progress / config.fraction, 0, 1)
    if config.kind == "full":
        return jnp.broadcast_to(fully, masked.shape)
    if config.kind == "fixed":
        return config.power * log_m
    if config.kind == "cyclic":
        level = jnp.arange(masked.shape[1])[:, None] % states
        return jnp.broadcast_to(jnp.where(jnp.arange(states) == level, 0.0, -jnp.inf), masked.shape)
    if config.kind == "linear":
        floor = 0.3 + 0.7 * share
        growing = jnp.where(masked >= floor - 1e-6, 0.0, -jnp.inf)
    else:
        growing = config.power * share * log_m
    over = jnp.log(jnp.where(jnp.arange(states) == 0, 1 - config.replay, config.replay / max(states - 1, 1)))
    return jnp.where(share >= 1, over, growing)


def sample_state(
    config: CurriculumConfig,
    key: Array,
    commit_pass: Int[Array, "B A K"],
    passes: int,
    progress: Float[Array, ""],
) -> Bool[Array, "B A K"]:
    """Which slots the student sees: those committed up to a random pass s in 0 .. passes - 1."""
    B, A, K = commit_pass.shape
    levels = jnp.arange(passes)
    masked = (commit_pass[..., None] > levels).mean(axis=2, dtype=jnp.float32) * (K / (K - 1))
    # A state that masks nothing teaches nothing (the teacher may finish early).
    weights = jnp.where(masked > 0, state_log_weights(config, masked, progress), -jnp.inf)
    level = jax.random.categorical(key, weights, axis=-1)
    return commit_pass <= level[..., None]
