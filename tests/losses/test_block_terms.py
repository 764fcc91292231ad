"""Losses of whole blocks against loops; which way they pull; extremes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dstill_jax.errors import UserError
from dstill_jax.losses.block_terms import Contrasted, chain_loss, contrast_loss, first_error_loss
from dstill_jax.losses.config import BlockTerms, LossConfig, TermWeights
from dstill_jax.losses.weights import dpace_weights

pytestmark = pytest.mark.usefixtures("quick_compilation")

SHAPE = (2, 5, 7)
DDO = BlockTerms(ddo_real=1.0, ddo_fake=0.5, ddo_beta=0.7)


@pytest.fixture(scope="module")
def slots():
    """Cross-entropies, right or wrong, counted, verified, weights; a block in which nothing counts, one without an error."""
    random = np.random.default_rng(0)
    data_ce = random.exponential(1.0, SHAPE).astype(np.float32)
    correct = random.random(SHAPE) < 0.6
    verified = random.random(SHAPE) < 0.8
    verified[0, 1], correct[1, 3] = False, True
    counted = verified & ((random.random(SHAPE) < 0.85) | correct)  # the others hold a token that cannot be drafted
    weights = np.where(counted, random.random(SHAPE), 0.0).astype(np.float32)
    return data_ce, correct, counted, verified, weights


@pytest.fixture(scope="module")
def log_p():
    return Contrasted(*-np.random.default_rng(1).exponential(2.0, (4, *SHAPE)).astype(np.float32))


def test_first_error_is_the_cross_entropy_of_the_slot_that_ends_the_draft(slots):
    data_ce, correct, counted, verified, weights = slots
    assert (verified & ~counted).any()
    found = np.asarray(first_error_loss(*map(jnp.asarray, slots)))
    for b, a in np.ndindex(SHAPE[:2]):
        wrong = [k for k in range(SHAPE[2]) if verified[b, a, k] and not correct[b, a, k]]
        expected = weights[b, a, wrong[0]] * data_ce[b, a, wrong[0]] if wrong else 0.0
        np.testing.assert_allclose(found[b, a], expected, rtol=1e-6)
    assert found[0, 1] == found[1, 3] == 0 and (found > 0).sum() >= 5


def test_chain_is_the_share_of_slots_a_drawn_draft_does_not_reach(slots):
    data_ce, _, counted, verified, _ = slots
    found = np.asarray(chain_loss(*map(jnp.asarray, (data_ce, counted, verified))))
    for b, a in np.ndindex(SHAPE[:2]):
        survival, reached = 1.0, []
        for k in np.flatnonzero(verified[b, a]):
            survival *= float(np.exp(-data_ce[b, a, k])) if counted[b, a, k] else 0.0
            if counted[b, a, k]:
                reached.append(survival)
        expected = 1 - np.mean(reached) if reached else 0.0
        np.testing.assert_allclose(found[b, a], expected, rtol=1e-5, atol=1e-6)


def test_the_gradient_of_the_chain_is_dpace_without_smoothing(slots):
    data_ce, _, counted, verified, _ = map(jnp.asarray, slots)
    gradient = jax.grad(lambda ce: chain_loss(ce, counted, verified).sum())(data_ce)
    probability = jnp.where(counted, jnp.exp(-data_ce), 0.0)
    expected = dpace_weights(probability, counted, verified, 0.0) / np.maximum(counted.sum(-1, keepdims=True), 1)
    np.testing.assert_allclose(gradient, np.where(counted, expected, 0.0), rtol=1e-4, atol=1e-6)


def test_contrast_follows_the_formula(slots, log_p):
    *_, weights = slots
    real_weights = weights * (np.arange(SHAPE[2]) != 2)
    found = np.asarray(contrast_loss(DDO, log_p, jnp.asarray(real_weights), jnp.asarray(weights)))

    def sigma(x):
        return 1 / (1 + np.exp(-x))

    for b, a in np.ndindex(SHAPE[:2]):
        expected = 0.0
        if real_weights[b, a].any():
            gain = np.average(log_p.real[b, a] - log_p.reference_real[b, a], weights=real_weights[b, a])
            expected -= np.log(sigma(0.7 * gain))
        if weights[b, a].any():
            gain = np.average(log_p.fake[b, a] - log_p.reference_fake[b, a], weights=weights[b, a])
            expected -= 0.5 * np.log(1 - sigma(0.7 * gain))
        np.testing.assert_allclose(found[b, a], expected, rtol=1e-5, atol=1e-6)
    assert found[0, 1] == 0


def test_contrast_raises_one_completion_and_lowers_the_other(slots, log_p):
    weights = jnp.asarray(slots[-1])
    by = jax.grad(lambda log_p: contrast_loss(DDO, log_p, weights, weights).sum())(log_p)
    counted = slots[-1] > 0
    assert (np.asarray(by.real)[counted] < 0).all() and (np.asarray(by.fake)[counted] > 0).all()
    for part in (by.reference_real, by.reference_fake):
        assert not np.asarray(part).any()
    assert not np.asarray(by.real)[~counted].any() and not np.asarray(by.fake)[~counted].any()


def test_first_error_and_chain_push_the_right_tokens_up(slots):
    data_ce, correct, counted, verified, weights = map(jnp.asarray, slots)
    of_first = np.asarray(jax.grad(lambda ce: first_error_loss(ce, correct, counted, verified, weights).sum())(data_ce))
    of_chain = np.asarray(jax.grad(lambda ce: chain_loss(ce, counted, verified).sum())(data_ce))
    reached = slots[2] & (np.cumsum(slots[3] & ~slots[2], -1) == 0)  # nothing before it that cannot be drafted
    assert (of_first >= 0).all() and (of_chain[reached] > 0).all() and not of_chain[~reached].any()
    assert ((of_first > 0).sum(-1) <= 1).all()


@pytest.mark.parametrize("size", [0.0, 1e4])
def test_extremes_stay_finite(size, slots):
    _, correct, counted, verified, weights = map(jnp.asarray, slots)

    def total(x):
        far = Contrasted(-x, -x, jnp.zeros(SHAPE), jnp.zeros(SHAPE))
        near = Contrasted(jnp.zeros(SHAPE), jnp.zeros(SHAPE), -x, -x)
        parts = [contrast_loss(DDO, log_p, weights, weights) for log_p in (far, near)]
        parts += [first_error_loss(x, correct, counted, verified, weights), chain_loss(x, counted, verified)]
        return sum(p.sum() for p in parts)

    value, gradient = jax.value_and_grad(total)(jnp.full(SHAPE, size))
    assert np.isfinite(value) and np.isfinite(gradient).all()


@pytest.mark.parametrize(
    "changes, message", [({"chain": -1.0}, "BlockTerms.chain=-1.0"), ({"ddo_beta": 0.0}, "BlockTerms.ddo_beta=0.0")]
)
def test_bad_block_terms_are_refused_by_field(changes, message):
    with pytest.raises(UserError, match=message):
        BlockTerms(**changes)


def test_consistency_needs_a_weight_and_a_known_partner():
    with pytest.raises(UserError, match="consistency_with='teacher'.*rest.consistency_kl"):
        LossConfig(consistency_with="teacher")
    with pytest.raises(UserError, match="consistency_with='ema'"):
        LossConfig(rest=TermWeights(consistency_kl=1.0), consistency_with="ema")
