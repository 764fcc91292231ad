"""Row losses against dense float64 formulas, values and gradients; and the memory that chunks are there to save."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dstill_jax.losses.chunked import RowInputs, greedy_with_confidence, map_rows, row_losses

R, D, V = 11, 6, 23


def log_softmax(x):
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


@pytest.fixture(scope="module")
def data():
    random = np.random.default_rng(0)
    hidden, teacher, target = random.normal(size=(3, R, D)).astype(np.float32)
    labels, hard = random.integers(0, V, (2, R)).astype(np.int32)
    labels[[2, 7]] = -1  # outside a training vocabulary
    head = random.normal(size=(D, V)).astype(np.float32)
    labels[4] = np.argmax(hidden[4] @ head)
    return hidden, RowInputs(labels, hard, teacher, target), head


@functools.partial(jax.jit, static_argnames=("chunk", "kl_direction"))
def values_and_gradients(hidden, inputs, head, cotangents, chunk, kl_direction):
    """Losses, and the gradients of their sums weighed by `cotangents` [5, R] with respect to all inputs."""

    def total(hidden, teacher, target, head):
        losses = row_losses(
            hidden,
            inputs._replace(teacher_hidden=teacher, target_hidden=target),
            head,
            kl_direction=kl_direction,
            target_kl=True,
            target_l1=True,
            chunk=chunk,
        )
        return sum((c * term).sum() for c, term in zip(cotangents, losses[:5], strict=True)), losses

    return jax.grad(total, (0, 1, 2, 3), has_aux=True)(hidden, inputs.teacher_hidden, inputs.target_hidden, head)


def dense(hidden, inputs, head, kl_direction):
    """Each term in float64, and its derivative with respect to the logits, [R, V]."""
    head = head.astype(np.float64)
    log_p, log_t, log_g = (
        log_softmax(h.astype(np.float64) @ head) for h in (hidden, inputs.teacher_hidden, inputs.target_hidden)
    )
    p = np.exp(log_p)

    def ce(labels):
        picked = np.where(labels >= 0, -log_p[np.arange(R), labels], 0.0)
        return picked, (p - np.eye(V)[labels]) * (labels >= 0)[:, None]

    def kl(log_q):
        q = np.exp(log_q)
        if kl_direction == "forward":
            return (q * (log_q - log_p)).sum(-1), p - q
        value = (p * (log_p - log_q)).sum(-1)
        return value, p * (log_p - log_q - value[:, None])

    sign = np.sign(p - np.exp(log_g))
    l1 = np.abs(p - np.exp(log_g)).sum(-1), p * (sign - (sign * p).sum(-1, keepdims=True))
    return ce(inputs.labels), ce(inputs.hard_labels), kl(log_t), kl(log_g), l1


@pytest.mark.parametrize("chunk, kl_direction", [(4, "forward"), (4, "reverse"), (1, "forward"), (512, "reverse")])
def test_losses_and_gradients_equal_dense_float64(data, chunk, kl_direction):
    hidden, inputs, head = data
    expected = dense(hidden, inputs, head, kl_direction)
    cotangents = np.random.default_rng(1).normal(size=(5, R)).astype(np.float32)
    gradients, losses = values_and_gradients(hidden, inputs, head, cotangents, chunk, kl_direction)
    gradient = np.zeros((R, D))
    for c, term, (value, by_logits) in zip(cotangents, losses[:5], expected, strict=True):
        np.testing.assert_allclose(term, value, rtol=2e-5, atol=2e-6)
        gradient += c[:, None] * (by_logits @ head.T.astype(np.float64))
    np.testing.assert_allclose(gradients[0], gradient, rtol=2e-4, atol=2e-5)
    for frozen in gradients[1:]:  # teacher, target and head get nothing
        assert not np.asarray(frozen).any()
    right = (hidden @ head).argmax(-1) == inputs.labels
    assert np.asarray(losses.correct).tolist() == right.tolist() and right.any()


def test_a_label_below_zero_costs_nothing_and_is_never_right(data):
    hidden, inputs, head = data
    losses = row_losses(hidden, RowInputs(np.full(R, -1, np.int32)), head, chunk=4)
    assert not np.asarray(losses.data_ce).any() and not np.asarray(losses.correct).any()
    assert losses.hard_ce is losses.teacher_kl is losses.target_kl is losses.target_l1 is None


def test_map_rows_joins_chunks_in_order():
    x = jnp.arange(10.0)
    out = map_rows(lambda a, b: (a + b, a * 2), 4, x, x * 10)
    np.testing.assert_array_equal(out[0], np.arange(10) * 11)
    np.testing.assert_array_equal(out[1], np.arange(10) * 2)


@pytest.mark.parametrize("columns", [[], [3, 7, 0]])
def test_greedy_never_picks_a_banned_column_and_states_its_probability(data, columns):
    hidden, _, head = data
    logits = (hidden @ head).astype(np.float64)
    assert set(logits.argmax(-1)) & {3, 7, 0}
    banned = np.isin(np.arange(V), columns)
    logits[:, banned] = -np.inf
    best, sure = greedy_with_confidence(hidden, head, banned, chunk=4)
    assert np.asarray(best).tolist() == logits.argmax(-1).tolist()
    np.testing.assert_allclose(sure, np.exp(log_softmax(logits).max(-1)), rtol=2e-5)


def temporary_bytes(rows: int, vocab: int, chunk: int) -> int:
    hidden, label = jax.ShapeDtypeStruct((rows, 8), jnp.float32), jax.ShapeDtypeStruct((rows,), jnp.int32)
    head = jax.ShapeDtypeStruct((8, vocab), jnp.float32)

    def loss(hidden, labels, teacher, head):
        terms = row_losses(hidden, RowInputs(labels, None, teacher, None), head, chunk=chunk)
        return (terms.data_ce + terms.teacher_kl).sum()

    compiled = jax.jit(jax.value_and_grad(loss)).lower(hidden, label, hidden, head).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def test_no_whole_logits_are_held_forward_or_backward():
    rows, vocab, chunk = 4096, 8192, 64
    whole = rows * vocab * 4
    assert temporary_bytes(rows, vocab, chunk) < 8 * chunk * vocab * 4 < whole / 4
    assert temporary_bytes(rows, vocab, rows) >= whole  # the measure sees what it is meant to see
