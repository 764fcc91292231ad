"""Stage 2: one pass of the student against the end of the teacher's many passes (DStill, arXiv 2610.27379)."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from dstill_jax import blocks as blocks_lib
from dstill_jax.dims import Params
from dstill_jax.distill import conditioning
from dstill_jax.distill.conditioning import Frozen, Metrics, Task, TeacherView
from dstill_jax.distill.config import StageTwoConfig
from dstill_jax.distill.curriculum import sample_state
from dstill_jax.distill.trajectories import teacher_trajectory


def stage_two_loss(
    task: Task,
    config: StageTwoConfig,
    params: Params,
    frozen: Frozen,
    batch: dict[str, Array],
    key: Array,
    progress: Float[Array, ""],
) -> tuple[Array, Array, Metrics]:
    """(loss sum, weight, metrics) of one batch; `frozen.teacher` is the stage-1 drafter."""
    anchor_key, state_key = jax.random.split(key)
    data = conditioning.condition(task, frozen, batch, anchor_key)
    passes = config.passes or task.drafter.block_size - 1
    teacher = teacher_trajectory(
        task,
        frozen,
        frozen.teacher,  # type: ignore[arg-type]
        data,
        passes,
        config.order,
        config.threshold,
    )
    revealed = sample_state(config.curriculum, state_key, teacher.commit_pass, passes, progress)
    tokens = blocks_lib.mask_tokens(teacher.tokens, revealed, task.drafter.mask_token_id)
    context = conditioning.project(task, params, data)
    hidden = conditioning.run_pass(task, frozen, params, data, context, tokens)
    total, weight, metrics = conditioning.score(
        task,
        frozen,
        config.loss,
        data,
        hidden,
        revealed,
        progress,
        TeacherView(teacher.tokens, teacher.hidden),  # type: ignore[arg-type]
    )
    accepted = blocks_lib.accepted_prefix(teacher.tokens == data.blocks.tokens, data.blocks.scored)
    valid, count = data.blocks.valid, data.blocks.valid.sum().astype(jnp.float32)
    metrics["teacher_tau"] = ((valid * (1.0 + accepted)).sum(), count)
    metrics["masked_share"] = ((valid * (~revealed).sum(-1) / (revealed.shape[-1] - 1)).sum(), count)
    return total, weight, metrics
