"""Which documents share a row, in which order: pure functions of (seed, epoch, index). Called by `pipeline`.

A *unit* is one row of a batch: a tuple of row numbers of the dataset. Units have global indices 0, 1, 2, ... that run
on through the epochs, so a position in the data is one integer.
"""

import bisect
import functools
import threading
from collections import OrderedDict
from typing import Protocol

import numpy as np

_KEEP = 3  # epochs held in memory; readers cross an epoch's end at slightly different times


class UnitOrder(Protocol):
    """The order of units."""

    def unit(self, index: int) -> tuple[int, ...]:
        """Dataset rows of the unit with this global index."""
        ...

    def end(self, epochs: int) -> int:
        """The global index after the last unit of the first `epochs` epochs."""
        ...


def epoch_order(count: int, seed: int, epoch: int) -> np.ndarray:
    """A permutation of `count` row numbers for one epoch, int64 [count].

    Sorting the raw output of a counter-based generator gives the same order under every version of NumPy.
    """
    raw = np.random.Philox(np.random.SeedSequence([seed, epoch])).random_raw(count)
    return np.argsort(raw, kind="stable")


class OneEach:
    """Every unit is one document."""

    def __init__(self, rows: np.ndarray, seed: int) -> None:
        self._rows = rows
        self._order = functools.lru_cache(maxsize=_KEEP)(lambda epoch: rows[epoch_order(len(rows), seed, epoch)])

    def unit(self, index: int) -> tuple[int, ...]:
        epoch, place = divmod(index, len(self._rows))
        return (int(self._order(epoch)[place]),)

    def end(self, epochs: int) -> int:
        return epochs * len(self._rows)


class Packed:
    """Documents packed anew in each epoch, in that epoch's order.

    The number of units differs between epochs, so reaching epoch e means packing the epochs before it: about 3 seconds
    for each million documents.
    """

    def __init__(self, rows: np.ndarray, lengths: np.ndarray, capacity: int, seed: int) -> None:
        """`lengths` [rows] are the documents' lengths, each at most `capacity`."""
        self._rows, self._lengths, self._capacity = rows, lengths, capacity
        self._seed = seed
        self._ends: list[int] = []  # global index after each epoch
        self._plans: OrderedDict[int, list[tuple[int, ...]]] = OrderedDict()
        self._lock = threading.Lock()

    def unit(self, index: int) -> tuple[int, ...]:
        with self._lock:
            epoch = self._locate(index)
            begin = self._ends[epoch - 1] if epoch else 0
            return self._plan(epoch)[index - begin]

    def end(self, epochs: int) -> int:
        with self._lock:
            while len(self._ends) < epochs:
                self._extend()
            return self._ends[epochs - 1] if epochs else 0

    def _locate(self, index: int) -> int:
        while not self._ends or self._ends[-1] <= index:
            self._extend()
        return bisect.bisect_right(self._ends, index)

    def _extend(self) -> None:
        plan = self._plan(len(self._ends))
        self._ends.append((self._ends[-1] if self._ends else 0) + len(plan))

    def _plan(self, epoch: int) -> list[tuple[int, ...]]:
        if epoch not in self._plans:
            order = epoch_order(len(self._rows), self._seed, epoch)
            bins = pack_best_fit(self._lengths[order], self._capacity)
            self._plans[epoch] = [tuple(int(self._rows[order[i]]) for i in members) for members in bins]
        self._plans.move_to_end(epoch)
        while len(self._plans) > _KEEP:
            self._plans.popitem(last=False)
        return self._plans[epoch]


def pack_best_fit(lengths: np.ndarray, capacity: int, max_open: int = 64) -> list[list[int]]:
    """Packs documents, taken in order, each into the fullest open bin that has room for it; no document is split.

    At most `max_open` bins are open at once (the fullest is closed first), so a bin holds documents that come near one
    another.

    Returns:
        The members of each bin, bins in the order in which they were opened.
    """
    bins: list[list[int]] = []
    open_bins: list[tuple[int, int]] = []  # (room, bin), sorted: the first that fits is the fullest
    for document, length in enumerate(lengths.tolist()):
        if length > capacity:
            raise ValueError(f"document {document} has {length} tokens, more than the capacity of {capacity}")
        place = bisect.bisect_left(open_bins, (length, -1))
        if place < len(open_bins):
            room, number = open_bins.pop(place)
        else:
            room, number = capacity, len(bins)
            bins.append([])
            if len(open_bins) == max_open:
                open_bins.pop(0)
        bins[number].append(document)
        if room > length:
            bisect.insort(open_bins, (room - length, number))
    return bins
