"""What a step of stage 2 costs, in plain steps: the figure behind STEP_COST in `grid.py`.

    taskset --cpu-list 0 python experiments/003_when_does_dstill_pay/costs.py

Trains a few steps of each in turn, on the texts that `run.py` has made, and throws the drafters away. Medians; nothing
else should run on the machine.
"""

import argparse
import dataclasses
import tempfile
import time
from pathlib import Path

import jax
import numpy as np
from grid import STEP_COST, arms, run_config
from texts import TARGET

from dstill_jax.allocator import keep_freed_memory
from dstill_jax.runs import RunConfig, run_stage
from dstill_jax.weights.load import load_target

_STEPS = 60


def median_step(config: RunConfig, target) -> float:
    """Milliseconds of a step, the first ones, which compile, apart."""
    times = []

    def on_step(step: int, state) -> None:
        jax.block_until_ready(state["step"])
        times.append(time.perf_counter())

    run_stage(config, target=target, on_step=on_step)
    return float(np.median(np.diff(times)[5:]) * 1e3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", type=Path, default=Path("runs/003"))
    parser.add_argument("--data", default="large", choices=("small", "large"))
    args = parser.parse_args()
    keep_freed_memory()
    target = load_target(str(TARGET))
    for block_size in STEP_COST:
        with tempfile.TemporaryDirectory() as work:
            grid, folders = arms(block_size, args.data), dict.fromkeys(("a1", "s1"), f"{work}/a1/drafter")
            found = {}
            for name in ("a1", "dstill"):
                arm = dataclasses.replace(grid[name], steps=_STEPS)
                data = str((args.root / args.data / "train").resolve())
                config = run_config(arm, block_size, 1, str(TARGET), data, f"{work}/{name}", folders)
                found[name] = median_step(config, target)
        plain, second = found["a1"], found["dstill"]
        print(
            f"block {block_size}: plain {plain:.0f} ms, stage 2 {second:.0f} ms, {second / plain:.2f} times", flush=True
        )


if __name__ == "__main__":
    main()
