"""Checkpoints of a train state: written whole or not at all, and never restored into something that differs.

`CheckpointStore` is used by `loop.py`; `load_params` and `load_metadata` by whatever starts from a trained model.

A checkpoint is an Orbax step folder `<directory>/<step>/`. The state is stored as nested dicts of arrays whatever the
optimiser's own containers are, beside JSON metadata: the identity of the run (stage, target fingerprint, resolved
config, data), which must be equal for a run to be resumed, and notes (versions), which need not. The position in the
data is the step itself. A save that is killed leaves a temporary folder, which is never looked at and removed later.
"""

import importlib.metadata
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

import jax
from orbax.checkpoint import v1 as ocp

from dstill_jax import __version__
from dstill_jax.dims import Params
from dstill_jax.errors import UserError
from dstill_jax.training.state import TrainState

_FORMAT = 1
_CHECKPOINTS = "checkpoints"
_MAX_LISTED = 12


class CheckpointStore:
    """The checkpoints of one run, in one folder; close it (or use `with`) when done."""

    def __init__(self, directory: str | Path, keep_last: int = 2) -> None:
        """Opens or creates the folder. Step folders without a readable checkpoint are put out of the way."""
        self.directory = Path(directory).absolute()
        self._save_failed = False
        if jax.process_index() == 0:
            _set_incomplete_aside(self.directory)
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._checkpointer = ocp.training.Checkpointer(
                self.directory,
                save_decision_policy=ocp.training.save_decision_policies.FixedIntervalPolicy(1),
                preservation_policy=ocp.training.preservation_policies.LatestN(keep_last),
                cleanup_tmp_directories=True,
            )
        except OSError as e:
            raise UserError(f"cannot open checkpoint folder {self.directory}: {e}; choose another run folder") from e

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        try:
            self._checkpointer.close()
        except Exception:
            if not self._save_failed:  # else it is the failure that `save` has reported, raised once more
                raise

    def latest_step(self) -> int | None:
        """The newest complete checkpoint, or None."""
        return latest_step(self.directory)

    def path(self, step: int) -> Path:
        return self.directory / str(step)

    def save(self, state: TrainState, identity: Mapping[str, Any]) -> Path:
        """Writes the state under its own step and returns the folder; does nothing when that step is there already.

        Returns only after the checkpoint is complete. Raises `UserError` when it cannot be written.
        """
        step = int(state["step"])
        if any(c.step == step for c in self._checkpointer.checkpoints):
            return self.path(step)
        metadata = {"format": _FORMAT, "step": step, "identity": _as_json(identity), "notes": _notes()}
        before = self.latest_step()
        try:
            self._checkpointer.save(step, _to_plain(state), custom_metadata=metadata)
        except Exception as e:  # Orbax raises many kinds for a full or read-only disk
            self._save_failed = True
            last = "there is none before it" if before is None else f"the last good one is {self.path(before)}"
            raise UserError(
                f"cannot write checkpoint {self.path(step)}: {_first_line(e)}; {last}."
                " Free some space or fix the folder's permissions, then run the same command to resume"
            ) from e
        return self.path(step)

    def restore(self, template: TrainState, identity: Mapping[str, Any], step: int | None = None) -> TrainState:
        """The state of `step` (default: the newest), laid out and placed like `template`.

        Structure, shapes, dtypes and `identity` are compared first: any difference is a `UserError` listing the
        paths, since Orbax alone would cast, and fill or drop what does not match.
        """
        step = _require_step(self.directory, step)
        path = self.path(step)
        stored, metadata = _read_metadata(path)
        plain = _to_plain(template)
        differences = _tree_differences(stored, plain)
        differences += _json_differences(metadata["identity"], _as_json(identity))
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
        wrong = _tree_differences(_flat(loaded), plain)
        assert not wrong and int(restored["step"]) == step, f"restored state of {path} differs: {wrong}"
        return restored


def latest_step(directory: str | Path) -> int | None:
    """The newest complete checkpoint under a run folder or its checkpoint folder, or None."""
    steps = _complete_steps(_checkpoint_folder(Path(directory)))
    return max(steps, default=None)


def load_params(
    directory: str | Path,
    which: Literal["ema", "params"] = "ema",
    *,
    step: int | None = None,
    sharding: jax.sharding.Sharding | None = None,
) -> Params:
    """The weights of a checkpoint alone, float32: the moving average, or the raw parameters. Nothing else is read.

    `directory` is a run folder, its checkpoint folder, or the folder of one step; `step` defaults to the newest. The
    arrays are placed by `sharding`, by default on the first device.
    """
    if which not in ("ema", "params"):
        raise UserError(f"which={which!r} is not stored as weights; use 'ema' or 'params'")
    path = _step_folder(Path(directory), step)
    stored, _ = _read_metadata(path)
    sharding = sharding or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    abstract: dict[str, Any] = {}
    for keys, (shape, dtype) in stored.items():
        if keys[0] == which:
            _insert(abstract, keys, jax.ShapeDtypeStruct(shape, dtype, sharding=sharding))
    context = ocp.Context()
    context.pytree.loading.partial_load = True
    with context:
        return _load(path, abstract)[which]


def load_metadata(directory: str | Path, *, step: int | None = None) -> dict[str, Any]:
    """What was saved beside the arrays: {"format", "step", "identity": {...}, "notes": {...}}."""
    return _read_metadata(_step_folder(Path(directory), step))[1]


# Folders


def _checkpoint_folder(directory: Path) -> Path:
    return directory / _CHECKPOINTS if (directory / _CHECKPOINTS).is_dir() else directory


def _step_folder(directory: Path, step: int | None) -> Path:
    directory = directory.absolute()
    if step is None and _is_complete(directory):
        return directory
    folder = _checkpoint_folder(directory)
    return folder / str(_require_step(folder, step))


def _require_step(folder: Path, step: int | None) -> int:
    steps = _complete_steps(folder)
    if not steps:
        raise UserError(f"{folder} holds no complete checkpoint; give a run folder of `dstill train`")
    if step is None:
        return max(steps)
    if step not in steps:
        raise UserError(f"{folder} holds no checkpoint of step {step}; it has {', '.join(map(str, sorted(steps)))}")
    return step


def _complete_steps(folder: Path) -> list[int]:
    if not folder.is_dir():
        return []
    return [int(p.name) for p in folder.iterdir() if p.name.isdecimal() and _is_complete(p)]


def _is_complete(path: Path) -> bool:
    return path.is_dir() and (path / "_CHECKPOINT_METADATA").is_file() and ocp.is_orbax_checkpoint(path)


def _set_incomplete_aside(folder: Path) -> None:
    """Step folders that hold no checkpoint: the rest of a killed deletion goes, a newer one (a broken copy) is renamed.

    Orbax would count them as checkpoints, hence delete good ones in their place.
    """
    if not folder.is_dir():
        return
    newest = max(_complete_steps(folder), default=-1)
    for path in folder.iterdir():
        if path.is_dir() and path.name.isdecimal() and not _is_complete(path):
            if int(path.name) < newest:
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.rename(_free_name(path))


def _free_name(path: Path) -> Path:
    names = (path.with_name(f"{path.name}.incomplete{suffix}") for suffix in ("", *(f"-{i}" for i in range(1, 10_000))))
    return next(name for name in names if not name.exists())


# Contents


def _load(path: Path, abstract: dict[str, Any]) -> dict[str, Any]:
    try:
        return ocp.load(path, abstract)
    except Exception as e:  # truncated or missing files surface as many kinds
        raise _unreadable(path, e) from e


def _unreadable(path: Path, error: Exception) -> UserError:
    return UserError(f"cannot read checkpoint {path}: {_first_line(error)}; delete that folder to use an older one")


def _read_metadata(path: Path) -> tuple[dict[tuple[str, ...], tuple[tuple[int, ...], Any]], dict[str, Any]]:
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
    return _flat(metadata.metadata), custom


def _flat(tree: Any, prefix: tuple[str, ...] = ()) -> dict[tuple[str, ...], tuple[tuple[int, ...], Any]]:
    if isinstance(tree, Mapping):
        return {k: v for name, sub in tree.items() for k, v in _flat(sub, (*prefix, str(name))).items()}
    return {prefix: (tuple(tree.shape), tree.dtype)}


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


def _tree_differences(stored: dict[tuple[str, ...], tuple[tuple[int, ...], Any]], plain: dict[str, Any]) -> list[str]:
    wanted = _flat(plain)
    found = []
    for keys in sorted(stored.keys() | wanted.keys()):
        name = "/".join(keys)
        if keys not in wanted:
            found.append(f"{name} is only in the checkpoint")
        elif keys not in stored:
            found.append(f"{name} is not in the checkpoint")
        else:
            (shape, dtype), (want_shape, want_dtype) = stored[keys], wanted[keys]
            if shape != want_shape:
                found.append(f"{name} has shape {list(shape)} there, {list(want_shape)} now")
            if dtype != want_dtype:
                found.append(f"{name} is {dtype} there, {want_dtype} now")
    return found


def _json_differences(stored: Any, wanted: Any, prefix: str = "") -> list[str]:
    if isinstance(stored, dict) and isinstance(wanted, dict):
        found = []
        for key in sorted(stored.keys() | wanted.keys()):
            name = f"{prefix}.{key}" if prefix else key
            if key not in wanted:
                found.append(f"{name} is only in the checkpoint ({stored[key]!r})")
            elif key not in stored:
                found.append(f"{name} is not in the checkpoint ({wanted[key]!r} now)")
            else:
                found += _json_differences(stored[key], wanted[key], name)
        return found
    return [] if stored == wanted else [f"{prefix} is {stored!r} there, {wanted!r} now"]


def _as_json(values: Mapping[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(dict(values)))


def _notes() -> dict[str, str]:
    packages = ("jax", "optax", "orbax-checkpoint")
    return {"dstill-jax": __version__, **{name: importlib.metadata.version(name) for name in packages}}


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0] or type(error).__name__
