"""Everything a job of several processes does, on a tiny target: data, both stages, evaluation.

`python hosts_case.py FUNCTION FOLDER ARGUMENTS_AS_JSON [PORT PROCESSES INDEX]` calls a function of this file, alone or as
one process of a job on this machine, and prints its result as JSON. A folder that is there already is continued.
"""

import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import sharded_case
import simulated
from tiny_models import random_target

from dstill_jax.data.generate import PrepareSummary, prepare
from dstill_jax.data.pipeline import PipelineConfig
from dstill_jax.data.prepare_config import PrepareConfig
from dstill_jax.data.prompts import PromptSource
from dstill_jax.data.templates import TemplateConfig
from dstill_jax.distill.initialise import DrafterShape
from dstill_jax.evaluation.measure import Arm, EvaluationConfig, measure
from dstill_jax.models.drafter import Memory
from dstill_jax.runs import BEST, RunConfig, run_stage
from dstill_jax.sharding import MeshConfig, hosts
from dstill_jax.training import Interrupted, read_jsonl
from dstill_jax.weights import load

STEPS, ROWS, LENGTH = 6, 8, 32
MASK = 127


def make_inputs(root: Path) -> None:
    """A random target with a tokenizer of single characters, and prompts."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    model = random_target(vocab_size=128, hidden_size=32, intermediate_size=48, num_layers=6)
    load.save_target(root / "target", model.config, model.params)
    inner = Tokenizer(models.WordLevel({"<pad>": 0, **{chr(c): c for c in range(32, 127)}}, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    inner.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>").save_pretrained(root / "target")
    texts = ["ab" * (3 + i % 5) + chr(65 + i) for i in range(19)]
    (root / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))


def data_config(root: Path) -> PrepareConfig:
    return PrepareConfig(
        target=str(root / "target"), source=PromptSource(str(root / "prompts.jsonl")), out=str(root / "data"),
        template=TemplateConfig(style="raw"), max_prompt_tokens=16, max_new_tokens=10, batch_size=4, temperature=0.7,
        stop_token_ids=(3,),
    )  # fmt: skip


def run_configs(root: Path, mesh: dict[str, int], steps: int = STEPS) -> tuple[RunConfig, RunConfig]:
    base = sharded_case.run_config("stage1", MeshConfig(**mesh), Memory(), steps, 2)
    first = dataclasses.replace(
        base,
        target=str(root / "target"),
        data=str(root / "data"),
        out=str(root / "stage1"),
        train=dataclasses.replace(base.train, save_every=2, progress=False, keep_best=("train/loss", "min")),
        batches=PipelineConfig(seq_len=LENGTH, batch_size=ROWS, mode="pack"),
        start_from=None,
        new=DrafterShape(MASK, num_layers=1, block_size=4, num_taps=2, init_from_layers=(3,)),
        vocabulary=64,
    )
    second = dataclasses.replace(
        first,
        objective=sharded_case.OBJECTIVES["stage2"],
        out=str(root / "stage2"),
        new=None,
        start_from=f"{first.out}/drafter",
    )
    return first, second


def made_data(root: Path) -> PrepareSummary:
    if hosts.first() and not (root / "prompts.jsonl").exists():
        root.mkdir(parents=True, exist_ok=True)
        make_inputs(root)
    hosts.exchange()
    return prepare(data_config(root), show_progress=False)


def everything(root: Path, mesh: dict[str, int]) -> dict[str, Any]:
    """All parts in turn, in every process of the job."""
    summary = made_data(root)
    for config in run_configs(root, mesh):
        drafter = run_stage(config)
    target = load.load_target(str(root / "target"))
    arms = [Arm("plain", "autoregressive"), Arm("drafted", "dflash", load.load_drafter(str(drafter), target))]
    prompts = [[65 + i, 97, 98, 97 + i] for i in range(5)]
    settings = EvaluationConfig(max_new_tokens=8, batch_size=2, timed_prompts=1)
    result, answers = measure(target, arms, prompts, settings, prompts_name="five")
    logs = {name: read_jsonl(root / name / "metrics.jsonl") for name in ("stage1", "stage2")}
    best = load.load_drafter(str(root / "stage2" / BEST), target)
    weights = jax.tree.leaves((arms[1].drafter.params, best.params))
    return {
        "rows": summary.rows,
        "data": json.loads((root / "data" / "dataset" / "provenance.json").read_text())["content_sha256"],
        "steps": [record["step"] for record in logs["stage1"]],
        **{name: [record["train/loss"] for record in log] for name, log in logs.items()},
        "weights": [float(jnp.linalg.norm(x)) for x in weights],
        "answers": [[c.tokens for c in done] for done in answers.values()],
        "committed": [m.acceptance_lengths for m in result.arms],
        "timed": [len(m.seconds) for m in result.arms],
    }


def start(function: str, root: Path, processes: int, devices: int, **arguments: Any) -> list[subprocess.Popen]:
    """The processes of one job, each with so many simulated devices; standard error goes to ROOT.INDEX.log."""
    port = free_port()
    command = [sys.executable, str(Path(__file__)), function, str(root), json.dumps(arguments)]
    jobs = [[port, str(processes), str(index)] if processes > 1 else [] for index in range(processes)]
    return [_process([*command, *job], root, index, devices) for index, job in enumerate(jobs)]


def start_train(config: Path, root: Path, processes: int) -> list[subprocess.Popen]:
    """As `start`: `dstill train` with that config file, its run folder in `root`; one device in each process."""
    command = [sys.executable, "-m", "dstill_jax.cli", "train", str(config), f"out={root / 'stage1'}"]
    job = ["--coordinator", f"127.0.0.1:{free_port()}", "--processes", str(processes), "--process-id"]
    return [_process([*command, *job, str(index)], root, index, 1) for index in range(processes)]


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def _process(command: list[str], root: Path, index: int, devices: int) -> subprocess.Popen:
    root.parent.mkdir(parents=True, exist_ok=True)
    environment = simulated.environment(devices) | {
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        # What one job of a test compiles, the next one finds.
        "JAX_COMPILATION_CACHE_DIR": str(root.parent / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
    }
    with open(f"{root}.{index}.log", "ab") as log:
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=log, text=True)


def finish(started: Sequence[subprocess.Popen], root: Path) -> list[Any]:
    """What each process of a job of this file returned; all have ended well."""
    return [json.loads(text.splitlines()[-1]) for text in printed(started, root)]


def printed(started: Sequence[subprocess.Popen], root: Path) -> list[str]:
    """Standard output of each process; all have ended well."""
    texts = [process.communicate()[0] for process in started]
    for index, process in enumerate(started):
        assert process.returncode == 0, Path(f"{root}.{index}.log").read_text()[-4000:]
    return texts


def stage_one(root: Path, mesh: dict[str, int], steps: int, seconds: float = 0.0) -> dict[str, Any]:
    """Data and stage 1 alone, each step slowed down by `seconds`; a run that is asked to stop says so."""
    made_data(root)
    try:
        run_stage(run_configs(root, mesh, steps)[0], on_step=lambda step, state: time.sleep(seconds))
    except Interrupted as stop:
        return {"stopped": stop.step, "signal": signal.Signals(stop.signum).name}
    weights = load.load_drafter(str(root / "stage1" / "drafter")).params
    return {"weights": [float(jnp.linalg.norm(x)) for x in jax.tree.leaves(weights)]}


def main(function: str, root: str, arguments: str, port: str = "", processes: str = "1", index: str = "0") -> int:
    def work() -> int:
        print(json.dumps(globals()[function](Path(root), **json.loads(arguments))), flush=True)
        return 0

    if not port:
        return work()
    launch = hosts.find_launch(f"127.0.0.1:{port}", int(processes), int(index), timeout=60)
    assert launch is not None
    return hosts.together(launch, work, preemption=True)


if __name__ == "__main__":
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    sys.exit(main(*sys.argv[1:]))
