"""The conversation dataset: ArrayRecord files of a TFDS builder, with its provenance beside it.

Written by `generate`, read by `pipeline` and by evaluation. A dataset is a folder:

    conversations-train.array_record-*, dataset_info.json, features.json    what TFDS reads, without TensorFlow
    provenance.json     where it came from: target, template, sampling, counts
    lengths.npy         int32 [rows, 3]: tokens, supervised tokens, anchors
    features.f16        only when features were stored
"""

import contextlib
import hashlib
import io
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from dstill_jax.data import features as features_lib
from dstill_jax.data.manifest import write_json
from dstill_jax.errors import MissingExtraError, UserError
from dstill_jax.paths import in_home

DATASET_FOLDER = "dataset"
_NAME, _VERSION, _SPLIT = "conversations", "1.0.0", "train"


@dataclass(frozen=True)
class Conversation:
    """Tokens [n] int32, loss_mask [n] bool (True = an assistant token, counted) and the id of the source row."""

    source_id: str
    tokens: np.ndarray
    loss_mask: np.ndarray


class ConversationSource(Protocol):
    """What the pipeline needs: random access to rows, and their sizes without reading them."""

    stats: np.ndarray  # int32 [rows, 3]: tokens, supervised tokens and anchors of each row
    fingerprint: str  # identifies the content
    feature_width: int  # 0: no stored features

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Conversation: ...

    def features(self, index: int) -> np.ndarray: ...  # float16 [n, W]


def num_anchors(loss_mask: np.ndarray) -> int:
    """Positions supervised together with the next one: where a block may start."""
    return int(np.count_nonzero(loss_mask[:-1] & loss_mask[1:]))


class MemoryDataset:
    """A ConversationSource over a list, for tests and small experiments."""

    def __init__(self, rows: Sequence[Conversation], features: Sequence[np.ndarray] | None = None) -> None:
        self._rows = list(rows)
        self._features = features
        self.stats = np.array([_row_stats(row) for row in rows], np.int32).reshape(-1, 3)
        self.feature_width = features[0].shape[1] if features else 0
        digest = hashlib.sha256()
        for row in rows:
            digest.update(_row_bytes(row))
        self.fingerprint = digest.hexdigest()

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Conversation:
        return self._rows[index]

    def features(self, index: int) -> np.ndarray:
        if self._features is None:
            raise UserError("this dataset has no stored features")
        return self._features[index]


class ConversationDataset:
    """A dataset on disk. `path` is the folder given to prepare, or the dataset folder in it."""

    def __init__(self, path: str | os.PathLike) -> None:
        """Raises UserError when the folder holds no complete dataset."""
        self.path = _find(Path(in_home(path)))
        try:
            self.provenance: dict[str, Any] = json.loads((self.path / "provenance.json").read_text(encoding="utf-8"))
            self.stats = np.load(self.path / "lengths.npy").reshape(-1, 3)
            self.fingerprint: str = self.provenance["content_sha256"]
            width = self.provenance["feature_width"]
        except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise UserError(f"{self.path}: incomplete or damaged dataset ({reason}); prepare it again") from error
        self.lengths = self.stats[:, 0]
        self._records = _open_records(self.path)
        if len(self._records) != len(self.lengths):
            raise UserError(
                f"{self.path}: {len(self._records)} records, but {len(self.lengths)} lengths; prepare it again"
            )
        self.feature_width: int = width
        self._features = features_lib.FeatureFile(self.path / features_lib.NAME, self.lengths, width) if width else None

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Conversation:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of a dataset of {len(self)} rows")
        try:
            record = self._records[index]
        except RuntimeError as error:  # the reader's words for a file that is cut
            raise UserError(f"{self.path}: row {index} cannot be read ({error}); prepare it again") from error
        tokens, mask = record["tokens"], record["loss_mask"]
        if not len(tokens) == len(mask) == self.lengths[index]:
            raise UserError(
                f"{self.path}: row {index} has {len(tokens)} tokens, expected {self.lengths[index]}; prepare it again"
            )
        return Conversation(record["source_id"].decode(), tokens, mask)

    def features(self, index: int) -> np.ndarray:
        """Features [n, W] float16 of a row: taps, then the final normed hidden state; the last row is zero."""
        if self._features is None:
            raise UserError(
                f"{self.path} has no stored features; prepare it with record_features, or compute them live"
            )
        return self._features[index]


def dataset_exists(path: Path) -> bool:
    """Whether a complete dataset lies at `path` (a dataset folder appears all at once)."""
    return (path / "provenance.json").exists()


def write_dataset(
    path: Path,
    rows: Iterable[Conversation],
    provenance: dict[str, Any],
    features: Iterable[np.ndarray] | None = None,
    feature_width: int = 0,
) -> np.ndarray:
    """Writes a dataset to `path`, which appears all at once. Returns lengths.npy: int32 [rows, 3].

    `features` yields [n, W] float16 for each row, in the same order. The bytes depend on the arguments only.

    Raises:
        UserError: no rows, or not one supervised token in all of them.
        ValueError: a row's mask or features have another length than its tokens.
    """
    temporary = path.with_name(f"{path.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    recorder = _Recorder(rows, features, feature_width, temporary / features_lib.NAME)
    build = temporary / "build"
    _write_records(build, recorder)
    stats = np.array(recorder.stats, np.int32).reshape(-1, 3)
    if not stats[:, 1].sum():
        raise UserError(f"none of the {len(stats)} rows has a supervised token; there would be nothing to train on")
    for file in (build / _NAME / _VERSION).iterdir():
        file.rename(temporary / file.name)
    shutil.rmtree(build)
    if len(_open_records(temporary)) != len(stats):
        raise UserError(f"{temporary}: fewer records than rows were written; is the disk full?")
    np.save(temporary / "lengths.npy", stats)
    write_json(
        temporary / "provenance.json",
        {
            **provenance,
            "content_sha256": recorder.digest.hexdigest(),
            "feature_width": feature_width,
            "rows": len(stats),
            "tokens": int(stats[:, 0].sum()),
            "supervised_tokens": int(stats[:, 1].sum()),
            "rows_without_anchor": int((stats[:, 2] == 0).sum()),
        },
    )
    for file in temporary.iterdir():
        with open(file, "rb") as opened:
            os.fsync(opened.fileno())
    temporary.rename(path)
    return stats


class _Recorder:
    """Passes rows on, and keeps their lengths, their hash and their features as they go by."""

    def __init__(
        self, rows: Iterable[Conversation], features: Iterable[np.ndarray] | None, width: int, path: Path
    ) -> None:
        self._rows, self._features, self._width, self._path = rows, features, width, path
        self.stats: list[tuple[int, int, int]] = []
        self.digest = hashlib.sha256()

    def __iter__(self) -> Iterator[Conversation]:
        with contextlib.ExitStack() as stack:
            features = iter(self._features) if self._features is not None else None
            file = stack.enter_context(open(self._path, "wb")) if features is not None else None
            for row in self._rows:
                if row.tokens.shape != row.loss_mask.shape or row.tokens.ndim != 1:
                    raise ValueError(
                        f"{row.source_id}: tokens {row.tokens.shape} and loss_mask {row.loss_mask.shape} differ"
                    )
                if features is not None and file is not None:
                    values = next(features)
                    if values.shape != (len(row.tokens), self._width) or values.dtype != np.float16:
                        raise ValueError(
                            f"{row.source_id}: {values.dtype} features {values.shape} for {len(row.tokens)} tokens"
                        )
                    file.write(values.tobytes())
                self.stats.append(_row_stats(row))
                self.digest.update(_row_bytes(row))
                yield row


def _row_stats(row: Conversation) -> tuple[int, int, int]:
    return len(row.tokens), int(row.loss_mask.sum()), num_anchors(row.loss_mask)


def _row_bytes(row: Conversation) -> bytes:
    source_id, tokens = row.source_id.encode(), row.tokens.astype("<i4").tobytes()
    return f"{len(source_id)},{len(tokens)};".encode() + source_id + tokens + row.loss_mask.astype(np.uint8).tobytes()


def _find(path: Path) -> Path:
    for folder in (path / DATASET_FOLDER, path):
        if dataset_exists(folder):
            return folder
    if (path / "manifest.json").exists():
        raise UserError(f"{path}: its preparation has not finished; run the same prepare command again to continue it")
    raise UserError(f"{path}: no dataset there; make one with: dstill prepare")


def _tfds() -> Any:
    try:
        import array_record  # noqa: F401
        import tensorflow_datasets
    except ImportError as error:
        raise MissingExtraError(error.name or "tensorflow-datasets", "data") from error
    return tensorflow_datasets


def _open_records(path: Path) -> Any:
    tfds = _tfds()
    try:
        return tfds.builder_from_directory(path).as_data_source(_SPLIT)
    except Exception as error:  # TFDS raises many kinds for damaged files
        raise UserError(
            f"{path}: TFDS cannot read it ({' '.join(str(error).split())[:200]}); prepare it again"
        ) from error


def _write_records(folder: Path, rows: Iterable[Conversation]) -> None:
    tfds = _tfds()
    builder_class = _builder_class(tfds)
    with contextlib.redirect_stdout(io.StringIO()), _no_progress_bar(tfds):
        builder = builder_class(rows, data_dir=str(folder), file_format="array_record")
        try:
            builder.download_and_prepare()
        except AssertionError as error:
            if "No examples" in str(error):
                raise UserError("no rows are left to write; there would be nothing to train on") from error
            raise


def _builder_class(tfds: Any) -> type:
    from tensorflow_datasets.core.writer import ExampleWriter
    from tensorflow_datasets.proto import tf_example_pb2

    class CanonicalWriter(ExampleWriter):
        """Sorts each record's fields: protobuf leaves a map's order to the process; bytes must not depend on it."""

        def write(self, path, examples):
            return super().write(path, ((key, _sort_fields(record)) for key, record in examples))

    def _sort_fields(record: bytes) -> bytes:
        return tf_example_pb2.Example.FromString(record).SerializeToString(deterministic=True)

    with tfds.core.registered.skip_registration():

        class Conversations(tfds.core.GeneratorBasedBuilder):
            """Conversations of a target model: tokens and loss masks."""

            name = _NAME
            VERSION = tfds.core.Version(_VERSION)
            code_path = None  # nothing is downloaded, so TFDS need not look for checksums beside this file

            def __init__(self, rows: Iterable[Conversation], **kwargs: Any) -> None:
                self._conversations = rows
                super().__init__(**kwargs)

            def _info(self):
                return tfds.core.DatasetInfo(
                    builder=self,
                    description="Conversations of a target model, tokenised, with the assistant's tokens marked.",
                    features=tfds.features.FeaturesDict(
                        {
                            "source_id": tfds.features.Text(),
                            "tokens": tfds.features.Tensor(shape=(None,), dtype=np.int32),
                            "loss_mask": tfds.features.Tensor(shape=(None,), dtype=np.bool_),
                        }
                    ),
                    disable_shuffling=True,
                )

            def _split_generators(self, dl_manager):
                del dl_manager
                return {_SPLIT: self._generate_examples()}

            def _generate_examples(self):
                for index, row in enumerate(self._conversations):
                    yield index, {"source_id": row.source_id, "tokens": row.tokens, "loss_mask": row.loss_mask}

            def _example_writer(self):
                return CanonicalWriter(self.info.file_format)

    return Conversations


@contextlib.contextmanager
def _no_progress_bar(tfds: Any) -> Iterator[None]:
    tfds.disable_progress_bar()
    try:
        yield
    finally:
        tfds.enable_progress_bar()
