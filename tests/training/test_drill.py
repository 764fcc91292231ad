"""Stopped at twenty random moments of its life, a run ends as if nothing had happened.

Five each while it starts (imports, compiles), in a step, in a save that a thread writes, and in an evaluation; one process
of four is stopped in `tests/sharded/test_hosts.py`.
"""

import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from test_training_loop import leaves, start_script, train_records, wait_until
from toy_training import EVALUATING, evaluation, run_toy

from dstill_jax.training import latest_step

STEPS = 100
SETTINGS = {"total_steps": STEPS, "save_every": 3}


def has_begun(kind: str, run_dir: Path) -> Callable[[], bool]:
    """Tells when a run that starts now has come to the kind of moment."""
    metrics = run_dir / "metrics.jsonl"
    size = metrics.stat().st_size if metrics.exists() else 0
    marker = run_dir / EVALUATING
    marker.unlink(missing_ok=True)  # of a run that was killed there
    old = {path.name for path in run_dir.glob("checkpoints/*.orbax-checkpoint-tmp")}
    return {
        "start": lambda: True,
        "step": lambda: metrics.exists() and metrics.stat().st_size > size,
        "save": lambda: any(p.name not in old for p in run_dir.glob("checkpoints/*.orbax-checkpoint-tmp")),
        "evaluation": marker.exists,
    }[kind]


@pytest.mark.slow  # a minute: the script starts 21 times
def test_twenty_signals_at_random_moments_change_no_bit(tmp_path: Path) -> None:
    expected = run_toy(tmp_path / "whole", on_step=evaluation(tmp_path / "whole"), **SETTINGS)
    run_dir, random_moments = tmp_path / "drilled", random.Random(7)
    reached = []
    for number in range(20):
        kind = ("start", "step", "save", "evaluation")[number % 4]
        begun = has_begun(kind, run_dir)
        options = [f"{name}={value}" for name, value in SETTINGS.items()]
        process = start_script(run_dir, "delay_ms=40", "evaluate_ms=100", *options)
        wait_until(begun, process)
        time.sleep(random_moments.random() * {"start": 2.0, "step": 0.1, "save": 0.01, "evaluation": 0.05}[kind])
        signum = random_moments.choice((signal.SIGKILL, signal.SIGTERM))
        process.send_signal(signum)
        process.communicate()
        # 130: it was told of SIGTERM, saved and said so; before its handler is there, SIGTERM kills.
        assert process.returncode in ((-9,) if signum == signal.SIGKILL else (130, -15) if kind == "start" else (130,))
        reached.append(latest_step(run_dir) or 0)
    assert reached == sorted(reached) and 0 < reached[-1] < STEPS, "no step was lost again"
    state = run_toy(run_dir, on_step=evaluation(run_dir), **SETTINGS)
    assert leaves(state) == leaves(expected)
    assert [record["step"] for record in train_records(run_dir)] == list(range(1, STEPS + 1))
    assert train_records(run_dir) == train_records(tmp_path / "whole")
