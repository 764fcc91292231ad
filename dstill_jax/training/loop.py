"""The training loop: restore, iterate, record, save; a resumed run equals an uninterrupted one bit for bit.

Called by the command line and the demo. A run folder holds `checkpoints/`, `metrics.jsonl`, `config.json` and, when
asked for, `tensorboard/` and `profile/`.
"""

import collections
import contextlib
import functools
import json
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax

from dstill_jax.dims import Params
from dstill_jax.errors import UserError
from dstill_jax.locks import only_one
from dstill_jax.sharding import hosts
from dstill_jax.sharding.rows import RowPlaces
from dstill_jax.training.checkpoints import CHECKPOINTS, CheckpointStore
from dstill_jax.training.config import OPERATIONAL_FIELDS, OptimizerConfig, TrainConfig, to_dict
from dstill_jax.training.interrupt import Interrupted, StopSignals
from dstill_jax.training.metrics import ConsoleWriter, JsonlWriter, MetricWriter, MultiWriter, TensorBoardWriter, means
from dstill_jax.training.optimizer import Optimizer, build_optimizer
from dstill_jax.training.prefetch import Batch, Data, Prefetcher
from dstill_jax.training.state import TrainState, init_state
from dstill_jax.training.step import LossFn, Metrics, TrainStep, make_train_step

OnStep = Callable[[int, TrainState], Mapping[str, float] | None]


class NonFiniteError(UserError, FloatingPointError):
    """The loss or a gradient became NaN or infinite; the message names the step, the metric and the last checkpoint."""


def train(
    loss_fn: LossFn,
    frozen: Any,
    params_init: Params,
    data: Data,
    train_config: TrainConfig,
    optimizer_config: OptimizerConfig,
    run_dir: str | Path,
    metadata: Mapping[str, Any],
    on_step: OnStep | None = None,
    *,
    rows: RowPlaces | None = None,
    checkpoints: str | Path | None = None,
    state_shardings: Callable[[TrainState], Any] | None = None,
) -> TrainState:
    """Trains for `train_config.total_steps` steps, from the newest checkpoint of `run_dir` when there is one.

    `loss_fn` and batches are described in `step.py` and `prefetch.py`; `frozen` is any pytree handed to `loss_fn`.
    `params_init` (float32) is copied, and only its layout matters when resuming. `metadata` (JSON values: `stage`,
    `target_fingerprint`, the resolved `config`) is saved with each checkpoint and must be equal on resuming, as must
    the fields of both configs that affect numbers. `on_step(step, state)` runs after each step, before it is saved; it
    may return metrics for that step's record, and must keep no reference to the state, whose memory the next step
    reuses. With `rows` those of a batch are spread over a mesh, and weights not yet placed on it are replicated over it,
    unless `state_shardings` tells where each array of a state (of shapes) belongs: then it is created there.
    `checkpoints` is a folder or bucket for them, by default `run_dir/checkpoints`. In a job of several processes all
    call this; what is written once is written by the first.

    Returns the final state. Raises `Interrupted` after saving on SIGTERM or SIGINT, `NonFiniteError`, and `UserError`
    when the folder belongs to another run or cannot be written.
    """
    run_dir = Path(run_dir).absolute()
    identity = _identity(metadata, train_config, optimizer_config, data)
    optimizer = build_optimizer(optimizer_config, train_config.total_steps)
    state = _begin(params_init, optimizer, train_config.seed, rows, state_shardings)
    del params_init  # of a caller that keeps none of it, the copy is all that stays on the device
    shardings = None if rows is None else jax.tree.map(lambda x: x.sharding, state)
    with contextlib.ExitStack() as stack:
        signals = stack.enter_context(StopSignals())
        if hosts.first():
            stack.enter_context(only_one(run_dir))
        store = stack.enter_context(
            CheckpointStore(checkpoints or run_dir / CHECKPOINTS, train_config.keep_last, train_config.keep_best)
        )
        newest = store.agreed_step()
        if newest is not None:
            state = store.restore(state, identity, newest)
        start = int(state["step"])
        if start >= train_config.total_steps:
            return state
        if hosts.first():
            _write_config(run_dir, identity)
        label = str(metadata.get("stage", "train"))
        writer = stack.enter_context(contextlib.closing(_writers(run_dir, train_config, start, label)))
        run = _Run(
            train_step=make_train_step(loss_fn, optimizer, train_config, state_shardings=shardings),
            config=train_config,
            store=store,
            identity=identity,
            recorder=_Recorder(writer, store, train_config.log_every),
            signals=signals,
            profiler=stack.enter_context(_Profiler(train_config.profile_steps, run_dir / "profile")),
            on_step=on_step,
        )
        batches = stack.enter_context(Prefetcher(data, start, train_config.total_steps, train_config.prefetch, rows))
        return run.steps(state, start, frozen, batches)


class _Run:
    """The iteration itself, with what it needs at hand."""

    def __init__(
        self,
        train_step: TrainStep,
        config: TrainConfig,
        store: CheckpointStore,
        identity: dict[str, Any],
        recorder: "_Recorder",
        signals: StopSignals,
        profiler: "_Profiler",
        on_step: OnStep | None,
    ) -> None:
        self._train_step, self._config, self._on_step = train_step, config, on_step
        self._store, self._identity, self._recorder = store, identity, recorder
        self._signals, self._profiler = signals, profiler

    def steps(self, state: TrainState, start: int, frozen: Any, batches: Prefetcher) -> TrainState:
        clock, compiled_for = _Clock(), set()
        total = self._config.total_steps
        for done in range(start + 1, total + 1):
            asked = time.perf_counter()
            batch = next(batches)
            waited = time.perf_counter() - asked
            self._profiler.before(done)
            with jax.profiler.StepTraceAnnotation("train", step_num=done):
                state, metrics = self._train_step(state, frozen, batch)
            shapes = tuple(sorted((name, x.shape) for name, x in batch.items()))
            if shapes not in compiled_for:  # the call compiled: keep its time out of the rate
                compiled_for.add(shapes)
                jax.block_until_ready(state)
                perf = {"perf/compile_seconds": time.perf_counter() - asked - waited}
                clock.restart()
            else:
                perf = clock.lap(_tokens(batch))
            perf["perf/data_wait_seconds"] = waited
            self._profiler.after(done, state)
            extra = None if self._on_step is None else self._on_step(done, state)
            self._recorder.push(done, metrics, {**perf, **(extra or {})})
            stop = self._signals.agreed()
            saves = done % self._config.save_every == 0 or done == total or stop is not None
            if saves:
                values = self._recorder.flush()  # raises on a bad step, so a checkpoint is always of a good one
                last = done == total or stop is not None
                checkpoint = self._store.save(state, self._identity, values, wait=last)
                self._check_judge(metrics, values)
            if stop is not None and done < total:
                raise Interrupted(stop, done, total, checkpoint, self._store.describe_best())
            if saves or self._on_step is not None:
                clock.restart()
        return state

    def _check_judge(self, metrics: Metrics, values: dict[str, float]) -> None:
        """What `on_step` measures may come now and then, and a step may count nothing; all else is misspelt."""
        judge, known = self._config.keep_best, {*values, *(f"train/{name}" for name in metrics)}
        if judge is not None and judge[0] not in known and self._on_step is None:
            raise UserError(
                f"TrainConfig.keep_best={judge!r}: this run measures no {judge[0]!r}; choose one of"
                f" {', '.join(sorted(known))}, and run the same command again to go on from the last checkpoint"
            )


class _Recorder:
    """Metrics on their way to the writers, one step behind: fetching step n waits for it, when n + 1 already runs."""

    def __init__(self, writer: MetricWriter, store: CheckpointStore, log_every: int) -> None:
        self._writer, self._store, self._log_every = writer, store, log_every
        self._pending: tuple[int, Metrics, dict[str, float]] | None = None
        self._values: dict[str, float] = {}

    def push(self, step: int, metrics: Metrics, extra: dict[str, float]) -> None:
        previous, self._pending = self._pending, (step, metrics, extra)
        self._record(previous)

    def flush(self) -> dict[str, float]:
        """Everything is on disk; the values of the last step."""
        previous, self._pending = self._pending, None
        self._record(previous)
        self._writer.flush()
        return self._values

    def _record(self, pending: tuple[int, Metrics, dict[str, float]] | None) -> None:
        if pending is None:
            return
        step, metrics, extra = pending
        host = jax.device_get(metrics)
        values = self._values = {**means(host), **extra}
        bad = bool(host["nonfinite"][0])
        if bad or step % self._log_every == 0 or any(name.startswith("eval/") for name in extra):
            self._writer.write(step, values)
        if bad:
            self._writer.flush()
            raise NonFiniteError(self._explain(step, host))

    def _explain(self, step: int, host: Mapping[str, tuple[Any, Any]]) -> str:
        ordered = {"loss": host["loss"], "grad_norm": host["grad_norm"], **host}
        worst = {name: next((x for x in pair if not math.isfinite(x)), None) for name, pair in ordered.items()}
        named = [f"train/{name} is {x}" for name, x in worst.items() if x is not None]
        self._store.wait()
        last = self._store.latest_step()
        saved = "there is no checkpoint yet" if last is None else f"the last good one is {self._store.path(last)}"
        return (
            f"step {step}: {', '.join(named)}; this step changed nothing and {saved}."
            " Give a lower learning rate, in another run folder, or look at the data of that step"
        )


class _Clock:
    """Steps per second over the last steps; compilation, saving and callbacks left out."""

    _FILLING = 2  # steps that are only handed to the device before the host has to wait for one

    def __init__(self) -> None:
        self._laps: collections.deque[tuple[float, int]] = collections.deque(maxlen=50)
        self._last: float | None = None
        self._filling = 0

    def restart(self) -> None:
        self._last, self._filling = None, self._FILLING

    def lap(self, tokens: int) -> dict[str, float]:
        now = time.perf_counter()
        if self._filling:
            self._filling -= 1
        elif self._last is not None:
            self._laps.append((now - self._last, tokens))
        self._last = now
        seconds = sum(s for s, _ in self._laps)
        if not seconds:
            return {}
        rates = {"perf/steps_per_second": len(self._laps) / seconds}
        if tokens:
            rates["perf/tokens_per_second"] = sum(t for _, t in self._laps) / seconds
        return rates


class _Profiler:
    """A `jax.profiler` trace of the steps asked for; every process traces, each to its own file."""

    def __init__(self, steps: tuple[int, int] | None, directory: Path) -> None:
        self._steps, self._directory, self._tracing = steps, directory, False

    def __enter__(self) -> "_Profiler":
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def before(self, step: int) -> None:
        if self._steps is not None and not self._tracing and self._steps[0] <= step <= self._steps[1]:
            jax.profiler.start_trace(str(self._directory))
            self._tracing = True

    def after(self, step: int, state: TrainState) -> None:
        if self._tracing and self._steps is not None and step >= self._steps[1]:
            jax.block_until_ready(state)
            self._stop()

    def _stop(self) -> None:
        if self._tracing:
            self._tracing = False
            jax.profiler.stop_trace()


def _identity(
    metadata: Mapping[str, Any], train_config: TrainConfig, optimizer_config: OptimizerConfig, data: Data
) -> dict[str, Any]:
    """What must be equal for a run to be continued, as JSON values."""
    numeric = {k: v for k, v in to_dict(train_config).items() if k not in OPERATIONAL_FIELDS}
    identity = {
        **metadata,
        "train": numeric,
        "optimizer": to_dict(optimizer_config),
        "data_fingerprint": getattr(data, "fingerprint", None),
    }
    try:
        return json.loads(json.dumps(identity, allow_nan=False))
    except (TypeError, ValueError) as e:
        raise UserError(f"metadata of a run must be JSON values: {e}") from e


def _begin(
    params: Params,
    optimizer: Optimizer,
    seed: int,
    rows: RowPlaces | None,
    state_shardings: Callable[[TrainState], Any] | None,
) -> TrainState:
    if state_shardings is None:
        return _place(init_state(params, optimizer, seed), rows)
    create = functools.partial(init_state, optimizer=optimizer, seed=seed)
    return jax.jit(create, out_shardings=state_shardings(jax.eval_shape(create, params)))(params)


def _place(state: TrainState, rows: RowPlaces | None) -> TrainState:
    if rows is None:
        return state
    mesh = rows.sharding.mesh
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

    def place(x: jax.Array) -> jax.Array:
        on_mesh = isinstance(x.sharding, jax.sharding.NamedSharding) and x.sharding.mesh == mesh
        return x if on_mesh else jax.device_put(x, everywhere)

    return jax.tree.map(place, state)


def _writers(run_dir: Path, config: TrainConfig, completed_steps: int, label: str) -> MultiWriter:
    if not hosts.first():
        return MultiWriter()
    writers: list[MetricWriter] = [JsonlWriter(run_dir / "metrics.jsonl", completed_steps)]
    if config.tensorboard:
        writers.append(TensorBoardWriter(run_dir / "tensorboard", completed_steps))
    if config.progress:
        writers.append(ConsoleWriter(config.total_steps, completed_steps, label))
    return MultiWriter(*writers)


def _write_config(run_dir: Path, identity: dict[str, Any]) -> None:
    path = run_dir / "config.json"
    temporary = path.with_name(path.name + ".tmp")
    if path.exists() and not _is_run_config(path):
        raise UserError(f"{path} is not a run's; the folder holds something else: choose another run folder")
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(identity, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        temporary.replace(path)
    except OSError as e:
        raise UserError(f"cannot write {path}: {e}; choose another run folder") from e


def _is_run_config(path: Path) -> bool:
    try:
        return {"train", "optimizer"} <= set(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, RecursionError):
        return False


def _tokens(batch: Batch) -> int:
    return int(batch["tokens"].size) if "tokens" in batch else 0
