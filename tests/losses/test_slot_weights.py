"""Slot weights against loops."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dstill_jax.errors import UserError
from dstill_jax.losses import weights as weights_lib
from dstill_jax.losses.config import LossConfig, TermWeights

pytestmark = pytest.mark.usefixtures("quick_compilation")

SHAPE = (2, 5, 7)


@pytest.fixture(scope="module")
def slots():
    random = np.random.default_rng(0)
    revealed = random.random(SHAPE) < 0.3
    revealed[..., 0] = True
    verified = ~revealed & (random.random(SHAPE) < 0.8)
    verified[1, 4] = False  # a block in which nothing counts
    counted = verified & (random.random(SHAPE) < 0.85)  # the others hold a token that cannot be drafted
    rank = np.cumsum(~revealed, -1) - ~revealed
    correct = (random.random(SHAPE) < 0.6) & counted
    probability = np.where(counted, random.random(SHAPE), 0).astype(np.float32)
    return rank, counted, verified, correct, probability


def weights_of(config: LossConfig, slots, progress: float = 0.0) -> np.ndarray:
    return np.asarray(weights_lib.slot_weights(config, *map(jnp.asarray, slots), jnp.float32(progress)))


def test_decay_counts_the_masked_slots_to_the_left(slots):
    rank, counted, *_ = slots
    weights = weights_of(LossConfig(gamma=3.0), slots)
    for index in np.ndindex(SHAPE):
        expected = np.exp(-rank[index] / 3.0) if counted[index] else 0.0
        np.testing.assert_allclose(weights[index], expected, rtol=1e-6)


def test_uniform_weights_are_one_where_counted(slots):
    assert (weights_of(LossConfig(weighting="uniform"), slots) == slots[1]).all()


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_dpace_is_the_suffix_sum_of_smoothed_survival(slots, alpha):
    _, counted, verified, _, probability = slots
    weights = weights_of(LossConfig(weighting="dpace", dpace_alpha=alpha), slots)
    for b, a in np.ndindex(SHAPE[:2]):
        which = np.flatnonzero(counted[b, a])
        survival, product = [], 1.0
        for k in np.flatnonzero(verified[b, a]):
            product *= (1 - alpha) * float(probability[b, a, k]) + alpha
            if counted[b, a, k]:
                survival.append(product)
        expected = np.zeros(SHAPE[2])
        for place, k in enumerate(which):
            expected[k] = sum(survival[place:])
        np.testing.assert_allclose(weights[b, a], expected, rtol=2e-6)


def test_dpace_carries_no_gradient(slots):
    _, counted, verified, _, probability = map(jnp.asarray, slots)
    gradient = jax.grad(lambda p: weights_lib.dpace_weights(p, counted, verified, 0.5).sum())(probability)
    assert not np.asarray(gradient).any()


@pytest.mark.parametrize("progress, residual", [(0.0, 1.0), (0.3, 0.55), (0.6, 0.1), (0.99, 0.1)])
def test_auf_drops_to_its_residual_after_the_first_error(slots, progress, residual):
    _, counted, verified, correct, _ = slots
    weights = weights_of(LossConfig(weighting="auf"), slots, progress)
    for b, a in np.ndindex(SHAPE[:2]):
        failed = False
        for k in range(SHAPE[2]):
            expected = (residual if failed else 1.0) if counted[b, a, k] else 0.0
            np.testing.assert_allclose(weights[b, a, k], expected, rtol=1e-5)
            failed |= bool(verified[b, a, k] and not correct[b, a, k])


def test_auf_without_annealing_starts_at_its_residual():
    config = LossConfig(weighting="auf", auf_anneal_fraction=0.0)
    assert float(weights_lib.auf_residual(config, jnp.float32(0.01))) == pytest.approx(0.1)


def test_slot_1_has_terms_of_its_own_and_slot_0_none():
    config = LossConfig(first=TermWeights(data_ce=1.0), rest=TermWeights(teacher_kl=0.5, data_ce=0.25))
    assert weights_lib.term_weights(config, "data_ce", 4).tolist() == [0, 1, 0.25, 0.25]
    assert weights_lib.term_weights(config, "teacher_kl", 4).tolist() == [0, 0, 0.5, 0.5]
    assert weights_lib.term_weights(config, "data_ce", 2).tolist() == [0, 1]


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"gamma": 0}, "gamma=0"),
        ({"weighting": "decayed"}, "weighting='decayed'"),
        ({"kl_direction": "both"}, "kl_direction='both'"),
        ({"teacher_slots": "none"}, "teacher_slots='none'"),
        ({"data_slots": "some"}, "data_slots='some'"),
        ({"dpace_alpha": 1.5}, "dpace_alpha=1.5"),
        ({"after_error_weight": -1}, "after_error_weight=-1"),
        # Nothing reads these: the loss is cross-entropy with the text, weighed by distance.
        (
            {"kl_direction": "reverse"},
            "kl_direction='reverse' is read by teacher_kl, target_kl and consistency_kl only",
        ),
        ({"teacher_slots": "after_error"}, "teacher_slots='after_error' is read by hard_ce"),
        ({"rest": TermWeights(hard_ce=1), "first": TermWeights(hard_ce=1), "data_slots": "until_error"}, "data_slots"),
        ({"dpace_alpha": 0.2}, "dpace_alpha=0.2 is read by weighting='dpace' only"),
        ({"weighting": "dpace", "auf_residual": 0.2}, "auf_residual=0.2 is read by weighting='auf' only"),
        ({"auf_anneal_fraction": 0.2}, "auf_anneal_fraction=0.2"),
    ],
)
def test_bad_loss_configs_are_refused_by_field(changes, message):
    with pytest.raises(UserError, match=message):
        LossConfig(**changes)


@pytest.mark.parametrize("terms", [{}, {"data_ce": -1.0, "hard_ce": 2.0}])
def test_term_weights_must_weigh_something(terms):
    with pytest.raises(UserError, match="loss weights"):
        TermWeights(**terms)
