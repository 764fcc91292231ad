"""How a drafter begins: its shape, its first weights, the scale of its inputs and the vocabulary it trains on."""

from collections.abc import Iterable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from dstill_jax.config import DrafterConfig, TargetConfig, default_target_layer_ids
from dstill_jax.dims import Params
from dstill_jax.errors import UserError
from dstill_jax.models import drafter as drafter_lib
from dstill_jax.models import target as target_lib
from dstill_jax.models.layers import store_input_first


@dataclass(frozen=True)
class DrafterShape:
    """A new drafter for some target; what is left out is the target's own."""

    mask_token_id: int  # a row of the target's embedding that its text never uses; no default on purpose
    num_layers: int = 5
    block_size: int = 16
    num_taps: int = 5
    target_layer_ids: tuple[int, ...] | None = None  # default: `num_taps` layers spread evenly
    intermediate_size: int | None = None
    causal: bool = False
    init_from_layers: tuple[int, ...] | None = None  # start draft layer i as a copy of this target layer

    def build(self, target: TargetConfig) -> DrafterConfig:
        """The drafter's configuration. Raises UserError when it does not fit the target."""
        if self.mask_token_id in target.eos_token_ids or self.mask_token_id == target.bos_token_id:
            raise UserError(
                f"mask_token_id={self.mask_token_id} begins or ends the target's texts; pick an id that never appears"
            )
        if self.init_from_layers is not None:
            if len(self.init_from_layers) != self.num_layers:
                raise UserError(
                    f"init_from_layers={self.init_from_layers} must name num_layers={self.num_layers} layers"
                )
            if not all(0 <= i < target.num_layers for i in self.init_from_layers):
                raise UserError(f"init_from_layers={self.init_from_layers} must be within 0..{target.num_layers - 1}")
            if self.intermediate_size not in (None, target.intermediate_size):
                raise UserError("init_from_layers copies whole layers: leave intermediate_size to the target's")
        ids = self.target_layer_ids
        if ids is None:
            ids = default_target_layer_ids(target.num_layers, self.num_taps)
        elif self.num_taps not in (type(self).num_taps, len(ids)):
            raise UserError(f"num_taps={self.num_taps} and target_layer_ids={ids} contradict each other; leave one out")
        width = target.intermediate_size if self.intermediate_size is None else self.intermediate_size
        return DrafterConfig(
            vocab_size=target.vocab_size,
            hidden_size=target.hidden_size,
            intermediate_size=width,
            num_layers=self.num_layers,
            num_heads=target.num_heads,
            num_kv_heads=target.num_kv_heads,
            head_dim=target.head_dim,
            rms_norm_eps=target.rms_norm_eps,
            rope=target.rope,
            block_size=self.block_size,
            mask_token_id=self.mask_token_id,
            target_layer_ids=tuple(ids),
            num_target_layers=target.num_layers,
            max_position_embeddings=target.max_position_embeddings,
            causal=self.causal,
        )


def tap_scale(features: Float[np.ndarray, "tokens T*D"]) -> Float[np.ndarray, "T*D"]:
    """1 / standard deviation of each tapped dimension.

    A residual stream has dimensions hundreds of times larger than others; without this the first steps are spent on
    them. The scale folds into `fc`, so a finished drafter does not have it.
    """
    deviation = np.asarray(features, np.float64).std(axis=0)
    return (1.0 / np.maximum(deviation, 1e-3 * max(float(deviation.mean()), 1e-9))).astype(np.float32)


def training_vocabulary(
    token_lists: Iterable[np.ndarray], vocab_size: int, size: int, mask_token_id: int
) -> Int[np.ndarray, "V'"]:
    """The `size` most frequent token ids of some texts, ascending; unseen ids fill up from the lowest.

    The mask token, which is never a label and never drafted, is not among them.

    Raises UserError when `size` is not in 1 .. vocab_size.
    """
    if not 1 <= size <= vocab_size:
        raise UserError(f"training vocabulary of {size} tokens must be between 1 and the target's {vocab_size}")
    counts = np.zeros(vocab_size, np.int64)
    for tokens in token_lists:
        counts += np.bincount(np.asarray(tokens), minlength=vocab_size)
    order = np.lexsort((np.arange(vocab_size), -counts))
    return np.sort(order[order != mask_token_id][:size]).astype(np.int32)


def new_params(
    shape: DrafterShape,
    config: DrafterConfig,
    target: TargetConfig,
    target_params: Params,
    key: Array,
    tap_scale: Float[Array, "T*D"] | None = None,
) -> Params:
    """First parameters, acting on raw taps: random, or with layers copied from the target.

    A copied layer finds its own context again if what it read in the target, the output of the layer below, is a tap:
    `fc` then starts by passing that tap through, `hidden_norm` as the layer's own input norm, and the layer's context
    keys and values are those of the target from the first step. The lowest such layer is served.

    Args:
      tap_scale: 1 / standard deviation of each tapped dimension, see `tap_scale`; None: taps of unit variance.
    """
    params = drafter_lib.init_params(config, key)
    width = config.num_taps * config.hidden_size
    scale = jnp.ones(width) if tap_scale is None else jnp.asarray(tap_scale)
    # Scaled taps have unit variance: keep the projection's output there too.
    fc = jax.random.normal(jax.random.fold_in(key, 1), (width, config.hidden_size)) * width**-0.5 * scale[:, None]
    if shape.init_from_layers is None:
        return {**params, "fc": {"kernel": fc}}
    unrolled = target_lib.unstack_layers(target_params) if target_lib.is_stacked(target_params) else target_params
    for i, layer in enumerate(shape.init_from_layers):
        params[f"layers_{i}"] = _as_draft_layer(config, target, unrolled[f"layers_{layer}"], params[f"layers_{i}"])
    params["norm"] = jax.tree.map(_float32, unrolled["norm"])
    served = [layer for layer in shape.init_from_layers if layer - 1 in config.target_layer_ids]
    if served:
        first = config.target_layer_ids.index(served[0] - 1) * config.hidden_size
        fc = jnp.zeros_like(fc).at[first : first + config.hidden_size].set(jnp.eye(config.hidden_size))
        params["hidden_norm"] = jax.tree.map(_float32, unrolled[f"layers_{served[0]}"]["input_layernorm"])
    return {**params, "fc": {"kernel": fc}}


def _float32(x: Array) -> Array:
    return jnp.asarray(x, jnp.float32)


def _as_draft_layer(config: DrafterConfig, target: TargetConfig, layer: Params, fresh: Params) -> Params:
    """A target layer as a draft layer. A target without head norms gets norms of the scale its heads have."""
    layer = jax.tree.map(_float32, store_input_first(layer))
    attention = {name: layer["attention"][name] for name in ("q_proj", "k_proj", "v_proj", "o_proj")}
    if target.attention_bias:
        raise UserError("init_from_layers: the target's attention has biases, which a drafter cannot hold")
    gain = layer["input_layernorm"]["scale"]
    for name, projection in (("q_norm", "q_proj"), ("k_norm", "k_proj")):
        if target.qk_norm:
            attention[name] = layer["attention"][name]
        else:
            # Inputs are normed, so a head's expected square is the squared length of its weighted columns.
            typical = jnp.sqrt(jnp.mean(jnp.sum((attention[projection]["kernel"] * gain[:, None]) ** 2, axis=0)))
            attention[name] = {"scale": jnp.full_like(fresh["attention"][name]["scale"], typical)}
    return {**layer, "attention": attention}
