"""results.json and the tables, from what the cells have measured, on this machine and on those before it.

The counts of every cell are kept in `measured/`, so an arm is never lost with the machine that trained it. Seeds are
pooled by prompt: committed tokens and rounds of all seeds are added before prompts are resampled, so an interval covers
the choice of prompts; the change of each seed alone stands beside it.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from grid import STEP_COST, arms
from texts import SIZES, count

from dstill_jax.evaluation.stats import Interval, paired_ratio_change, ratio_interval

CONTROLS = ("a1", "a1c", "auf", "auf_target", "a1_compute", "auf_compute", "a1c_long", "auf_long", "a1_long")
_SETS = ("choosing", "final")
_NAME = 8  # letters of a target's fingerprint that name its folder

Counts = tuple[np.ndarray, np.ndarray]  # committed tokens and rounds of each prompt


def collect(root: Path, kept: Path) -> None:
    """Copies what was measured under `root` to `kept`, by target: one file a cell, and how many prompts there were.

    The tiny target is trained where the bench runs, and another machine's is another one: its answers, and so the
    prompts that are left, differ. Cells are pooled and compared within a target only.
    """
    for size in SIZES:
        for file in sorted((root / size).glob("block*/seed*/*/measured_*.json")):
            folder = kept / json.loads(file.read_text())["target"][:_NAME]
            copy = folder / file.relative_to(root)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, copy)
            prompts = folder / size / "prompts.json"
            if not prompts.exists():
                prompts.write_text(json.dumps(count(root / size)) + "\n", encoding="utf-8")


def write_results(kept: Path, path: Path) -> None:
    """Everything that `collect` has kept, as JSON; prints all tables, those of targets of which only results are left, too."""
    targets = json.loads(path.read_text())["targets"] if path.exists() else {}
    results: dict[str, Any] = {"step_cost": STEP_COST, "targets": targets}
    for folder in sorted(kept.iterdir() if kept.exists() else ()):
        of_target: dict[str, Any] = {}
        for size in (size for size in SIZES if (folder / size).exists()):
            of_target[size] = {"prompts": json.loads((folder / size / "prompts.json").read_text())}
            for which in _SETS:
                for block in (8, 16):
                    lines = _lines(folder / size, size, block, which)
                    if lines:
                        of_target[size][f"block {block}, {which}"] = lines
        results["targets"][folder.name] = of_target
    for name, sizes in results["targets"].items():
        for size, tables in sizes.items():
            for table, lines in tables.items():
                if table != "prompts":
                    _print(f"target {name}, {size} data, {table}", lines)
    path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def _measured(root: Path, block: int, name: str, which: str) -> dict[int, dict[str, Any]]:
    """By seed, what a cell has measured."""
    found = {}
    for folder in sorted((root / f"block{block}").glob("seed*")):
        file = folder / name / f"measured_{which}.json"
        if file.exists():
            found[int(folder.name.removeprefix("seed"))] = json.loads(file.read_text())
    return found


def _counts(measured: dict[int, dict[str, Any]], label: str, seeds: list[int]) -> Counts:
    committed, rounds = (
        np.sum([measured[seed][label][name] for seed in seeds], axis=0, dtype=np.float64)
        for name in ("committed", "rounds")
    )
    return committed, rounds


def _lines(root: Path, size: str, block: int, which: str) -> list[dict[str, Any]]:
    grid = arms(block, size)
    everything = {name: _measured(root, block, name, which) for name in grid}
    lines = []
    for name, arm in grid.items():
        measured = everything[name]
        for label in sorted({label for m in measured.values() for label in m} - {"calibration", "target"}):
            seeds = [seed for seed, m in measured.items() if label in m]
            line = {"arm": name, "about": arm.about, "setting": label, "seeds": seeds, "steps": arm.steps}
            line["tau"] = numbers(ratio_interval(*_counts(measured, label, seeds)))
            line["against"] = _changes(everything, name, label)
            if label == "one pass":
                of_slots = [measured[seed]["calibration"] for seed in seeds if "calibration" in measured[seed]]
                for key in ("acceptance", "error"):
                    line[key] = np.mean([c[key] for c in of_slots], axis=0).round(4).tolist() if of_slots else []
            lines.append(line)
    return lines


def _changes(everything: dict[str, dict[int, dict[str, Any]]], name: str, label: str) -> dict[str, Any]:
    """Change of tau in per cent: against each control in the same setting, and against the arm's own one pass."""
    depth = "deep_" if name.startswith("deep_") else ""
    others = [(depth + control, label) for control in CONTROLS if depth + control != name]
    if label != "one pass":
        others.append((name, "one pass"))
    changes = {}
    for other, other_label in others:
        ours, theirs = everything[name], everything.get(other, {})
        seeds = [seed for seed in ours if label in ours[seed] and other_label in theirs.get(seed, {})]
        if seeds:
            pair = (*_counts(ours, label, seeds), *_counts(theirs, other_label, seeds))
            each = [(*_counts(ours, label, [s]), *_counts(theirs, other_label, [s])) for s in seeds]
            key = other if other != name else "own one pass"
            changes[key] = {
                "change": numbers(paired_ratio_change(*pair)),
                "by_seed": [round(paired_ratio_change(*one).value, 2) for one in each],
            }
    return changes


def numbers(interval: Interval) -> list[float]:
    return [round(float(x), 3) for x in (interval.value, interval.low, interval.high)]


def _print(title: str, lines: list[dict[str, Any]]) -> None:
    print(f"\n{title}\n\n| arm | setting | seeds | tau | change, % | slots 1.. |\n|---|---|---|---|---|---|")
    for line in lines:
        changes = "; ".join(
            "{} {:+.1f} [{:+.1f}, {:+.1f}]".format(other, *found["change"]) for other, found in line["against"].items()
        )
        slots = " ".join(f"{x:.3f}".lstrip("0") for x in line.get("acceptance", []))
        tau = "{:.3f} [{:.3f}, {:.3f}]".format(*line["tau"])
        print(f"| {line['arm']} | {line['setting']} | {len(line['seeds'])} | {tau} | {changes} | {slots} |")
