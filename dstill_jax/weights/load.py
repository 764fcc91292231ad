"""Load and save targets and drafters: the entry points of `weights/`, for users and the command line.

Folders are Hugging Face folders (targets) and public DFlash folders (drafters). Tensors pass through memory one by one;
with stacked layers, one weight kind (all its layers) at a time.
"""

import contextlib
import dataclasses
import itertools
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from dstill_jax.config import DrafterConfig, TargetConfig, check_drafter_matches
from dstill_jax.dims import Params
from dstill_jax.errors import UserError
from dstill_jax.models.drafter import Drafter
from dstill_jax.models.target import Target
from dstill_jax.paths import in_home
from dstill_jax.weights.embedded import EMBEDDED_TARGETS, resolve
from dstill_jax.weights.folders import CONFIG_FILES, MODEL_FILES, read_json, resolve_folder, write_json
from dstill_jax.weights.hf_config import (
    drafter_config_dict,
    generation_eos_token_ids,
    parse_drafter_config,
    parse_target_config,
    target_config_dict,
)
from dstill_jax.weights.load_sharded import read_sharded, to_tree_layout
from dstill_jax.weights.names import (
    TensorEntry,
    drafter_entries,
    is_ignorable,
    match_tree,
    set_leaf,
    target_entries,
)
from dstill_jax.weights.safetensors_io import (
    WEIGHTS_FILE,
    WeightFiles,
    aligned_empty,
    file_dtype,
    numpy_dtype,
    open_weights,
    write_safetensors,
)

CONFIG_FILE = "config.json"
PROVENANCE_FILE = "dstill.json"  # beside the public layout, so that no other loader meets an unknown key

"""Puts one finished host array where it will live, given its path in the parameter tree."""


def load_target(
    path_or_hub_id: str | os.PathLike[str],
    dtype: str = "float32",
    scan_layers: bool | None = None,
    mesh: jax.sharding.Mesh | None = None,
) -> Target:
    """A frozen target from a Hugging Face folder or hub id (Qwen3 and Llama-3.x), or an embedded one by its name.

    Args:
      path_or_hub_id: a folder with `config.json` and safetensors (one file or shards in bf16, f16 or f32), or a hub id,
        or "smollm2" or "tiny" (`embedded.fetch`, which raises, too).
      dtype: of the parameters: "float32", "bfloat16" or "float16".
      scan_layers: True stacks the layers' parameters on a leading axis; False keeps a subtree per layer, its matrices
        stored output first (`models/layers.py`); None: stacked unless the backend is a CPU.
      mesh: spread the parameters over it as `sharding/rules.py` says; each process reads the byte ranges of its own
        devices, once (whole rows where its part of a row is under 4 KB).

    Raises:
      UserError: the folder, its config or a tensor cannot be represented exactly; the field or tensor is named. A
        parameter does not divide over the mesh.

    Example:
      >>> target = load_target("Qwen/Qwen3-0.6B", dtype="bfloat16")  # doctest: +SKIP
    """
    wanted = numpy_dtype(dtype)
    described, files = _open_target(path_or_hub_id)
    with _blaming(Path(described.source)):
        entries = target_entries(described.config)
        check_tensors(files, entries, described.config)
        stacked = jax.default_backend() != "cpu" if scan_layers is None else scan_layers
        # Only matrices that stay whole are stored output first: the mesh's products take kernels.
        placed = entries if stacked or mesh is not None else [entry.output_first() for entry in entries]
        params = _read(files, placed, wanted, stacked, mesh)
    return dataclasses.replace(described, params=params)


def describe_target(path_or_hub_id: str | os.PathLike[str]) -> Target:
    """A target without its parameters: configuration, fingerprint and tokenizer cost no memory. Errors as `load_target`."""
    return _open_target(path_or_hub_id)[0]


def describe_target_config(path_or_hub_id: str | os.PathLike[str]) -> TargetConfig:
    """A target's configuration, of a folder that may lack the weights; of a hub id only JSON files are downloaded.

    Raises UserError for what `load_target` would not load either.
    """
    return _target_config(resolve_folder(resolve(path_or_hub_id, EMBEDDED_TARGETS), CONFIG_FILES))


def _target_config(folder: Path) -> TargetConfig:
    generation_file = folder / "generation_config.json"
    with _blaming(generation_file):
        more = generation_eos_token_ids(read_json(generation_file)) if generation_file.exists() else ()
    with _blaming(folder / CONFIG_FILE):
        return parse_target_config(read_json(folder / CONFIG_FILE), more)


def _open_target(path_or_hub_id: str | os.PathLike[str]) -> tuple[Target, WeightFiles]:
    folder = resolve_folder(resolve(path_or_hub_id, EMBEDDED_TARGETS))
    config = _target_config(folder)
    files = open_weights(folder)
    fingerprint = files.fingerprint((folder / CONFIG_FILE).read_bytes())
    return Target(config, {}, str(folder), fingerprint), files


def load_drafter(
    path_or_hub_id: str | os.PathLike[str],
    target: Target | None = None,
    dtype: str | None = None,
    mesh: jax.sharding.Mesh | None = None,
) -> Drafter:
    """A drafter in the public DFlash layout.

    Args:
      path_or_hub_id: a folder with `config.json` and `model.safetensors`, the folder of a run of `dstill train`, or a
        hub id.
      target: when given, the drafter must have been made for a target of this shape.
      dtype: of the parameters: "float32", "bfloat16" or "float16"; None: as the target's, float32 without one.
      mesh: spread the parameters over it, as in `load_target`.

    Raises:
      UserError: the folder cannot be represented exactly, or does not fit the target; both values are named.
    """
    loaded = target is not None and bool(target.params)
    wanted = numpy_dtype(dtype or (str(target.dtype) if loaded else "float32"))
    described = _describe_drafter(path_or_hub_id, None if target is None else target.config, MODEL_FILES)
    folder = Path(described.source)
    files = open_weights(folder)
    with _blaming(folder):
        entries = drafter_entries(described.config)
        check_tensors(files, entries, described.config)
        params = _read(files, entries, wanted, False, mesh)
    return dataclasses.replace(described, params=params)


def describe_drafter(path_or_hub_id: str | os.PathLike[str], target: TargetConfig | None = None) -> Drafter:
    """A drafter without its parameters: the folder may lack the weights; of a hub id only JSON files are downloaded.

    Folders, `target` and errors as for `load_drafter`.
    """
    return _describe_drafter(path_or_hub_id, target, CONFIG_FILES)


def _describe_drafter(
    path_or_hub_id: str | os.PathLike[str], target: TargetConfig | None, downloaded: Sequence[str]
) -> Drafter:
    run = Path(in_home(path_or_hub_id))
    finished = (run / "drafter" / CONFIG_FILE).exists()
    if not finished and (run / "metrics.jsonl").exists():
        raise UserError(f"{path_or_hub_id}: this run has not ended, so it has no drafter yet; run `dstill train` again")
    folder = run / "drafter" if finished else resolve_folder(path_or_hub_id, downloaded)
    with _blaming(folder / CONFIG_FILE):
        config = parse_drafter_config(read_json(folder / CONFIG_FILE))
        if target is not None:
            check_drafter_matches(config, target)
    provenance = folder / PROVENANCE_FILE
    known = read_json(provenance) if provenance.exists() else {}
    with _blaming(provenance):
        vocabulary = _checked_vocabulary(known.get("vocabulary"), config.vocab_size)
        if not isinstance(known.get("target_fingerprint"), str | None):
            raise UserError(
                f"target_fingerprint={known['target_fingerprint']!r} must be a text; export the drafter again"
            )
    return Drafter(config, {}, str(folder), known.get("target_fingerprint"), vocabulary)


def drafter_fingerprint(drafter: Drafter) -> str:
    """Identifies the weights in the folder that a drafter was loaded from: a hash of config, headers and samples."""
    folder = Path(drafter.source)
    return open_weights(folder).fingerprint((folder / CONFIG_FILE).read_bytes())


def _checked_vocabulary(tokens: Any, vocab_size: int) -> tuple[int, ...] | None:
    if tokens is None:
        return None
    whole = isinstance(tokens, list) and all(type(token) is int and 0 <= token < vocab_size for token in tokens)
    if not whole or not tokens or any(a >= b for a, b in itertools.pairwise(tokens)):
        raise UserError(f"vocabulary must list distinct token ids of 0..{vocab_size - 1} in ascending order")
    return tuple(tokens)


def save_target(path: str | os.PathLike[str], config: TargetConfig, params: Params, dtype: str = "float32") -> None:
    """Write a target as a Hugging Face folder (`config.json`, `model.safetensors`); other files there are kept.

    Args:
      params: unrolled or stacked.

    Raises:
      UserError: the parameters do not fit the config, or the folder holds other weights.
      OSError: the disk is full or not writable.
    """
    pairs = match_tree(target_entries(config), params)
    _save(path, target_config_dict(config, _checked(dtype)), pairs, dtype)


def save_drafter(
    path: str | os.PathLike[str], drafter: Drafter, target_config: TargetConfig, dtype: str = "bfloat16"
) -> None:
    """Write a drafter in the public DFlash layout; the target's fingerprint and the vocabulary go to a file of their own.

    Raises:
      UserError: the drafter does not fit the target or its own config, or the folder holds other weights.
      OSError: the disk is full or not writable.
    """
    config = drafter_config_dict(drafter.config, target_config, _checked(dtype))
    pairs = match_tree(drafter_entries(drafter.config), drafter.params)
    provenance = {"target_fingerprint": drafter.target_fingerprint, "vocabulary": drafter.vocabulary}
    provenance = {name: value for name, value in provenance.items() if value is not None}
    _save(path, config, pairs, dtype, provenance or None)


# --- reading --------------------------------------------------------------------------------------------------------


def check_tensors(files: WeightFiles, entries: list[TensorEntry], config: TargetConfig | DrafterConfig) -> None:
    """Every tensor of the map is there with its shape, and every tensor there is in the map.

    Raises:
      UserError: naming the missing, leftover or misshapen tensors.
    """
    wanted = {entry.name for entry in entries}
    missing = [entry.name for entry in entries if entry.name not in files.tensors]
    leftover = [name for name in files.tensors if name not in wanted and not is_ignorable(name, config)]
    if missing:
        extra = f"; not in the config: {_some(leftover)}" if leftover else ""
        raise UserError(f"the weights lack {_some(missing)}, which the config asks for{extra}")
    if leftover:
        raise UserError(f"the config has no place for {_some(leftover)}; the model is not what its config says")
    for entry in entries:
        if files.tensors[entry.name].shape != entry.shape:
            raise UserError(
                f"{entry.name} has shape {list(files.tensors[entry.name].shape)} in the weights,"
                f" the config says {list(entry.shape)}"
            )


def _read(
    files: WeightFiles, entries: list[TensorEntry], dtype: np.dtype, stacked: bool, mesh: jax.sharding.Mesh | None
) -> Params:
    if mesh is None:
        return read_params(files, entries, dtype, stacked)
    return read_sharded(files, entries, dtype, stacked, mesh)


def read_params(
    files: WeightFiles,
    entries: list[TensorEntry],
    dtype: np.dtype,
    stacked: bool,
) -> Params:
    """The parameter tree, filled tensor by tensor, on one device."""
    groups: dict[tuple[str, ...], list[TensorEntry]] = {}
    for entry in entries:
        groups.setdefault(entry.tree_path(stacked), []).append(entry)
    params: Params = {}
    for path, group in groups.items():
        if stacked and group[0].layer is not None:
            array = aligned_empty((len(group), *group[0].tree_shape), dtype)
            for entry in group:
                array[entry.layer] = _read_cast(files, entry, dtype)
        else:
            array = _read_cast(files, group[0], dtype)
        set_leaf(params, path, jax.device_put(array))
    return params


def _read_cast(files: WeightFiles, entry: TensorEntry, dtype: np.dtype) -> np.ndarray:
    return to_tree_layout(files.read(entry.name), entry, dtype)


# --- writing --------------------------------------------------------------------------------------------------------


def _save(
    path: str | os.PathLike[str],
    config: dict[str, Any],
    pairs: list[tuple[TensorEntry, Any, bool]],
    dtype: str,
    provenance: dict[str, Any] | None = None,
) -> None:
    """Everything is written aside, then moved in, `config.json` last.

    A full disk leaves the folder as it was; a save killed between two moves leaves it without a config: not loadable.
    """
    folder = Path(in_home(path))
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file; give a folder to save to")
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / CONFIG_FILE).exists():
        found = read_json(folder / CONFIG_FILE).get("architectures")
        if found != config["architectures"]:
            raise UserError(f"{folder} holds something else (architectures={found}); save to a folder of its own")
    others = [p.name for p in sorted(folder.iterdir()) if ".safetensors" in p.suffixes and p.name != WEIGHTS_FILE]
    if others:
        raise UserError(f"{folder} holds other weights ({_some(others)}); save to a folder of its own")
    specs = [(entry.name, entry.shape, file_dtype(dtype)) for entry, _, _ in pairs]
    staging = folder / f".saving.{os.getpid()}"
    staging.mkdir(exist_ok=True)
    try:
        write_safetensors(staging / WEIGHTS_FILE, specs, _host_values(pairs, numpy_dtype(dtype)))
        if provenance is not None:
            write_json(staging / PROVENANCE_FILE, provenance)
        write_json(staging / CONFIG_FILE, config)
        for name in (CONFIG_FILE, PROVENANCE_FILE):
            (folder / name).unlink(missing_ok=True)
        for name in (WEIGHTS_FILE, PROVENANCE_FILE, CONFIG_FILE):
            if (staging / name).exists():
                os.replace(staging / name, folder / name)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _host_values(pairs: list[tuple[TensorEntry, Any, bool]], dtype: np.dtype) -> Iterator[np.ndarray]:
    for entry, leaf, over_layers in pairs:
        value = np.asarray(leaf[entry.layer] if over_layers else leaf)
        yield np.ascontiguousarray(value.T if entry.transpose else value, dtype)


def _checked(dtype: str) -> str:
    file_dtype(dtype)
    return dtype


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"


@contextlib.contextmanager
def _blaming(path: Path) -> Iterator[None]:
    """Puts the file's or folder's name before a message that does not have it."""
    try:
        yield
    except UserError as error:
        if str(path) in str(error):
            raise
        raise UserError(f"{path}: {error}") from error
