"""JSON form of an `EvaluationResult`: version 1 of the format, read and written here only.

    {"format": "dstill_jax.evaluation", "version": 1,
     "definitions": {"tau": "...", ...},
     "metadata": {every field of EvaluationMetadata},
     "arms": [{every field of MethodResult,
               "summary": {"tau": I, "tau_pooled": I, "slots": [share or null, ...], "reached": [...],
                           "histogram": [...], "tokens_per_second": x or null, "speedup": I or null,
                           "identical_outputs": n or null}}]}

with I = {"value": x, "low": x, "high": x, "level": 0.95, "prompts": n}. "definitions" and "summary" are for readers
without this library: they are written from the per-prompt data and ignored when read. Keys are never renamed or given
another meaning within a version; new optional ones may be added.
"""

import dataclasses
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dstill_jax.errors import UserError
from dstill_jax.evaluation.acceptance import SLOT_DEFINITION, TAU_DEFINITION
from dstill_jax.evaluation.results import (
    LOSSLESS_DEFINITION,
    SPEEDUP_DEFINITION,
    EvaluationMetadata,
    EvaluationResult,
    MethodResult,
)
from dstill_jax.evaluation.stats import INTERVAL_DEFINITION, Interval

FORMAT = "dstill_jax.evaluation"
VERSION = 1
DEFINITIONS = {
    "tau": TAU_DEFINITION,
    "slots": SLOT_DEFINITION,
    "intervals": INTERVAL_DEFINITION,
    "speedup": SPEEDUP_DEFINITION,
    "lossless": LOSSLESS_DEFINITION,
}


def to_json(result: EvaluationResult) -> str:
    """One field a line, so that files can be compared; lists of numbers stay on their line."""
    document = {
        "format": FORMAT,
        "version": VERSION,
        "definitions": DEFINITIONS,
        "metadata": dataclasses.asdict(result.metadata),
        "arms": [dataclasses.asdict(arm) | {"summary": summary(result, arm)} for arm in result.arms],
    }
    return _pretty(document) + "\n"


def summary(result: EvaluationResult, arm: MethodResult) -> dict[str, Any]:
    """The computed figures of one arm as plain JSON values."""
    counts = arm.counts
    return {
        "tau": _interval(arm.tau_interval()),
        "tau_pooled": _interval(arm.tau_pooled_interval()),
        "slots": [None if math.isnan(share) else float(share) for share in counts.conditional()],
        "reached": list(counts.reached),
        "histogram": list(counts.histogram),
        "tokens_per_second": arm.tokens_per_second,
        "speedup": _interval(result.speedup(arm)),
        "identical_outputs": result.identical_outputs(arm),
    }


def from_json(text: str, source: str) -> EvaluationResult:
    """Inverse of `to_json`; UserError names `source` and what is wrong in it."""
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"{source} is not JSON: {error}") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise UserError(f"{source} is not an evaluation: its 'format' must be {FORMAT!r}")
    if document.get("version") != VERSION:
        raise UserError(f"{source} has version {document.get('version')!r}, but this release reads {VERSION}")
    try:
        metadata = EvaluationMetadata(**_fields(EvaluationMetadata, document.get("metadata"), "metadata"))
        arms = document.get("arms")
        if not isinstance(arms, list):
            raise UserError("'arms' must be a list")
        return EvaluationResult(
            metadata, tuple(MethodResult(**_fields(MethodResult, arm, f"arms[{i}]")) for i, arm in enumerate(arms))
        )
    except UserError as error:
        raise UserError(f"{source}: {error}") from error
    except (TypeError, ValueError) as error:
        raise UserError(f"{source} has a value of the wrong type: {error}") from error


def write_text(path: str | Path, text: str) -> Path:
    """Write a file by way of a neighbour and a rename, folders included."""
    path = Path(path)
    partial = path.with_name(path.name + ".partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from error
    return path


def _fields(kind: type, values: Any, where: str) -> dict[str, Any]:
    if not isinstance(values, dict):
        raise UserError(f"'{where}' must be an object, got {type(values).__name__}")
    known = {field.name: field for field in dataclasses.fields(kind)}
    missing = [
        name
        for name, field in known.items()
        if name not in values and field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise UserError(f"'{where}' lacks {', '.join(missing)}")
    unknown = set(values) - set(known) - {"summary"}
    if unknown:
        raise UserError(f"'{where}' has unknown fields {', '.join(sorted(unknown))}: written by a newer release?")
    return {name: values[name] for name in known if name in values}


def _interval(interval: Interval | None) -> dict[str, Any] | None:
    if interval is None:
        return None
    return {name: getattr(interval, name) for name in ("value", "low", "high", "level", "prompts")}


def _pretty(value: Any, depth: int = 0) -> str:
    pad = "  " * (depth + 1)
    if isinstance(value, Mapping) and value and depth < 4:
        items = [f"{pad}{json.dumps(str(key))}: {_pretty(item, depth + 1)}" for key, item in value.items()]
        return "{\n" + ",\n".join(items) + "\n" + pad[:-2] + "}"
    if isinstance(value, list) and value and isinstance(value[0], Mapping):
        return "[\n" + ",\n".join(pad + _pretty(item, depth + 1) for item in value) + "\n" + pad[:-2] + "]"
    return json.dumps(value, ensure_ascii=False, allow_nan=False)
