"""One process at a time in a folder. Used by `data.generate` and `training.loop`."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from dstill_jax.errors import UserError


@contextlib.contextmanager
def only_one(folder: Path) -> Iterator[None]:
    """Makes the folder if need be and holds a lock in it that the system drops when the process dies.

    Raises UserError when another process holds it, or the folder cannot be written.
    """
    try:
        import fcntl
    except ImportError:  # no such locks on this system
        yield
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = open(folder / "lock", "w")
    except OSError as error:
        raise UserError(f"cannot write in {folder}: {error.strerror or error}; choose another folder") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(
                f"{folder}: another process is working in this folder; wait for it or choose another folder"
            ) from error
        except OSError:  # a file system without locks, as some network disks are
            pass
        yield
