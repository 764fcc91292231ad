"""The optimiser: AdamW or Muon on float32 weights, its learning rate a function of the step.

Built by `loop.py` from an `OptimizerConfig`, used by `state.py` (moments) and `step.py` (updates).
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import optax
import optax.contrib
from jaxtyping import Array, Float, Int

from dstill_jax.dims import Params
from dstill_jax.errors import UserError
from dstill_jax.training.config import OptimizerConfig

Schedule = Callable[[Int[Array, ""] | int], Float[Array, ""]]

_NEVER_DECAYED = ("scale", "bias")
_MUON_MOMENTUM, _MUON_RMS = 0.95, 0.2


@dataclass(frozen=True)
class Optimizer:
    """What a train step needs to turn a gradient into new weights.

    `transform` yields the update *before* the learning rate: the rate is read from `schedule` at the step of the train
    state, so steps that are counted but move nothing (empty batches) do not shift it, nor does resuming.
    """

    transform: optax.GradientTransformation
    schedule: Schedule  # number of completed steps -> learning rate of the next step
    ema_decay: float


def build_optimizer(config: OptimizerConfig, total_steps: int) -> Optimizer:
    """Clip by global norm, the directions of `config.kind`, decoupled weight decay on matrices, warm-up and cosine."""
    clip = optax.identity() if config.clip_norm is None else optax.clip_by_global_norm(config.clip_norm)
    directions = (_muon(config),) if config.kind == "muon" else _adamw(config)
    return Optimizer(optax.chain(clip, *directions), build_schedule(config, total_steps), config.ema_decay)


def _adamw(config: OptimizerConfig) -> tuple[optax.GradientTransformation, ...]:
    return (
        optax.scale_by_adam(b1=config.b1, b2=config.b2, eps=config.eps),
        optax.add_decayed_weights(config.weight_decay, mask=decay_mask),
    )


def _muon(config: OptimizerConfig) -> optax.GradientTransformation:
    """Matrices move along their orthogonalised momentum, everything else along AdamW's direction.

    An orthogonal step is scaled to the root mean square of AdamW's, about 0.2 an entry, so that one learning rate serves
    both (arXiv 2502.16982, section 2.2).
    """
    matrices = optax.contrib.muon(
        1.0,  # the rate is applied by the train step
        beta=_MUON_MOMENTUM,
        eps=config.eps,
        weight_decay=config.weight_decay,
        consistent_rms=_MUON_RMS,
    )
    matrices = optax.chain(matrices, optax.scale(-1.0))  # optax descends, here directions are subtracted

    def kinds(params: Params) -> Params:
        return jax.tree.map(lambda leaf: "matrix" if leaf.ndim == 2 else "rest", params)

    return optax.partition({"matrix": matrices, "rest": optax.chain(*_adamw(config))}, kinds)


def build_schedule(config: OptimizerConfig, total_steps: int) -> Schedule:
    """Linear warm-up to the peak, then cosine; the first step has a rate above zero, the last the final rate."""
    warmup = min(round(config.warmup_fraction * total_steps), total_steps - 1)
    curve = optax.warmup_cosine_decay_schedule(
        init_value=0.0 if warmup else config.learning_rate,
        peak_value=config.learning_rate,
        warmup_steps=warmup,
        decay_steps=total_steps,
        end_value=config.learning_rate * config.final_lr_fraction,
    )
    # Evaluated one step ahead: optax starts at rate zero, which would waste the first step.
    return lambda step: jnp.asarray(curve(step + 1), jnp.float32)


def decay_mask(params: Params) -> Params:
    """True for the weights that decay: matrices, but no norm scale or bias even where layers are stacked (`[L, D]`)."""

    def decays(path: jax.tree_util.KeyPath, leaf: Array) -> bool:
        name = jax.tree_util.keystr(path[-1:], simple=True)
        return leaf.ndim >= 2 and name not in _NEVER_DECAYED

    return jax.tree_util.tree_map_with_path(decays, params)


def require_float32(tree: object, what: str) -> None:
    """Raises `UserError` listing every floating-point leaf of `tree` that is not float32.

    Lower precision would silently freeze small weights: an update below half a bfloat16 step rounds to nothing.
    """
    wrong = [
        f"{jax.tree_util.keystr(path, simple=True, separator='/')} ({leaf.dtype})"
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        if jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.dtype != jnp.float32
    ]
    if wrong:
        raise UserError(
            f"{what} must be float32 for training, but {', '.join(wrong[:8])}{' ...' if len(wrong) > 8 else ''}"
            f" {'is' if len(wrong) == 1 else 'are'} not; cast to float32 (compute may still be bfloat16)"
        )
