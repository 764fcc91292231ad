"""kill -9 in the middle of preparing: nothing is lost, nothing doubled, every byte the same."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from fake_backend import FakeBackend
from test_generate import WORKER, files, make_config, run

import dstill_jax
from dstill_jax.data import pool
from dstill_jax.data.dataset import ConversationDataset
from dstill_jax.data.generate import prepare
from dstill_jax.data.prepare_config import config_to_dict
from dstill_jax.data.shards import Answer, ShardWriter, read_answers
from dstill_jax.errors import UserError

SCRIPT = """
import json, sys
from fake_backend import FakeBackend
from dstill_jax.data.generate import prepare
from dstill_jax.data.prepare_config import config_from_dict
config = config_from_dict(json.loads(sys.argv[1]))
prepare(config, backend=FakeBackend(config), worker_command=json.loads(sys.argv[2]), show_progress=False)
"""


def start(config, seconds):
    """A prepare process of its own that takes `seconds` for each answer."""
    paths = [str(Path(__file__).parent), str(Path(dstill_jax.__file__).parent.parent)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "FAKE_SECONDS": str(seconds)}
    arguments = [sys.executable, "-c", SCRIPT, json.dumps(config_to_dict(config)), json.dumps(WORKER)]
    return subprocess.Popen(arguments, env=environment)


def finished_lines(config):
    return sum(p.read_bytes().count(b"\n") for p in Path(config.out, "work").glob("shard-*.jsonl"))


def wait_for(condition, seconds=30):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.02)


def kill_midway(config, lines, seconds=0.05):
    process = start(config, seconds)
    wait_for(lambda: finished_lines(config) >= lines or process.poll() is not None)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL, "it had finished already"


def test_a_killed_process_loses_no_answer_that_was_added(tmp_path):
    """However soon after the one before it came: answers end in bursts, and the next burst may be minutes away."""
    writer = ShardWriter(tmp_path, feature_width=2, interval=3600)
    for i in range(5):
        writer.add(Answer(i, 1, [i, 7, 8], "stop"), np.full((2, 2), i, np.float16))
    found = read_answers(tmp_path, 2)  # the writer is neither committed nor closed
    assert {i: answer.tokens.tolist() for i, answer in found.items()} == {i: [i, 7, 8] for i in range(5)}
    assert found[0].tokens.dtype == np.int32
    writer.close()


@pytest.mark.parametrize("workers", [1, 2])
def test_two_kills_change_no_byte(tmp_path, workers):
    settings = {"record_features": True, "tap_ids": (1, 4), "rows": 60}
    whole = make_config(tmp_path, out="whole", **settings)
    run(whole)
    config = make_config(tmp_path, out="killed", workers=workers, **settings)
    kill_midway(config, 6)
    kill_midway(config, 20)
    kept = finished_lines(config)
    assert not Path(config.out, "dataset").exists()
    summary = run(config)
    assert summary.resumed_rows >= 20 and kept >= 20, "answers on disk are used"
    assert files(config.out) == files(whole.out)


def test_workers_leave_when_their_parent_is_killed(tmp_path):
    config = make_config(tmp_path, workers=2, rows=60)
    kill_midway(config, 1, seconds=0.1)
    time.sleep(1.0)  # a flush interval and more
    lines = finished_lines(config)
    time.sleep(1.0)
    assert finished_lines(config) == lines < 60


def test_a_killed_worker_is_reported_and_its_answers_are_kept(tmp_path, monkeypatch):
    config = make_config(tmp_path, workers=2, rows=60)
    monkeypatch.setenv("FAKE_SECONDS", "0.1")
    monkeypatch.setattr(pool, "_start", start_and_kill)
    with pytest.raises(
        UserError, match=r"worker 0 was killed by signal 9 \(out of memory\?\).*finished answers are kept"
    ):
        run(config)
    monkeypatch.undo()
    assert run(config).resumed_rows > 0


def start_and_kill(k, job, folder, command, start=pool._start):
    process = start(k, job, folder, command)
    if k == 0:
        wait_for(lambda: any(p.stat().st_size for p in folder.parent.glob("shard-*.jsonl")))
        process.send_signal(signal.SIGKILL)
    return process


def test_a_torn_line_and_unfinished_features_do_not_count(tmp_path):
    with ShardWriter(tmp_path) as shard:
        shard.add(Answer(4, 2, [1, 2, 3], "stop"))
        shard.add(Answer(5, 1, [1, 2], "length"))
    whole = shard.path.read_bytes()
    for cut in range(1, len(whole)):
        shard.path.write_bytes(whole[:cut])
        complete = whole[:cut].count(b"\n")
        assert sorted(read_answers(tmp_path)) == [4, 5][:complete]


def test_a_new_process_never_writes_to_an_old_shard(tmp_path):
    with ShardWriter(tmp_path) as first:
        first.add(Answer(0, 1, [1, 2], "stop"))
    first.path.write_bytes(first.path.read_bytes()[:-3])  # torn
    with ShardWriter(tmp_path) as second:
        second.add(Answer(1, 1, [1, 2], "stop"))
    assert first.path != second.path
    assert sorted(read_answers(tmp_path)) == [1]


def test_damage_inside_a_shard_is_refused_with_file_and_line(tmp_path):
    with ShardWriter(tmp_path) as shard:
        for i in range(3):
            shard.add(Answer(i, 1, [1, 2], "stop"))
    lines = shard.path.read_bytes().splitlines(keepends=True)
    shard.path.write_bytes(lines[0] + b'{"index": 1\n' + lines[2])
    with pytest.raises(UserError, match=r"shard-0000.jsonl:2: damaged line"):
        read_answers(tmp_path)


def test_an_answer_that_two_shards_hold_counts_once_and_must_agree(tmp_path):
    for tokens in ([1, 2], [1, 2], [1, 3]):
        if tokens == [1, 3]:
            assert len(read_answers(tmp_path)) == 1
        with ShardWriter(tmp_path) as shard:
            shard.add(Answer(0, 1, tokens, "stop"))
    with pytest.raises(UserError, match="row 0 was answered twice, differently"):
        read_answers(tmp_path)


def test_features_shorter_than_their_lines_are_refused(tmp_path):
    with ShardWriter(tmp_path, feature_width=3) as shard:
        shard.add(Answer(0, 1, [1, 2, 3], "stop"), np.ones((2, 3), np.float16))
    features = shard.path.with_suffix(".f16")
    assert features.stat().st_size == 3 * 3 * 2
    features.write_bytes(features.read_bytes()[:-1])
    with pytest.raises(UserError, match="17 bytes, but row 0 ends at 18"):
        read_answers(tmp_path, 3)


def test_two_prepares_do_not_work_in_one_folder(tmp_path):
    config = make_config(tmp_path, rows=60)
    process = start(config, 0.2)
    try:
        wait_for(lambda: finished_lines(config) >= 1)
        with pytest.raises(UserError, match="another process is working in this folder"):
            run(config)
    finally:
        process.kill()
        process.wait()


def test_an_interrupted_preparation_is_no_dataset_yet(tmp_path):
    class Stopped(FakeBackend):
        def answer(self, requests, **options):
            for number, completion in enumerate(super().answer(requests, **options)):
                if number == 5:
                    raise KeyboardInterrupt
                yield completion

    config = make_config(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        prepare(config, backend=Stopped(config), show_progress=False)
    with pytest.raises(UserError, match="its preparation has not finished"):
        ConversationDataset(config.out)
    assert run(config).resumed_rows == 5
