"""What differs between a stored state or configuration and the one at hand, path by path. Used by `checkpoints`."""

from collections.abc import Mapping
from typing import Any

Layout = dict[tuple[str, ...], tuple[tuple[int, ...], Any]]
"""{path of a leaf: (shape, dtype)}."""


def flat(tree: Any, prefix: tuple[str, ...] = ()) -> Layout:
    """The layout of nested dicts of arrays (or of their metadata)."""
    if isinstance(tree, Mapping):
        return {k: v for name, sub in tree.items() for k, v in flat(sub, (*prefix, str(name))).items()}
    return {prefix: (tuple(tree.shape), tree.dtype)}


def tree_differences(stored: Layout, plain: dict[str, Any]) -> list[str]:
    """A line for each leaf that is missing, left over, or of another shape or dtype than in `plain`."""
    wanted = flat(plain)
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


def json_differences(stored: Any, wanted: Any, prefix: str = "") -> list[str]:
    """A line for each field that differs, dots reaching into nested ones."""
    if isinstance(stored, dict) and isinstance(wanted, dict):
        found = []
        for key in sorted(stored.keys() | wanted.keys()):
            name = f"{prefix}.{key}" if prefix else key
            if key not in wanted:
                found.append(f"{name} is only in the checkpoint ({stored[key]!r})")
            elif key not in stored:
                found.append(f"{name} is not in the checkpoint ({wanted[key]!r} now)")
            else:
                found += json_differences(stored[key], wanted[key], name)
        return found
    return [] if stored == wanted else [f"{prefix} is {stored!r} there, {wanted!r} now"]
