"""The cache folder: where fetched and converted things live, and how they appear there all at once.

Called by `packages`, `gguf`, `tiny` and `embedded`. A file or folder made here is either absent or complete, also after
`kill -9`: work is done beside the final name and renamed last.
"""

import contextlib
import hashlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from dstill_jax.errors import UserError

_CHUNK = 1 << 20


def cache_root(cache_dir: str | os.PathLike | None = None) -> Path:
    """`cache_dir`, else `$DSTILL_CACHE`, else `~/.cache/dstill_jax`. The folder is made if it is absent.

    Raises:
        UserError: the folder cannot be made or written to.
    """
    folder = Path(cache_dir or os.environ.get("DSTILL_CACHE") or Path.home() / ".cache" / "dstill_jax").expanduser()
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

    The operating system drops the lock of a killed process. Where there are no such locks (Windows) it does nothing.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        import fcntl
    except ImportError:
        yield
        return
    with open(path.with_name(path.name + ".lock"), "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yields an empty working folder that takes the name `path` when the block ends without an error.

    Whatever stood at `path` is replaced. A working folder left by a killed run is cleared first. Call under
    `locked(path)`.
    """
    partial = path.with_name(path.name + ".partial")
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
    if path.exists():
        old = path.with_name(path.name + ".old")
        shutil.rmtree(old, ignore_errors=True)
        path.rename(old)
        partial.rename(path)
        shutil.rmtree(old, ignore_errors=True)
    else:
        partial.rename(path)
    _sync(path.parent)


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
