"""Refinement against a plain-Python reference, block by block and slot by slot."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dstill_jax import refinement
from dstill_jax.errors import UserError

pytestmark = pytest.mark.usefixtures("quick_compilation")

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


@functools.partial(jax.jit, static_argnames=("passes", "order"))
def refine(passes, order, levels=5, threshold=0.9):
    """Traced levels and threshold: one compilation serves several cases."""

    def choose_fn(hidden, slots):
        h = hidden[..., 0].astype(jnp.int32)
        return token_of(h), ((h * 7 % levels + 1) / (levels + 1)).astype(jnp.float32)

    return refinement.refine(
        hidden_fn, choose_fn, jnp.asarray(ANCHORS), K, MASK, passes, order, threshold, keep_hidden=True
    )


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
            score = sure
            if order == "prefix":
                score = {j: math.prod(sure[i] for i in remaining if i <= j) for j in remaining}
            ranked = sorted(remaining, key=lambda j: (-score[j], j))  # ties: the earlier slot
            now = ranked[:quota]
            if order != "quota":
                now = [j for j in remaining if j in now or score[j] >= threshold]
        for j in now:
            tokens[j], commit[j], confidence[j], hidden[j] = token_of(h[j]), number, sure[j], h[j]
        remaining = [j for j in remaining if j not in now]
    return tokens, commit, confidence, hidden


@pytest.mark.parametrize("order", ["confidence", "quota", "prefix", "left_to_right"])
@pytest.mark.parametrize("passes", [1, 4, K - 1, K + 3])
def test_refinement_equals_the_plain_reference(order, passes):
    for levels, threshold in itertools.product((3, 10), (0.55, 0.95)):
        out = jax.tree.map(np.asarray, refine(passes, order, levels, threshold))
        for b, a in np.ndindex(ANCHORS.shape):
            tokens, commit, confidence, hidden = reference(int(ANCHORS[b, a]), passes, order, threshold, levels)
            assert out.tokens[b, a].tolist() == tokens
            assert out.commit_pass[b, a].tolist() == commit
            np.testing.assert_allclose(out.confidence[b, a], confidence, rtol=1e-6)
            assert out.hidden[b, a, :, 0].tolist() == hidden


@pytest.mark.parametrize("order", ["confidence", "quota", "prefix", "left_to_right"])
@pytest.mark.parametrize("passes", [1, 4, K + 3])
def test_every_slot_is_committed_once_and_the_anchor_is_given(order, passes):
    out = refine(passes, order)
    commit = np.asarray(out.commit_pass)
    assert (commit[..., 0] == 0).all() and (np.asarray(out.confidence)[..., 0] == 1).all()
    assert (commit[..., 1:] >= 1).all() and (commit[..., 1:] <= passes).all()
    assert not (np.asarray(out.tokens) == MASK).any()
    assert (np.asarray(out.tokens)[..., 0] == ANCHORS).all()


def test_left_to_right_with_a_slot_a_pass_is_sequential_greedy_decoding():
    out = refine(K - 1, "left_to_right")
    for b, a in np.ndindex(ANCHORS.shape):
        tokens = [int(ANCHORS[b, a])] + [MASK] * (K - 1)
        for j in range(1, K):
            tokens[j] = token_of(mixed(tokens, j))
        assert out.tokens[b, a].tolist() == tokens
        assert out.commit_pass[b, a].tolist() == list(range(K))


def test_one_pass_is_the_same_in_every_order():
    first, *others = (refine(1, order).tokens for order in ("confidence", "quota", "prefix", "left_to_right"))
    assert all((first == other).all() for other in others)


def test_a_threshold_reached_everywhere_commits_everything_in_the_first_pass():
    lowest = 0.5  # one level: every slot is sure to 1 / 2, which is "at least the threshold"
    commit = np.asarray(refine(4, "confidence", 1, lowest).commit_pass)
    assert (commit[..., 1:] == 1).all()
    assert np.asarray(refine(4, "confidence", 1, 0.51).commit_pass).max() == 4


def test_in_prefix_order_commits_are_always_a_prefix():
    for threshold in (0.3, 0.99):
        commit = np.asarray(refine(4, "prefix", 10, threshold).commit_pass)
        assert (np.diff(commit, axis=-1) >= 0).all()
    assert (
        np.asarray(refine(3, "prefix", 10, 1.0).commit_pass) == np.asarray(refine(3, "left_to_right").commit_pass)
    ).all()


def test_a_block_of_two_slots_and_nothing_kept():
    def hidden(tokens, slots):
        return tokens[..., :1].astype(jnp.float32)[..., None]

    def choose(hidden, slots):
        return hidden[..., 0].astype(jnp.int32) + 1, jnp.ones(slots.shape)

    out = refinement.refine(hidden, choose, jnp.asarray(ANCHORS), 2, MASK, 1)
    assert (np.asarray(out.tokens) == np.stack([ANCHORS, ANCHORS + 1], -1)).all()
    assert (np.asarray(out.commit_pass)[..., 1] == 1).all() and out.hidden is None


@pytest.mark.parametrize("order, passes, message", [("random", 2, "order='random'"), ("quota", 0, "passes=0")])
def test_unknown_orders_and_pass_counts_are_refused(order, passes, message):
    with pytest.raises(UserError, match=message):
        refine(passes, order)
