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

    All of them together make the new config, in whatever order they stand; of two for one field the later counts.

    Raises UserError naming the field: unknown, not a single value, or refused by the config itself.
    """
    tree: dict[str, Any] = {}
    for assignment in assignments:
        path, separator, text = assignment.partition("=")
        if not separator:
            raise UserError(f"override {assignment!r} must look like FIELD=VALUE")
        *groups, field = path.split(".")
        fields = tree
        for group in groups:
            fields = fields.setdefault(group, {})
            if not isinstance(fields, dict):
                raise UserError(f"{path}: {group} is set as a whole, too; leave one of the two out")
        if isinstance(fields.get(field), dict):
            raise UserError(f"{path}: fields of {field} are set, too; leave one of the two out")
        fields[field] = text
    return _replaced(config, tree, "")


def _replaced(config: Any, tree: dict[str, Any], inside: str) -> Any:
    """`config` with the fields of `tree`, a text or a further tree each; `inside` is the path to it."""
    values = {}
    for name, given in tree.items():
        path = f"{inside}{name}"
        old, hint = _field(config, name, path)
        if isinstance(given, dict):
            if not dataclasses.is_dataclass(old):
                raise UserError(f"{path}.{next(iter(given))}: {path} is {old!r} here, which has no fields of its own")
            values[name] = _replaced(old, given, f"{path}.")
        elif dataclasses.is_dataclass(old):
            names = ", ".join(f.name for f in dataclasses.fields(old))
            raise UserError(f"{path} is a group of fields; set one of {names}")
        else:
            value = _value(given, hint)
            if not _fits(value, hint):
                raise UserError(f"{path}={value!r} must be {_named(hint)}; it is {old!r} now")
            values[name] = float(value) if isinstance(old, float) and type(value) is int else value
    return dataclasses.replace(config, **values)


def _field(config: Any, name: str, path: str) -> tuple[Any, Any]:
    """The field's value now, and its annotation."""
    names = [f.name for f in dataclasses.fields(config)]
    if name not in names:
        close = difflib.get_close_matches(name, names, 1)
        raise UserError(
            f"{path}: {type(config).__name__} has no field {name!r};"
            + (f" did you mean {close[0]!r}?" if close else f" its fields are {', '.join(names)}")
        )
    return getattr(config, name), typing.get_type_hints(type(config))[name]


def _value(text: str, hint: Any) -> Any:
    if hint is bool and text in ("true", "false"):  # as in JSON and YAML
        return text == "true"
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text  # a word: a folder, a name


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
