"""Slots under the head: which field is compared with what, against dense float64 formulas; what is not asked for."""

import functools

import jax
import numpy as np
import pytest

from dstill_jax.losses.head import SlotInputs, slot_choices, slot_losses
from pallas_kernels.fused_head_loss import HeadTiles

B, A, J, D, V = 2, 3, 2, 6, 23
TILES = HeadTiles(5, V)  # does not divide the 12 slots


def log_softmax(x):
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


@pytest.fixture(scope="module")
def data():
    random = np.random.default_rng(0)
    hidden, teacher, target = random.normal(size=(3, B, A, J, D)).astype(np.float32)
    labels, hard = random.integers(0, V, (2, B, A, J)).astype(np.int32)
    labels[0, 2, 0] = labels[1, 0, 1] = -1  # outside a training vocabulary
    head = random.normal(size=(D, V)).astype(np.float32)
    labels[1, 1, 1] = np.argmax(hidden[1, 1, 1] @ head)
    return hidden, SlotInputs(labels, hard, teacher, target), head


@functools.partial(jax.jit, static_argnames="direction")
def values_and_gradients(hidden, inputs, head, cotangents, direction):
    """Losses, and the gradients of their sums weighed by `cotangents` [5, B, A, J] with respect to all inputs."""

    def total(hidden, teacher, target, head):
        inputs_ = inputs._replace(teacher_hidden=teacher, target_hidden=target)
        losses = slot_losses(hidden, inputs_, head, kl_direction=direction, target_kl=True, target_l1=True, tiles=TILES)
        return sum((c * term).sum() for c, term in zip(cotangents, losses[:5], strict=True)), losses

    return jax.grad(total, (0, 1, 2, 3), has_aux=True)(hidden, inputs.teacher_hidden, inputs.target_hidden, head)


def dense(hidden, inputs, head, direction):
    """Each term in float64, and its derivative with respect to the logits, [B, A, J, V]."""
    head = head.astype(np.float64)
    log_p, log_t, log_g = (
        log_softmax(h.astype(np.float64) @ head) for h in (hidden, inputs.teacher_hidden, inputs.target_hidden)
    )
    p = np.exp(log_p)

    def ce(labels):
        picked = np.take_along_axis(log_p, np.maximum(labels, 0)[..., None], -1)[..., 0]
        return np.where(labels >= 0, -picked, 0.0), (p - np.eye(V)[labels]) * (labels >= 0)[..., None]

    def kl(log_q):
        q = np.exp(log_q)
        if direction == "forward":
            return (q * (log_q - log_p)).sum(-1), p - q
        value = (p * (log_p - log_q)).sum(-1)
        return value, p * (log_p - log_q - value[..., None])

    sign = np.sign(p - np.exp(log_g))
    l1 = np.abs(p - np.exp(log_g)).sum(-1), p * (sign - (sign * p).sum(-1, keepdims=True))
    return ce(inputs.labels), ce(inputs.hard_labels), kl(log_t), kl(log_g), l1


@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_losses_and_gradients_equal_dense_float64(data, direction):
    hidden, inputs, head = data
    cotangents = np.random.default_rng(1).normal(size=(5, B, A, J)).astype(np.float32)
    gradients, losses = values_and_gradients(hidden, inputs, head, cotangents, direction)
    gradient = np.zeros(hidden.shape)
    for c, term, (value, by_logits) in zip(cotangents, losses[:5], dense(hidden, inputs, head, direction), strict=True):
        np.testing.assert_allclose(term, value, rtol=2e-5, atol=2e-6)
        gradient += c[..., None] * (by_logits @ head.T.astype(np.float64))
    np.testing.assert_allclose(gradients[0], gradient, rtol=2e-4, atol=2e-5)
    for frozen in gradients[1:]:  # teacher, target and head get nothing
        assert not np.asarray(frozen).any()
    right = (hidden @ head).argmax(-1) == inputs.labels
    assert np.asarray(losses.correct).tolist() == right.tolist() and right.any()


def test_a_label_below_zero_costs_nothing_and_what_is_not_asked_for_is_none(data):
    hidden, inputs, head = data
    losses = slot_losses(hidden, SlotInputs(np.full_like(inputs.labels, -1)), head)
    assert not np.asarray(losses.data_ce).any() and not np.asarray(losses.correct).any()
    assert losses.hard_ce is losses.teacher_kl is losses.target_kl is losses.target_l1 is None
    taught = SlotInputs(inputs.labels, teacher_hidden=inputs.teacher_hidden)  # as the later states of stage 2 come
    losses = slot_losses(hidden, taught, head, target_kl=True, target_l1=True)
    assert losses.teacher_kl is not None and losses.target_kl is losses.target_l1 is None


@pytest.mark.parametrize("columns", [[], [3, 19, 0]])
@pytest.mark.parametrize("tiles", [None, TILES, HeadTiles(4, 9)], ids=str)
def test_choices_are_never_banned_and_state_their_probability(data, columns, tiles):
    hidden, _, head = data
    logits = (hidden @ head).astype(np.float64)
    assert set(logits.argmax(-1).ravel()) & {3, 19, 0}
    banned = np.isin(np.arange(V), columns)
    logits[..., banned] = -np.inf
    best, sure = slot_choices(hidden, head, banned, tiles)
    assert np.asarray(best).tolist() == logits.argmax(-1).tolist()
    np.testing.assert_allclose(sure, np.exp(log_softmax(logits).max(-1)), rtol=2e-5)
