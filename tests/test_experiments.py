"""Experiments that cannot be run here in full: their arms are sound, and small pieces of them are right."""

import importlib
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest

BENCH = Path(__file__).resolve().parents[1] / "experiments" / "003_when_does_dstill_pay"


@pytest.fixture
def bench(monkeypatch):
    """Modules of the ablation bench, by name."""
    monkeypatch.syspath_prepend(str(BENCH))
    yield importlib.import_module
    for name in ("grid", "texts", "calibration"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("size", ["small", "large"])
@pytest.mark.parametrize("block_size", [8, 16])
def test_every_arm_of_the_bench_is_a_run_that_starts_from_an_arm_before_it(bench, block_size, size):
    grid = bench("grid")
    arms, seen = grid.arms(block_size, size), set()
    for name, arm in arms.items():
        folders = {other: f"runs/{other}" for other in seen}
        run = grid.run_config(arm, block_size, 1, "tiny", "data", "out", folders)
        assert run.train.total_steps == arm.steps and (run.new is None) == (arm.start is not None)
        if run.new is not None:
            assert run.new.block_size == block_size
        seen.add(name)


def test_every_arm_at_scale_starts_from_one_before_it():
    script = runpy.run_path(str(BENCH.parent / "004_smollm2_at_scale" / "run.py"))
    seen = set()
    for name, stage in script["stages"]().items():
        assert stage.start is None or stage.start in seen
        seen.add(name)
    assert script["BEST"] in seen


def test_loops_are_told_from_text_that_only_repeats_words(bench):
    is_loop = bench("texts").is_loop
    rng = np.random.default_rng(0)
    assert is_loop(np.tile([5, 6, 7], 40)) and is_loop(np.concatenate([rng.integers(0, 99, 60), np.full(32, 3)]))
    assert not is_loop(rng.integers(0, 99, 96)) and not is_loop(np.tile(np.arange(17), 6))


def test_simulated_rounds_are_those_of_greedy_decoding(bench):
    walk = bench("calibration")._walk
    answer = np.arange(10) >= 3  # tokens 3 .. 9 are the answer; 3 comes with the prefill
    accepted = {3: 2, 4: 0, 5: 9, 6: 0, 7: 5, 8: 0}
    assert walk(accepted, answer) == (6, 3), "3 -> 6 by two drafted and one more, 6 -> 7, 7 -> 9 cut by the end"
