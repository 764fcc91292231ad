"""Training batches from a conversation dataset, by step. `training.prefetch` reads ahead.

`batch(step)` is a pure function of the dataset, the configuration and the step, so the position in the data is one
integer: resuming anywhere, twice, or on another number of hosts gives the same batches. A batch is a dict of NumPy
arrays:

    tokens        int32 [B, S]
    loss_mask     bool  [B, S]     True = counted
    document_ids  int32 [B, S]     1, 2, ... within a row; 0 = padding
    positions     int32 [B, S]     from 0 in each document
    features      float16 [B, S, W]    only when the dataset stores them; row i belongs to token i
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dstill_jax.data.dataset import ConversationSource, num_anchors
from dstill_jax.data.packing import OneEach, Packed, UnitOrder
from dstill_jax.errors import UserError

_ENDLESS = 2**40  # units of a pipeline without a last epoch

Batch = dict[str, np.ndarray]


@dataclass(frozen=True)
class PipelineConfig:
    """Shapes and order of the batches."""

    seq_len: int  # S
    batch_size: int  # rows of the global batch, over all processes
    mode: str = "pad"  # "pad": one document a row; "pack": several, never split
    overlong: str = "truncate"  # documents longer than seq_len: "truncate" or "drop"
    seed: int = 0
    num_epochs: int | None = None  # None: without end; else the last batch is filled up with empty rows

    def __post_init__(self) -> None:
        if self.seq_len < 2:
            raise UserError(f"seq_len={self.seq_len} must be at least 2")
        if self.mode not in ("pad", "pack"):
            raise UserError(f"mode={self.mode!r} must be 'pad' or 'pack'")
        if self.overlong not in ("truncate", "drop"):
            raise UserError(f"overlong={self.overlong!r} must be 'truncate' or 'drop'")
        if self.seed < 0:
            raise UserError(f"seed={self.seed} must not be negative")
        if self.num_epochs is not None and self.num_epochs < 1:
            raise UserError(f"num_epochs={self.num_epochs} must be at least 1, or None for no end")
        if self.batch_size < 1:
            raise UserError(f"batch_size={self.batch_size} must be at least 1")


@dataclass(frozen=True)
class PipelineSummary:
    """What one epoch holds, counted after truncation and dropping."""

    documents: int
    truncated: int
    dropped: int
    tokens: int
    tokens_cut: int  # in truncated and dropped documents
    supervised_tokens: int
    without_anchor: int  # documents with no two supervised tokens in a row: they are seen, and train nothing
    rows: int  # of the first epoch
    fill: float  # share of a row's slots that hold a token

    def describe(self) -> str:
        """One line for a log."""
        return (
            f"{self.documents} documents ({self.truncated} truncated, {self.dropped} dropped, {self.without_anchor}"
            f" with nothing to train on), {self.tokens} tokens ({self.supervised_tokens} supervised,"
            f" {self.tokens_cut} cut) in {self.rows} rows, {self.fill:.0%} full"
        )


class BatchPipeline:
    """Random access to the batches of a dataset, or to the rows of them that one process needs."""

    def __init__(self, source: ConversationSource, config: PipelineConfig, rows: Sequence[int] | None = None) -> None:
        """`rows`: places in the global batch that are read, all by default; they change neither order nor steps.

        Raises UserError when no document is left, or none of them has a place for a block.
        """
        self.source = source
        self.config = config
        self.rows = range(config.batch_size) if rows is None else tuple(rows)
        lengths = np.asarray(source.stats[:, 0], np.int64)
        kept = lengths <= config.seq_len if config.overlong == "drop" else np.ones(len(lengths), bool)
        documents = np.flatnonzero(kept)
        if not len(documents):
            raise UserError(
                f"all {len(lengths)} documents are longer than seq_len={config.seq_len};"
                " raise it or use overlong='truncate'"
            )
        cut = np.minimum(lengths[documents], config.seq_len)
        self._order: UnitOrder = (
            Packed(documents, cut, config.seq_len, config.seed)
            if config.mode == "pack"
            else OneEach(documents, config.seed)
        )
        self.summary = self._summarise(documents, lengths, cut)
        if self.summary.without_anchor == len(documents):
            raise UserError(
                f"none of the {len(documents)} documents has two supervised tokens in a row within seq_len={config.seq_len};"
                " there would be nothing to train on"
            )
        self._units = self._order.end(config.num_epochs) if config.num_epochs else _ENDLESS

    @property
    def total_steps(self) -> int | None:
        """Batches until the last epoch's end, the same in every process; None when there is no end."""
        return -(-self._units // self.config.batch_size) if self.config.num_epochs else None

    def batch(self, step: int) -> Batch:
        """The rows `self.rows` of the global batch of that step."""
        if step < 0 or (self.total_steps is not None and step >= self.total_steps):
            raise IndexError(f"step {step} is outside 0..{self.total_steps}")
        shape = len(self.rows), self.config.seq_len
        batch: Batch = {
            "tokens": np.zeros(shape, np.int32),
            "loss_mask": np.zeros(shape, bool),
            "document_ids": np.zeros(shape, np.int32),
            "positions": np.zeros(shape, np.int32),
        }
        if self.source.feature_width:
            batch["features"] = np.empty((*shape, self.source.feature_width), np.float16)
        for row, place in enumerate(self.rows):
            unit = step * self.config.batch_size + place
            self._fill({name: array[row] for name, array in batch.items()}, unit)
        return batch

    @property
    def key(self) -> dict[str, Any]:
        """Everything the sequence of global batches depends on."""
        names = ("seq_len", "batch_size", "mode", "overlong", "seed")
        return {"dataset": self.source.fingerprint, **{name: getattr(self.config, name) for name in names}}

    def _fill(self, row: Batch, unit: int) -> None:
        """One row of a batch that is zero so far, its features apart: large arrays are written once."""
        begin, size = 0, self.config.seq_len
        for number, index in enumerate(self._order.unit(unit) if unit < self._units else (), start=1):
            document = self.source[index]
            length = min(len(document.tokens), size - begin)
            place = slice(begin, begin + length)
            row["tokens"][place] = document.tokens[:length]
            row["loss_mask"][place] = document.loss_mask[:length]
            row["document_ids"][place] = number
            row["positions"][place] = np.arange(length)
            if "features" in row:
                row["features"][place] = self.source.features(index)[:length]
            begin += length
        if "features" in row:
            row["features"][begin:] = 0

    def _summarise(self, rows: np.ndarray, lengths: np.ndarray, cut: np.ndarray) -> PipelineSummary:
        whole = rows[lengths[rows] == cut]
        supervised = int(self.source.stats[whole, 1].sum())
        without_anchor = int((self.source.stats[whole, 2] == 0).sum())
        for index in rows[lengths[rows] > cut].tolist():
            mask = self.source[index].loss_mask[: self.config.seq_len]
            supervised += int(mask.sum())
            without_anchor += num_anchors(mask) == 0
        units = self._order.end(1)
        return PipelineSummary(
            documents=len(rows),
            truncated=int((lengths[rows] > cut).sum()),
            dropped=len(lengths) - len(rows),
            tokens=int(cut.sum()),
            tokens_cut=int(lengths.sum() - cut.sum()),
            supervised_tokens=supervised,
            without_anchor=without_anchor,
            rows=units,
            fill=float(cut.sum() / (units * self.config.seq_len)),
        )
