"""The teacher's multi-pass completions of masked blocks, computed inside the training step."""

import jax
from jaxtyping import Array

from dstill_jax.dims import Params
from dstill_jax.distill import conditioning
from dstill_jax.distill.conditioning import Conditioned, Frozen, Task
from dstill_jax.models.drafter import ContextKV
from dstill_jax.refinement import CommitOrder, Trajectory, refine


def teacher_trajectory(
    task: Task,
    frozen: Frozen,
    teacher: Params,
    data: Conditioned,
    context: ContextKV,
    passes: int,
    order: CommitOrder,
    threshold: float,
) -> Trajectory:
    """Completes every block from its anchor alone; `context` is the teacher's, computed once for all passes.

    Left to right, a pass needs the head on the slots it commits only, and its last layer on those slots only.
    """

    def hidden_fn(tokens: Array, slots: Array) -> Array:
        return conditioning.run_pass(task, frozen, teacher, data, context, tokens, slots)

    def choose_fn(hidden: Array, slots: Array) -> tuple[Array, Array]:
        return conditioning.pick(task, frozen, hidden)

    with jax.named_scope("teacher"):
        trajectory = refine(
            hidden_fn,
            choose_fn,
            data.blocks.tokens[..., 0],
            task.drafter.block_size,
            task.drafter.mask_token_id,
            passes,
            order,
            threshold,
            keep_hidden=True,
        )
    return jax.lax.stop_gradient(trajectory)
