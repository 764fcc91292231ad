"""Where a new drafter begins: layers copied from the target find the target's own context."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import random_target

from dstill_jax.distill.initialise import DrafterShape, new_params
from dstill_jax.models import drafter as drafter_lib
from dstill_jax.models import target as target_lib


@pytest.mark.parametrize("scaled", [False, True])
def test_the_first_copied_layer_starts_with_the_targets_own_keys_and_values(scaled: bool) -> None:
    target = random_target(num_layers=4)
    shape = DrafterShape(36, num_layers=2, block_size=4, target_layer_ids=(0, 2), init_from_layers=(1, 3))
    config = shape.build(target.config)
    scale = np.random.default_rng(0).uniform(0.1, 3, 32).astype(np.float32) if scaled else None
    params = new_params(shape, config, target.config, target.params, jax.random.key(0), scale)

    tokens = jnp.asarray(np.random.default_rng(1).integers(0, 36, (2, 9)))
    positions = jnp.broadcast_to(jnp.arange(9), (2, 9))
    cache = target_lib.init_cache(target.config, 2, 9, jnp.float32, target_lib.is_stacked(target.params))
    out = target_lib.forward(
        target.config, target.params, tokens, positions, cache, jnp.zeros(2, jnp.int32), config.target_layer_ids
    )
    context = drafter_lib.context_kv(config, params, drafter_lib.project_context(config, params, out.taps), positions)

    def layer_1(stored) -> np.ndarray:
        return np.concatenate(stored)[1]

    for got, wanted in zip(context[0], (layer_1(out.cache.keys), layer_1(out.cache.values)), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)
    # The projection serves one layer: layer 3 reads another.
    layer_3 = np.concatenate(out.cache.values)[3]
    assert np.abs(np.asarray(context[1][1]) - layer_3).max() > 0.1


def test_a_copied_layer_whose_input_is_no_tap_gets_a_random_context() -> None:
    target = random_target(num_layers=4)
    shape = DrafterShape(36, num_layers=1, block_size=4, target_layer_ids=(0, 1), init_from_layers=(3,))
    params = new_params(shape, shape.build(target.config), target.config, target.params, jax.random.key(0))
    np.testing.assert_array_equal(params["hidden_norm"]["scale"], 1)
    assert np.asarray(params["fc"]["kernel"]).std() == pytest.approx(32**-0.5, rel=0.1)
