"""Model folders on disk: find one by path or hub id, read its JSON, write files into it atomically."""

import contextlib
import json
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from dstill_jax.errors import MissingExtraError, UserError
from dstill_jax.paths import in_home
from dstill_jax.weights.cache_folder import replace_file

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
MODEL_FILES = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja")
CONFIG_FILES = ("*.json",)


def resolve_folder(path_or_hub_id: str | os.PathLike[str], files: Sequence[str] = MODEL_FILES) -> Path:
    """A local folder as it is; anything that looks like a hub id is downloaded (or found in the hub's cache).

    Args:
        files: patterns of what is downloaded: `CONFIG_FILES` where no weights are read.

    Raises:
        UserError: neither a folder nor an id that the hub could deliver.
        MissingExtraError: a hub id was given and `huggingface_hub` is not installed.
    """
    path = Path(in_home(path_or_hub_id))
    if path.is_dir():
        return path
    if path.exists():
        raise UserError(f"{path} is a file; give the folder that holds config.json and the safetensors")
    name = os.fspath(path_or_hub_id)
    if not _HUB_ID.fullmatch(name):
        raise UserError(f"no folder at {name!r}; give a model folder or a hub id such as 'owner/name'")
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise MissingExtraError("huggingface_hub", "data") from None
    try:
        # Files of sub-folders are other formats of the same weights.
        return Path(snapshot_download(name, allow_patterns=list(files), ignore_patterns=["*/*"]))
    except Exception as error:  # the hub client raises many unrelated types: offline, unknown, private, interrupted
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(
            f"{name!r} is not a local folder, and the hub could not deliver it ({reason});"
            " check the spelling, the network and the access rights, or give a local folder"
        ) from error


def readable_name(folder: str | os.PathLike[str]) -> str:
    """A model's name for people: the hub id of what the hub's cache holds, otherwise the folder's own name."""
    path = Path(folder).resolve()
    if path.parent.name == "snapshots":  # models--owner--name/snapshots/<commit>
        return path.parents[1].name.removeprefix("models--").replace("--", "/")
    return path.name


def read_json(path: Path) -> dict:
    """A JSON object from a file; a missing or malformed file is a `UserError` that names file and line."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{path} does not exist; is {path.parent} a model folder?") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}: {error}") from error
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"{path} line {error.lineno} is not valid JSON: {error.msg}") from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, brackets thousands deep
        raise UserError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} must hold a JSON object, it holds a {type(value).__name__}")
    return value


def write_json(path: Path, value: dict) -> None:
    """Write a JSON object atomically."""
    with atomic_path(path) as temporary:
        temporary.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


@contextlib.contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """A temporary path beside `path` that becomes `path` when the body ends well, and disappears when it does not."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        replace_file(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
