"""Stage 2: one pass of the student against the end of the teacher's many passes (DStill, arXiv 2610.27379)."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from dstill_jax import blocks as blocks_lib
from dstill_jax.dims import Params
from dstill_jax.distill import conditioning
from dstill_jax.distill.conditioning import Conditioned, Frozen, LaterState, Metrics, StalePass, Task, TeacherView
from dstill_jax.distill.config import StageTwoConfig
from dstill_jax.distill.curriculum import Shown, sample_state
from dstill_jax.distill.trajectories import teacher_trajectory
from dstill_jax.models.drafter import ContextKV
from dstill_jax.refinement import Trajectory


def stage_two_loss(
    task: Task,
    config: StageTwoConfig,
    params: Params,
    frozen: Frozen,
    batch: dict[str, Array],
    key: Array,
    progress: Float[Array, ""],
) -> tuple[Array, Array, Metrics]:
    """(loss sum, weight, metrics) of one batch; `frozen.teacher` is the stage-1 drafter, or the round before."""
    passes = config.passes or task.drafter.block_size - 1
    config.check_passes(passes, task.drafter.block_size - 1)
    anchor_key, state_key = jax.random.split(key)
    data = conditioning.condition(task, frozen, batch, anchor_key)
    of_teacher: Params = frozen.teacher  # type: ignore[assignment]
    teacher_context = conditioning.project(task, of_teacher, data)
    teacher = teacher_trajectory(
        task, frozen, of_teacher, data, teacher_context, passes, config.order, config.threshold
    )
    shown = sample_state(config.curriculum, state_key, teacher.commit_pass, passes, progress, config.student_passes)
    tokens = blocks_lib.mask_tokens(teacher.tokens, shown.revealed, task.drafter.mask_token_id)
    context = conditioning.project(task, params, data)
    hidden = conditioning.run_pass(task, frozen, params, data, context, tokens)
    later = stale = None
    if config.loss.uses("consistency_kl"):
        own = config.loss.consistency_with == "student"
        model = (params, context) if own else (of_teacher, teacher_context)
        later = _later_state(task, frozen, *model, data, teacher, shown)
    if config.loss.whole.contrasts:
        ahead = conditioning.run_pass(task, frozen, of_teacher, data, teacher_context, tokens)
        stale = StalePass(conditioning.pick(task, frozen, ahead)[0], jax.lax.stop_gradient(ahead))
    view = TeacherView(teacher.tokens, teacher.hidden, shown.wanted, later, stale)  # type: ignore[arg-type]
    total, weight, metrics = conditioning.score(task, frozen, config.loss, data, hidden, shown.revealed, progress, view)
    accepted = blocks_lib.accepted_prefix(teacher.tokens == data.blocks.tokens, data.blocks.scored)
    valid, count = data.blocks.valid, data.blocks.valid.sum().astype(jnp.float32)
    metrics["teacher_tau"] = ((valid * (1.0 + accepted)).sum(), count)
    metrics["masked_share"] = ((valid * (~shown.revealed).sum(-1) / (task.drafter.block_size - 1)).sum(), count)
    return total, weight, metrics


def _later_state(
    task: Task,
    frozen: Frozen,
    params: Params,
    context: ContextKV,
    data: Conditioned,
    teacher: Trajectory,
    shown: Shown,
) -> LaterState:
    """A model's output for the state one pass further on, held fixed, and the slots still masked there."""
    revealed = teacher.commit_pass <= shown.level + 1
    tokens = blocks_lib.mask_tokens(teacher.tokens, revealed, task.drafter.mask_token_id)
    hidden = conditioning.run_pass(task, frozen, params, data, context, tokens)
    return LaterState(jax.lax.stop_gradient(hidden), ~revealed)
