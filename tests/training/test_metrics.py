"""Metrics are sums over weights, and the record holds every step once."""

import json
import math
import sys

import numpy as np
import pytest

from dstill_jax.errors import MissingExtraError, UserError
from dstill_jax.training import ConsoleWriter, JsonlWriter, MultiWriter, TensorBoardWriter, read_jsonl
from dstill_jax.training.metrics import means


def test_means_divide_once_and_leave_out_what_was_not_measured():
    values = means({"loss": (np.float32(6), np.float32(4)), "slot_7": (np.float32(0), np.float32(0))})
    assert values == {"train/loss": 1.5}


def write_steps(path, steps, completed=0):
    writer = JsonlWriter(path, completed)
    for step in steps:
        writer.write(step, {"train/loss": step / 2})
    writer.close()


def test_resuming_drops_the_steps_that_will_be_repeated(tmp_path):
    path = tmp_path / "run" / "metrics.jsonl"
    write_steps(path, range(1, 8))
    write_steps(path, range(5, 10), completed=4)
    assert [r["step"] for r in read_jsonl(path)] == list(range(1, 10))


def test_a_last_line_cut_by_a_crash_is_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_steps(path, range(1, 4))
    text = path.read_text()
    path.write_text(text[:-9])
    assert [r["step"] for r in read_jsonl(path)] == [1, 2]
    write_steps(path, [3], completed=3)
    assert path.read_text() == text


def test_numbers_that_are_not_finite_stay_valid_json(tmp_path):
    writer = JsonlWriter(tmp_path / "m.jsonl")
    writer.write(1, {"train/loss": math.nan, "train/x": math.inf})
    writer.close()

    def refuse(constant):
        raise AssertionError(constant)

    line = json.loads((tmp_path / "m.jsonl").read_text(), parse_constant=refuse)
    assert line == {"step": 1, "train/loss": None, "train/x": None}


def test_a_record_that_cannot_be_opened_is_named(tmp_path):
    (tmp_path / "run").write_text("")
    with pytest.raises(UserError, match=r"cannot write metrics to .*metrics\.jsonl"):
        JsonlWriter(tmp_path / "run" / "metrics.jsonl")


def test_tensorboard_is_optional_and_named_when_missing(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(MissingExtraError, match=r"dstill-jax\[report\]"):
        TensorBoardWriter(tmp_path)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_events_are_written(tmp_path):
    writer = TensorBoardWriter(tmp_path, completed_steps=3)
    writer.write(4, {"train/loss": 1.0})
    writer.close()
    (events,) = tmp_path.iterdir()
    assert b"train/loss" in events.read_bytes()


def test_console_without_a_terminal_prints_the_last_step(capsys):
    writer = ConsoleWriter(10, label="stage1")
    for step in range(1, 11):
        writer.write(step, {"train/loss": 2.5, "train/tau": 1.75, "perf/steps_per_second": 2.0})
    writer.close()
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2  # the first, since nothing was printed before, and the last
    assert lines[0] == "stage1 1/10 loss 2.500  τ≈ 1.750  2.00 steps/s  0:04 left"
    assert lines[1].startswith("stage1 10/10")


def test_all_writers_are_closed_even_when_one_fails():
    closed = []

    class Writer:
        def __init__(self, name):
            self.name = name

        def write(self, step, values):
            pass

        def flush(self):
            pass

        def close(self):
            closed.append(self.name)
            if self.name == "a":
                raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        MultiWriter(Writer("a"), Writer("b")).close()
    assert closed == ["a", "b"]
