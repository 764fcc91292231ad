"""What helps a drafter when text is scarce: SmolLM2 on a sixth of the GSM8K questions, judged on others.

    python experiments/005_little_text/run.py --data runs/004/data        (15 minutes an arm on one core)

`--data` is what `experiments/004*/run.py` has prepared: greedy answers with features, each question in three versions.
"""

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dstill_jax.allocator import keep_freed_memory
from dstill_jax.data.dataset import DATASET_FOLDER, Conversation, ConversationDataset, dataset_exists, write_dataset
from dstill_jax.data.pipeline import BatchPipeline, PipelineConfig
from dstill_jax.distill.conditioning import Frozen, Task
from dstill_jax.distill.config import dflash_baseline
from dstill_jax.distill.initialise import DrafterShape
from dstill_jax.distill.stage_one import stage_one_loss
from dstill_jax.evaluation.stats import Interval, paired_ratio_change, ratio_interval
from dstill_jax.losses.config import LossConfig, TermWeights
from dstill_jax.models.target import Target, head_matrix
from dstill_jax.runs import RunConfig, run_stage
from dstill_jax.training.config import OptimizerConfig, TrainConfig
from dstill_jax.weights.embedded import fetch
from dstill_jax.weights.load import load_drafter, load_target

HERE = Path(__file__).resolve().parent
SHAPE = DrafterShape(mask_token_id=16, num_layers=2, block_size=8, init_from_layers=(28, 29))
STEPS, ROWS, ANCHORS, TOKENS = 2000, 2, 32, 256
BATCHES = 150  # that an arm is judged on


def base(root: Path, source: str) -> RunConfig:
    """Plain cross-entropy: what every arm changes one thing of."""
    return RunConfig(
        target=source,
        data=str(root / "train"),
        out="",
        objective=dflash_baseline(LossConfig()),
        optimizer=OptimizerConfig(learning_rate=3e-3),
        train=TrainConfig(total_steps=STEPS, save_every=250, keep_last=1, log_every=20, seed=1, progress=False),
        batches=PipelineConfig(TOKENS, ROWS, seed=1),
        new=SHAPE,
        anchors_per_row=ANCHORS,
        vocabulary=4096,
        compute_dtype="float32",
    )


def arms(plain: RunConfig) -> dict[str, RunConfig]:
    """By how much of the loss is the target's distribution in the place of the text's token."""

    def mixed(share: float) -> RunConfig:
        terms = TermWeights(data_ce=1 - share, target_kl=share)
        return dataclasses.replace(plain, objective=dflash_baseline(LossConfig(terms, terms)))

    return {"plain": plain, "half": mixed(0.5), "whole": mixed(1.0)}


def split(data: Path, root: Path) -> None:
    """`root/heldout`: every third question, as it was asked; `root/train`: a fourth of the others, in all versions."""
    whole = ConversationDataset(data)
    rows = [whole[i] for i in range(len(whole))]
    questions = sorted({_question(row) for row in rows})
    trained = set(questions[1::4]) - set(questions[::3])
    chosen = {
        "train": [i for i, row in enumerate(rows) if _question(row) in trained],
        "heldout": [i for i, row in enumerate(rows) if row.source_id in questions[::3]],
    }
    for name, indices in chosen.items():
        path = root / name / DATASET_FOLDER
        if not dataset_exists(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            features = (np.asarray(whole.features(i)) for i in indices)
            about = {"inputs": whole.provenance["inputs"]}
            write_dataset(path, (rows[i] for i in indices), about, features, whole.feature_width)


def _question(row: Conversation) -> str:
    return row.source_id.partition("/numbers")[0]


def judge(data: Path, folder: Path, target: Target) -> dict[str, np.ndarray]:
    """One pass at random anchors, the same ones for every arm: [batches, (sum, weight)] of each metric."""
    drafter = load_drafter(str(folder), target)
    config, objective = drafter.config, dflash_baseline()
    vocabulary = jnp.asarray(drafter.vocabulary)
    head = head_matrix(target.config, target.params)[:, vocabulary]
    frozen = Frozen(
        target.params["embed"]["embedding"], head, vocabulary, jnp.ones(config.num_taps * config.hidden_size)
    )
    task = Task(target.config, config, ANCHORS)
    pipeline = BatchPipeline(ConversationDataset(data), PipelineConfig(TOKENS, ROWS, seed=2))
    run = jax.jit(
        lambda batch, key: stage_one_loss(task, objective, drafter.params, frozen, batch, key, jnp.float32(0))[2]
    )
    found = [run(jax.tree.map(jnp.asarray, pipeline.batch(i)), jax.random.key(i)) for i in range(BATCHES)]
    return {name: np.asarray([x[name] for x in found], np.float64) for name in ("tau", "slot1", "data_ce")}


def describe(metrics: dict[str, np.ndarray], plain: dict[str, np.ndarray]) -> dict[str, list[float]]:
    """Each metric with its interval over batches, and the paired change of tau against `plain` in per cent."""
    found = {name: _numbers(ratio_interval(*pairs.T)) for name, pairs in metrics.items()}
    return {**found, "change of tau, %": _numbers(paired_ratio_change(*metrics["tau"].T, *plain["tau"].T))}


def _numbers(interval: Interval) -> list[float]:
    return [round(float(x), 3) for x in (interval.value, interval.low, interval.high)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder prepared by experiment 004")
    parser.add_argument("--root", type=Path, default=Path("runs/005"), help="folder of the runs")
    args = parser.parse_args()
    keep_freed_memory()
    root, source = args.root.resolve(), str(fetch("smollm2", report=print))
    split(args.data, root)
    target = load_target(source)
    measured: dict[str, dict[str, dict[str, np.ndarray]]] = {}
    results: dict[str, Any] = {}
    for name, config in arms(base(root, source)).items():
        folder = run_stage(dataclasses.replace(config, out=str(root / name)), target=target)
        measured[name] = {which: judge(root / which, folder, target) for which in ("heldout", "train")}
        results[name] = {which: describe(found, measured["plain"][which]) for which, found in measured[name].items()}
        print(name, results[name], flush=True)
    (HERE / "results.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
