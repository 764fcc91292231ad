"""The train step: one division, empty batches that move nothing, bad numbers that change nothing."""

import copy
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy_training import OPTIMIZER, ToyData, toy_frozen, toy_loss, toy_params

from dstill_jax.errors import UserError
from dstill_jax.training import OptimizerConfig, TrainConfig, build_optimizer, init_state, make_train_step

WIDTH = 5


def squared_loss(params, frozen, batch, key, step):
    """Masked squared error of a linear map, and a metric with a denominator of its own."""
    error = (jnp.einsum("bsd,d->bs", batch["x"], params["w"]["kernel"]) - batch["y"]) ** 2
    mask = batch["mask"].astype(jnp.float32)
    long = mask * (batch["y"] > 0)
    return (error * mask).sum(), mask.sum(), {"positive_error": ((error * long).sum(), long.sum())}


def unequal_batch(rows: int, supervised: list[int], length: int = 320, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    mask = np.arange(length) < np.array(supervised).reshape(rows, 1)
    x, y = rng.normal(size=(rows, length, WIDTH)), rng.normal(size=(rows, length))
    return {"x": x.astype(np.float32), "y": y.astype(np.float32), "mask": mask}


def fresh(accumulate: int, loss=squared_loss, **optimizer_fields):
    optimizer = build_optimizer(OptimizerConfig(learning_rate=0.1, **optimizer_fields), 10)
    params = {"w": {"kernel": np.linspace(-1, 1, WIDTH).astype(np.float32)}}
    train_step = make_train_step(loss, optimizer, TrainConfig(total_steps=10, accumulate_steps=accumulate))
    return init_state(params, optimizer, 0), train_step


def numpy_gradient(kernel: np.ndarray, batch: dict[str, np.ndarray]) -> np.ndarray:
    """Of the loss over all supervised tokens together, in float64."""
    x, y, mask = (batch[n].astype(np.float64) for n in ("x", "y", "mask"))
    residual = (x @ kernel.astype(np.float64) - y) * mask
    return 2 * (residual[..., None] * x).sum((0, 1)) / mask.sum()


@pytest.mark.parametrize(
    ("accumulate", "supervised"), [(1, [3, 300]), (2, [3, 300]), (4, [3, 300, 0, 17]), (2, [0, 300])]
)
def test_splitting_a_batch_leaves_gradient_and_metrics_unchanged(accumulate, supervised):
    batch = unequal_batch(len(supervised), supervised)
    state, train_step = fresh(accumulate, clip_norm=None)
    expected = numpy_gradient(np.linspace(-1, 1, WIDTH), batch)
    state, metrics = train_step(state, None, batch)
    np.testing.assert_allclose(metrics["grad_norm"][0], np.linalg.norm(expected), rtol=1e-5)
    first_moment = state["opt_state"][1].mu["w"]["kernel"]
    np.testing.assert_allclose(first_moment, 0.1 * expected, rtol=1e-4, atol=1e-6)
    assert float(metrics["loss"][1]) == sum(supervised)
    positive = (batch["mask"] & (batch["y"] > 0)).sum()
    assert float(metrics["positive_error"][1]) == positive


def test_rows_of_an_accumulated_batch_are_each_used_once():
    def loss(params, frozen, batch, key, step):
        return (params["w"]["kernel"][0] * batch["id"]).sum(), jnp.ones(()), {"ids": (batch["id"].sum(), jnp.ones(()))}

    state, train_step = fresh(3, loss)
    _, metrics = train_step(state, None, {"id": 2.0 ** np.arange(6, dtype=np.float32)})
    assert float(metrics["ids"][0]) == 63.0 and float(metrics["loss"][1]) == 3.0


def test_rows_that_do_not_divide_are_refused_by_name():
    state, train_step = fresh(2)
    with pytest.raises(UserError, match=r"batch\['mask'\] has shape \(3, .* multiple of accumulate_steps=2"):
        train_step(state, None, unequal_batch(3, [1, 2, 3]))


@pytest.mark.parametrize("accumulate", [1, 2])
def test_an_empty_batch_is_counted_and_moves_nothing(accumulate):
    state, train_step = fresh(accumulate, weight_decay=0.5)
    state, _ = train_step(state, None, unequal_batch(2, [10, 20]))  # moments are not zero any more
    before = copy.deepcopy(jax.device_get(state))
    state, metrics = train_step(state, None, unequal_batch(2, [0, 0]))
    after = jax.device_get(state)
    for name in ("params", "opt_state", "ema", "updates", "rng"):
        jax.tree.map(np.testing.assert_array_equal, after[name], before[name])
    assert after["step"] == 2 and after["updates"] == 1
    assert metrics["loss"] == (0.0, 0.0) and metrics["updated"][0] == 0.0 and metrics["nonfinite"][0] == 0.0


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_a_loss_that_is_not_finite_is_flagged_and_changes_nothing(poison):
    state, train_step = fresh(1)
    state, _ = train_step(state, None, unequal_batch(2, [10, 20]))
    before = copy.deepcopy(jax.device_get(state))
    batch = unequal_batch(2, [10, 20])
    batch["y"][1, 5] = poison
    state, metrics = train_step(state, None, batch)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state), before)
    assert metrics["nonfinite"][0] == 1.0


def test_a_bad_gradient_of_a_finite_loss_is_flagged():
    def loss(params, frozen, batch, key, step):
        return jnp.sqrt(params["w"]["kernel"][2] * 0.0).sum(), jnp.ones(()), {}  # slope of sqrt at 0, times 0

    state, train_step = fresh(1, loss)
    state, metrics = train_step(state, None, {"x": np.zeros((1, 1), np.float32)})
    assert float(metrics["loss"][0]) == 0.0 and float(metrics["nonfinite"][0]) == 1.0
    assert int(state["updates"]) == 0


def test_the_key_of_a_step_is_the_base_key_folded_with_the_step():
    def loss(params, frozen, batch, key, step):
        draw = jax.random.uniform(key)
        return params["w"]["kernel"].sum() * 0, jnp.ones(()), {"draw": (draw, jnp.ones(())), "step": (step * 1.0, draw)}

    state, train_step = fresh(1, loss)
    for step in range(3):
        state, metrics = train_step(state, None, {"x": np.zeros((1, 1), np.float32)})
        assert float(metrics["draw"][0]) == float(jax.random.uniform(jax.random.fold_in(jax.random.key(0), step)))
        assert float(metrics["step"][0]) == step


def test_micro_batches_draw_from_different_keys():
    def loss(params, frozen, batch, key, step):
        bits = jax.random.bernoulli(key, 0.5, (16,)).astype(jnp.float32) @ (2.0 ** jnp.arange(16))
        return params["w"]["kernel"].sum() * 0, jnp.ones(()), {"sum": (bits, bits**2)}

    state, train_step = fresh(2, loss)
    total, squares = train_step(state, None, {"x": np.zeros((2, 1), np.float32)})[1]["sum"]
    assert float(total) ** 2 != 2 * float(squares)  # equal only for two equal draws


def test_small_updates_of_a_norm_weight_are_not_rounded_away():
    """One weight at 1.0, gradient 0.01, learning rate 6e-4: in bfloat16 it would never leave 1.0."""

    def loss(params, frozen, batch, key, step):
        scale = params["norm"]["scale"].astype(jnp.bfloat16)  # compute may be bfloat16
        return 0.01 * scale.astype(jnp.float32).sum(), jnp.ones(()), {}

    config = OptimizerConfig(learning_rate=6e-4, warmup_fraction=0.0, final_lr_fraction=1.0)
    optimizer = build_optimizer(config, 100)
    state = init_state({"norm": {"scale": np.ones(1, np.float32)}}, optimizer, 0)
    train_step = make_train_step(loss, optimizer, TrainConfig(total_steps=100))
    for _ in range(100):
        state, _ = train_step(state, None, {"x": np.zeros((1, 1), np.float32)})
    # Adam moves by the learning rate when the gradient is constant, whatever its size.
    np.testing.assert_allclose(state["params"]["norm"]["scale"], 1.0 - 100 * 6e-4, rtol=1e-4)
    in_bfloat16 = jnp.ones((), jnp.bfloat16)
    assert in_bfloat16 - jnp.bfloat16(6e-4) == 1.0  # the trap this is about


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda s: (s, jnp.ones((), jnp.int32), {}), "weight must be a float32 scalar, got int32"),
        (
            lambda s: (s, jnp.ones(()), {"slots": (jnp.ones(3), jnp.ones(3))}),
            r"metrics\['slots'\]\[0\] must be a float32",
        ),
        (lambda s: (s, jnp.ones(()), {"grad_norm": (s, s)}), "metric named 'grad_norm'"),
    ],
)
def test_a_loss_function_that_breaks_its_contract_is_told_so(returned, message):
    state, train_step = fresh(1, lambda params, *_: returned(params["w"]["kernel"].sum()))
    with pytest.raises(ValueError, match=message):
        train_step(state, None, {"x": np.zeros((1, 1), np.float32)})


def test_a_second_step_does_not_compile_again():
    optimizer = build_optimizer(OPTIMIZER, 10)
    traces = []

    def counting_loss(*args):
        traces.append(1)
        return toy_loss(*args)

    train_step = make_train_step(counting_loss, optimizer, TrainConfig(total_steps=10))
    state, data, frozen = init_state(toy_params(), optimizer, 0), ToyData(), toy_frozen()
    for step in range(3):
        state, _ = train_step(state, frozen, data.batch(step))
    assert len(traces) == 1


TWO_DEVICES = """
import jax, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec
import test_train_step as t
mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
rows, everywhere = NamedSharding(mesh, PartitionSpec("data")), NamedSharding(mesh, PartitionSpec())
for accumulate, supervised in ((1, [3, 300]), (2, [3, 300, 0, 17])):
    batch = t.unequal_batch(len(supervised), supervised)
    results = []
    for spread in (False, True):
        state, train_step = t.fresh(accumulate)
        if spread:
            state, batch = jax.device_put(state, everywhere), jax.device_put(batch, rows)
        for _ in range(3):
            state, metrics = train_step(state, None, batch)
        results.append(jax.device_get((state, metrics)))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), *results)
print("equal")
"""


def test_two_devices_with_3_and_300_tokens_equal_one_device():
    environment = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", TWO_DEVICES], env=script_environment(**environment), capture_output=True, text=True
    )
    assert done.stdout.strip() == "equal", done.stderr


def script_environment(**more: str) -> dict[str, str]:
    """The environment of a child process that imports what this one imports."""
    import os

    return {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), **more}
