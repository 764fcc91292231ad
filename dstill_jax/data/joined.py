"""Several datasets read as one. Called by `runs`; `pipeline` sees a source like any other."""

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from dstill_jax.data.dataset import Conversation, ConversationDataset
from dstill_jax.errors import UserError


class JoinedDataset:
    """A ConversationSource with the rows of each part, one part after another; the pipeline shuffles across them."""

    def __init__(self, parts: Sequence[ConversationDataset]) -> None:
        """Raises UserError naming the folders: no part, one of them twice, another target, or other stored features."""
        if not parts:
            raise UserError("data=() names no dataset; give a folder made by dstill prepare, or several")
        first = parts[0]
        for part in parts[1:]:
            if part.feature_width != first.feature_width:
                raise UserError(
                    f"{first.path} stores {first.feature_width} feature values a token, {part.path} {part.feature_width};"
                    " prepare both with the same features"
                )
            # What training checks against its target, which sees the provenance of the first part only.
            for name in ("target_fingerprint", "tap_ids") if first.feature_width else ("target_fingerprint",):
                ours, theirs = (p.provenance.get("inputs", {}).get(name) for p in (first, part))
                if ours != theirs:
                    raise UserError(f"{first.path} has {name}={ours}, {part.path} {theirs}; they cannot be joined")
        if len({part.fingerprint for part in parts}) < len(parts):
            raise UserError(f"data={[str(p.path) for p in parts]} holds the same rows twice; name each dataset once")
        self._parts = tuple(parts)
        self._ends = np.cumsum([len(part) for part in parts])
        self.provenance: dict[str, Any] = first.provenance
        self.stats = np.concatenate([part.stats for part in parts])
        self.fingerprint = hashlib.sha256("".join(part.fingerprint for part in parts).encode()).hexdigest()
        self.feature_width = first.feature_width

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> Conversation:
        part, row = self._place(index)
        return part[row]

    def features(self, index: int) -> np.ndarray:
        """Features [n, W] float16 of a row, as its part stores them."""
        part, row = self._place(index)
        return part.features(row)

    def _place(self, index: int) -> tuple[ConversationDataset, int]:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of datasets of {len(self)} rows together")
        number = int(np.searchsorted(self._ends, index, side="right"))
        part = self._parts[number]
        return part, index - int(self._ends[number]) + len(part)


Dataset = ConversationDataset | JoinedDataset


def open_data(folders: str | tuple[str, ...]) -> Dataset:
    """The dataset of a folder, or of several joined.

    Raises UserError: a folder without a complete dataset, or datasets that cannot be joined.
    """
    if isinstance(folders, str):
        return ConversationDataset(folders)
    return JoinedDataset([ConversationDataset(folder) for folder in folders])
