"""The key of a prepared folder: every input that decides its content. Called by `generate`.

A folder is only continued, or used as it is, by a run whose key is the same in every field.
"""

import json
import os
from pathlib import Path
from typing import Any

from dstill_jax.errors import UserError

NAME = "manifest.json"


def check_manifest(folder: Path, inputs: dict[str, Any]) -> None:
    """Writes the manifest into a new folder, or compares with the one that is there.

    Raises:
        UserError: the folder was made from other inputs (each differing field is named) or holds something else.
    """
    inputs = json.loads(json.dumps(inputs))
    path = folder / NAME
    if path.exists():
        try:
            stored = json.loads(path.read_text(encoding="utf-8"))["inputs"]
            differing = sorted(
                k for k in stored.keys() | inputs.keys() if stored.get(k, "absent") != inputs.get(k, "absent")
            )
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
            raise UserError(f"{path}: not a manifest of this program; choose another folder or remove it") from error
        if differing:
            changes = "; ".join(f"{k}: there {_short(stored, k)}, now {_short(inputs, k)}" for k in differing)
            raise UserError(f"{folder} was prepared from other inputs ({changes}); choose another folder or remove it")
        return
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file; name a folder")
    if folder.exists() and any(file.suffix != ".tmp" for file in folder.iterdir()):
        raise UserError(f"{folder} is not empty and has no {NAME}; choose another folder")
    make_folder(folder)
    write_json(path, {"inputs": inputs})


def require_manifest(folder: Path, inputs: dict[str, Any]) -> None:
    """Compares with the manifest that another process has written. Errors as `check_manifest`, or when there is none."""
    if not (folder / NAME).exists():
        raise UserError(f"{folder} is empty here, and not for process 0; name a folder on a disk that all hosts share")
    check_manifest(folder, inputs)


def make_folder(folder: Path) -> None:
    """Makes a folder and its parents, if absent."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"folder {folder} cannot be made ({error.strerror}); choose another one") from error


def write_json(path: Path, value: Any) -> None:
    """Writes a JSON file that is there completely or not at all."""
    temporary = path.with_name(f"{path.name}.tmp")
    with open(temporary, "w", encoding="utf-8") as file:
        json.dump(value, file, indent=1, sort_keys=True)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def _short(values: dict[str, Any], key: str) -> str:
    text = json.dumps(values[key]) if key in values else "absent"
    return text if len(text) <= 24 else text[:21] + "..."
