"""The loop: a run that was stopped, killed or resumed ends exactly where an uninterrupted one does."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import numpy as np
import pytest
import toy_training
from toy_training import OPTIMIZER, ToyData, run_toy, toy_loss

from dstill_jax.errors import UserError
from dstill_jax.training import Interrupted, NonFiniteError, OptimizerConfig, latest_step, load_params, read_jsonl
from dstill_jax.training.interrupt import StopSignals, stop_between
from dstill_jax.training.prefetch import Prefetcher

SCRIPT = Path(toy_training.__file__)


def start_script(run_dir: Path, *overrides: str) -> subprocess.Popen:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, str(SCRIPT), str(run_dir), *overrides]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_until(condition, process: subprocess.Popen, seconds: float = 300.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < end, "the child made no progress"
        time.sleep(0.001)


def kill(process: subprocess.Popen) -> None:
    process.kill()
    process.communicate()


def leaves(state) -> dict[str, tuple[str, bytes]]:
    flat = jax.tree_util.tree_leaves_with_path(jax.device_get(state))
    return {jax.tree_util.keystr(p): (str(x.dtype), np.asarray(x).tobytes()) for p, x in flat}


def train_records(run_dir: Path) -> list[dict]:
    records = read_jsonl(run_dir / "metrics.jsonl")
    return [{k: v for k, v in r.items() if not k.startswith("perf/")} for r in records]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """(final state, records) of 60 steps in one go; two of the steps have nothing to learn from."""
    run_dir = tmp_path_factory.mktemp("uninterrupted")
    state = run_toy(run_dir)
    assert int(state["step"]) == 60 and int(state["updates"]) == 58
    assert latest_step(run_dir) == 60
    return leaves(state), train_records(run_dir)


def assert_equals(run_dir, state, uninterrupted):
    expected, records = uninterrupted
    assert leaves(state) == expected
    assert [r["step"] for r in records] == list(range(1, 61))
    assert train_records(run_dir) == records


def test_the_toy_learns(uninterrupted):
    records = uninterrupted[1]
    assert records[-1]["train/loss"] < records[0]["train/loss"] - 0.5
    assert records[5]["train/updated"] == 0.0 and "train/loss" not in records[5]  # the sixth batch is empty


def test_killed_at_random_points_and_resumed_twice_it_ends_bit_for_bit_the_same(tmp_path, uninterrupted):
    rng = random.Random(0)
    metrics, killed_at = tmp_path / "metrics.jsonl", []
    for lowest in (13, 33):
        steps = lowest + rng.randrange(10)
        process = start_script(tmp_path, "delay_ms=20")
        wait_until(lambda n=steps: metrics.exists() and len(metrics.read_bytes().splitlines()) >= n, process)
        wait_until(lambda n=lowest: (latest_step(tmp_path) or 0) >= n // 10 * 10, process)  # written by a thread
        kill(process)
        killed_at.append(latest_step(tmp_path))
    assert killed_at == sorted(killed_at) and 10 <= killed_at[0] < killed_at[1] < 60
    assert_equals(tmp_path, run_toy(tmp_path), uninterrupted)


def test_killed_in_the_middle_of_a_save_it_resumes_from_the_checkpoint_before(tmp_path, uninterrupted):
    process = start_script(tmp_path, "delay_ms=2")
    unfinished = tmp_path / "checkpoints" / "30.orbax-checkpoint-tmp"
    wait_until(unfinished.exists, process)
    kill(process)
    assert latest_step(tmp_path) in (20, 30)  # 30 only if the save won the race
    assert_equals(tmp_path, run_toy(tmp_path), uninterrupted)
    assert not unfinished.exists()


@pytest.mark.parametrize("signum", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_signal_saves_at_the_step_it_came_in_and_says_how_to_resume(tmp_path, uninterrupted, signum):
    def send(step, state):
        if step == 27:
            os.kill(os.getpid(), signum)

    before = signal.getsignal(signum)
    with pytest.raises(Interrupted, match=rf"{signum.name} after step 27 of 60, saved in .*/27; run the same command"):
        run_toy(tmp_path, on_step=send)
    assert signal.getsignal(signum) is before
    assert latest_step(tmp_path) == 27
    assert_equals(tmp_path, run_toy(tmp_path), uninterrupted)


def test_a_run_that_keeps_the_best_says_which_it_is_when_it_stops(tmp_path):
    def send(step, state):
        if step == 13:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Interrupted, match=r"saved in .*/13; the best by train/loss max is of step 10; run the same"):
        run_toy(tmp_path, on_step=send, keep_best=("train/loss", "max"))


def test_a_judge_that_nobody_measures_is_named_at_the_first_save_which_is_kept(tmp_path, uninterrupted):
    with pytest.raises(UserError, match=r"measures no 'train/los'; choose one of .*train/loss"):
        run_toy(tmp_path, keep_best=("train/los", "min"))
    assert latest_step(tmp_path) == 10
    assert_equals(tmp_path, run_toy(tmp_path, keep_best=("train/loss", "min")), uninterrupted)


def test_a_step_that_counts_nothing_is_not_judged(tmp_path):
    def loss(*args):
        total, weight, metrics = toy_loss(*args)
        return total, weight, {**metrics, "rare": (0.0 * total, 0.0 * weight)}

    run_toy(tmp_path, loss_fn=loss, total_steps=10, keep_best=("train/rare", "min"))


def test_a_signal_too_late_for_one_run_stops_before_the_next(tmp_path):
    def send(step, state):
        if step == 4:
            os.kill(os.getpid(), signal.SIGTERM)

    done = []
    with pytest.raises(Interrupted, match="stopped by SIGTERM between two runs; run the same command again"):
        for name in stop_between(["first", "second"]):
            run_toy(tmp_path / name, total_steps=4, on_step=send)
            done.append(name)
    assert done == ["first"] and latest_step(tmp_path / "first") == 4
    for name in stop_between(["last"]):
        run_toy(tmp_path / name, total_steps=4, on_step=send)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_signal_while_a_run_is_set_up_stops_it_after_its_first_step(tmp_path):
    """Setting up is loading a target and reading data; nothing listens then but `stop_between`."""
    with pytest.raises(Interrupted) as caught:
        for name in stop_between(["only"]):
            os.kill(os.getpid(), signal.SIGTERM)
            run_toy(tmp_path / name)
    assert caught.value.step == 1


def test_processes_agree_to_stop_whatever_step_a_run_begins_at(monkeypatch):
    """jax's service names the question after the last one as the point to stop at, so questions are counted, not steps."""
    asked = []

    def reached(question: int) -> bool:
        asked.append(question)
        return len(asked) == 3

    monkeypatch.setattr("dstill_jax.sharding.hosts.count", lambda: 2)
    monkeypatch.setattr("jax.experimental.multihost_utils.reached_preemption_sync_point", reached)
    with pytest.raises(Interrupted, match="SIGTERM between two runs"):
        for steps in stop_between([2, 1, 1]):
            with StopSignals() as signals:
                found = [signals.agreed() for _ in range(steps)]
    assert asked == list(range(asked[0], asked[0] + 3))
    assert found == [signal.SIGTERM]  # in the last step of the second run: the third does not begin


def test_a_signal_during_compilation_stops_after_the_first_step(tmp_path, uninterrupted):
    def loss(*args):  # runs once, while the step is traced
        os.kill(os.getpid(), signal.SIGTERM)
        return toy_loss(*args)

    with pytest.raises(Interrupted) as caught:
        run_toy(tmp_path, loss_fn=loss)
    assert (caught.value.step, caught.value.signum) == (1, signal.SIGTERM)
    assert_equals(tmp_path, run_toy(tmp_path), uninterrupted)


@pytest.mark.slow
def test_a_signal_at_the_last_step_lets_the_run_finish(tmp_path, uninterrupted):
    def send(step, state):
        if step == 60:
            os.kill(os.getpid(), signal.SIGTERM)

    assert_equals(tmp_path, run_toy(tmp_path, on_step=send), uninterrupted)


@pytest.mark.slow
def test_a_script_stopped_by_a_signal_exits_cleanly(tmp_path):
    process = start_script(tmp_path, "delay_ms=20")
    wait_until((tmp_path / "checkpoints" / "10").exists, process)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "run the same command again to resume" in out, err
    assert str(latest_step(tmp_path)) in out


@pytest.mark.slow
def test_accumulated_micro_batches_resume_exactly(tmp_path):
    def stop(step, state):
        if step == 11:
            os.kill(os.getpid(), signal.SIGTERM)

    whole = run_toy(tmp_path / "whole", accumulate_steps=3, total_steps=20)
    with pytest.raises(Interrupted):
        run_toy(tmp_path / "parts", accumulate_steps=3, total_steps=20, on_step=stop)
    assert leaves(run_toy(tmp_path / "parts", accumulate_steps=3, total_steps=20)) == leaves(whole)


def test_a_finished_run_is_returned_without_another_step(tmp_path):
    state = run_toy(tmp_path, total_steps=3)

    def never(*_):
        raise AssertionError("trained again")

    assert leaves(run_toy(tmp_path, total_steps=3, loss_fn=never)) == leaves(state)


def test_the_average_saved_is_the_average_returned(tmp_path):
    state = run_toy(tmp_path, total_steps=4)
    assert leaves(load_params(tmp_path)) == leaves(state["ema"])
    assert leaves(load_params(tmp_path, "params")) == leaves(state["params"])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"seed": 4}, r"train\.seed is 3 there, 4 now"),
        ({"accumulate_steps": 2}, r"train\.accumulate_steps is 1 there, 2 now"),
        ({"total_steps": 9}, r"train\.total_steps is 4 there, 9 now"),
        ({"optimizer": OptimizerConfig(learning_rate=1.0, warmup_fraction=0.1)}, r"optimizer\.learning_rate is 0\.01"),
        ({"metadata": {"stage": "toy", "target_fingerprint": "other", "config": {}}}, "target_fingerprint is 'abc'"),
    ],
)
def test_a_run_folder_of_another_run_is_refused(tmp_path, changed, message):
    run_toy(tmp_path, total_steps=4)
    with pytest.raises(UserError, match=message):
        run_toy(tmp_path, **{"total_steps": 4, **changed})


def test_how_often_a_run_saves_may_change_when_it_resumes(tmp_path, uninterrupted):
    def stop(step, state):
        if step == 15:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Interrupted):
        run_toy(tmp_path, on_step=stop)
    assert_equals(tmp_path, run_toy(tmp_path, save_every=7, keep_last=3, prefetch=1), uninterrupted)
    assert sorted(int(p.name) for p in (tmp_path / "checkpoints").iterdir()) == [49, 56, 60]


class PoisonedData(ToyData):
    def batch(self, step):
        batch = super().batch(step)
        return {**batch, "poison": np.full(4, np.nan if step == 22 else 0.0, np.float32)}


def poisoned_loss(params, frozen, batch, key, step):
    total, weight, metrics = toy_loss(params, frozen, {n: batch[n] for n in ("tokens", "loss_mask")}, key, step)
    return total + batch["poison"].sum(), weight, metrics


@pytest.mark.parametrize("save_every", [20, 23])
def test_a_loss_that_is_not_a_number_stops_with_step_metric_and_checkpoint(tmp_path, save_every):
    last = r"the last good one is .*checkpoints/20" if save_every == 20 else "there is no checkpoint yet"
    with pytest.raises(NonFiniteError, match=rf"^step 23: train/loss is nan.*{last}") as caught:
        run_toy(tmp_path, data=PoisonedData(), loss_fn=poisoned_loss, save_every=save_every)
    assert isinstance(caught.value, FloatingPointError) and isinstance(caught.value, UserError)
    assert latest_step(tmp_path) == (20 if save_every == 20 else None)
    assert read_jsonl(tmp_path / "metrics.jsonl")[-1]["step"] == 23


def test_an_error_in_the_data_reaches_the_caller_and_ends_the_thread(tmp_path):
    class Broken(ToyData):
        def batch(self, step):
            if step == 4:
                raise UserError("row 17 of answers.jsonl is empty")
            return super().batch(step)

    with pytest.raises(UserError, match="row 17"):
        run_toy(tmp_path, data=Broken())
    assert not [t for t in threading.enumerate() if t.name == "prefetch"]


def test_batches_arrive_in_order_and_no_more_than_asked_are_prepared():
    asked = []

    class Counting:
        def batch(self, step):
            asked.append(step)
            return {"x": np.full(2, step)}

    with Prefetcher(Counting(), 3, 100, depth=2) as batches:
        assert [int(next(batches)["x"][0]) for _ in range(4)] == [3, 4, 5, 6]
        time.sleep(0.2)
        assert asked == list(range(3, 10))  # four taken, two waiting, one in hand


def test_metrics_of_a_callback_join_the_record_of_their_step(tmp_path):
    run_toy(tmp_path, total_steps=6, log_every=4, on_step=lambda n, s: {"eval/tau": 2.0 * n} if n == 3 else None)
    records = read_jsonl(tmp_path / "metrics.jsonl")
    assert [r["step"] for r in records] == [3, 4] and records[0]["eval/tau"] == 6.0


def test_the_record_holds_speed_without_compilation(tmp_path):
    run_toy(tmp_path, total_steps=6)
    records = read_jsonl(tmp_path / "metrics.jsonl")
    assert "perf/compile_seconds" in records[0] and "perf/steps_per_second" not in records[0]
    assert all(r["perf/steps_per_second"] > 0 and r["perf/tokens_per_second"] > 0 for r in records[3:])
    assert records[-1]["perf/steps_per_second"] > 1 / records[0]["perf/compile_seconds"]


def test_the_resolved_configuration_is_written(tmp_path):
    run_toy(tmp_path, total_steps=2)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["train"] == {"total_steps": 2, "accumulate_steps": 1, "seed": 3}
    assert written["optimizer"]["learning_rate"] == OPTIMIZER.learning_rate
    assert written["data_fingerprint"] == "toy" and written["stage"] == "toy"


@pytest.mark.slow
def test_a_profile_is_written_for_the_steps_asked_for(tmp_path):
    run_toy(tmp_path, total_steps=4, profile_steps=(2, 3))
    assert list((tmp_path / "profile").rglob("*.xplane.pb"))


FULL_DISK = """
import resource, sys
import toy_training
from dstill_jax.errors import UserError
resource.setrlimit(resource.RLIMIT_FSIZE, (600, 600))
try:
    toy_training.run_toy(__import__("pathlib").Path(sys.argv[1]), total_steps=4, save_every=1, log_every=4)
except UserError as e:
    print(e)
"""


def test_a_disk_without_room_is_one_clear_line(tmp_path):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", FULL_DISK, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout.startswith("cannot write checkpoint") and done.stdout.count("\n") == 1, done.stderr
