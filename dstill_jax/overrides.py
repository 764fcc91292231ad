"""FIELD=VALUE on the command line: nested frozen configs with some fields replaced, types checked. Used by `commands`."""

import ast
import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Sequence
from typing import Any, TypeVar

from dstill_jax.errors import UserError

Config = TypeVar("Config")


def override(config: Config, assignments: Sequence[str]) -> Config:
    """Applies FIELD=VALUE assignments, dots reaching into nested configs; values are Python literals or plain words.

    Raises UserError naming the field: unknown, not a single value, or refused by the config itself.
    """
    for assignment in assignments:
        path, separator, text = assignment.partition("=")
        if not separator:
            raise UserError(f"override {assignment!r} must look like FIELD=VALUE")
        try:
            value = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            value = text  # a word: a folder, a name
        config = _replaced(config, path.split("."), value, path)
    return config


def _replaced(config: Any, parts: list[str], value: Any, path: str) -> Any:
    if not dataclasses.is_dataclass(config):
        raise UserError(f"{path}: this run sets {config!r} there, which has no fields of its own")
    names = [f.name for f in dataclasses.fields(config)]
    if parts[0] not in names:
        close = difflib.get_close_matches(parts[0], names, 1)
        raise UserError(
            f"{path}: {type(config).__name__} has no field {parts[0]!r};"
            + (f" did you mean {close[0]!r}?" if close else f" its fields are {', '.join(names)}")
        )
    old = getattr(config, parts[0])
    if len(parts) > 1:
        value = _replaced(old, parts[1:], value, path)
    elif dataclasses.is_dataclass(old):
        raise UserError(f"{path} is a group of fields; set one of {', '.join(f.name for f in dataclasses.fields(old))}")
    else:
        hint = typing.get_type_hints(type(config))[parts[0]]
        if not _fits(value, hint):
            raise UserError(f"{path}={value!r} must be {_named(hint)}; it is {old!r} now")
        if isinstance(old, float):
            value = float(value)
    return dataclasses.replace(config, **{parts[0]: value})


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value is of an annotated type: plain ones, unions, tuples and literals."""
    kind, inner = typing.get_origin(hint), typing.get_args(hint)
    if kind in (typing.Union, types.UnionType):
        return any(_fits(value, one) for one in inner)
    if kind is typing.Literal:
        return type(value) in {type(one) for one in inner}  # the config names the choices
    if kind is tuple:
        if not isinstance(value, tuple):
            return False
        expected = inner[:1] * len(value) if inner[-1] is Ellipsis else inner
        return len(value) == len(expected) and all(map(_fits, value, expected))
    if hint is float:
        return type(value) in (int, float) and math.isfinite(value)
    return value is None if hint is type(None) else type(value) is hint


def _named(hint: Any) -> str:
    return (
        "a finite number"
        if hint is float
        else hint.__name__
        if isinstance(hint, type)
        else str(hint).replace("typing.", "")
    )
