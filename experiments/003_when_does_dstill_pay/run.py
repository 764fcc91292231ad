"""Trains and measures a grid of arms on the tiny target, as many at a time as asked, and writes results.json.

    python experiments/003_when_does_dstill_pay/run.py --blocks 8 --seeds 1 --arms a1 s1 a1c auf dstill
    python experiments/003_when_does_dstill_pay/run.py --table          (from what is measured, trains nothing)

Hardware: any CPU, whose cores the cells share. What was stopped goes on; what is measured is not measured again, and
its counts are kept in `measured/`, from which `--table` makes the tables on any machine.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent


def wanted_cells(blocks: list[int], seeds: list[int], names: list[str] | None, size: str) -> list[tuple[int, int, str]]:
    """(block size, seed, arm), each after the cell that it starts from, which is added where it was not asked for."""
    from grid import arms

    cells: list[tuple[int, int, str]] = []
    for seed in seeds:
        for block in blocks:
            grid = arms(block, size)
            if unknown := sorted(set(names or ()) - set(grid)):
                raise SystemExit(f"no arm {', '.join(unknown)}; the arms are {', '.join(grid)}")
            for name in names or grid:
                line: list[tuple[int, int, str]] = []
                at: str | None = name
                while at is not None:
                    line.insert(0, (block, seed, at))
                    at = grid[at].start
                cells += [cell for cell in line if cell not in cells]
    return cells


def run_cells(root: Path, target: str, size: str, cells: list[tuple[int, int, str]], jobs: int, final: bool) -> None:
    """Each cell in a process of its own cores, as soon as the one it starts from is done."""
    from grid import arms

    from dstill_jax.data.pool import split_cores

    waiting, running, done = list(cells), {}, set()
    free, held = split_cores(jobs), {}
    while waiting or running:
        for cell, process in list(running.items()):
            if process.poll() is None:
                continue
            del running[cell]
            free.append(held.pop(cell))
            if process.returncode:
                for other in running.values():
                    other.terminate()  # it saves what it has
                raise SystemExit(f"{cell} failed; see {_log(root, cell)}")
            done.add(cell)
            print(f"{time.strftime('%H:%M:%S')} {cell} done", flush=True)
        for cell in list(waiting):
            block, seed, name = cell
            start = arms(block, size)[name].start
            if len(running) < jobs and (start is None or (block, seed, start) in done):
                waiting.remove(cell)
                held[cell] = free.pop(0)
                running[cell] = _start(root, target, size, cell, final, held[cell])
        time.sleep(0.5)


def _log(root: Path, cell: tuple[int, int, str]) -> Path:
    return root / "logs" / ("-".join(map(str, cell)) + ".log")


def _start(
    root: Path, target: str, size: str, cell: tuple[int, int, str], final: bool, cores: tuple[int, ...]
) -> subprocess.Popen:
    block, seed, name = cell
    call = f"run_cell(Path({str(root)!r}), {target!r}, {size!r}, {block}, {seed}, {name!r}, final={final})"
    # Pinned before JAX counts the cores: without it each process has a thread for every core, and all are slower.
    pin = f"import os; os.sched_setaffinity(0, {cores}); " if cores else ""
    code = f"{pin}from pathlib import Path; from cell import run_cell; {call}"
    path = os.pathsep.join(filter(None, (str(HERE), os.environ.get("PYTHONPATH"))))
    environment = os.environ | {"PYTHONPATH": path}
    log = _log(root, cell)
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a") as out:
        return subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=out, stderr=subprocess.STDOUT)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", type=Path, default=Path("runs/003"), help="folder of texts, runs and measurements")
    parser.add_argument("--data", default="large", choices=("small", "large"), help="how many prompts, see texts.py")
    parser.add_argument("--blocks", type=int, nargs="+", default=[8, 16], choices=(8, 16))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--arms", nargs="+", help="arms of grid.py; by default all")
    parser.add_argument("--jobs", type=int, default=2, help="cells at a time")
    parser.add_argument("--final", action="store_true", help="also measure on the prompts kept for the final table")
    parser.add_argument("--table", action="store_true", help="only write results.json and print the tables")
    args = parser.parse_args()
    root = (args.root / args.data).resolve()
    if not args.table:
        from texts import make_texts

        cells = wanted_cells(args.blocks, args.seeds, args.arms, args.data)
        run_cells(root, make_texts(root, args.data), args.data, cells, args.jobs, args.final)
    from tables import collect, write_results

    collect(args.root, HERE / "measured")
    write_results(HERE / "measured", HERE / "results.json")


if __name__ == "__main__":
    main()
