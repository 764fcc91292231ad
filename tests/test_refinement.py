"""Refinement against a plain-Python reference, block by block and slot by slot."""

import itertools
import math

import jax.numpy as jnp
import numpy as np
import pytest

from dstill_jax import refinement
from dstill_jax.errors import UserError

K, MASK, ANCHORS = 7, 50, np.array([[3, 8, 11], [2, 3, 40]], np.int32)
PRIMES = np.array([2, 3, 5, 7, 11, 13, 17])


def mixed(tokens, slot):
    """A number that depends on every token of the block and on the slot."""
    return (int(np.dot(tokens, PRIMES)) * 31 + int(slot) * 12) % 101


def token_of(h):
    return h % 13


def confidence_of(h, levels):
    return (h * 7 % levels + 1) / (levels + 1)  # few levels: many ties


def hidden_fn(tokens, slots):
    total = (tokens * jnp.asarray(PRIMES)).sum(-1)[..., None] * 31
    return ((total + slots * 12) % 101)[..., None].astype(jnp.float32)


def choose_fn_for(levels):
    def choose_fn(hidden, slots):
        h = hidden[..., 0].astype(jnp.int32)
        return token_of(h), ((h * 7 % levels + 1) / (levels + 1)).astype(jnp.float32)

    return choose_fn


def reference(anchor, passes, order, threshold, levels):
    """(tokens, commit pass, confidence, hidden) of one block."""
    tokens, commit = [anchor] + [MASK] * (K - 1), [0] * K
    confidence, hidden = [1.0] * K, [0.0] * K
    remaining = list(range(1, K))
    for number in range(1, passes + 1):
        if not remaining:
            break
        h = {j: mixed(tokens, j) for j in remaining}
        sure = {j: confidence_of(h[j], levels) for j in remaining}
        quota = math.ceil(len(remaining) / (passes - number + 1))
        if order == "left_to_right":
            now = remaining[:quota]
        else:
            ranked = sorted(remaining, key=lambda j: (-sure[j], j))  # ties: the earlier slot
            now = ranked[:quota]
            if order == "confidence":
                now = [j for j in remaining if j in now or sure[j] >= threshold]
        for j in now:
            tokens[j], commit[j], confidence[j], hidden[j] = token_of(h[j]), number, sure[j], h[j]
        remaining = [j for j in remaining if j not in now]
    return tokens, commit, confidence, hidden


@pytest.mark.parametrize("order", ["confidence", "quota", "left_to_right"])
@pytest.mark.parametrize("passes", [1, 2, 4, K - 1, K + 3])
def test_refinement_equals_the_plain_reference(order, passes):
    for levels, threshold in itertools.product((3, 10), (0.55, 0.95)):
        out = refinement.refine(
            hidden_fn, choose_fn_for(levels), jnp.asarray(ANCHORS), K, MASK, passes, order, threshold, keep_hidden=True
        )
        for b, a in np.ndindex(ANCHORS.shape):
            tokens, commit, confidence, hidden = reference(int(ANCHORS[b, a]), passes, order, threshold, levels)
            assert out.tokens[b, a].tolist() == tokens
            assert out.commit_pass[b, a].tolist() == commit
            np.testing.assert_allclose(out.confidence[b, a], confidence, rtol=1e-6)
            assert out.hidden[b, a, :, 0].tolist() == hidden


@pytest.mark.parametrize("order", ["confidence", "quota", "left_to_right"])
@pytest.mark.parametrize("passes", [1, 3, 20])
def test_every_slot_is_committed_once_and_the_anchor_is_given(order, passes):
    out = refinement.refine(hidden_fn, choose_fn_for(5), jnp.asarray(ANCHORS), K, MASK, passes, order)
    commit = np.asarray(out.commit_pass)
    assert (commit[..., 0] == 0).all() and (np.asarray(out.confidence)[..., 0] == 1).all()
    assert (commit[..., 1:] >= 1).all() and (commit[..., 1:] <= passes).all()
    assert not (np.asarray(out.tokens) == MASK).any()
    assert (np.asarray(out.tokens)[..., 0] == ANCHORS).all()
    assert out.hidden is None


def test_left_to_right_with_a_slot_a_pass_is_sequential_greedy_decoding():
    out = refinement.refine(hidden_fn, choose_fn_for(5), jnp.asarray(ANCHORS), K, MASK, K - 1, "left_to_right")
    for b, a in np.ndindex(ANCHORS.shape):
        tokens = [int(ANCHORS[b, a])] + [MASK] * (K - 1)
        for j in range(1, K):
            tokens[j] = token_of(mixed(tokens, j))
        assert out.tokens[b, a].tolist() == tokens
        assert out.commit_pass[b, a].tolist() == list(range(K))


def test_one_pass_is_the_same_in_every_order():
    first, *others = (
        refinement.refine(hidden_fn, choose_fn_for(5), jnp.asarray(ANCHORS), K, MASK, 1, order).tokens
        for order in ("confidence", "quota", "left_to_right")
    )
    assert all((first == other).all() for other in others)


@pytest.mark.parametrize("confidence", [0.9, 1.0])
def test_a_threshold_reached_everywhere_commits_everything_in_the_first_pass(confidence):
    def sure(hidden, slots):
        return token_of(hidden[..., 0].astype(jnp.int32)), jnp.full(slots.shape, confidence)

    out = refinement.refine(hidden_fn, sure, jnp.asarray(ANCHORS), K, MASK, 4, "confidence", confidence)
    assert (np.asarray(out.commit_pass)[..., 1:] == 1).all()


def test_a_block_of_two_slots():
    out = refinement.refine(
        lambda t, s: hidden_fn(jnp.pad(t, ((0, 0), (0, 0), (0, 5))), s), choose_fn_for(5), jnp.asarray(ANCHORS), 2, 9, 1
    )
    assert out.tokens.shape == (2, 3, 2) and (np.asarray(out.commit_pass)[..., 1] == 1).all()


@pytest.mark.parametrize("order, passes, message", [("random", 2, "order='random'"), ("quota", 0, "passes=0")])
def test_unknown_orders_and_pass_counts_are_refused(order, passes, message):
    with pytest.raises(UserError, match=message):
        refinement.refine(hidden_fn, choose_fn_for(5), jnp.asarray(ANCHORS), K, MASK, passes, order)
