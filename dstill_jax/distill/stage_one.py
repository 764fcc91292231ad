"""Stage 1: complete partially revealed blocks. With full views only, the DFlash baseline."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from dstill_jax import blocks as blocks_lib
from dstill_jax.dims import Params
from dstill_jax.distill import conditioning
from dstill_jax.distill.conditioning import Frozen, Metrics, Task
from dstill_jax.distill.config import StageOneConfig
from dstill_jax.losses.chunked import greedy_with_confidence


def stage_one_loss(
    task: Task,
    config: StageOneConfig,
    params: Params,
    frozen: Frozen,
    batch: dict[str, Array],
    key: Array,
    progress: Float[Array, ""],
) -> tuple[Array, Array, Metrics]:
    """(loss sum, weight, metrics) of one batch. `progress` in [0, 1) picks the view mix."""
    anchor_key, view_key = jax.random.split(key)
    data = conditioning.condition(task, frozen, batch, anchor_key)
    context = conditioning.project(task, params, data)
    confidence = None
    if config.views.own_order or config.late_views.own_order:
        confidence = _first_pass_confidence(task, params, frozen, data, context)
    late = progress >= config.late_from
    shares = jnp.where(late, jnp.asarray(config.late_views.shares), jnp.asarray(config.views.shares))
    decay = jnp.where(late, config.late_views.prefix_decay, config.views.prefix_decay)
    revealed = blocks_lib.sample_views(view_key, shares, decay, data.blocks, confidence)
    tokens = blocks_lib.mask_tokens(data.blocks.tokens, revealed, task.drafter.mask_token_id)
    hidden = conditioning.run_pass(task, frozen, params, data, context, tokens)
    return conditioning.score(task, frozen, config.loss, data, hidden, revealed, progress)


def _first_pass_confidence(
    task: Task, params: Params, frozen: Frozen, data: conditioning.Conditioned, context: conditioning.ContextKV
) -> Float[Array, "B A K"]:
    """How sure the drafter is of each slot when nothing is revealed; no gradient."""
    slots = jnp.arange(task.drafter.block_size) == 0
    tokens = blocks_lib.mask_tokens(data.blocks.tokens, slots, task.drafter.mask_token_id)
    hidden = jax.lax.stop_gradient(conditioning.run_pass(task, frozen, params, data, context, tokens))
    _, sure = greedy_with_confidence(
        hidden.reshape(-1, hidden.shape[-1]),
        frozen.head,
        conditioning.banned_columns(task, frozen),
        task.head_chunk,
    )
    return sure.reshape(hidden.shape[:-1])
