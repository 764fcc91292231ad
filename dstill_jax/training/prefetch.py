"""Batches prepared ahead: a thread asks for the next batches and sends them to the device while the current step runs.

Used by `loop.py` alone.
"""

import queue
import threading
from collections.abc import Iterator, Mapping
from typing import Any, Protocol, Self

import jax
import numpy as np

from dstill_jax.sharding.rows import RowPlaces

Batch = dict[str, jax.Array]


class Data(Protocol):
    """A source of batches. An optional attribute `fingerprint: str` is compared when a run is resumed."""

    def batch(self, step: int) -> Mapping[str, np.ndarray]:
        """The arrays of optimiser step `step` (the first is 0), `[accumulate_steps * B, ...]` each.

        On a mesh: the rows that `RowPlaces.local` names. A pure function of `step`, so that the position in the data is
        the step itself. Called from another thread, and ahead of time; the arrays must not be written to afterwards.
        """
        ...


class Prefetcher:
    """Device batches of steps `start` to `stop - 1`, in order, `depth` of them prepared ahead.

    `rows` tells where they belong on a mesh; without it they go to the first device. An exception of `data.batch` is
    raised again by `next`. Close it (or use `with`) to end the thread.
    """

    def __init__(self, data: Data, start: int, stop: int, depth: int = 2, rows: RowPlaces | None = None) -> None:
        self._data, self._rows = data, rows
        self._ready: queue.Queue[tuple[Batch | None, BaseException | None]] = queue.Queue(maxsize=depth)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._work, args=(start, stop), name="prefetch", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        batch, error = self._ready.get()
        if error is not None:
            raise error
        if batch is None:
            raise StopIteration
        return batch

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    def _work(self, start: int, stop: int) -> None:
        try:
            for step in range(start, stop):
                if self._closed.is_set() or not self._put(self._to_device(self._data.batch(step)), None):
                    return
            self._put(None, None)
        except BaseException as e:  # carried over to the consumer, whatever it is
            self._put(None, e)

    def _to_device(self, batch: Mapping[str, Any]) -> Batch:
        if self._rows is not None:
            return self._rows.place(batch)
        return {name: jax.device_put(x) for name, x in batch.items()}

    def _put(self, batch: Batch | None, error: BaseException | None) -> bool:
        while not self._closed.is_set():
            try:
                self._ready.put((batch, error), timeout=0.1)
                return True
            except queue.Full:
                continue
        return False
