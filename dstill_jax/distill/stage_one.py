"""Stage 1: complete partially revealed blocks. With full views only, the DFlash baseline."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dstill_jax import blocks as blocks_lib
from dstill_jax.dims import Params
from dstill_jax.distill import conditioning
from dstill_jax.distill.conditioning import Frozen, Metrics, Task
from dstill_jax.distill.config import StageOneConfig


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
    anchor_key, view_key, own_key = jax.random.split(key, 3)
    data = conditioning.condition(task, frozen, batch, anchor_key)
    context = conditioning.project(task, params, data)
    own_tokens = confidence = None
    if config.views.own_order or config.late_views.own_order or config.own_tokens:
        own_tokens, confidence = _first_pass(task, params, frozen, data, context)
    late = progress >= config.late_from
    shares = jnp.where(late, jnp.asarray(config.late_views.shares), jnp.asarray(config.views.shares))
    decay = jnp.where(late, config.late_views.prefix_decay, config.views.prefix_decay)
    revealed = blocks_lib.sample_views(view_key, shares, decay, data.blocks, confidence)
    shown = data.blocks.tokens
    if own_tokens is not None and config.own_tokens:
        # What refinement will see: its own guesses, some of them wrong. Labels stay true.
        swap = jax.random.uniform(own_key, shown.shape) < config.own_tokens * progress
        shown = jnp.where(swap & (jnp.arange(shown.shape[-1]) > 0), own_tokens, shown)
    tokens = blocks_lib.mask_tokens(shown, revealed, task.drafter.mask_token_id)
    hidden = conditioning.run_pass(task, frozen, params, data, context, tokens)
    return conditioning.score(task, frozen, config.loss, data, hidden, revealed, progress)


def _first_pass(
    task: Task, params: Params, frozen: Frozen, data: conditioning.Conditioned, context: conditioning.ContextKV
) -> tuple[Int[Array, "B A K"], Float[Array, "B A K"]]:
    """The drafter's own tokens, and how sure it is of each, when nothing is revealed; no gradient."""
    slots = jnp.arange(task.drafter.block_size) == 0
    tokens = blocks_lib.mask_tokens(data.blocks.tokens, slots, task.drafter.mask_token_id)
    return conditioning.pick(task, frozen, conditioning.run_pass(task, frozen, params, data, context, tokens))
