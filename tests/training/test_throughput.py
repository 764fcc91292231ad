"""What a step must not wait for: the input pipeline, and copies between host and device.

The steps of both stages run on a mesh under the same guard in `tests/sharded/sharded_case.py` (`curves`).
"""

import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy_training import ToyData, run_toy

from dstill_jax.data.dataset import Conversation, ConversationDataset, write_dataset
from dstill_jax.data.pipeline import BatchPipeline, PipelineConfig

# Tokens a second that the four chips of a v5p host take at most: 157,965 on 16 chips, by the plan for v5p-32 in
# configs/qwen3_8b_stage1.py, whose rows these are. (v6e chips may take a quarter more.)
TAKEN_BY_A_HOST = 157_965 / 4
ARRAY = type(jnp.zeros(()))


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> ConversationDataset:
    """400 conversations of 200 to 2500 tokens."""
    folder, random = tmp_path_factory.mktemp("conversations"), np.random.default_rng(0)
    texts = [
        Conversation(f"row {i}", random.integers(0, 150_000, n).astype(np.int32), np.arange(n) >= n // 3)
        for i, n in enumerate(random.integers(200, 2500, 400))
    ]
    write_dataset(folder / "dataset", texts, {"inputs": {"target_fingerprint": None, "tap_ids": []}})
    return ConversationDataset(str(folder))


@pytest.mark.parametrize("mode", ["pack", "pad"])
def test_a_host_reads_rows_ten_times_as_fast_as_its_chips_take_them(dataset: ConversationDataset, mode: str) -> None:
    """Four rows of 3072 of a batch of 16, without the threads that read ahead, which would be faster still."""
    pipeline = BatchPipeline(dataset, PipelineConfig(seq_len=3072, batch_size=16, mode=mode), range(4))
    seconds = []
    for step in range(20):
        began = time.perf_counter()
        batch = pipeline.batch(step)
        seconds.append(time.perf_counter() - began)
    rate = batch["tokens"].size / sorted(seconds)[len(seconds) // 2]
    print(f"{mode}: {rate:,.0f} tokens/s, {rate / TAKEN_BY_A_HOST:.0f} times what four chips take")
    assert rate >= 10 * TAKEN_BY_A_HOST


def test_the_loop_copies_nothing_between_host_and_device_unasked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From its second step on (the first compiles), records and batches prepared by a thread included; saves read."""
    guarded = []

    def guard(step: int, state: dict) -> None:
        jax.config.update("jax_transfer_guard", "disallow")
        monkeypatch.undo() if step % 3 == 0 or step == 8 else _forbid_reading(monkeypatch)
        guarded.append(step)

    try:
        run_toy(tmp_path, total_steps=8, save_every=3, on_step=guard)
    finally:
        jax.config.update("jax_transfer_guard", None)
    assert guarded == list(range(1, 9))


def _forbid_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    """No array becomes a Python number: on a CPU the transfer guard does not see that. `jax.device_get` stays allowed."""

    def refuse(array: jax.Array, *_: object) -> None:
        raise AssertionError(f"an array of shape {array.shape} was read on the host")

    for name in ("__float__", "__int__", "__bool__", "__index__", "item", "tolist"):
        monkeypatch.setattr(ARRAY, name, refuse)


def test_the_guard_catches_a_metric_that_is_read_each_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(step: int, state: dict) -> None:
        _forbid_reading(monkeypatch)
        if step == 3:
            float(state["step"])

    with pytest.raises(AssertionError, match="was read on the host"):
        run_toy(tmp_path, data=ToyData(), total_steps=8, on_step=wrong)


def test_the_guard_catches_a_batch_that_is_not_on_the_device(tmp_path: Path) -> None:
    def wrong(step: int, state: dict) -> None:
        jax.config.update("jax_transfer_guard", "disallow")
        if step == 3:
            state["step"] + np.ones(3, np.int32)

    try:
        with pytest.raises(Exception, match="Disallowed host-to-device transfer"):
            run_toy(tmp_path, data=ToyData(), total_steps=8, on_step=wrong)
    finally:
        jax.config.update("jax_transfer_guard", None)
