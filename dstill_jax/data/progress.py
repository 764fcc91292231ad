"""The progress bar and the clock of answer generation. Called by `generate`."""

import time
from typing import Any


class GenerationProgress:
    """Counts what workers report; shows it unless told not to. A context manager."""

    def __init__(self, total_rows: int, done_rows: int, show: bool) -> None:
        self.rows = done_rows
        self.tokens = 0
        self._began: float | None = None
        self._last = 0.0
        self._bar = _bar(total_rows) if show else None

    @property
    def tokens_per_second(self) -> float:
        """New tokens a second since the first worker was ready."""
        return self.tokens / max(self._last - self._began, 1e-9) if self._began and self.tokens else 0.0

    def report(self, message: dict[str, Any]) -> None:
        """Takes one report of `worker.run_share`."""
        now = time.monotonic()
        if message.get("ready"):
            self._began = self._began or now
        if "rows" in message:
            self.rows += message["rows"]
            self.tokens += message["tokens"]
            self._last = now
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=self.rows, rate=f"{self.tokens_per_second:.0f} tokens/s")

    def __enter__(self) -> "GenerationProgress":
        if self._bar is not None:
            self._bar.start()
            self._bar.update(self._bar.task_ids[0], completed=self.rows)
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()


def _bar(total: int) -> Any:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    bar = Progress(
        TextColumn("answers"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(), console=Console(stderr=True),
    )  # fmt: skip
    bar.add_task("answers", total=total, rate="loading")
    return bar
