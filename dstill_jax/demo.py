"""`dstill demo`: the whole method on one machine, with its controls, ending in one honest table.

Data from the target itself, the DFlash baseline, stage 1, stage 2 and the control that goes on with plain
cross-entropy; then real decoding of held-out prompts with all of them. Every step is kept in the demo's folder and
found again when the demo is started anew.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dstill_jax.blocks import ViewMix
from dstill_jax.data.generate import prepare
from dstill_jax.data.pipeline import PipelineConfig
from dstill_jax.data.prepare_config import PrepareConfig
from dstill_jax.data.prompts import PromptSource, read_rows
from dstill_jax.data.templates import ChatTemplate, TemplateConfig
from dstill_jax.distill.config import CurriculumConfig, StageOneConfig, StageTwoConfig, dflash_baseline
from dstill_jax.distill.initialise import DrafterShape
from dstill_jax.errors import UserError
from dstill_jax.evaluation.measure import Arm, EvaluationConfig, measure
from dstill_jax.evaluation.plots import require_matplotlib
from dstill_jax.evaluation.results import EvaluationResult
from dstill_jax.losses.config import LossConfig, TermWeights
from dstill_jax.models.target import Target
from dstill_jax.runs import RunConfig, run_stage
from dstill_jax.training.config import OptimizerConfig, TrainConfig
from dstill_jax.training.interrupt import stop_between
from dstill_jax.weights.embedded import fetch, gsm8k_split, read_jsonl
from dstill_jax.weights.load import describe_target, load_drafter, load_target

_TIMED = 20  # held-out prompts decoded one at a time, for the speeds; more than these are decoded in batches
STAGE_ONE_SHARE = 0.6  # of the steps of the baseline; stage 2, or its control, gets the rest


@dataclass(frozen=True)
class Scale:
    """What a budget buys. Fixed numbers, not a clock: the same command gives the same drafter."""

    shape: DrafterShape
    rows: int  # training prompts, answered by the target
    held_out: int  # prompts of the table
    prompt_tokens: int
    new_tokens: int  # of each training answer
    decoded: int  # new tokens of each held-out prompt
    temperature: float
    steps: int  # of the baseline
    rows_per_step: int
    anchors_per_row: int
    vocabulary: int | None
    learning_rate: float
    style: str
    workers: int = 2

    @property
    def generated_together(self) -> int:
        """Rows of a worker's batch: up to 80, such that its last batch is about as full as the others."""
        share = -(-self.rows // self.workers)
        return -(-share // -(-share // 80))


def smollm2_scale(minutes: float) -> Scale:
    """SmolLM2-135M-Instruct on two CPU cores."""
    return Scale(
        shape=DrafterShape(mask_token_id=16, num_layers=2, block_size=8, init_from_layers=(28, 29)),
        rows=max(32, min(800, round(24 * minutes))),
        held_out=max(4, min(100, round(1.25 * minutes))),
        prompt_tokens=104,
        new_tokens=128,
        decoded=64,
        temperature=0.0,
        steps=max(10, round(39 * minutes)),
        rows_per_step=2,
        anchors_per_row=32,
        vocabulary=4096,
        learning_rate=3e-3,
        style="chat",
    )


def tiny_scale(minutes: float) -> Scale:
    """The tiny target: too weak to be of use, fast enough for a test of everything."""
    return Scale(
        shape=DrafterShape(mask_token_id=2, num_layers=2, block_size=8, target_layer_ids=(0, 1, 2)),
        rows=max(32, round(256 * minutes)),
        held_out=max(4, round(16 * minutes)),
        prompt_tokens=80,
        new_tokens=96,
        decoded=64,
        temperature=0.3,
        steps=max(10, round(150 * minutes)),
        rows_per_step=4,
        anchors_per_row=32,
        vocabulary=None,
        learning_rate=2.5e-3,
        style="chat",
    )


_SCALES: dict[str, tuple[Callable[[float], Scale], float]] = {
    "smollm2": (smollm2_scale, 16.0),
    "tiny": (tiny_scale, 1.0),
}


def demo(target_name: str, minutes: float | None = None, out: str | None = None, json_path: str | None = None) -> Path:
    """Runs the demo, or goes on with it; returns the path of its report.

    Raises:
      UserError: minutes out of range, no network for the first fetch, no space, a folder of another demo.
    """
    make_scale, default = _SCALES[target_name]
    minutes = default if minutes is None else minutes
    if not 0 < minutes <= 10000:
        raise UserError(f"minutes={minutes} must be positive and at most 10000")
    require_matplotlib()  # for the report, at the end
    scale = make_scale(minutes)
    folder = Path(out or f".demo/{target_name}-{minutes:g}min")
    folder.mkdir(parents=True, exist_ok=True)
    _say(f"1/4 target and prompts ({target_name})")
    source, train_rows, held_out = _material(target_name, scale, folder)
    _say(f"2/4 the target answers {scale.rows} prompts")
    data = _answers(scale, source, train_rows, folder)
    target = load_target(source)
    runs = _runs(scale, source, data, folder)
    _say(f"3/4 training: {sum(config.train.total_steps for config in runs.values())} steps in all")
    for name, config in stop_between(runs.items()):
        _say(f"  {name}: {config.train.total_steps} steps ({_STEPS_OF[name]})")
        run_stage(config, target=target)
    _say(f"4/4 decoding {scale.held_out} held-out prompts with every arm")
    return _table(target_name, minutes, scale, target, runs, held_out, folder, json_path)


_STEPS_OF = {
    "a1": "DFlash baseline: plain cross-entropy, fully masked blocks",
    "stage1": "stage 1: partially revealed blocks",
    "a1c": "control: stage 1, then plain cross-entropy",
    "a4": "stage 2: DStill",
}


def _material(target_name: str, scale: Scale, folder: Path) -> tuple[str, Path, list[Any]]:
    """The target's folder, a file of training prompts that are short enough, and such held-out rows."""
    source = fetch(target_name, report=_say)
    train_file = folder / "prompts_train.jsonl"
    if target_name == "tiny":
        return (
            str(source),
            source / "prompts_train.jsonl",
            read_rows(PromptSource(str(source / "prompts_heldout.jsonl"))),
        )
    held_out_file = folder / "prompts_heldout.jsonl"
    template = ChatTemplate(describe_target(source).tokenizer, TemplateConfig(style=scale.style))
    for path, rows in zip(
        (train_file, held_out_file), gsm8k_split(read_jsonl(fetch("gsm8k", report=_say))), strict=True
    ):
        lines = [json.dumps(row) + "\n" for row in rows]
        path.write_text("".join(lines), encoding="utf-8")
        lengths = [len(template.prompt_ids(row)) for row in read_rows(PromptSource(str(path)))]
        short = [line for line, n in zip(lines, lengths, strict=True) if n <= scale.prompt_tokens]
        path.write_text("".join(short), encoding="utf-8")
    return str(source), train_file, read_rows(PromptSource(str(held_out_file)))


def _answers(scale: Scale, source: str, prompts: Path, folder: Path) -> Path:
    summary = prepare(
        PrepareConfig(
            target=source,
            source=PromptSource(str(prompts)),
            out=str(folder / "data"),
            template=TemplateConfig(style=scale.style),
            limit=scale.rows,
            max_prompt_tokens=scale.prompt_tokens,
            max_new_tokens=scale.new_tokens,
            temperature=scale.temperature,
            batch_size=scale.generated_together,
            workers=scale.workers,
            record_features=True,
            tap_ids=scale.shape.build(describe_target(source).config).target_layer_ids,
        )
    )
    if summary.new_tokens:
        _say(f"  {summary.new_tokens} tokens, {summary.tokens_per_second:.0f} a second")
    return folder / "data"


def _runs(scale: Scale, source: str, data: Path, folder: Path) -> dict[str, RunConfig]:
    """The four training runs, in the order in which they need each other."""
    gamma = 4.0
    plain = LossConfig(gamma=gamma)
    first = round(scale.steps * STAGE_ONE_SHARE)
    rest = scale.steps - first
    stage1 = folder / "stage1" / "drafter"

    def run(name: str, steps: int, objective: Any, learning_rate: float, **begin: Any) -> RunConfig:
        return RunConfig(
            target=source,
            data=str(data),
            out=str(folder / name),
            objective=objective,
            optimizer=OptimizerConfig(learning_rate=learning_rate, ema_decay=0.98),
            train=TrainConfig(total_steps=steps, save_every=50, keep_last=1, seed=1),
            batches=PipelineConfig(scale.prompt_tokens + scale.new_tokens, scale.rows_per_step, seed=1),
            anchors_per_row=scale.anchors_per_row,
            vocabulary=scale.vocabulary,
            compute_dtype="float32",
            **begin,
        )

    views = StageOneConfig(plain, ViewMix(0.35, 0.35, 0.30), ViewMix(0.8, 0.1, 0.1))
    # A short way to fully masked blocks: as long as others are shown, slot 1 is trained less than in the control.
    distil = StageTwoConfig(
        LossConfig(first=TermWeights(data_ce=1.0), rest=TermWeights(teacher_kl=0.5, data_ce=0.5), gamma=gamma),
        CurriculumConfig(fraction=0.15),
    )
    later = scale.learning_rate * 0.5
    return {
        "a1": run("a1", scale.steps, dflash_baseline(plain), scale.learning_rate, new=scale.shape),
        "stage1": run("stage1", first, views, scale.learning_rate, new=scale.shape),
        "a1c": run("a1c", rest, dflash_baseline(plain), later, start_from=str(stage1)),
        "a4": run("a4", rest, distil, later, start_from=str(stage1)),
    }


def _table(
    target_name: str,
    minutes: float,
    scale: Scale,
    target: Target,
    runs: dict[str, RunConfig],
    held_out: list[Any],
    folder: Path,
    json_path: str | None,
) -> Path:
    from dstill_jax.data.prompt_sets import render
    from dstill_jax.evaluation.progress import progress
    from dstill_jax.evaluation.tables import print_headline

    prompts = [p for p in render(target, held_out, TemplateConfig(style=scale.style)) if len(p) <= scale.prompt_tokens]
    prompts = prompts[: scale.held_out]
    command = f"dstill demo --target {target_name} --minutes {minutes:g}"
    with progress("decoding") as advance:
        result, completions = measure(
            target,
            _arms(scale, target, runs),
            prompts,
            EvaluationConfig(scale.decoded, scale.temperature, seed=7, timed_prompts=_TIMED),
            prompts_name=f"{'GSM8K (its test file)' if target_name == 'smollm2' else 'standard library'}, held-out split",
            command=command,
            report=advance,
        )
    print_headline(result)
    caveats = _caveats(target_name, scale, result)
    for caveat in caveats:
        print(f"* {caveat}")
    if json_path is not None:
        result.save(json_path)
    best = max((a for a in result if a.method == "dflash"), key=lambda a: a.tau_pooled)
    report = _report(result, completions[best.name], best, prompts, target, runs, folder, caveats, command)
    print(f"\nreport: {report}")
    return report


def _arms(scale: Scale, target: Target, runs: dict[str, RunConfig]) -> list[Arm]:
    drafters = {name: load_drafter(f"{config.out}/drafter", target) for name, config in runs.items()}
    most = scale.shape.block_size - 1
    first = runs["stage1"].train.total_steps

    def arm(name: str, run: str, about: str, steps: int, method: str = "dflash", **options: Any) -> Arm:
        return Arm(name, method, drafters[run], run, {"draft_tokens": most, **options}, about, steps)

    arms = [
        Arm("autoregressive", "autoregressive", description="plain decoding, one token a pass"),
        Arm("prompt lookup", "lookup", options={"draft_tokens": most}, description="n-grams of the text so far"),
        Arm("prompt lookup, W=3", "lookup", options={"draft_tokens": 3}, description="the same, shorter drafts"),
        arm("A1 DFlash", "a1", _STEPS_OF["a1"], scale.steps),
        arm("A2 stage 1, one pass", "stage1", _STEPS_OF["stage1"], first),
        arm(f"A3 stage 1, {most} passes", "stage1", "the same weights, refined", first, "refine", passes=most),
        arm("A1c stage 1 + plain", "a1c", _STEPS_OF["a1c"], scale.steps),
        arm("A4 DStill", "a4", _STEPS_OF["a4"], scale.steps),
    ]
    for base in ("A1 DFlash", "A4 DStill"):
        whole = next(a for a in arms if a.name == base)
        arms.append(replace(whole, name=f"{base}, W=3", options={"draft_tokens": 3}))
    return arms


def _caveats(target_name: str, scale: Scale, result: EvaluationResult) -> list[str]:
    caveats = [
        f"{scale.steps} steps of {scale.rows_per_step} x {scale.anchors_per_row} blocks are far from where plain"
        " cross-entropy stops improving, and a frozen early teacher has little to teach: at this size stage 2 (A4) is"
        " not expected to beat its control (A1c) by much, nor A1. The table shows what was measured.",
        "A4 and A1c start from the same stage 1 and see the same data for the same number of steps; a stage-2 step"
        " costs more time, so equal steps are not equal compute.",
        "One seed; intervals cover the prompts, not the training noise.",
    ]
    if target_name == "smollm2":
        caveats.append("Prompts come from GSM8K's test file; rows used for training are never used for this table.")
    same = [arm.name for arm in result if result.identical_outputs(arm) not in (None, len(arm.tokens))]
    if same:
        caveats.append(f"Outputs differ from autoregressive decoding somewhere in: {', '.join(same)}.")
    return caveats


def _report(
    result: EvaluationResult,
    completions: list[Any],
    best: Any,
    prompts: list[list[int]],
    target: Target,
    runs: dict[str, RunConfig],
    folder: Path,
    caveats: list[str],
    command: str,
) -> Path:
    """results.json, PNG plots and report.html; prints the coloured passage."""
    from dstill_jax.evaluation.colour import colour_segments, legend_ansi, to_ansi
    from dstill_jax.evaluation.plots import read_metrics, result_figures, save_png
    from dstill_jax.evaluation.report import Sample, write_report

    def decode(ids: list[int]) -> str:
        return target.tokenizer.decode(ids, clean_up_tokenization_spaces=False)

    longest = max(range(len(completions)), key=lambda i: sum(completions[i].acceptance_lengths))
    done = completions[longest]
    segments = colour_segments(done.tokens, done.acceptance_lengths, decode)
    print(
        f"\n{best.name} on a held-out prompt. {legend_ansi(best.drafted_length)}\n{to_ansi(segments, best.drafted_length)}"
    )
    result.save(folder / "results.json")
    for name, figure in result_figures(result).items():
        save_png(figure, folder / f"{name}.png")
    write_report(
        folder / "report.html",
        result,
        title=f"dstill demo: {result.metadata.target}",
        caveats=caveats,
        samples=[Sample(best.name, decode(prompts[longest]), segments, best.drafted_length)],
        training={name: read_metrics(Path(config.out) / "metrics.jsonl") for name, config in runs.items()},
        reference="A1c stage 1 + plain",
        command=command,
    )
    return folder / "report.html"


def _say(message: str) -> None:
    print(message, flush=True)
