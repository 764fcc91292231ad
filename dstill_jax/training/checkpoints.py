"""Checkpoints of a train state: written whole or not at all, and never restored into something that differs.

`CheckpointStore` is used by `loop.py`; `load_params` and `load_metadata` by whatever starts from a trained model.

A checkpoint is an Orbax step folder `<directory>/<step>/`. The state is stored as nested dicts of arrays whatever the
optimiser's own containers are, beside JSON metadata: the identity of the run (stage, target fingerprint, resolved
config, data), which must be equal for a run to be resumed, and notes (versions), which need not. The position in the
data is the step itself. A save that is killed leaves a temporary folder, which is never looked at and removed later.

Several processes save and restore together, each its own devices' shares, in a folder that all of them see: a shared
disk, or a bucket (gs://...).
"""

import contextlib
import importlib.metadata
import json
import math
import shutil
from collections.abc import Iterator, Mapping
from typing import Any, Literal, Self

import jax
from etils import epath
from orbax.checkpoint import v1 as ocp

from dstill_jax import __version__
from dstill_jax.dims import Params
from dstill_jax.errors import UserError
from dstill_jax.sharding import hosts
from dstill_jax.training.compare import Layout, flat, json_differences, tree_differences
from dstill_jax.training.state import TrainState

_FORMAT = 1
CHECKPOINTS = "checkpoints"
"""Name of the folder of checkpoints in a run's folder."""

_MAX_LISTED = 12
_PARTS = {"_CHECKPOINT_METADATA", "commit_success.txt", "state", "metrics"}  # what a step folder holds


class CheckpointStore:
    """The checkpoints of one run, in one folder; close it (or use `with`) when done.

    All processes of a job call the same methods in the same order.
    """

    def __init__(
        self, directory: str | epath.PathLike, keep_last: int = 2, keep_best: tuple[str, str] | None = None
    ) -> None:
        """Opens or creates the folder. Step folders without a readable checkpoint are put out of the way.

        The `keep_last` newest checkpoints are kept, and with `keep_best` = (metric, "min" or "max") the best of those
        that were saved with this metric.
        """
        self.directory = _folder(directory)
        self._pending: tuple[int, Any] | None = None  # the step that is being written, and Orbax's promise
        self._failed = False
        self._keep_best = keep_best
        if hosts.first():
            _set_incomplete_aside(self.directory)
        hosts.exchange()  # nobody looks before that is done
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._checkpointer = ocp.training.Checkpointer(
                self.directory,
                save_decision_policy=ocp.training.save_decision_policies.FixedIntervalPolicy(1),
                preservation_policy=_preservation(keep_last, keep_best),
                cleanup_tmp_directories=True,
            )
        except (OSError, ImportError) as e:  # a bucket needs a package of its own
            raise UserError(f"cannot open checkpoint folder {self.directory}: {e}; choose another run folder") from e

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Waits for a save that is under way. Raises `UserError` when it cannot be finished."""
        try:
            self.wait()
        finally:
            # Orbax raises once more what `save` or `wait` have reported.
            with contextlib.suppress(Exception) if self._failed else contextlib.nullcontext():
                self._checkpointer.close()

    def latest_step(self) -> int | None:
        """The newest complete checkpoint, or None."""
        return max(_complete_steps(self.directory), default=None)

    def agreed_step(self) -> int | None:
        """`latest_step`, the same in every process.

        Raises `UserError` when the processes do not see the same folder.
        """
        seen = hosts.exchange(self.latest_step())
        if len(set(seen)) > 1:
            raise UserError(
                f"the newest checkpoint in {self.directory} is of step {', '.join(map(str, seen))} as seen by processes"
                f" 0 to {len(seen) - 1}; keep checkpoints on a disk that all hosts share, or in a bucket"
            )
        return seen[0]

    def path(self, step: int) -> epath.Path:
        return self.directory / str(step)

    def describe_best(self) -> str:
        """Which checkpoint is the best so far by `keep_best`, in a few words; "" when there is none."""
        if self._keep_best is None:
            return ""
        with contextlib.suppress(UserError):
            return f"the best by {' '.join(self._keep_best)} is of step {best_step(self.directory, *self._keep_best)}"
        return ""

    def save(
        self,
        state: TrainState,
        identity: Mapping[str, Any],
        metrics: Mapping[str, float] | None = None,
        *,
        wait: bool = True,
    ) -> epath.Path:
        """Writes the state under its own step and returns the folder; does nothing when that step is there already.

        With `wait=False` it returns as soon as the state is copied, so that the next step may reuse its memory, and a
        thread writes the copy; the checkpoint counts when it is complete. Raises `UserError` when it cannot be
        written, or an earlier one could not.
        """
        self.wait()
        step = int(state["step"])
        if any(c.step == step for c in self._checkpointer.checkpoints):
            return self.path(step)
        metadata = {"format": _FORMAT, "step": step, "identity": _as_json(identity), "notes": _notes()}
        judged = None
        if self._keep_best is not None and metrics is not None and self._keep_best[0] in metrics:
            judged = {self._keep_best[0]: metrics[self._keep_best[0]]}
        metadata["metrics"] = judged
        with self._blaming(step):
            promise = self._checkpointer.save_async(step, _to_plain(state), metrics=judged, custom_metadata=metadata)
            self._pending = step, promise
        if wait:
            self.wait()
        return self.path(step)

    def wait(self) -> None:
        """Until nothing is being written any more. Raises `UserError` when it could not be."""
        pending, self._pending = self._pending, None
        if pending is not None:
            with self._blaming(pending[0]):
                pending[1].result()

    @contextlib.contextmanager
    def _blaming(self, step: int) -> Iterator[None]:
        try:
            yield
        except Exception as e:  # Orbax raises many kinds for a full or read-only disk
            self._failed = True
            before = self.latest_step()
            last = "there is none before it" if before is None else f"the last good one is {self.path(before)}"
            raise UserError(
                f"cannot write checkpoint {self.path(step)}: {_first_line(e)}; {last}."
                " Free some space or fix the folder's permissions, then run the same command to resume"
            ) from e

    def restore(self, template: TrainState, identity: Mapping[str, Any], step: int | None = None) -> TrainState:
        """The state of `step` (default: the newest), laid out and placed like `template`.

        Structure, shapes, dtypes and `identity` are compared first: any difference is a `UserError` listing the
        paths, since Orbax alone would cast, and fill or drop what does not match.
        """
        step = _require_step(self.directory, step)
        path = self.path(step)
        stored, metadata = _read_metadata(path)
        plain = _to_plain(template)
        differences = tree_differences(stored, plain)
        differences += json_differences(metadata["identity"], _as_json(identity))
        if differences:
            shown = "; ".join(differences[:_MAX_LISTED])
            more = f"; and {len(differences) - _MAX_LISTED} more" if len(differences) > _MAX_LISTED else ""
            raise UserError(
                f"checkpoint {path} belongs to another run: {shown}{more}."
                " Use the configuration it was made with, or another run folder"
            )
        abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), plain)
        loaded = _load(path, abstract)
        restored = _from_plain(template, loaded)
        wrong = tree_differences(flat(loaded), plain)
        assert not wrong and int(restored["step"]) == step, f"restored state of {path} differs: {wrong}"
        return restored


def latest_step(directory: str | epath.PathLike) -> int | None:
    """The newest complete checkpoint under a run folder or its checkpoint folder, or None."""
    steps = _complete_steps(_checkpoint_folder(_folder(directory)))
    return max(steps, default=None)


def best_step(directory: str | epath.PathLike, metric: str, mode: Literal["min", "max"]) -> int:
    """The step of the best checkpoint that was saved with this metric (`TrainConfig.keep_best`).

    Raises `UserError` when there is none.
    """
    folder = _checkpoint_folder(_folder(directory))
    found = {step: _read_metadata(folder / str(step))[1].get("metrics") or {} for step in _complete_steps(folder)}
    judged = {step: metrics[metric] for step, metrics in found.items() if metric in metrics}
    if not judged:
        raise UserError(f"no checkpoint in {folder} was saved with the metric {metric!r}; set train.keep_best")
    return (min if mode == "min" else max)(judged, key=lambda step: judged[step])


def load_params(
    directory: str | epath.PathLike,
    which: Literal["ema", "params"] = "ema",
    *,
    step: int | None = None,
    sharding: jax.sharding.Sharding | None = None,
    like: Params | None = None,
) -> Params:
    """The weights of a checkpoint alone, float32: the moving average, or the raw parameters. Nothing else is read.

    The scale of the taps is apart from them in training: what can draft is a run's `drafter` folder.
    `directory` is a run folder, its checkpoint folder, or the folder of one step; `step` defaults to the newest. The
    arrays are placed as those of `like` are, or all by `sharding`, by default on the first device.
    """
    if which not in ("ema", "params"):
        raise UserError(f"which={which!r} is not stored as weights; use 'ema' or 'params'")
    path = _step_folder(_folder(directory), step)
    stored, _ = _read_metadata(path)
    sharding = sharding or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    places = {(which, *_keys(p)): x.sharding for p, x in jax.tree_util.tree_leaves_with_path(like)}
    abstract: dict[str, Any] = {}
    for keys, (shape, dtype) in stored.items():
        if keys[0] == which:
            _insert(abstract, keys, jax.ShapeDtypeStruct(shape, dtype, sharding=places.get(keys, sharding)))
    context = ocp.Context()
    context.pytree.loading.partial_load = True
    with context:
        return _load(path, abstract)[which]


def load_metadata(directory: str | epath.PathLike, *, step: int | None = None) -> dict[str, Any]:
    """What was saved beside the arrays: {"format", "step", "identity": {...}, "notes": {...}}."""
    return _read_metadata(_step_folder(_folder(directory), step))[1]


def _preservation(keep_last: int, keep_best: tuple[str, str] | None) -> Any:
    policies = ocp.training.preservation_policies
    newest = policies.LatestN(keep_last)
    if keep_best is None:
        return newest
    metric, mode = keep_best
    worst = math.inf if mode == "min" else -math.inf  # checkpoints of before, which another metric was to judge
    best = policies.BestN(
        get_metric_fn=lambda metrics: metrics.get(metric, worst),
        reverse=mode == "min",
        n=1,
        keep_checkpoints_without_metrics=False,
    )
    return policies.AnyPreservationPolicy([newest, best])


# Folders


def _folder(path: str | epath.PathLike) -> epath.Path:
    """Absolute; a bucket (gs://...) as it is."""
    return epath.Path(path) if "://" in str(path) else epath.Path(path).absolute()


def _checkpoint_folder(directory: epath.Path) -> epath.Path:
    return directory / CHECKPOINTS if (directory / CHECKPOINTS).is_dir() else directory


def _step_folder(directory: epath.Path, step: int | None) -> epath.Path:
    if step is None and _is_complete(directory):
        return directory
    folder = _checkpoint_folder(directory)
    return folder / str(_require_step(folder, step))


def _require_step(folder: epath.Path, step: int | None) -> int:
    steps = _complete_steps(folder)
    if not steps:
        raise UserError(f"{folder} holds no complete checkpoint; give a run folder of `dstill train`")
    if step is None:
        return max(steps)
    if step not in steps:
        raise UserError(f"{folder} holds no checkpoint of step {step}; it has {', '.join(map(str, sorted(steps)))}")
    return step


def _complete_steps(folder: epath.Path) -> list[int]:
    if not folder.is_dir():
        return []
    return [int(p.name) for p in folder.iterdir() if p.name.isdecimal() and _is_complete(p)]


def _is_complete(path: epath.Path) -> bool:
    # In a bucket, where nothing can be renamed, the last of these files is what completes a checkpoint.
    named = all((path / name).is_file() for name in ("_CHECKPOINT_METADATA", "commit_success.txt"))
    return named and ocp.is_orbax_checkpoint(path)


def _set_incomplete_aside(folder: epath.Path) -> None:
    """Step folders that hold no checkpoint: the rest of a killed deletion goes, a newer one (a broken copy) is renamed.

    Orbax would count them as checkpoints, hence delete good ones in their place. In a bucket it looks after them itself.
    Raises `UserError` where a folder with a number for its name holds something else.
    """
    if "://" in str(folder) or not folder.is_dir():
        return
    newest = max(_complete_steps(folder), default=-1)
    for path in folder.iterdir():
        if path.is_dir() and path.name.isdecimal() and not _is_complete(path):
            if other := sorted({file.name for file in path.iterdir()} - _PARTS):
                raise UserError(
                    f"{path} holds {other[0]} and is no checkpoint, but has a checkpoint's name and would be deleted as an"
                    " old one; give checkpoints a folder of their own"
                )
            if int(path.name) < newest:
                shutil.rmtree(path, ignore_errors=True)  # a local folder
            else:
                path.rename(_free_name(path))


def _free_name(path: epath.Path) -> epath.Path:
    names = (path.with_name(f"{path.name}.incomplete{suffix}") for suffix in ("", *(f"-{i}" for i in range(1, 10_000))))
    return next(name for name in names if not name.exists())


# Contents


def _load(path: epath.Path, abstract: dict[str, Any]) -> dict[str, Any]:
    try:
        return ocp.load(path, abstract)
    except Exception as e:  # truncated or missing files surface as many kinds
        raise _unreadable(path, e) from e


def _unreadable(path: epath.Path, error: Exception) -> UserError:
    return UserError(f"cannot read checkpoint {path}: {_first_line(error)}; delete that folder to use an older one")


def _read_metadata(path: epath.Path) -> tuple[Layout, dict[str, Any]]:
    """({path of a leaf: (shape, dtype)}, custom metadata) without reading an array."""
    try:
        metadata = ocp.metadata(path)
    except Exception as e:
        raise _unreadable(path, e) from e
    custom = metadata.custom_metadata
    if not isinstance(custom, dict) or custom.get("format") != _FORMAT:
        found = custom.get("format") if isinstance(custom, dict) else None
        raise UserError(f"{path} is not a checkpoint of this library (format {found!r}, expected {_FORMAT})")
    if not isinstance(metadata.metadata, Mapping):  # Orbax only logs an unreadable array
        raise _unreadable(path, ValueError("its arrays are missing or damaged"))
    return flat(metadata.metadata), custom


def _to_plain(tree: Any) -> dict[str, Any]:
    """The same leaves in nested dicts, keyed by attribute, key or position."""
    plain: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        _insert(plain, _keys(path), leaf)
    return plain


def _from_plain(template: Any, plain: dict[str, Any]) -> Any:
    def pick(path: jax.tree_util.KeyPath, _: Any) -> Any:
        node = plain
        for key in _keys(path):
            node = node[key]
        return node

    return jax.tree_util.tree_map_with_path(pick, template)


def _keys(path: jax.tree_util.KeyPath) -> tuple[str, ...]:
    return tuple(jax.tree_util.keystr((entry,), simple=True) for entry in path)


def _insert(tree: dict[str, Any], keys: tuple[str, ...], leaf: Any) -> None:
    for key in keys[:-1]:
        tree = tree.setdefault(key, {})
    tree[keys[-1]] = leaf


def _as_json(values: Mapping[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(dict(values)))


def _notes() -> dict[str, str]:
    packages = ("jax", "optax", "orbax-checkpoint")
    return {"dstill-jax": __version__, **{name: importlib.metadata.version(name) for name in packages}}


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0] or type(error).__name__
