"""The dataset on disk: what is written is what is read, all at once, without TensorFlow."""

import hashlib
import subprocess
import sys

import numpy as np
import pytest

from dstill_jax.data.dataset import Conversation, ConversationDataset, MemoryDataset, num_anchors, write_dataset
from dstill_jax.data.features import NAME as FEATURES
from dstill_jax.data.features import check_disk, feature_bytes
from dstill_jax.errors import UserError

LENGTHS = (5, 17, 64, 2)


def make_rows(lengths=LENGTHS, seed=0):
    rng = np.random.default_rng(seed)
    rows = []
    for i, n in enumerate(lengths):
        mask = np.arange(n) >= n // 2
        rows.append(Conversation(f"füße/{i}", rng.integers(0, 2**31 - 1, n, dtype=np.int32), mask))
    return rows


def make_features(rows, width=6, seed=1):
    rng = np.random.default_rng(seed)
    return [rng.normal(size=(len(row.tokens), width)).astype(np.float16) for row in rows]


def tree(folder):
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.iterdir())}


def test_rows_come_back_as_they_were_written(tmp_path):
    rows = make_rows()
    write_dataset(tmp_path / "out", rows, {"target": "x"})
    dataset = ConversationDataset(tmp_path / "out")
    assert len(dataset) == len(rows) and dataset.lengths.tolist() == list(LENGTHS)
    for i, row in enumerate(rows):
        assert dataset[i].source_id == row.source_id
        np.testing.assert_array_equal(dataset[i].tokens, row.tokens)
        np.testing.assert_array_equal(dataset[i].loss_mask, row.loss_mask)
    assert dataset.provenance["target"] == "x" and dataset.provenance["tokens"] == sum(LENGTHS)
    assert dataset.provenance["rows_without_anchor"] == 1, "the row of 2 tokens has one supervised token"
    assert dataset.fingerprint == MemoryDataset(rows).fingerprint
    with pytest.raises(IndexError):
        dataset[len(rows)]


def test_tfds_itself_reads_the_folder(tmp_path):
    import tensorflow_datasets as tfds

    rows = make_rows()
    write_dataset(tmp_path / "out", rows, {})
    records = tfds.builder_from_directory(tmp_path / "out").as_data_source("train")
    assert records[1]["source_id"].decode() == rows[1].source_id
    np.testing.assert_array_equal(records[2]["tokens"], rows[2].tokens)


def test_the_bytes_are_the_same_in_another_process(tmp_path):
    write_dataset(tmp_path / "here", make_rows(), {"a": 1})
    code = (
        "import sys; sys.path.insert(0, sys.argv[2]); from pathlib import Path;"
        "from test_dataset import make_rows; from dstill_jax.data.dataset import write_dataset;"
        "write_dataset(Path(sys.argv[1]) / 'there', make_rows(), {'a': 1})"
    )
    here = str(sys.modules[__name__].__file__).rsplit("/", 1)[0]
    for seed in ("1", "2"):  # protobuf and Python order maps by a random seed of the process
        subprocess.run([sys.executable, "-c", code, str(tmp_path), here], check=True, env={"PYTHONHASHSEED": seed})
        assert tree(tmp_path / "there") == tree(tmp_path / "here")
        (tmp_path / "there").rename(tmp_path / f"there{seed}")


def test_features_are_rows_of_their_tokens(tmp_path):
    rows = make_rows()
    features = make_features(rows)
    write_dataset(tmp_path / "out", rows, {}, iter(features), 6)
    dataset = ConversationDataset(tmp_path / "out")
    assert dataset.feature_width == 6
    for i in (2, 0, 3, 1):
        np.testing.assert_array_equal(dataset.features(i), features[i])
    assert isinstance(dataset.features(0), np.memmap)


def test_features_that_do_not_belong_to_their_tokens_are_refused(tmp_path):
    rows = make_rows()
    short = [f[:-1] if i == 1 else f for i, f in enumerate(make_features(rows))]
    with pytest.raises(ValueError, match="for 17 tokens"):
        write_dataset(tmp_path / "out", rows, {}, iter(short), 6)
    write_dataset(tmp_path / "out", rows, {}, iter(make_features(rows)), 6)
    file = tmp_path / "out" / FEATURES
    file.write_bytes(file.read_bytes()[:-12])
    with pytest.raises(UserError, match="88 tokens of 6 values need 1056"):
        ConversationDataset(tmp_path / "out")


def test_asking_for_features_that_are_not_there_is_an_error(tmp_path):
    write_dataset(tmp_path / "out", make_rows(), {})
    with pytest.raises(UserError, match="no stored features"):
        ConversationDataset(tmp_path / "out").features(0)


def test_nothing_supervised_and_no_rows_are_refused_and_leave_nothing(tmp_path):
    rows = [Conversation("a", row.tokens, np.zeros_like(row.loss_mask)) for row in make_rows()]
    with pytest.raises(UserError, match="none of the 4 rows has a supervised token"):
        write_dataset(tmp_path / "out", rows, {})
    with pytest.raises(UserError, match="no rows"):
        write_dataset(tmp_path / "out", [], {})
    assert not (tmp_path / "out").exists()


def test_a_row_whose_mask_is_short_is_refused(tmp_path):
    row = make_rows()[0]
    with pytest.raises(ValueError, match="differ"):
        write_dataset(tmp_path / "out", [Conversation("a", row.tokens, row.loss_mask[1:])], {})


def test_damaged_folders_are_refused_by_name(tmp_path):
    with pytest.raises(UserError, match="no dataset there"):
        ConversationDataset(tmp_path)
    write_dataset(tmp_path / "out", make_rows(), {})
    (tmp_path / "out" / "dataset_info.json").write_text("{")
    with pytest.raises(UserError, match="TFDS cannot read it"):
        ConversationDataset(tmp_path / "out")
    (tmp_path / "out" / "lengths.npy").unlink()
    with pytest.raises(UserError, match="incomplete or damaged"):
        ConversationDataset(tmp_path / "out")


def test_anchors_are_supervised_positions_followed_by_one():
    assert [num_anchors(np.array(m, bool)) for m in ([0, 1, 1, 1], [1, 0, 1, 0], [0, 0], [1], [1, 1, 0, 1, 1])] == [
        2, 0, 0, 0, 2,
    ]  # fmt: skip


def test_features_that_cannot_fit_are_refused_before_work(tmp_path):
    needed = feature_bytes(30_000 * 65_536, 5, 2880)
    assert needed == 30_000 * 65_536 * 6 * 2880 * 2
    with pytest.raises(UserError, match=r"may take 67.95 TB, but .* free"):
        check_disk(tmp_path / "not" / "yet", needed, "storing features")
    check_disk(tmp_path, 1, "storing features")
