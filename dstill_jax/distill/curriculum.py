"""From partly to fully masked: which state of a trajectory a student is shown, and how far it has to get in a pass."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from dstill_jax.distill.config import CurriculumConfig


class Shown(NamedTuple):
    """The state of its trajectory in which each block is shown."""

    level: Int[Array, "B A 1"]  # passes of the teacher that are already done, 0 .. passes - 1
    revealed: Bool[Array, "B A K"]  # slots committed by then
    wanted: Bool[Array, "B A K"]  # slots that the student's next pass has to fill


def marks(passes: int, student_passes: int) -> tuple[np.ndarray, np.ndarray]:
    """(start, end) of the stretch that each state 0 .. passes - 1 lies in, as numbers of passes done.

    A student that keeps `student_passes` passes has to cover the teacher's `passes` in that many stretches, as equal as
    can be, the longer ones first. One pass: a single stretch from 0 to `passes`.
    """
    stretches = np.array_split(np.arange(passes), student_passes)
    start = np.concatenate([np.full(s.size, s[0]) for s in stretches])
    end = np.concatenate([np.full(s.size, s[-1] + 1) for s in stretches])
    return start, end


def state_log_weights(
    config: CurriculumConfig,
    masked: Float[Array, "B A S"],
    progress: Float[Array, ""],
    first: tuple[int, ...] = (0,),
) -> Float[Array, "B A S"]:
    """Unnormalised log-probability of showing each state.

    Args:
      masked: share of masked slots of each state, of those its stretch has to fill; state 0 is fully masked (share 1).
      progress: share of training done, in [0, 1).
      first: the first states of all stretches: those that count as fully masked.
    """
    states = masked.shape[-1]
    is_first = np.isin(np.arange(states), first)
    fully = jnp.where(is_first, 0.0, -jnp.inf)
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
    replayed = config.replay / max(states - len(first), 1)
    over = jnp.log(jnp.where(is_first, (1 - config.replay) / len(first), replayed))
    return jnp.where(share >= 1, over, growing)


def sample_state(
    config: CurriculumConfig,
    key: Array,
    commit_pass: Int[Array, "B A K"],
    passes: int,
    progress: Float[Array, ""],
    student_passes: int = 1,
) -> Shown:
    """A random state of each trajectory: what was committed up to pass s in 0 .. passes - 1."""
    start, end = marks(passes, student_passes)
    commit = commit_pass[..., None]
    masked = ((commit > np.arange(passes)) & (commit <= end)).sum(axis=2)
    whole = ((commit > start) & (commit <= end)).sum(axis=2)
    share = masked.astype(jnp.float32) / jnp.maximum(whole, 1)
    # A state that leaves nothing to fill teaches nothing (the teacher may finish early).
    weights = state_log_weights(config, share, progress, tuple(np.unique(start).tolist()))
    level = jax.random.categorical(key, jnp.where(masked > 0, weights, -jnp.inf), axis=-1)[..., None]
    revealed = commit_pass <= level
    return Shown(level, revealed, ~revealed & (commit_pass <= jnp.asarray(end)[level]))
