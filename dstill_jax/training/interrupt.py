"""Stopping on a signal: finish the step, save, say how to resume.

Used by `loop.py`; the command line catches `Interrupted`.
"""

import itertools
import os
import signal
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, Self, TypeVar

from jax.experimental import multihost_utils

from dstill_jax.sharding import hosts

T = TypeVar("T")

_questions = itertools.count(1)
"""Counts the calls of `StopSignals.agreed` of this process. jax's preemption service names as the point to stop at the one
after the largest that it was asked about, which steps would jump over: a run goes on at step 501, the next one begins at 1."""


class Interrupted(Exception):
    """A run stopped at a signal, with everything saved. Running the same command again continues it."""

    def __init__(
        self, signum: int, step: int = 0, total_steps: int = 0, checkpoint: Path | None = None, note: str = ""
    ) -> None:
        """Without steps: between two runs."""
        self.signum, self.step, self.total_steps, self.checkpoint = signum, step, total_steps, checkpoint
        saved = "nothing to save yet" if checkpoint is None else f"saved in {checkpoint}"
        where = f"after step {step} of {total_steps}, {saved}" if total_steps else "between two runs"
        super().__init__(
            f"stopped by {signal.Signals(signum).name} {where}{note and '; ' + note}; run the same command again to resume"
        )


class StopSignals:
    """While entered, SIGTERM and SIGINT only set a flag, whatever the program is busy with.

    A signal during compilation, evaluation or saving is thus kept until the next step ends. A second SIGINT raises
    `KeyboardInterrupt` at once: the last checkpoint is what remains. Outside the main thread it does nothing.

    One inside another takes over what has come, and hands on what comes; see `stop_between`.

    In a job of several processes SIGTERM is left to jax's preemption service, which has all of them stop after the same
    step whichever was asked to; SIGINT is passed on to it.
    """

    def __init__(self) -> None:
        self.signum: int | None = None
        self._shared = hosts.count() > 1
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for signum in (signal.SIGINT,) if self._shared else (signal.SIGTERM, signal.SIGINT):
                self._previous[signum] = signal.signal(signum, self._received)
                outer = _owner(self._previous[signum])
                if outer is not None and self.signum is None:
                    self.signum = outer.signum  # it came while the run was being set up
        return self

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)
            outer = _owner(handler)
            if outer is not None and outer.signum is None:
                outer.signum = self.signum  # it came too late for what has ended here, not for what comes next
        self._previous.clear()

    def _received(self, signum: int, _: FrameType | None) -> None:
        if self.signum is not None and signum == signal.SIGINT:
            raise KeyboardInterrupt
        self.signum = signum
        if self._shared:
            os.kill(os.getpid(), signal.SIGTERM)

    def agreed(self) -> int | None:
        """The signal to stop at, the same in every process; all must ask after every step."""
        if self._shared and multihost_utils.reached_preemption_sync_point(next(_questions)):
            self.signum = signal.SIGTERM
            return self.signum
        return None if self._shared else self.signum


def _owner(handler: Any) -> StopSignals | None:
    """The StopSignals that a signal's handler belongs to."""
    owner = getattr(handler, "__self__", None)
    return owner if isinstance(owner, StopSignals) else None


def stop_between(runs: Iterable[T]) -> Iterator[T]:
    """Gives each run in turn, unless a signal came too late to stop the one before: then `Interrupted` is raised."""
    with StopSignals() as signals:
        for run in runs:
            if signals.signum is not None:
                raise Interrupted(signals.signum)
            yield run
