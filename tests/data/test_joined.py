"""Datasets joined: the rows, features and batches are those of one dataset that holds them all."""

from pathlib import Path

import numpy as np
import pytest

from dstill_jax.data.dataset import Conversation, ConversationDataset, write_dataset
from dstill_jax.data.joined import JoinedDataset, open_data
from dstill_jax.data.pipeline import BatchPipeline, PipelineConfig
from dstill_jax.errors import UserError

INPUTS = {"target_fingerprint": "a" * 64, "tap_ids": [0]}


def rows_of(numbers: range) -> list[Conversation]:
    found = []
    for number in numbers:
        tokens = np.arange(5 + number, dtype=np.int32) + number
        found.append(Conversation(f"row {number}", tokens, np.arange(len(tokens)) >= 2))
    return found


def write(folder: Path, numbers: range, width: int = 3, **inputs: object) -> str:
    rows = rows_of(numbers)
    features = [np.full((len(row.tokens), width), i, np.float16) for i, row in zip(numbers, rows, strict=True)]
    write_dataset(folder / "dataset", rows, {"inputs": INPUTS | inputs}, features if width else None, width)
    return str(folder)


@pytest.fixture
def parts(tmp_path: Path) -> tuple[str, ...]:
    return tuple(
        write(tmp_path / f"part{i}", numbers) for i, numbers in enumerate((range(4), range(4, 5), range(5, 11)))
    )


@pytest.mark.parametrize("mode", ["pad", "pack"])
def test_batches_are_those_of_one_dataset_with_all_rows(parts, tmp_path, mode) -> None:
    whole, joined = ConversationDataset(write(tmp_path / "whole", range(11))), open_data(parts)
    assert len(joined) == 11 and (joined.stats == whole.stats).all()
    config = PipelineConfig(seq_len=24, batch_size=3, mode=mode, seed=4)
    ours, theirs = BatchPipeline(joined, config), BatchPipeline(whole, config)
    assert ours.summary == theirs.summary
    for step in range(8):
        batch, expected = ours.batch(step), theirs.batch(step)
        assert batch.keys() == expected.keys() >= {"features"}
        for name, values in expected.items():
            np.testing.assert_array_equal(batch[name], values)


def test_the_position_in_the_data_belongs_to_these_parts_in_this_order(parts) -> None:
    prints = {open_data(p).fingerprint for p in (parts, parts[::-1], parts[:2], parts[0])}
    assert len(prints) == 4
    assert open_data(parts[0]).fingerprint == ConversationDataset(parts[0]).fingerprint
    with pytest.raises(IndexError, match="row 11"):
        open_data(parts)[11]


def test_generated_answers_join_finished_conversations(tmp_path) -> None:
    """Without stored features it does not matter which ones the parts would have: finished conversations name none."""
    generated = write(tmp_path / "generated", range(4), width=0, tap_ids=[])
    rows, inputs = rows_of(range(4, 7)), {"target_fingerprint": INPUTS["target_fingerprint"]}
    write_dataset(tmp_path / "finished" / "dataset", rows, {"inputs": inputs})
    for folders in ((generated, str(tmp_path / "finished")), (str(tmp_path / "finished"), generated)):
        assert len(open_data(folders)) == 7


def test_what_cannot_be_joined_is_named(parts, tmp_path) -> None:
    other = write(tmp_path / "other", range(20, 22), target_fingerprint="b" * 64)
    with pytest.raises(UserError, match=r"part0.*target_fingerprint=aaa.*other.*bbb"):
        open_data((parts[0], other))
    taps = write(tmp_path / "taps", range(20, 22), tap_ids=[1])
    with pytest.raises(UserError, match=r"tap_ids=\[0\].*\[1\]"):
        open_data((parts[0], taps))
    bare = write(tmp_path / "bare", range(20, 22), width=0)
    with pytest.raises(UserError, match="3 feature values a token.* 0;"):
        open_data((parts[0], bare))
    with pytest.raises(UserError, match="same rows twice"):
        open_data((parts[0], parts[0]))
    with pytest.raises(UserError, match="names no dataset"):
        JoinedDataset(())
    with pytest.raises(UserError, match="no dataset there"):
        open_data((parts[0], str(tmp_path / "nowhere")))
