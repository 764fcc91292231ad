"""One training run: a target, a dataset, a stage; out comes a folder with checkpoints, metrics and a drafter.

Called by the command line (`dstill train`), the demo and experiments. A run is described by a frozen `RunConfig`; files
in `configs/` export them.
"""

import contextlib
import dataclasses
import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from dstill_jax.config import DrafterConfig, TargetConfig
from dstill_jax.data.joined import open_data
from dstill_jax.data.pipeline import BatchPipeline, PipelineConfig
from dstill_jax.decoding.session import check_pair
from dstill_jax.dims import Params
from dstill_jax.distill import initialise
from dstill_jax.distill.conditioning import Frozen, Task, fold_tap_scale
from dstill_jax.distill.config import StageOneConfig, StageTwoConfig
from dstill_jax.distill.initialise import DrafterShape
from dstill_jax.distill.stage_one import stage_one_loss
from dstill_jax.distill.stage_two import stage_two_loss
from dstill_jax.errors import UserError
from dstill_jax.keys import seed_key
from dstill_jax.models import target as target_lib
from dstill_jax.models.drafter import Drafter, Memory
from dstill_jax.models.target import Target
from dstill_jax.paths import in_home
from dstill_jax.run_inputs import check_features, check_mask, tap_scale, training_vocabulary
from dstill_jax.sharding import hosts
from dstill_jax.sharding.activations import use_mesh
from dstill_jax.sharding.mesh import MeshConfig, build_mesh, check_model_divides, check_rows_divide
from dstill_jax.sharding.rows import RowPlaces
from dstill_jax.sharding.rules import batch_sharding, tree_shardings
from dstill_jax.training import checkpoints
from dstill_jax.training.config import OptimizerConfig, TrainConfig
from dstill_jax.training.loop import train
from dstill_jax.weights.load import drafter_fingerprint, load_drafter, load_target, save_drafter

BEST = "drafter_best"
"""Folder of a run with the drafter of its best checkpoint; `drafter` has that of the last step."""


@dataclass(frozen=True)
class RunConfig:
    """Everything that decides a run's result."""

    target: str  # Hugging Face folder, hub id, or "smollm2" or "tiny"
    data: str | tuple[str, ...]  # folder made by `dstill prepare`, or several
    out: str  # run folder; a stopped run is continued in it
    objective: StageOneConfig | StageTwoConfig  # stage 1 (or the DFlash baseline), or stage 2
    optimizer: OptimizerConfig
    train: TrainConfig
    batches: PipelineConfig
    new: DrafterShape | None = None  # a new drafter of this shape ...
    start_from: str | None = None  # ... or the drafter folder to go on from
    teacher: str | None = None  # stage 2: drafter folder of the teacher; None: `start_from`
    anchors_per_row: int = 512  # blocks drawn from each row in each step
    vocabulary: int | None = None  # train on this many most frequent tokens only; None: on `start_from`'s, or on all
    compute_dtype: str = "bfloat16"  # of activations; parameters and optimiser state are float32
    mesh: MeshConfig = MeshConfig()  # one device unless set
    memory: Memory = Memory()  # what is computed twice to save memory
    checkpoints: str | None = None  # folder or bucket (gs://...) of the checkpoints; None: in `out`

    def __post_init__(self) -> None:
        for name in ("target", "data", "out", "start_from", "teacher", "checkpoints"):
            object.__setattr__(self, name, in_home(getattr(self, name)))
        if (self.new is None) == (self.start_from is None):
            raise UserError("RunConfig needs exactly one of new (a DrafterShape) and start_from (a drafter folder)")
        if not self.out:
            raise UserError("RunConfig.out is empty; name a folder for the run")
        if self.teacher is not None and not isinstance(self.objective, StageTwoConfig):
            raise UserError("RunConfig.teacher is read by stage 2 only; leave it out for stage 1")
        if isinstance(self.objective, StageTwoConfig) and self.teacher is None and self.start_from is None:
            raise UserError("stage 2 distils a stage-1 drafter: name it with start_from, or with teacher")
        for name in ("anchors_per_row", "vocabulary"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"RunConfig.{name}={value} must be at least 1")
        if self.compute_dtype not in ("float32", "bfloat16"):
            raise UserError(f"RunConfig.compute_dtype={self.compute_dtype!r} must be float32 or bfloat16")
        check_rows_divide(self.mesh, self.batches.batch_size, self.batches.seq_len, self.train.accumulate_steps)
        if self.mesh.split_rows and self.anchors_per_row % self.mesh.fsdp:
            raise UserError(
                f"RunConfig.anchors_per_row={self.anchors_per_row} does not divide over mesh axis fsdp={self.mesh.fsdp}"
            )

    @property
    def stage(self) -> str:
        if isinstance(self.objective, StageTwoConfig):
            return "stage2"
        return "dflash" if self.objective.views.full == self.objective.late_views.full == 1 else "stage1"


@dataclass(frozen=True)
class _Data:
    """The pipeline as the training loop wants it: batches by step, and what identifies them."""

    pipeline: BatchPipeline
    fingerprint: str = field(default="")

    def batch(self, step: int) -> dict[str, np.ndarray]:
        return self.pipeline.batch(step)


def run_stage(
    config: RunConfig,
    *,
    target: Target | None = None,
    report: Callable[[str], None] | None = None,
    on_step: Any = None,
) -> Path:
    """Trains, or continues, or finds complete; returns the drafter's folder (`out/drafter`, float32 EMA weights).

    That is the drafter after the last step. With `train.keep_best` the best one is beside it, in `out/drafter_best`.

    Args:
      target: already loaded, to be shared by several runs.
      report: told in a line what was found in the data, and which step was the best.
      on_step: see `training.loop.train`.

    Raises:
      UserError: bad configuration or data, a run folder that belongs to another configuration.
      training.Interrupted: after saving on SIGTERM or SIGINT.
    """
    out = Path(config.out)
    mesh = build_mesh(config.mesh) if config.mesh.size > 1 or hosts.count() > 1 else None
    target = target or load_target(config.target, dtype=config.compute_dtype, mesh=mesh)
    begun, teacher = _given_drafters(config, target, mesh)
    drafter = config.new.build(target.config) if begun is None else begun.config  # type: ignore[union-attr]
    if teacher is not None and teacher.config != drafter:
        raise UserError(f"teacher {teacher.source} and student differ in shape; they must be the same drafter")
    for model in (target.config, drafter):
        check_model_divides(config.mesh, model)
    dataset = open_data(config.data)
    live = check_features(config.data, dataset, drafter, target)
    rows = None
    if mesh is not None:
        sharding = batch_sharding(mesh, split_rows=config.mesh.split_rows)
        rows = RowPlaces(sharding, config.batches.batch_size)
    pipeline = BatchPipeline(dataset, config.batches, None if rows is None else rows.local)
    if pipeline.total_steps is not None and pipeline.total_steps < config.train.total_steps:
        raise UserError(
            f"batches.num_epochs={config.batches.num_epochs} of {config.data} are {pipeline.total_steps} steps, and"
            f" train.total_steps={config.train.total_steps}; give more epochs (None: without end), or fewer steps"
        )
    if report is not None:
        report(pipeline.summary.describe())
    if config.new is not None:
        check_mask(dataset, drafter.mask_token_id)
    scale = tap_scale(dataset, drafter, target, config.batches.seq_len, mesh)
    trainable = fold_tap_scale(  # in training the scale is apart
        _new_params(config, drafter, target, scale, mesh) if begun is None else begun.params, 1.0 / jnp.asarray(scale)
    )
    kept = training_vocabulary(
        config.vocabulary,
        config.batches.seq_len,
        dataset,
        target,
        drafter,
        [d for d in (begun, teacher) if d is not None],
    )
    frozen = _freeze(target, scale, kept, teacher, live, mesh)
    # What is not read again would stay on the device.
    if not live:
        target = dataclasses.replace(target, params={})
    begun, teacher = (d and dataclasses.replace(d, params={}) for d in (begun, teacher))
    state = train(
        loss_function(config, target.config, drafter, mesh),
        frozen,
        _handed_over(trainable),
        _Data(pipeline, json.dumps(pipeline.key, sort_keys=True)),
        config.train,
        config.optimizer,
        out,
        {
            "stage": config.stage,
            "target_fingerprint": target.fingerprint,
            "config": describe(config),
            # A folder may hold other weights by the time the run goes on.
            "drafters": [None if d is None else drafter_fingerprint(d) for d in (begun, teacher)],
        },
        on_step,
        rows=rows,
        checkpoints=config.checkpoints,
        state_shardings=None if mesh is None else functools.partial(tree_shardings, mesh=mesh),
    )
    save = functools.partial(_save_average, drafter=drafter, target=target, frozen=frozen)
    folder = save(out / "drafter", state["ema"])
    best = _best_step(config)
    if best is not None:
        weights = checkpoints.load_params(config.checkpoints or out, step=best, like=state["ema"])
        folder_of_best = save(out / BEST, weights)
        if report is not None:
            by = " ".join(config.train.keep_best or ())
            report(f"{folder} is the drafter of the last step; {folder_of_best} the best by {by}, of step {best}")
    hosts.exchange()  # whoever returns finds the drafters there
    return folder


def _handed_over(params: Params) -> Params:
    """The same tree, of which the one that was given keeps nothing: its arrays go when `train` has copied them."""
    handed = dict(params)
    params.clear()
    return handed


def _best_step(config: RunConfig) -> int | None:
    """The step of the best checkpoint, as the first process sees it; None when none is asked for, or was judged."""
    found = None
    if config.train.keep_best is not None and hosts.first():
        with contextlib.suppress(UserError):
            found = checkpoints.best_step(config.checkpoints or config.out, *config.train.keep_best)
    return hosts.exchange(found)[0]


def _save_average(folder: Path, ema: Params, *, drafter: DrafterConfig, target: Target, frozen: Frozen) -> Path:
    """Averaged weights as a drafter folder, written by the first process."""
    finished = hosts.gathered(fold_tap_scale(ema, frozen.tap_scale))
    vocabulary = None if frozen.vocabulary is None else tuple(np.asarray(frozen.vocabulary).tolist())
    if hosts.first():
        trained = Drafter(drafter, finished, str(folder), target.fingerprint, vocabulary)
        save_drafter(folder, trained, target.config, dtype="float32")
    return folder


def stage_two_of(config: RunConfig, objective: StageTwoConfig, out: str, steps: int) -> RunConfig:
    """The run that goes on from a stage-1 run's drafter: same target, data and batches, half the learning rate."""
    return dataclasses.replace(
        config,
        objective=objective,
        out=out,
        new=None,
        start_from=f"{config.out}/drafter",
        checkpoints=None,  # the stage-1 run's folder is its own
        optimizer=dataclasses.replace(config.optimizer, learning_rate=config.optimizer.learning_rate / 2),
        train=dataclasses.replace(config.train, total_steps=steps),
    )


def refreshed_runs(config: RunConfig, student_passes: Sequence[int]) -> tuple[RunConfig, ...]:
    """Stage 2 several times over: each run's student (its averaged weights) is teacher and start of the next.

    `(2, 1)` after a teacher of 4 passes halves them, 4 -> 2 -> 1 (SDTT, arXiv 2410.21035); `(1, 1)` distils the full
    trajectories of the first student once more. Run them in order, `for run in runs: run_stage(run)`: a finished one is
    found complete, a stopped one goes on.

    Args:
      config: the first run; run i writes to `out/round<i>`, with the same steps and learning rate each.
      student_passes: that each run leaves to its student, and its successor's teacher takes (all of
        `objective.passes` again when that is 1).

    Raises UserError for a run of stage 1, and for a round that leaves no fewer passes than its teacher takes.
    """
    if not isinstance(config.objective, StageTwoConfig) or not student_passes:
        raise UserError(
            f"refreshed_runs needs a stage-2 run and the passes of each round, got a {config.stage} run and"
            f" student_passes={tuple(student_passes)}; give it e.g. stage_two_of(...) and (2, 1)"
        )
    runs: list[RunConfig] = []
    passes = config.objective.passes
    for number, left in enumerate(student_passes, start=1):
        objective = dataclasses.replace(config.objective, passes=passes, student_passes=left)
        run = dataclasses.replace(config, objective=objective, out=f"{config.out}/round{number}")
        if config.checkpoints is not None:
            run = dataclasses.replace(run, checkpoints=f"{config.checkpoints}/round{number}")
        if runs:
            run = dataclasses.replace(run, new=None, teacher=None, start_from=f"{runs[-1].out}/drafter")
        runs.append(run)
        passes = left if left > 1 else config.objective.passes
    return tuple(runs)


def describe(config: RunConfig) -> dict[str, Any]:
    """The configuration as JSON values, less what may differ when a run is continued: its devices, and all paths, since
    target, data and drafters are known by what is in them."""
    values = dataclasses.asdict(config)
    for name in ("out", "checkpoints", "target", "data", "start_from", "teacher", "mesh", "memory"):
        values.pop(name)
    for name in ("train", "optimizer"):  # the loop compares them itself
        values.pop(name)
    return json.loads(json.dumps(values))


def _new_params(
    config: RunConfig, drafter: DrafterConfig, target: Target, scale: np.ndarray, mesh: Mesh | None
) -> Params:
    assert config.new is not None
    key = jax.random.fold_in(seed_key(config.train.seed), 0)
    create = functools.partial(initialise.new_params, config.new, drafter, target.config)
    places = None if mesh is None else tree_shardings(jax.eval_shape(create, target.params, key, scale), mesh)
    # One program, also on one device: outside jit the first pass of the module is some 150 little ones to compile.
    return jax.jit(create, out_shardings=places)(target.params, key, scale)


def _given_drafters(config: RunConfig, target: Target, mesh: Mesh | None) -> tuple[Drafter | None, Drafter | None]:
    """The drafter that the run goes on from, and stage 2's teacher, which may be the same: training copies its start.

    A drafter may go on on another target of its shape than it was trained on; what a teacher knows is about its own.
    """
    begun = None if config.start_from is None else load_drafter(config.start_from, target, "float32", mesh)
    if not isinstance(config.objective, StageTwoConfig):
        return begun, None
    teacher = begun if config.teacher is None else load_drafter(config.teacher, target, "float32", mesh)
    assert teacher is not None  # RunConfig asks for one of the two
    check_pair(target, teacher)
    return begun, teacher


def _freeze(
    target: Target,
    scale: np.ndarray,
    vocabulary: np.ndarray | None,
    teacher: Drafter | None,
    live: bool,
    mesh: Mesh | None,
) -> Frozen:
    head = target_lib.head_matrix(target.config, target.params)
    frozen = Frozen(
        embedding=target.params["embed"]["embedding"],
        head=head if vocabulary is None else head[:, vocabulary],
        vocabulary=None if vocabulary is None else jnp.asarray(vocabulary),
        tap_scale=jnp.asarray(scale),
        target=target.params if live else None,
        teacher=None if teacher is None else fold_tap_scale(teacher.params, 1.0 / jnp.asarray(scale)),
    )
    return frozen if mesh is None else jax.device_put(frozen, tree_shardings(frozen, mesh))


def loss_function(
    config: RunConfig, target: TargetConfig, drafter: DrafterConfig, mesh: Mesh | None = None
) -> Callable[..., Any]:
    """The run's loss as `training.step` wants it, with everything static compiled in."""
    task = Task(target, drafter, config.anchors_per_row, config.compute_dtype, memory=config.memory)
    objective, total = config.objective, config.train.total_steps
    one = functools.partial(
        stage_two_loss if isinstance(objective, StageTwoConfig) else stage_one_loss,  # type: ignore[arg-type]
        task,
        objective,  # type: ignore[arg-type]
    )

    def loss_fn(params: Params, frozen: Frozen, batch: dict, key: jax.Array, step: jax.Array) -> Any:
        with use_mesh(mesh, split_rows=config.mesh.split_rows):
            return one(params, frozen, batch, key, step.astype(jnp.float32) / total)

    return loss_fn
