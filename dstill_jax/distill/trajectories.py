"""The teacher's multi-pass completions of masked blocks, computed inside the training step."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from dstill_jax.dims import Params
from dstill_jax.distill import conditioning
from dstill_jax.distill.conditioning import Conditioned, Frozen, Task
from dstill_jax.losses.chunked import greedy_with_confidence
from dstill_jax.refinement import CommitOrder, Trajectory, refine


def teacher_trajectory(
    task: Task,
    frozen: Frozen,
    teacher: Params,
    data: Conditioned,
    passes: int,
    order: CommitOrder,
    threshold: float,
) -> Trajectory:
    """Completes every block from its anchor alone; context keys and values are computed once for all passes.

    Left to right, a pass needs the head on the slots it commits only, and its last layer on those slots only.
    """
    context = conditioning.project(task, teacher, data)
    columns = None if frozen.label_map is None else column_tokens(frozen)
    banned = conditioning.banned_columns(task, frozen)

    def hidden_fn(tokens: Array, slots: Array) -> Array:
        return conditioning.run_pass(task, frozen, teacher, data, context, tokens, slots)

    def choose_fn(hidden: Array, slots: Array) -> tuple[Array, Array]:
        flat = hidden.reshape(-1, hidden.shape[-1])
        best, sure = greedy_with_confidence(flat, frozen.head, banned, task.head_chunk)
        best = best if columns is None else columns[best]
        return best.reshape(slots.shape).astype(jnp.int32), sure.reshape(slots.shape)

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


def column_tokens(frozen: Frozen) -> Int[Array, "V'"]:
    """Token id of each head column: the inverse of `label_map`; 0, and banned, where a column stands for none."""
    assert frozen.label_map is not None
    V = frozen.label_map.shape[0]
    target = jnp.where(frozen.label_map >= 0, frozen.label_map, frozen.head.shape[1])
    return jnp.zeros(frozen.head.shape[1], jnp.int32).at[target].set(jnp.arange(V, dtype=jnp.int32), mode="drop")
