"""Stored features of the target: sizes, disk space and the memory-mapped file. Called by `generate` and `dataset`.

A dataset's features are one file, `features.f16`: float16 [total tokens, W], rows in the order of the dataset's
tokens, where W = (T + 1) * D: the taps, then the final normed hidden state. The last row of each document is zero
(the target never read its last token). Live capture during training is the default; storing pays on small targets
only.
"""

import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dstill_jax.errors import UserError

NAME = "features.f16"


def feature_width(num_taps: int, hidden_size: int) -> int:
    """W: values stored for each token."""
    return (num_taps + 1) * hidden_size


def feature_bytes(num_tokens: int, num_taps: int, hidden_size: int) -> int:
    """Bytes of the features of `num_tokens` tokens."""
    return num_tokens * feature_width(num_taps, hidden_size) * 2


def check_disk(folder: Path, needed: int, what: str) -> None:
    """Refuses work that cannot fit.

    Raises:
        UserError: fewer than `needed` bytes are free where `folder` is.
    """
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise UserError(
            f"{what} may take {_size(needed)}, but {folder} has {_size(free)} free; use fewer or shorter"
            " rows, fewer taps, or another disk"
        )


class FeatureFile:
    """Read access to `features.f16` of a dataset with rows of these lengths."""

    def __init__(self, path: Path, lengths: Sequence[int] | np.ndarray, width: int) -> None:
        """Raises UserError when the file's size does not belong to the number of tokens."""
        self._ends = np.cumsum(np.asarray(lengths, np.int64))
        total = int(self._ends[-1])
        size = path.stat().st_size if path.exists() else 0
        if size != total * width * 2:
            raise UserError(
                f"{path}: {size} bytes, but {total} tokens of {width} values need {total * width * 2}; prepare it again"
            )
        self.width = width
        self._rows = np.memmap(path, np.float16, mode="r", shape=(total, width))

    def __getitem__(self, index: int) -> np.ndarray:
        """Features [n, W] of row `index`, not yet read from disk."""
        begin = int(self._ends[index - 1]) if index else 0
        return self._rows[begin : int(self._ends[index])]


def _size(count: int) -> str:
    value = float(count)
    for unit in ("bytes", "KB", "MB", "GB"):
        if value < 1000:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.4g} TB"
