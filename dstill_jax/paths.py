"""Paths as users write them."""

import os
from typing import Any


def in_home(path: Any) -> Any:
    """A path with `~` spelled out, several of them, or None; buckets and hub ids stay as they are.

    Unlike `Path.expanduser` it does not raise for a `~name` whom the machine does not know.
    """
    if path is None:
        return None
    return tuple(map(in_home, path)) if isinstance(path, (tuple, list)) else os.path.expanduser(path)
