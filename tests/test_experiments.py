"""Experiments that cannot be run here in full: their arms are sound, and small pieces of them are right."""

import dataclasses
import importlib
import json
import runpy
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from tiny_models import random_target

BENCH = Path(__file__).resolve().parents[1] / "experiments" / "003_when_does_dstill_pay"


@pytest.fixture
def bench(monkeypatch):
    """Modules of the ablation bench, by name."""
    monkeypatch.syspath_prepend(str(BENCH))
    yield importlib.import_module
    for name in ("grid", "texts", "calibration", "tables"):
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


def test_the_parts_of_a_training_step_that_are_timed_still_trace(monkeypatch):
    script = runpy.run_path(str(BENCH.parent / "000_cpu_costs" / "run.py"))
    names = script["step_costs"].__globals__
    monkeypatch.setitem(names, "SHAPE", dataclasses.replace(script["SHAPE"], init_from_layers=None))
    monkeypatch.setitem(names, "_median_ms", lambda function, *arguments: jax.eval_shape(function, *arguments))
    traced = names["step_costs"](random_target(num_layers=8, vocab_size=4200))
    assert len(traced) == 6 and all(jax.tree.leaves(shapes) for shapes in traced.values())


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


def _measured(root, seed, arm, committed, rounds, target="a"):
    folder = root / "large" / "block8" / f"seed{seed}" / arm
    folder.mkdir(parents=True)
    for split in ("train", "heldout"):
        (root / "large" / f"prompts_{split}.jsonl").write_text("{}\n" * len(committed))
    counts = {"committed": committed, "rounds": rounds, "histogram": [], "seconds": 1.0}
    (folder / "measured_choosing.json").write_text(json.dumps({"target": target, "one pass": counts}))


def test_measurements_of_an_earlier_machine_are_kept_and_pooled_by_prompt(bench, tmp_path, capsys):
    tables = bench("tables")
    for seed, committed in ((1, [30, 50]), (2, [34, 54])):
        root = tmp_path / f"machine{seed}"
        _measured(root, seed, "a1c", [30, 50], [10, 10])
        _measured(root, seed, "auf", committed, [10, 10])
        tables.collect(root, tmp_path / "kept")
    tables.write_results(tmp_path / "kept", tmp_path / "results.json")
    found = json.loads((tmp_path / "results.json").read_text())["targets"]["a"]["large"]
    lines = {line["arm"]: line for line in found["block 8, choosing"]}
    assert found["prompts"] == {"train": 2, "heldout": 2} and lines["auf"]["seeds"] == [1, 2]
    assert lines["auf"]["tau"][0] == round((30 + 50 + 34 + 54) / 40, 3) and lines["a1c"]["tau"][0] == 4.0
    assert lines["auf"]["against"]["a1c"]["change"][0] == 5.0
    assert lines["auf"]["against"]["a1c"]["by_seed"] == [0.0, 10.0]
    assert "| auf | one pass | 2 |" in capsys.readouterr().out


def test_measurements_with_different_targets_are_not_pooled(bench, tmp_path):
    tables = bench("tables")
    _measured(tmp_path / "runs", 1, "a1c", [30, 30], [10, 10], target="a" * 64)
    _measured(tmp_path / "runs", 2, "a1c", [50, 50], [10, 10], target="b" * 64)
    tables.collect(tmp_path / "runs", tmp_path / "kept")
    (tmp_path / "results.json").write_text('{"targets": {"of old": {}}}')
    tables.write_results(tmp_path / "kept", tmp_path / "results.json")
    targets = json.loads((tmp_path / "results.json").read_text())["targets"]
    assert targets.pop("of old") == {}
    taus = {name: found["large"]["block 8, choosing"][0]["tau"][0] for name, found in targets.items()}
    assert taus == {"a" * 8: 3.0, "b" * 8: 5.0}
