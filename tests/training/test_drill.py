"""Stopped at twenty random moments of its life (starting, compiling, in a step, in a save), a run ends the same."""

import random
import signal
import time
from pathlib import Path

import pytest
from test_training_loop import assert_equals, start_script, uninterrupted
from toy_training import run_toy

from dstill_jax.training import latest_step

__all__ = ["uninterrupted"]  # the fixture


@pytest.mark.slow
def test_twenty_signals_at_random_moments_change_no_bit(tmp_path: Path, uninterrupted: tuple) -> None:
    random_moments, progress = random.Random(7), []
    for number in range(20):
        process = start_script(tmp_path, "delay_ms=40", "save_every=3")
        metrics = tmp_path / "metrics.jsonl"
        if number % 4:  # else: while it starts
            size = metrics.stat().st_size if metrics.exists() else 0
            end = time.monotonic() + 300
            while process.poll() is None and (not metrics.exists() or metrics.stat().st_size <= size):
                assert time.monotonic() < end, "the run made no progress"
                time.sleep(0.01)
        time.sleep(random_moments.random() * 0.3)
        process.send_signal(random_moments.choice((signal.SIGKILL, signal.SIGTERM)))
        process.communicate()
        progress.append(latest_step(tmp_path) or 0)
    assert progress == sorted(progress), "no step was lost again"
    assert_equals(tmp_path, run_toy(tmp_path), uninterrupted)
