"""The cache folder: where fetched and converted things live, and how they appear there all at once.

Called by `packages`, `gguf`, `tiny` and `embedded`. A file or folder made here is either absent or complete, also after
`kill -9`: work is done beside the final name and renamed last.
"""

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dstill_jax.errors import UserError
from dstill_jax.paths import in_home

_CHUNK = 1 << 20


def cache_root(cache_dir: str | os.PathLike | None = None) -> Path:
    """`cache_dir`, else `$DSTILL_CACHE`, else `~/.cache/dstill_jax`. The folder is made if it is absent.

    Raises:
        UserError: the folder cannot be made or written to.
    """
    folder = Path(in_home(cache_dir or os.environ.get("DSTILL_CACHE") or Path.home() / ".cache" / "dstill_jax"))
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"cache folder {folder} cannot be made ({error.strerror}); set DSTILL_CACHE to a folder you can write to"
        ) from error
    if not os.access(folder, os.W_OK):
        raise UserError(f"cache folder {folder} is not writable; set DSTILL_CACHE to a folder you can write to")
    return folder


def sha256_of(path: Path) -> str:
    """Hex SHA-256 of a file, read in pieces."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds `<path>.lock`, so that two processes do not build the same thing at once.

    The operating system drops the lock of a killed process. Where there are no such locks (Windows, some
    network disks) it does nothing.
    """
    path = path.resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        import fcntl
    except ImportError:
        yield
        return
    with open(path.with_name(path.name + ".lock"), "a") as file:  # a file of that name may be somebody's
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yields an empty working folder that takes the name `path` when the block ends without an error.

    A folder made here before is replaced. A working folder left by a killed run is cleared first. Call under
    `locked(path)`. The block writes `provenance.json`, by which the folder is known later (`provenance`).

    Raises:
        UserError: something else stands at `path`, or writing failed.
    """
    require_replaceable(path)
    path = path.resolve()
    # Names that nobody gives to a folder of his own: what has them may be deleted.
    partial, old = (path.with_name(f".{path.name}.dstill-{kind}") for kind in ("partial", "old"))
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        for file in partial.rglob("*"):
            if file.is_file():
                _sync(file)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, OSError) and not isinstance(error, UserError):
            raise UserError(f"writing {path} failed: {error.strerror or error}; free some space and retry") from error
        raise
    shutil.rmtree(old, ignore_errors=True)
    if path.exists():
        path.rename(old)
    partial.rename(path)
    shutil.rmtree(old, ignore_errors=True)
    _sync(path.parent)


def require_replaceable(path: Path) -> None:
    """Raises `UserError` unless `path` is free, an empty folder, or one made by `new_folder`."""
    if not path.exists():
        return
    advice = "move it, or choose another folder (of the cache: DSTILL_CACHE)"
    if not path.is_dir():
        raise UserError(f"{path} is a file; {advice}")
    found = sorted(file.name for file in path.iterdir())
    if found and provenance(path) is None:
        more = f" and {len(found) - 1} more" if len(found) > 1 else ""
        raise UserError(f"{path.resolve()} holds {found[0]}{more}, and dstill did not make that folder; {advice}")


def provenance(folder: Path) -> dict[str, Any] | None:
    """What `provenance.json` says of a folder made by `new_folder`; None: it is no such folder."""
    try:
        found = json.loads((folder / "provenance.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    # Datasets have a file of that name, too.
    ours = isinstance(found, dict) and isinstance(found.get("files"), dict) and ("source" in found or "recipe" in found)
    return found if ours else None


def is_whole(folder: Path, **origin: Any) -> bool:
    """Whether `folder` was made from `origin` (`source=` or `recipe=`) and its files have the sizes they were written with."""
    found = provenance(folder)
    if found is None or any(found.get(name) != value for name, value in origin.items()):
        return False
    try:
        return all((folder / file).stat().st_size == size for file, size in found["files"].items())
    except OSError:
        return False


def replace_file(partial: Path, path: Path) -> None:
    """Gives a finished `partial` its final name, after its bytes have reached the disk."""
    _sync(partial)
    os.replace(partial, path)


def _sync(path: Path) -> None:
    """Forces a file or folder to disk, where the file system can."""
    handle = os.open(path, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            os.fsync(handle)
    finally:
        os.close(handle)
