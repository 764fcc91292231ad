"""SmolLM2-135M-Instruct with ten times the data and steps of the demo: every arm and control, then real decoding.

    python experiments/004_smollm2_at_scale/run.py                 (everything; hours on two CPU cores)
    python experiments/004_smollm2_at_scale/run.py --stop-after a1  (up to an arm)

Whatever was stopped goes on where it was. Training prompts are those rows of GSM8K's test file that are not held out, and
twice more the same with other numbers; HumanEval and AIME are never trained on.
"""

import argparse
import json
import random
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dstill_jax.blocks import ViewMix
from dstill_jax.commands import read_prompts, render, training_prompts
from dstill_jax.data.generate import prepare
from dstill_jax.data.pipeline import PipelineConfig
from dstill_jax.data.prepare_config import PrepareConfig
from dstill_jax.data.prompts import PromptSource
from dstill_jax.distill.config import CurriculumConfig, StageOneConfig, StageTwoConfig, dflash_baseline
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
from dstill_jax.weights.load import load_drafter, load_target

HERE = Path(__file__).resolve().parent
BLOCK, GAMMA, MASK = 8, 4.0, 16
SHAPE = DrafterShape(mask_token_id=MASK, num_layers=2, block_size=BLOCK, init_from_layers=(28, 29))
PROMPT_TOKENS, NEW_TOKENS, VARIANTS = 128, 128, 3
PLAIN, VIEWS, DISTIL = 6000, 1500, 1500
DECODED, TIMED = 96, 20  # new tokens of a held-out prompt; prompts decoded alone, for the speeds
TREES_OF = ("a1_compute", "dstill")
STEP_COST = 1.9  # time of a stage-2 step over that of a plain one, in the demo


@dataclass(frozen=True)
class Stage:
    """One training run, going on from another's drafter unless it is the first."""

    objective: Any
    steps: int
    start: str | None = None


def stages() -> dict[str, Stage]:
    """The arms, each after the one that it starts from."""
    plain = dflash_baseline(LossConfig(gamma=GAMMA))
    auf = dflash_baseline(LossConfig(gamma=GAMMA, weighting="auf"))
    views = StageOneConfig(LossConfig(gamma=GAMMA), ViewMix(0.35, 0.35, 0.30), ViewMix(0.8, 0.1, 0.1))
    loss = LossConfig(TermWeights(data_ce=1.0), TermWeights(teacher_kl=1.0), gamma=GAMMA)
    equal = VIEWS + round(DISTIL * STEP_COST)
    return {
        "a1": Stage(plain, PLAIN),
        "stage1": Stage(views, VIEWS, "a1"),
        "dstill": Stage(StageTwoConfig(loss, CurriculumConfig()), DISTIL, "stage1"),
        "a1c": Stage(plain, DISTIL, "stage1"),
        "auf": Stage(auf, DISTIL, "stage1"),
        "a1_compute": Stage(plain, equal, "a1"),
        "auf_compute": Stage(auf, equal, "a1"),
    }


def varied(rows: list[dict[str, Any]], variants: int) -> list[dict[str, Any]]:
    """Each question as it is, and again with every number drawn anew, of as many digits: other greedy answers."""
    draw = random.Random(0)

    def other(match: re.Match[str]) -> str:
        digits = len(match[0])
        return str(draw.randrange(10 ** (digits - 1), 10**digits))

    def variant(row: dict[str, Any], number: int) -> dict[str, Any]:
        if number == 0:
            return row
        return {"id": f"{row['id']}/numbers{number}", "prompt": re.sub(r"\d+", other, row["prompt"])}

    return [variant(row, number) for number in range(variants) for row in rows]


def answers(root: Path, source: str, workers: int) -> Path:
    """Greedy answers to the training prompts, with the target's features."""
    prompts = root / "prompts.jsonl"
    rows = varied(read_jsonl(Path(training_prompts("gsm8k"))), VARIANTS)
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    summary = prepare(
        PrepareConfig(
            target=source,
            source=PromptSource(str(prompts)),
            out=str(root / "data"),
            max_prompt_tokens=PROMPT_TOKENS,
            max_new_tokens=NEW_TOKENS,
            temperature=0.0,
            batch_size=80,
            workers=workers,
            record_features=True,
            tap_ids=SHAPE.build(load_target(source).config).target_layer_ids,
        )
    )
    print(f"{summary.rows} answers, {summary.supervised_tokens} tokens", flush=True)
    return root / "data"


def train_all(root: Path, source: str, data: Path, target: Target, last: str | None) -> None:
    """The arms in order, up to `last`."""
    for name, stage in stages().items():
        config = RunConfig(
            target=source,
            data=str(data),
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
        if name == last:
            return


def measure_all(root: Path, target: Target) -> dict[str, Any]:
    """Every setting on every prompt set, at temperature 0 and 1; each is kept in `root` and not measured again."""
    found = {}
    for prompts, count in (("gsm8k", 60), ("humaneval", 30), ("aime", 30)):
        for temperature in (0.0, 1.0):
            path = root / f"measured_{prompts}_{temperature:g}.json"
            if not path.exists():
                rows = [p for p in render(target, read_prompts(prompts, None), raw=False) if len(p) <= 512][:count]
                config = EvaluationConfig(DECODED, temperature, seed=7, timed_prompts=TIMED)
                result, _ = measure(
                    target, settings(root, target), rows, config, prompts_name=f"{prompts}, not trained on"
                )
                result.save(path)
            result = EvaluationResult.load(path)
            print_headline(result)
            found[f"{prompts}, T = {temperature:g}"] = {arm.name: _line(result, arm.name) for arm in result}
    return found


def settings(root: Path, target: Target) -> list[Arm]:
    """Drafters by name, with chains of 7 and 3 and trees of several sizes."""
    arms = [Arm("autoregressive", "autoregressive")]
    arms += [Arm(f"lookup, {width} drafted", "lookup", options={"draft_tokens": width}) for width in (7, 3)]
    for name, stage in stages().items():
        drafter = load_drafter(str(root / name / "drafter"), target)
        arms.append(Arm(f"{name}, 7 drafted", "dflash", drafter, name, training_steps=stage.steps))
        if name == "stage1":
            arms.append(Arm(f"{name}, 7 passes", "refine", drafter, name, {"passes": 7}, training_steps=stage.steps))
        if name in TREES_OF:
            arms.append(Arm(f"{name}, 3 drafted", "dflash", drafter, name, {"draft_tokens": 3}))
            arms += [Arm(f"{name}, tree of {n}", "ddtree", drafter, name, {"tree_budget": n}) for n in (4, 8, 16, 64)]
    return arms


def _line(result: EvaluationResult, name: str) -> dict[str, Any]:
    arm = result.arm(name)
    line: dict[str, Any] = {"tau": _numbers(arm.tau_pooled_interval()), "same text": result.identical_outputs(arm)}
    for control in ("a1c", "auf", "a1_compute", "auf_compute"):
        if name == "dstill, 7 drafted":
            line[f"change against {control}, %"] = _numbers(tau_pooled_change(arm, result.arm(f"{control}, 7 drafted")))
    faster = speedup(arm, result.arm("autoregressive"))
    return line if faster is None else {**line, "speed-up": _numbers(faster)}


def _numbers(interval: Interval) -> list[float]:
    return [round(float(x), 3) for x in (interval.value, interval.low, interval.high)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", type=Path, default=Path("runs/004"), help="folder of data, runs and measurements")
    parser.add_argument("--workers", type=int, default=2, help="processes that generate the answers")
    parser.add_argument("--stop-after", choices=tuple(stages()), help="train up to this arm, and measure nothing")
    args = parser.parse_args()
    root, source = args.root.resolve(), str(fetch("smollm2", report=print))
    root.mkdir(parents=True, exist_ok=True)
    data = answers(root, source, args.workers)
    target = load_target(source)
    train_all(root, source, data, target, args.stop_after)
    if args.stop_after is None:
        results = measure_all(root, target)
        (HERE / "results.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
