"""Finished answers on disk while a dataset is being generated. Called by `worker` (writing) and `generate` (reading).

Each worker process appends to a shard of its own: `shard-NNNN.jsonl`, one line an answer, and beside it
`shard-NNNN.f16` when features are stored. A line is written only after its features are on disk, a started shard is
never written by a later process, and a torn last line is ignored. So after `kill -9` everything on a whole line
counts, and nothing else does.
"""

import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Int

from dstill_jax.errors import UserError


@dataclass(frozen=True)
class Answer:
    """One generated answer: prompt and new tokens, and where its features lie."""

    index: int  # of the row in the prompt source
    prompt_length: int
    tokens: Sequence[int] | Int[np.ndarray, "n"]  # prompt, then new tokens; an array when it was read
    finish_reason: str  # "stop" or "length"
    feature_file: str | None = None
    feature_offset: int = 0  # in bytes; len(tokens) rows follow


class ShardWriter:
    """Appends answers to a new shard in `folder`; a context manager.

    Args:
        folder: the work folder.
        feature_width: (T + 1) * D when features are stored, else 0.
        interval: seconds between flushes to disk; what a machine that goes down can lose. A killed process loses nothing.
    """

    def __init__(self, folder: Path, feature_width: int = 0, interval: float = 0.5) -> None:
        self.path, self._lines = _open_new(folder)
        self._width = feature_width
        self._features = open(self.path.with_suffix(".f16"), "wb") if feature_width else None
        self._interval = interval
        self._offset = 0
        self._committed = time.monotonic()

    def add(self, answer: Answer, features: np.ndarray | None = None) -> None:
        """Stores an answer. `features` [n - 1, W]: one row for each token but the last, which the target has not read.

        Raises:
            UserError: features are not finite in float16.
            ValueError: the number of feature rows does not belong to the number of tokens.
        """
        record = {
            "index": answer.index, "prompt_length": answer.prompt_length, "tokens": answer.tokens,
            "finish_reason": answer.finish_reason,
        }  # fmt: skip
        if self._features is not None:
            rows = np.zeros((len(answer.tokens), self._width), np.float16)
            if features is None or features.shape != (len(rows) - 1, self._width):
                shape = None if features is None else features.shape
                raise ValueError(f"features of row {answer.index} must be {(len(rows) - 1, self._width)}, got {shape}")
            rows[:-1] = features
            if not np.isfinite(rows).all():
                raise UserError("the target's hidden states overflow float16; prepare without record_features")
            self._features.write(rows.tobytes())
            self._features.flush()
            record["feature_offset"] = self._offset
            self._offset += rows.nbytes
        self._lines.write(json.dumps(record, separators=(",", ":")).encode() + b"\n")
        self._lines.flush()
        if time.monotonic() - self._committed >= self._interval:
            self.commit()

    def commit(self) -> None:
        """To the disk itself: features first, then the lines that speak of them."""
        if self._features is not None:
            os.fsync(self._features.fileno())
        os.fsync(self._lines.fileno())
        self._committed = time.monotonic()

    def close(self) -> None:
        self.commit()
        self._lines.close()
        if self._features is not None:
            self._features.close()

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_answers(folder: Path, feature_width: int = 0) -> dict[int, Answer]:
    """All whole answers of a work folder, by row index. An answer that two shards hold counts once.

    Raises:
        UserError: a damaged line before the last one, or features that are shorter than their lines say.
    """
    answers: dict[int, Answer] = {}
    for path in sorted(folder.glob("shard-*.jsonl")):
        for answer in _read_shard(path, feature_width):
            first = answers.setdefault(answer.index, answer)
            if not np.array_equal(first.tokens, answer.tokens):
                raise UserError(
                    f"{path}: row {answer.index} was answered twice, differently; remove the folder and start again"
                )
    return answers


def _read_shard(path: Path, feature_width: int) -> Iterator[Answer]:
    feature_path = path.with_suffix(".f16")
    available = feature_path.stat().st_size if feature_width and feature_path.exists() else 0
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return  # torn by a kill
            try:
                record = json.loads(line)
                offset = record.pop("feature_offset", 0)
                record["tokens"] = np.asarray(record["tokens"], np.int32)  # a list takes nine times as much
                answer = Answer(
                    **record, feature_file=str(feature_path) if feature_width else None, feature_offset=offset
                )
                needed = offset + len(answer.tokens) * feature_width * 2
            except (ValueError, TypeError, AttributeError, KeyError) as error:
                raise UserError(
                    f"{path}:{number}: damaged line; remove this file, its rows are generated again"
                ) from error
            if needed > available and feature_width:
                raise UserError(
                    f"{feature_path}: {available} bytes, but row {answer.index} ends at {needed}; remove this file and"
                    f" {path.name}, their rows are generated again"
                )
            yield answer


def _open_new(folder: Path):
    number = 0
    while True:
        path = folder / f"shard-{number:04d}.jsonl"
        try:
            return path, open(path, "xb")
        except FileExistsError:
            number += 1
