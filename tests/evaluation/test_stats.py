"""Bootstrap intervals: right coverage, seeded, paired, and refused for one prompt."""

import numpy as np
import pytest

from dstill_jax.errors import UserError
from dstill_jax.evaluation import (
    Bootstrap,
    mean_interval,
    paired_mean_change,
    paired_ratio_change,
    ratio_interval,
    speedup_interval,
    stats,
)

FEW = Bootstrap(resamples=400)


def test_mean_interval_agrees_with_a_plain_loop():
    values = np.random.default_rng(1).normal(2, 1, size=40)
    generator = np.random.default_rng(2)
    means = [values[generator.integers(0, 40, 40)].mean() for _ in range(20_000)]
    interval = mean_interval(values, Bootstrap(resamples=20_000))
    assert interval.value == pytest.approx(values.mean())
    np.testing.assert_allclose([interval.low, interval.high], np.quantile(means, [0.025, 0.975]), atol=0.02)


def test_95_percent_intervals_cover_about_95_percent():
    generator = np.random.default_rng(0)
    intervals = [mean_interval(generator.normal(size=60), Bootstrap(resamples=400, seed=s)) for s in range(400)]
    covered = sum(interval.low <= 0 <= interval.high for interval in intervals)
    assert 0.90 <= covered / 400 <= 0.98  # percentile intervals of 60 values are slightly too short


def test_intervals_repeat_with_the_seed_and_move_with_it():
    values = np.arange(10.0)
    assert mean_interval(values, FEW) == mean_interval(values, FEW)
    assert mean_interval(values, FEW) != mean_interval(values, Bootstrap(resamples=400, seed=1))


def test_memory_limit_does_not_change_the_draws(monkeypatch):
    values = np.arange(10.0)
    whole = mean_interval(values, FEW)
    monkeypatch.setattr(stats, "_CHUNK", 70)
    assert mean_interval(values, FEW) == whole


def test_pooled_ratio_is_not_the_mean_of_ratios():
    interval = ratio_interval(np.array([8.0, 6.0]), np.array([2.0, 6.0]), FEW)
    assert interval.value == 14 / 8
    assert (interval.low, interval.high) == (1.0, 4.0)


def test_pairing_removes_the_spread_between_prompts():
    base = np.random.default_rng(0).uniform(1, 8, size=50)
    better = base * 1.1
    change = paired_mean_change(better, base, FEW)
    assert change.value == pytest.approx(10) and change.half_width < 1e-9
    assert mean_interval(better, FEW).low < base.mean()  # unpaired intervals overlap by far


def test_ratio_change_of_equal_arms_is_zero_with_no_width():
    top, bottom = np.array([4.0, 9.0, 3.0]), np.array([2.0, 3.0, 3.0])
    change = paired_ratio_change(top, bottom, top, bottom, FEW)
    assert (change.value, change.low, change.high) == (0, 0, 0)


def test_speedup_is_seconds_per_token_of_the_baseline_over_the_methods():
    interval = speedup_interval(np.array([4.0, 8.0]), np.array([4, 8]), np.array([2.0, 4.0]), np.array([4, 8]), FEW)
    assert (interval.value, interval.low, interval.high) == (2, 2, 2)
    longer = speedup_interval(np.array([4.0, 8.0]), np.array([4, 8]), np.array([4.0, 8.0]), np.array([8, 16]), FEW)
    assert longer.value == 2  # more tokens in the same time


def test_formatting_never_shows_minus_zero():
    assert stats.Interval(-0.001, -0.004, 1.25, 5).format(1, sign=True) == "+0.0 [+0.0, +1.2]"


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: mean_interval(np.ones(1)), "at least 2 prompts, got 1"),
        (lambda: ratio_interval(np.ones(1), np.ones(1)), "at least 2 prompts"),
        (lambda: speedup_interval(*[np.ones(1)] * 4), "at least 2 prompts"),
        (lambda: paired_mean_change(np.ones(3), np.ones(4)), "same prompts"),
        (lambda: mean_interval(np.array([1.0, np.nan])), "finite for every prompt"),
        (lambda: ratio_interval(np.ones(2), np.zeros(2)), "denominator"),
        (lambda: Bootstrap(level=95), "between 0 and 1"),
        (lambda: Bootstrap(resamples=10), "at least 100"),
    ],
)
def test_bad_input_is_refused(call, words):
    with pytest.raises(UserError, match=words):
        call()
