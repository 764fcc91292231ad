"""Plans the runs of `configs/` for TPU slices that are not attached, and writes the plans into their docstrings.

    python experiments/002_config_plans/run.py --quick                                  (every target, both stages)
    python experiments/002_config_plans/run.py qwen3_8b_stage1 --slices v6e-16 v5p-8

Hardware: no TPU; any Linux x86-64 machine with `jax[tpu]` installed. Up to 4 minutes of CPU time and 3.6 GB of memory for each
plan, 1 minute with --quick; 16 plans in all. Plans are *compiled for* a slice; nothing runs on one. A file is rewritten when
all its plans are there.
"""

import argparse
import re
import subprocess
import sys
from pathlib import Path

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
TARGETS = ("qwen3_0_6b", "qwen3_4b", "qwen3_8b", "llama31_8b")
SLICES = ("v5e-16", "v5p-32")
_UNPLANNED = re.compile(
    r"`dstill plan configs/\w+\.py --slice v5e-16` says whether it\s+fits; nobody has compiled it yet\."
)


def planned(path: Path, slice_name: str, quick: bool) -> str:
    """What `dstill plan` prints, each in a process of its own: a compiler that aborts takes no other plan with it."""
    command = [sys.executable, "-m", "dstill_jax.cli", "plan", str(path), "--slice", slice_name, *["--quick"] * quick]
    done = subprocess.run(command, cwd=CONFIGS.parent, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{path.name} for {slice_name}: {done.stderr.strip()[-2000:]}")
    return done.stdout.strip()


def with_plans(source: str, name: str, plans: list[str]) -> str:
    """The file's text with these plans at the end of its docstring, in place of those for the same slices."""
    opening, description, code = source.split('"""', 2)
    before, *old = re.split(r"^(?=plan for )", description, flags=re.MULTILINE)
    by_slice = {plan.split()[2]: plan.strip() for plan in (*old, *plans)}
    before = _UNPLANNED.sub(
        f"Planned (compiled, not run) with\n          `dstill plan configs/{name} --slice ...`:", before
    )
    return '"""'.join((opening, before.rstrip() + "\n\n" + "\n\n".join(by_slice.values()) + "\n", code))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="files of configs/, without .py; by default all that name a TPU slice")
    parser.add_argument("--slices", nargs="+", default=SLICES)
    parser.add_argument("--quick", action="store_true", help="compile at the lowest effort (docs/planning.md)")
    args = parser.parse_args()
    for name in args.names or [f"{target}_stage{stage}" for stage in (1, 2) for target in TARGETS]:
        path = CONFIGS / f"{name}.py"
        plans = [planned(path, slice_name, args.quick) for slice_name in args.slices]
        path.write_text(with_plans(path.read_text(), path.name, plans))
        print(f"{path.name}: {', '.join(args.slices)}", flush=True)


if __name__ == "__main__":
    main()
