"""The train state: everything that a resumed run needs, as one plain dict of arrays.

Made by `init_state`, advanced by `step.py`, saved and restored by `checkpoints.py`.

    params     nested dict, float32
    opt_state  of the optax transform; moments float32
    ema        same tree as params, float32: the averaged weights
    step       int32 scalar: completed steps, steps with nothing to learn from included
    updates    int32 scalar: steps that moved the weights
    rng        uint32 [2]: data of the base key; the key of a step is `fold_in(base_key, step)`

The moving average starts *at the parameters*, with decay `min(ema_decay, (1 + n) / (10 + n))` at update n. The bound
makes its memory about a tenth of the updates so far, so a short run is not dominated by its initial weights, and the
stored tree needs no debiasing: whoever loads it cannot forget to.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dstill_jax.dims import Params
from dstill_jax.keys import key_of, seed_key
from dstill_jax.training.optimizer import Optimizer, require_float32

TrainState = dict[str, Any]


def init_state(params: Params, optimizer: Optimizer, seed: int) -> TrainState:
    """A state at step 0. `params` is copied, since a train step consumes (donates) its state.

    Raises `UserError` when a weight is not float32.
    """
    require_float32(params, "params")
    params = _copy(params)
    opt_state = optimizer.transform.init(params)
    require_float32(opt_state, "opt_state")
    return {
        "params": params,
        "opt_state": opt_state,
        "ema": _copy(params),
        "step": jnp.zeros((), jnp.int32),
        "updates": jnp.zeros((), jnp.int32),
        "rng": jax.random.key_data(seed_key(seed)),
    }


def base_key(state: TrainState) -> jax.Array:
    """The typed key from which every step's key is folded."""
    return key_of(state["rng"])


def update_ema(ema: Params, params: Params, updates: Int[Array, ""], max_decay: float) -> Params:
    """The average after the `updates`-th update (1 for the first) has produced `params`."""
    decay = ema_decay_at(updates, max_decay)
    return jax.tree.map(lambda e, p: e + (1.0 - decay) * (p - e), ema, params)


def ema_decay_at(updates: Int[Array, ""] | int, max_decay: float) -> Float[Array, ""]:
    """min(max_decay, (1 + n) / (10 + n)) as float32."""
    n = jnp.asarray(updates, jnp.float32)
    return jnp.minimum(jnp.float32(max_decay), (1.0 + n) / (10.0 + n))


def _copy(tree: Params) -> Params:
    return jax.tree.map(lambda x: jnp.array(x, copy=True), tree)
