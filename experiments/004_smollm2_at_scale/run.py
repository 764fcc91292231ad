"""SmolLM2-135M-Instruct with ten times the data and steps of the demo: every arm and control, then real decoding.

    python experiments/004_smollm2_at_scale/run.py                 (everything; hours to a day on two CPU cores)
    python experiments/004_smollm2_at_scale/run.py --arms a1      (trains the arms named only, in this order)

Whatever was stopped goes on where it was; once the answers are there, calls with other arms can run side by side.
Training prompts are those rows of GSM8K's test file that are not held out, twice more the same with other numbers, and
six times spliced from halves of two; HumanEval and AIME are never trained on.
"""

import argparse
import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dstill_jax.allocator import keep_freed_memory
from dstill_jax.blocks import ViewMix
from dstill_jax.data.generate import prepare
from dstill_jax.data.pipeline import PipelineConfig
from dstill_jax.data.prepare_config import PrepareConfig
from dstill_jax.data.prompt_sets import read_prompts, render, training_prompts
from dstill_jax.data.prompts import PromptSource
from dstill_jax.distill.config import StageOneConfig, StageTwoConfig, dflash_baseline
from dstill_jax.distill.initialise import DrafterShape
from dstill_jax.evaluation.measure import Arm, EvaluationConfig, measure
from dstill_jax.evaluation.results import EvaluationResult, speedup, tau_pooled_change
from dstill_jax.evaluation.stats import Interval
from dstill_jax.evaluation.tables import print_headline
from dstill_jax.losses.config import LossConfig, TermWeights
from dstill_jax.models.target import Target
from dstill_jax.runs import RunConfig, run_stage
from dstill_jax.training.config import OptimizerConfig, TrainConfig
from dstill_jax.weights.embedded import fetch, read_jsonl
from dstill_jax.weights.load import load_drafter, load_target, save_drafter

HERE = Path(__file__).resolve().parent
BLOCK, GAMMA, MASK = 8, 4.0, 16
SHAPE = DrafterShape(mask_token_id=MASK, num_layers=2, block_size=BLOCK, init_from_layers=(28, 29))
PROMPT_TOKENS, NEW_TOKENS, VARIANTS, SPLICED = 128, 128, 3, 6
PLAIN, VIEWS, DISTIL = 10_000, 1500, 1500
DECODED, TIMED = 96, 20  # new tokens of a held-out prompt; prompts decoded alone, for the speeds
PROMPTS = {"gsm8k": 60, "humaneval": 30, "aime": 30}  # held-out ones of each set
CONTROLS = ("a1", "a1c", "auf", "a1_compute", "auf_compute")
BEST = "auf_compute"  # the drafter that is decoded in every way
FEW = (
    "autoregressive",
    "lookup, 7 drafted",
    *(f"{n}, 7 drafted" for n in ("a1", "auf", "dstill", BEST)),
    f"{BEST}, tree of 64",
)
STEP_COST = 1.9  # time of a stage-2 step over that of a plain one, in the demo


@dataclass(frozen=True)
class Stage:
    """One training run, going on from another's drafter unless it is the first."""

    objective: Any
    steps: int
    start: str | None = None


def stages() -> dict[str, Stage]:
    """The arms, each after the one that it starts from."""
    # Half the text, half the target's distribution: with this little text that is worth 2 % (experiment 005).
    half = TermWeights(data_ce=0.5, target_kl=0.5)
    loss = LossConfig(half, half, gamma=GAMMA)
    plain, auf = dflash_baseline(loss), dflash_baseline(replace(loss, weighting="auf"))
    views = StageOneConfig(loss, ViewMix(0.35, 0.35, 0.30), ViewMix(0.8, 0.1, 0.1))
    # The winner of experiment 003: half of that, half the teacher, up to the drafter's own first error.
    distil = replace(loss, rest=TermWeights(teacher_kl=0.5, data_ce=0.25, target_kl=0.25), weighting="auf")
    equal = VIEWS + round(DISTIL * STEP_COST)
    return {
        "a1": Stage(plain, PLAIN),
        "stage1": Stage(views, VIEWS, "a1"),
        "auf": Stage(auf, DISTIL, "stage1"),
        "dstill": Stage(StageTwoConfig(distil), DISTIL, "stage1"),
        "a1c": Stage(plain, DISTIL, "stage1"),
        "a1_compute": Stage(plain, equal, "a1"),
        "auf_compute": Stage(auf, equal, "a1"),
    }


def varied(rows: list[dict[str, Any]], variants: int) -> list[dict[str, Any]]:
    """Each question as it is, and again with every number drawn anew, of as many digits: other greedy answers."""
    draw = random.Random(0)

    def variant(row: dict[str, Any], number: int) -> dict[str, Any]:
        return {"id": f"{row['id']}/numbers{number}", "prompt": _renumbered(row["prompt"], draw)} if number else row

    return [variant(row, number) for number in range(variants) for row in rows]


def spliced(rows: list[dict[str, Any]], rounds: int) -> list[dict[str, Any]]:
    """The beginning of each question with the end of another, drawn anew each round: senseless, answered all the same."""
    draw = random.Random(1)
    found = []
    for number in range(1, rounds + 1):
        for row, other in zip(rows, draw.sample(rows, len(rows)), strict=True):
            begin, end = (re.split(r"(?<=[.?!])\s+", x["prompt"].strip()) for x in (row, other))
            text = " ".join(begin[: (len(begin) + 1) // 2] + end[len(end) // 2 :])
            found.append({"id": f"{row['id']}/spliced{number}", "prompt": _renumbered(text, draw)})
    return found


def _renumbered(text: str, draw: random.Random) -> str:
    def other(match: re.Match[str]) -> str:
        digits = len(match[0])
        return str(draw.randrange(10 ** (digits - 1), 10**digits))

    return re.sub(r"\d+", other, text)


def answers(root: Path, source: str, workers: int) -> tuple[str, ...]:
    """Greedy answers to the training prompts, with the target's features: the folders."""
    rows = read_jsonl(Path(training_prompts("gsm8k")))
    sets = {"data": varied(rows, VARIANTS), "data_spliced": spliced(rows, SPLICED)}
    for name, prompts in sets.items():
        path = root / f"prompts_{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in prompts), encoding="utf-8")
        summary = prepare(
            PrepareConfig(
                target=source,
                source=PromptSource(str(path)),
                out=str(root / name),
                max_prompt_tokens=PROMPT_TOKENS,
                max_new_tokens=NEW_TOKENS,
                temperature=0.0,
                batch_size=80,
                workers=workers,
                record_features=True,
                tap_ids=SHAPE.build(load_target(source).config).target_layer_ids,
            )
        )
        print(f"{name}: {summary.rows} answers, {summary.supervised_tokens} tokens", flush=True)
    return tuple(str(root / name) for name in sets)


def train_all(root: Path, source: str, data: tuple[str, ...], target: Target, names: Sequence[str]) -> None:
    """The arms of these names, in order; those they start from must be there or among them."""
    for name in names:
        stage = stages()[name]
        config = RunConfig(
            target=source,
            data=data,
            out=str(root / name),
            objective=stage.objective,
            optimizer=OptimizerConfig(learning_rate=3e-3 if stage.start is None else 1.5e-3),
            train=TrainConfig(total_steps=stage.steps, save_every=250, keep_last=1, log_every=10, seed=1),
            batches=PipelineConfig(PROMPT_TOKENS + NEW_TOKENS, 2, seed=1),
            new=SHAPE if stage.start is None else None,
            start_from=None if stage.start is None else str(root / stage.start / "drafter"),
            anchors_per_row=32,
            vocabulary=4096,
            compute_dtype="float32",
        )
        print(f"{name}: {stage.steps} steps", flush=True)
        run_stage(config, target=target, report=print)


def measure_all(root: Path, target: Target) -> dict[str, Any]:
    """Every prompt set at temperature 0 and 1; each is kept in `root` and not measured again.

    Held-out GSM8K at temperature 0 has all settings and the speeds, so nothing else should run on the machine then; the
    other sets have the settings of `FEW`.
    """
    everything, found = settings(root, target), {}
    few = [arm for arm in everything if arm.name in FEW]
    for prompts, count in PROMPTS.items():
        for temperature in (0.0, 1.0):
            first = prompts == "gsm8k" and temperature == 0
            arms = everything if first else few
            path = root / f"measured_{prompts}_{temperature:g}.json"
            if not path.exists() or {a.name for a in EvaluationResult.load(path)} != {a.name for a in arms}:
                rows = [p for p in render(target, read_prompts(prompts)) if len(p) <= 512][:count]
                config = EvaluationConfig(DECODED, temperature, seed=7, timed_prompts=TIMED if first else 0)
                result, _ = measure(target, arms, rows, config, prompts_name=f"{prompts}, not trained on")
                result.save(path)
            result = EvaluationResult.load(path)
            print_headline(result)
            found[f"{prompts}, T = {temperature:g}"] = {arm.name: _line(result, arm.name) for arm in result}
    return found


def settings(root: Path, target: Target) -> list[Arm]:
    """The drafters trained so far, each in its settings, and what needs none."""
    arms = [Arm("autoregressive", "autoregressive")]
    arms += [Arm(f"lookup, {width} drafted", "lookup", options={"draft_tokens": width}) for width in (7, 3)]
    for name in stages():
        folder = root / name / "drafter"
        if folder.exists():
            # What is measured is what can be shipped: all arms alike rounded to bfloat16.
            exported = root / "exported" / name
            save_drafter(exported, load_drafter(str(folder), target), target.config)
            drafter = load_drafter(str(exported), target)
            steps = _steps(name)
            arms += [
                Arm(f"{name}, {about}", method, drafter, name, options, training_steps=steps)
                for about, method, options in _decodings(name)
            ]
    return arms


def _steps(name: str) -> int:
    """Of all stages together."""
    stage = stages()[name]
    return stage.steps + (0 if stage.start is None else _steps(stage.start))


def _decodings(name: str) -> list[tuple[str, str, dict[str, int]]]:
    """What it is called, the method and its options: a full chain, and shorter ones and trees of some drafters."""
    found = [("7 drafted", "dflash", {})]
    if name == "stage1":
        found.append(("7 passes", "refine", {"passes": 7}))
    if name == BEST:
        found += [(f"{n} drafted", "dflash", {"draft_tokens": n}) for n in (3, 4, 5)]
        found += [(f"tree of {n}", "ddtree", {"tree_budget": n}) for n in (16, 64)]
    return found


def _line(result: EvaluationResult, name: str) -> dict[str, Any]:
    arm = result.arm(name)
    line: dict[str, Any] = {"tau": _numbers(arm.tau_pooled_interval()), "same text": result.identical_outputs(arm)}
    for control in CONTROLS:
        other = f"{control}, 7 drafted"
        if name.endswith(", 7 drafted") and name != other and other in [a.name for a in result]:
            line[f"change against {control}, %"] = _numbers(tau_pooled_change(arm, result.arm(other)))
    faster = speedup(arm, result.arm("autoregressive"))
    return line if faster is None else {**line, "speed-up": _numbers(faster)}


def _numbers(interval: Interval) -> list[float]:
    return [round(float(x), 3) for x in (interval.value, interval.low, interval.high)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", type=Path, default=Path("runs/004"), help="folder of data, runs and measurements")
    parser.add_argument("--workers", type=int, default=2, help="processes that generate the answers")
    parser.add_argument(
        "--arms", nargs="+", choices=tuple(stages()), default=tuple(stages()), help="train these, in order"
    )
    parser.add_argument("--train-only", action="store_true", help="decode nothing")
    args = parser.parse_args()
    keep_freed_memory()
    root, source = args.root.resolve(), str(fetch("smollm2", report=print))
    root.mkdir(parents=True, exist_ok=True)
    data = answers(root, source, args.workers)
    target = load_target(source)
    train_all(root, source, data, target, args.arms)
    if not args.train_only:
        results = measure_all(root, target)
        (HERE / "results.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
