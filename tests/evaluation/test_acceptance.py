"""Acceptance counts: exact, and unbiased at the end of a response."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dstill_jax.errors import UserError
from dstill_jax.evaluation import AcceptanceCounts, tau_mean, tau_pooled
from dstill_jax.evaluation.acceptance import response_means


@pytest.mark.parametrize("order", list(itertools.permutations([3, 2, 1, 0])))
def test_runs_3_2_1_0_give_exactly_two_and_a_half_in_any_order(order):
    assert AcceptanceCounts.from_matched(order, drafted=3).tau_pooled == 2.5


def test_shares_are_conditional_on_earlier_slots():
    counts = AcceptanceCounts.from_matched([3, 2, 1, 0], drafted=3)
    assert counts.reached == (4, 3, 2) and counts.accepted == (3, 2, 1)
    np.testing.assert_array_equal(counts.conditional(), [3 / 4, 2 / 3, 1 / 2])
    assert counts.histogram == (0, 1, 1, 1, 1)


@given(st.lists(st.lists(st.booleans(), min_size=4, max_size=4), max_size=8))
def test_runs_agree_with_a_loop(rows):
    reached, accepted, committed = [0] * 4, [0] * 4, 0
    for row in rows:
        committed += 1
        for slot, hit in enumerate(row):
            reached[slot] += 1
            if not hit:
                break
            accepted[slot] += 1
            committed += 1
    counts = AcceptanceCounts.from_matched([[*row, False].index(False) for row in rows], drafted=4)
    assert (list(counts.reached), list(counts.accepted), counts.committed) == (reached, accepted, committed)


def test_the_slot_of_the_last_token_is_not_counted():
    # 3 committed at the end: either slot 3 was rejected, or it was accepted and the response was cut behind it... both
    # look the same, so slot 3 is left out; slots 1 and 2 are known.
    counts = AcceptanceCounts.from_acceptance_lengths([[1, 3]], drafted=4)
    assert counts.reached == (2, 1, 0, 0) and counts.accepted == (1, 1, 0, 0)
    running = AcceptanceCounts.from_acceptance_lengths([[1, 3]], drafted=4, last_round_cut=False)
    assert running.reached == (2, 1, 1, 0) and running.accepted == (1, 1, 0, 0)
    assert counts.committed == running.committed == 4 and counts.rounds == 2


def test_a_full_last_round_leaves_nothing_out():
    counts = AcceptanceCounts.from_acceptance_lengths([[3]], drafted=2)
    assert counts.reached == counts.accepted == (1, 1)


def test_shares_stay_unbiased_when_the_cap_cuts_short_responses():
    rate, drafted, length = 0.6, 3, 5
    generator = np.random.default_rng(0)
    responses = []
    for _ in range(20_000):
        left, rounds = length, []
        while left:
            run = next((k for k in range(drafted) if generator.random() >= rate), drafted)
            rounds.append(min(run + 1, left))
            left -= rounds[-1]
        responses.append(rounds)
    shares = AcceptanceCounts.from_acceptance_lengths(responses, drafted).conditional()
    np.testing.assert_allclose(shares, rate, atol=0.012)  # at least 5 standard errors at slot 3
    naive = AcceptanceCounts.from_acceptance_lengths(responses, drafted, last_round_cut=False).conditional()
    assert naive[0] < rate - 0.03  # counting cut rounds as rejections would be seen here


def test_the_two_means_differ_when_responses_differ():
    rounds = [[4, 4], [1, 1, 1, 1, 1, 1]]
    assert tau_mean(rounds) == 2.5
    assert tau_pooled(rounds) == 14 / 8
    assert AcceptanceCounts.from_acceptance_lengths(rounds, 3).tau_pooled == 14 / 8


def test_a_response_without_rounds_has_no_mean_and_harms_none():
    assert np.isnan(response_means([[], [2]])[0])
    assert tau_mean([[], [2]]) == tau_pooled([[], [2]]) == 2


def test_autoregressive_decoding_has_no_slots_and_tau_one():
    counts = AcceptanceCounts.from_acceptance_lengths([[1, 1], [1]], drafted=0)
    assert counts.tau_pooled == 1 and counts.conditional().shape == (0,)


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: AcceptanceCounts.from_matched([4], 3), "0..3"),
        (lambda: AcceptanceCounts.from_acceptance_lengths([[1], [5]], 3), r"acceptance_lengths\[1\]\[0\]"),
        (lambda: AcceptanceCounts.from_acceptance_lengths([[0]], 3), "1..4"),
        (lambda: AcceptanceCounts.from_acceptance_lengths([[1]], 3, last_round_cut=[True, False]), "one value per"),
        (lambda: AcceptanceCounts.from_matched([], 2).tau_pooled, "at least one round"),
        (lambda: AcceptanceCounts((1,), (2,), (0, 0, 1)), "must not exceed"),
        (lambda: tau_mean([[], []]), "nothing was decoded"),
    ],
)
def test_bad_counts_are_refused(call, words):
    with pytest.raises(UserError, match=words):
        call()
