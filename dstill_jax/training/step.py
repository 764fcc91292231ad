"""The train step: one jitted program from (state, frozen weights, batch) to (state, metrics).

Called by `loop.py`. A loss function has the signature

    loss_fn(params, frozen, batch, key, step) -> (loss_sum, weight, metrics)

with float32 scalars `loss_sum` and `weight` (how much was counted, e.g. supervised tokens; a constant with regard to
params) and `metrics: dict[str, (sum, weight)]`. Sums and weights are added over micro-batches and divided once, so
splitting a batch does not change what is learned, whatever the number of supervised tokens in each part.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dstill_jax.dims import Params
from dstill_jax.errors import UserError
from dstill_jax.training.config import TrainConfig
from dstill_jax.training.optimizer import Optimizer
from dstill_jax.training.state import TrainState, base_key, update_ema

Scalar = Float[Array, ""]
Metrics = dict[str, tuple[Scalar, Scalar]]
Batch = dict[str, Array]
LossFn = Callable[[Params, Any, Batch, jax.Array, Int[Array, ""]], tuple[Scalar, Scalar, Metrics]]
TrainStep = Callable[[TrainState, Any, Batch], tuple[TrainState, Metrics]]

STEP_METRICS = ("loss", "grad_norm", "learning_rate", "updated", "nonfinite")
"""Names that the step adds to the loss function's own metrics."""


def make_train_step(
    loss_fn: LossFn, optimizer: Optimizer, train_config: TrainConfig, *, state_shardings: Any = None
) -> TrainStep:
    """A jitted `train_step(state, frozen, batch) -> (state, metrics)`; the state passed in is donated.

    Batch arrays are `[accumulate_steps * B, ...]`. The key is `fold_in(base_key, step)`, folded once more with the
    index of the micro-batch when there are several. A step of zero total weight is counted but moves no weight, moment
    or average. A loss or gradient that is not finite leaves the whole state as it was and sets the metric `nonfinite`.
    `metrics` maps names to (sum, weight), both float32 scalars on the device, `STEP_METRICS` included.
    """

    def train_step(state: TrainState, frozen: Any, batch: Batch) -> tuple[TrainState, Metrics]:
        key = jax.random.fold_in(base_key(state), state["step"])
        grad_sum, (loss_sum, weight, metrics) = _summed_gradient(
            loss_fn, state["params"], frozen, batch, key, state["step"], train_config.accumulate_steps
        )
        grads = jax.tree.map(lambda g: g / jnp.where(weight > 0, weight, 1.0), grad_sum)
        grad_norm = jnp.sqrt(sum(jnp.sum(jnp.square(g)) for g in jax.tree.leaves(grads)))
        finite = jnp.isfinite(loss_sum) & jnp.isfinite(weight) & jnp.isfinite(grad_norm)
        updated = finite & (weight > 0)
        learning_rate = optimizer.schedule(state["step"])

        # A branch, not a masked update: with nothing to learn from, moments and weight decay must rest as well.
        moved = jax.lax.cond(
            updated, _apply_gradient(optimizer, learning_rate), lambda _, kept: kept, grads, _moving(state)
        )
        new_state = {**state, **moved, "step": state["step"] + finite.astype(jnp.int32)}
        one = jnp.ones((), jnp.float32)
        metrics |= {
            "loss": (loss_sum, weight),
            "grad_norm": (grad_norm, one),
            "learning_rate": (learning_rate, one),
            "updated": (updated.astype(jnp.float32), one),
            "nonfinite": ((~finite).astype(jnp.float32), one),
        }
        return new_state, metrics

    out_shardings = None if state_shardings is None else (state_shardings, None)
    return jax.jit(train_step, donate_argnames=("state",), out_shardings=out_shardings)


def _moving(state: TrainState) -> TrainState:
    return {name: state[name] for name in ("params", "opt_state", "ema", "updates")}


def _apply_gradient(optimizer: Optimizer, learning_rate: Scalar) -> Callable[[Params, TrainState], TrainState]:
    def apply(grads: Params, state: TrainState) -> TrainState:
        directions, opt_state = optimizer.transform.update(grads, state["opt_state"], state["params"])
        params = jax.tree.map(lambda p, d: p - learning_rate * d, state["params"], directions)
        updates = state["updates"] + 1
        ema = update_ema(state["ema"], params, updates, optimizer.ema_decay)
        return {"params": params, "opt_state": opt_state, "ema": ema, "updates": updates}

    return apply


def _summed_gradient(
    loss_fn: LossFn, params: Params, frozen: Any, batch: Batch, key: jax.Array, step: Int[Array, ""], accumulate: int
) -> tuple[Params, tuple[Scalar, Scalar, Metrics]]:
    """Gradient of the loss *sum* over all micro-batches, with the sums and weights that belong to it."""

    def one_part(part: Batch, part_key: jax.Array) -> tuple[Params, tuple[Scalar, Scalar, Metrics]]:
        def loss_and_aux(p: Params) -> tuple[Scalar, tuple[Scalar, Scalar, Metrics]]:
            loss_sum, weight, metrics = _checked(loss_fn(p, frozen, part, part_key, step))
            return loss_sum, (loss_sum, weight, metrics)

        return jax.grad(loss_and_aux, has_aux=True)(params)

    if accumulate == 1:
        return one_part(batch, key)
    parts = {name: _split(name, x, accumulate) for name, x in batch.items()}
    first = jax.tree.map(lambda x: x[0], parts)
    totals = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(one_part, first, key))

    def add_part(totals: Any, indexed: tuple[Int[Array, ""], Batch]) -> tuple[Any, None]:
        i, part = indexed
        return jax.tree.map(jnp.add, totals, one_part(part, jax.random.fold_in(key, i))), None

    totals, _ = jax.lax.scan(add_part, totals, (jnp.arange(accumulate), parts))
    return totals


def _split(name: str, x: Array, accumulate: int) -> Array:
    """[accumulate * B, ...] -> [accumulate, B, ...]; rows are dealt in turn, so row-sharded arrays stay put."""
    if x.ndim == 0 or x.shape[0] % accumulate:
        raise UserError(
            f"batch[{name!r}] has shape {x.shape}; its rows must be a multiple of accumulate_steps={accumulate}"
        )
    return jnp.swapaxes(x.reshape(x.shape[0] // accumulate, accumulate, *x.shape[1:]), 0, 1)


def _checked(result: tuple[Scalar, Scalar, Metrics]) -> tuple[Scalar, Scalar, Metrics]:
    """The loss function kept its contract: float32 scalars, no reserved metric name. Costs nothing once compiled."""
    loss_sum, weight, metrics = result
    pairs = {"loss_sum": loss_sum, "weight": weight}
    for name, (total, count) in metrics.items():
        if name in STEP_METRICS:
            raise ValueError(
                f"loss_fn returned a metric named {name!r}, which the train step itself reports; rename it"
            )
        pairs |= {f"metrics[{name!r}][0]": total, f"metrics[{name!r}][1]": count}
    for what, x in pairs.items():
        if jnp.shape(x) != () or jnp.result_type(x) != jnp.float32:
            raise ValueError(f"loss_fn: {what} must be a float32 scalar, got {jnp.result_type(x)} {jnp.shape(x)}")
    weight = jax.lax.stop_gradient(jnp.asarray(weight))
    return jnp.asarray(loss_sum), weight, {n: (jnp.asarray(a), jnp.asarray(b)) for n, (a, b) in metrics.items()}
