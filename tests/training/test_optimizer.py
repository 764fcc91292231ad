"""The optimiser against AdamW written out in NumPy, and the learning rate against its formula."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from dstill_jax.errors import UserError
from dstill_jax.training.config import OptimizerConfig, TrainConfig
from dstill_jax.training.optimizer import build_optimizer, build_schedule, decay_mask
from dstill_jax.training.state import ema_decay_at, init_state
from dstill_jax.training.step import make_train_step

CONFIG = OptimizerConfig(learning_rate=0.02, warmup_fraction=0.1, weight_decay=0.3, clip_norm=1.0, ema_decay=0.9)


def linear_loss(params, frozen, batch, key, step):
    """A loss whose gradient is the batch itself."""
    total = (params["head"]["kernel"] * batch["kernel"][0]).sum() + (params["norm"]["scale"] * batch["scale"][0]).sum()
    return total, jnp.ones(()), {}


def test_adamw_equals_the_textbook_in_float64():
    steps = 30
    rng = np.random.default_rng(0)
    params = {"head": {"kernel": rng.normal(size=(3, 4)).astype(np.float32)}, "norm": {"scale": np.ones(4, np.float32)}}
    optimizer = build_optimizer(CONFIG, steps)
    state = init_state(params, optimizer, 0)
    train_step = make_train_step(linear_loss, optimizer, TrainConfig(total_steps=steps))
    flat = {"kernel": params["head"]["kernel"].astype(np.float64), "scale": np.ones(4)}
    ema = {n: x.copy() for n, x in flat.items()}
    m, v = ({n: np.zeros_like(x) for n, x in flat.items()} for _ in range(2))
    for t in range(1, steps + 1):
        grads = {n: rng.normal(size=x.shape).astype(np.float32) for n, x in flat.items()}
        state, metrics = train_step(state, None, {n: g[None] for n, g in grads.items()})
        norm = np.sqrt(sum((g.astype(np.float64) ** 2).sum() for g in grads.values()))
        warmup, peak, last = 3, 0.02, 0.02 * 0.02
        cosine = last + (peak - last) * (1 + np.cos(np.pi * (t - warmup) / (steps - warmup))) / 2
        rate = peak * t / warmup if t <= warmup else cosine
        np.testing.assert_allclose(metrics["learning_rate"][0], rate, rtol=1e-5)
        np.testing.assert_allclose(metrics["grad_norm"][0], norm, rtol=1e-5)
        for n, g in grads.items():
            g = g.astype(np.float64) * min(1.0, 1.0 / norm)
            m[n] = 0.9 * m[n] + 0.1 * g
            v[n] = 0.98 * v[n] + 0.02 * g**2
            direction = m[n] / (1 - 0.9**t) / (np.sqrt(v[n] / (1 - 0.98**t)) + 1e-8)
            decay = 0.3 * flat[n] if n == "kernel" else 0.0
            flat[n] = flat[n] - rate * (direction + decay)
            ema[n] = ema[n] + (1 - min(0.9, (1 + t) / (10 + t))) * (flat[n] - ema[n])
    for tree, expected in ((state["params"], flat), (state["ema"], ema)):
        np.testing.assert_allclose(tree["head"]["kernel"], expected["kernel"], rtol=2e-5, atol=2e-6)
        np.testing.assert_allclose(tree["norm"]["scale"], expected["scale"], rtol=2e-5, atol=2e-6)


def test_muon_moves_matrices_along_their_orthogonalised_momentum_and_the_rest_as_adamw_does():
    config = dataclasses.replace(CONFIG, kind="muon", clip_norm=None)
    steps, shape = 12, (6, 10)
    rng = np.random.default_rng(1)
    params = {"head": {"kernel": rng.normal(size=shape).astype(np.float32)}, "norm": {"scale": np.ones(4, np.float32)}}
    muon, adamw = (
        make_train_step(linear_loss, build_optimizer(c, steps), TrainConfig(total_steps=steps))
        for c in (config, dataclasses.replace(config, kind="adamw"))
    )
    state, plain = (init_state(params, build_optimizer(c, steps), 0) for c in (config, CONFIG))
    momentum = np.zeros(shape)
    for t in range(1, steps + 1):
        gradient = {"kernel": rng.normal(size=shape), "scale": rng.normal(size=4)}
        batch = {n: g[None].astype(np.float32) for n, g in gradient.items()}
        before = np.asarray(state["params"]["head"]["kernel"], np.float64)
        state, metrics = muon(state, None, batch)
        plain, _ = adamw(plain, None, batch)
        momentum = 0.95 * momentum + 0.05 * gradient["kernel"]
        ahead = 0.95 * momentum / (1 - 0.95 ** (t + 1)) + 0.05 * gradient["kernel"] / (1 - 0.95**t)
        step = (before - np.asarray(state["params"]["head"]["kernel"])) / float(metrics["learning_rate"][0])
        u, _, v = np.linalg.svd(ahead, full_matrices=False)
        # Five Newton-Schulz iterations leave singular values between about 0.7 and 1.2, not at 1.
        singular = np.linalg.svd(u.T @ (step - 0.3 * before) @ v.T)[1] / (0.2 * np.sqrt(10))
        assert (0.6 < singular).all() and (singular < 1.3).all(), (t, singular)
        turned = u.T @ (step - 0.3 * before) @ v.T
        np.testing.assert_allclose(turned - np.diag(np.diag(turned)), 0, atol=2e-3)
        np.testing.assert_allclose(state["params"]["norm"]["scale"], plain["params"]["norm"]["scale"], rtol=1e-5)


@pytest.mark.parametrize(("fraction", "total"), [(0.0, 10), (0.04, 10), (0.5, 2), (0.99, 3), (0.1, 1), (0.04, 5000)])
def test_learning_rate_starts_above_zero_and_ends_at_the_final_fraction(fraction, total):
    config = OptimizerConfig(learning_rate=0.5, warmup_fraction=fraction, final_lr_fraction=0.1)
    rates = np.array([build_schedule(config, total)(s) for s in sorted({0, 1 % total, total // 2, total - 1})])
    assert (rates > 0).all() and (rates <= 0.5 + 1e-6).all()
    np.testing.assert_allclose(rates[-1], 0.05, rtol=1e-4)


def test_norm_scales_and_biases_never_decay_even_when_stacked():
    params = {
        "layers": {
            "norm": {"scale": jnp.ones((2, 3))},
            "q_proj": {"kernel": jnp.ones((2, 3, 3)), "bias": jnp.ones((2, 3))},
        },
        "embed": {"embedding": jnp.ones((5, 3))},
    }
    mask = decay_mask(params)
    assert mask == {
        "layers": {"norm": {"scale": False}, "q_proj": {"kernel": True, "bias": False}},
        "embed": {"embedding": True},
    }


def test_bfloat16_weights_are_refused_with_their_paths():
    params = {"a": {"kernel": jnp.ones((2, 2), jnp.bfloat16)}, "b": {"kernel": jnp.ones((2, 2))}}
    with pytest.raises(UserError, match=r"params must be float32 .* a/kernel \(bfloat16\) is not"):
        init_state(params, build_optimizer(CONFIG, 5), 0)


def test_initial_state_does_not_share_memory_with_the_weights_it_was_made_from():
    params = {"head": {"kernel": jnp.ones((2, 2))}, "norm": {"scale": jnp.ones(2)}}
    optimizer = build_optimizer(CONFIG, 5)
    batch = {"kernel": np.ones((1, 2, 2), np.float32), "scale": np.ones((1, 2), np.float32)}
    make_train_step(linear_loss, optimizer, TrainConfig(total_steps=5))(init_state(params, optimizer, 0), None, batch)
    np.testing.assert_array_equal(params["head"]["kernel"], np.ones((2, 2)))  # donated buffers would raise here


def test_average_forgets_its_start_early_and_never_exceeds_the_configured_decay():
    assert float(ema_decay_at(1, 0.999)) == pytest.approx(2 / 11)
    assert float(ema_decay_at(100, 0.999)) == pytest.approx(101 / 110)
    assert float(ema_decay_at(100_000, 0.999)) == pytest.approx(0.999)
    assert float(ema_decay_at(5, 0.0)) == 0.0
