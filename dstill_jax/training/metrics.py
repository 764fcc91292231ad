"""Metrics on the host: from (sum, weight) pairs to numbers, and where the numbers are written.

Used by `loop.py`. `metrics.jsonl` is the record of a run; TensorBoard and the console are views of it. Names start with
`train/`, `eval/<set>/` or `perf/`. A record of step n describes the n-th step (the first is 1).
"""

import json
import math
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from dstill_jax.errors import MissingExtraError, UserError


class MetricWriter(Protocol):
    """Somewhere metrics go. `write` is called once a step at most, in increasing order of steps."""

    def write(self, step: int, values: Mapping[str, float]) -> None: ...

    def flush(self) -> None:
        """Everything written so far survives a crash of the process and of the machine."""
        ...

    def close(self) -> None: ...


def means(metrics: Mapping[str, tuple[Any, Any]], prefix: str = "train/") -> dict[str, float]:
    """{prefix + name: sum / weight}; a metric of weight zero was not measured and is left out."""
    values = {}
    for name, (total, weight) in metrics.items():
        if np.isnan(weight) or weight != 0:
            values[prefix + name] = float(np.float64(total) / np.float64(weight))
    return values


class JsonlWriter:
    """One JSON object a line: {"step": n, "train/loss": ...}. A number that is not finite is written as null."""

    def __init__(self, path: str | Path, completed_steps: int = 0) -> None:
        """Opens the file for appending, after dropping every line beyond `completed_steps`.

        These are the lines of steps which a resumed run is about to repeat, and a last line cut by a crash.
        """
        self.path = Path(path)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            _truncate(self.path, completed_steps)
            self._file = self.path.open("a", encoding="utf-8")
        except OSError as e:
            raise UserError(f"cannot write metrics to {self.path}: {e}; choose another run folder") from e

    def write(self, step: int, values: Mapping[str, float]) -> None:
        record = {"step": step, **{k: v if math.isfinite(v) else None for k, v in values.items()}}
        try:
            self._file.write(json.dumps(record, allow_nan=False) + "\n")
            self._file.flush()
        except OSError as e:
            raise UserError(f"cannot write metrics to {self.path}: {e}; free space, then run again to resume") from e

    def flush(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def read_jsonl(path: str | Path) -> list[dict[str, Any]]:
    """The records of a metrics file, in order; a last line cut by a crash is ignored."""
    return [record for _, record in _records(Path(path))]


def _records(path: Path) -> Iterable[tuple[str, dict[str, Any]]]:
    if not path.exists():
        return
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(record, dict) and isinstance(record.get("step"), int):
            yield line, record


def _truncate(path: Path, completed_steps: int) -> None:
    if not path.exists():
        return
    kept = "".join(f"{line}\n" for line, record in _records(path) if record["step"] <= completed_steps)
    rewritten = path.with_name(path.name + ".tmp")
    with rewritten.open("w", encoding="utf-8") as f:
        f.write(kept)
        f.flush()
        os.fsync(f.fileno())
    rewritten.replace(path)


class TensorBoardWriter:
    """TensorBoard events through tensorboardX, imported here only. Needs the `report` extra."""

    def __init__(self, directory: str | Path, completed_steps: int = 0) -> None:
        try:
            from tensorboardX import SummaryWriter
        except ImportError as e:
            raise MissingExtraError("tensorboardX", "report") from e
        # Events of steps that a resumed run repeats are hidden by the viewer from this step on.
        self._writer = SummaryWriter(str(directory), purge_step=completed_steps + 1 if completed_steps else None)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class ConsoleWriter:
    """A progress bar with steps/s, time left, loss and, when the loss function reports `tau`, its estimate.

    Where standard error is no terminal (logs, CI) it prints a plain line at most every `seconds_between_lines`.
    """

    def __init__(
        self, total_steps: int, completed_steps: int = 0, label: str = "train", seconds_between_lines: float = 30.0
    ) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        self._total, self._label, self._every = total_steps, label, seconds_between_lines
        self._last_line = -math.inf
        self._console = Console(stderr=True)
        self._progress = None
        if self._console.is_terminal:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[note]}"),
            )
            self._progress = Progress(*columns, console=self._console)
            self._task = self._progress.add_task(label, total=total_steps, completed=completed_steps, note="compiling")
            self._progress.start()

    def write(self, step: int, values: Mapping[str, float]) -> None:
        note = self._note(step, values)
        if self._progress is not None:
            self._progress.update(self._task, completed=step, note=note)
        elif step == self._total or time.monotonic() - self._last_line >= self._every:
            self._last_line = time.monotonic()
            self._console.print(f"{self._label} {step}/{self._total} {note}", highlight=False, soft_wrap=True)

    def _note(self, step: int, values: Mapping[str, float]) -> str:
        parts = [
            f"{short} {values[name]:.3f}"
            for short, name in (("loss", "train/loss"), ("τ≈", "train/tau"))
            if name in values
        ]
        rate = values.get("perf/steps_per_second")
        if rate:
            left = (self._total - step) / rate
            parts += [f"{rate:.2f} steps/s", f"{int(left // 60)}:{int(left % 60):02d} left"]
        return "  ".join(parts)

    def flush(self) -> None:
        pass

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()


class MultiWriter:
    """Writes to several writers in order; closes all of them even when one fails."""

    def __init__(self, *writers: MetricWriter) -> None:
        self._writers = writers

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for writer in self._writers:
            writer.write(step, values)

    def flush(self) -> None:
        for writer in self._writers:
            writer.flush()

    def close(self) -> None:
        errors = []
        for writer in self._writers:
            try:
                writer.close()
            except Exception as e:
                errors.append(e)
        if errors:
            raise errors[0]
