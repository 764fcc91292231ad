"""Several processes on one machine: how they find each other, that they do what one does, and how they end."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import hosts_case
import numpy as np
import pytest
from jax._src.clusters import cloud_tpu_cluster

from dstill_jax.errors import UserError
from dstill_jax.sharding import hosts
from dstill_jax.sharding.hosts import Launch, find_launch
from dstill_jax.training import latest_step

BOUND = 1e-5  # as in test_sharded_runs.py: sums over devices in another order
CLUSTERS = ("SLURM_", "TPU_", "MEGASCALE_", "OMPI_", "KUBERNETES_", "JAX_COORDINATOR", "PMI_")


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Of a machine that is in no cluster."""
    for name in list(os.environ):
        if name.startswith(CLUSTERS):
            monkeypatch.delenv(name)
    return monkeypatch


def set_all(environment: pytest.MonkeyPatch, **values: object) -> None:
    for name, value in values.items():
        environment.setenv(name, str(value))


def test_one_machine_is_one_process(environment: pytest.MonkeyPatch) -> None:
    assert find_launch() is None
    assert find_launch(processes=1) is None
    assert (hosts.index(), hosts.count(), hosts.first()) == (0, 1, True)
    assert hosts.exchange({"a": 1}) == [{"a": 1}]
    assert hosts.gathered({"w": 3}) == {"w": 3}


def test_flags_describe_a_job() -> None:
    assert find_launch("10.0.0.2:1234", 4, 3, 60) == Launch("10.0.0.2:1234", 4, 3, 60)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("h:1", 2, None), "give all three"),
        ((None, 2, None), "give all three"),
        (("h", 2, 0), "HOST:PORT"),
        (("h:1", 2, 2), r"process_id=2 must be in 0\.\.1"),
        (("h:1", 0, 0), "processes=0"),
        (("h:1", 2, 0, 0), "timeout=0"),
    ],
)
def test_wrong_flags_are_named(arguments: tuple, message: str) -> None:
    with pytest.raises(UserError, match=message):
        find_launch(*arguments)


def test_a_slurm_step_is_found_and_one_task_is_no_job(environment: pytest.MonkeyPatch) -> None:
    step = {"SLURM_JOB_ID": 4097, "SLURM_STEP_NODELIST": "n[03-05],m1", "SLURM_PROCID": 2, "SLURM_LOCALID": 0}
    set_all(environment, **step, SLURM_NTASKS=4)
    assert find_launch() == Launch("n03:61441", 4, 2)
    assert find_launch(processes=1) is None
    set_all(environment, SLURM_NTASKS=1)
    assert find_launch() is None


def test_two_slices_on_gke_are_found(environment: pytest.MonkeyPatch) -> None:
    environment.setattr(cloud_tpu_cluster, "running_in_cloud_tpu_vm", True)
    set_all(environment, TPU_SKIP_MDS_QUERY=1, TPU_WORKER_HOSTNAMES="a,b", TPU_WORKER_ID=1)
    set_all(environment, MEGASCALE_COORDINATOR_ADDRESS="localhost", MEGASCALE_NUM_SLICES=2, MEGASCALE_SLICE_ID=1)
    assert find_launch() == Launch("localhost:8482", 4, 3)


def test_a_cluster_that_cannot_be_read_is_an_error_with_a_way_out(environment: pytest.MonkeyPatch) -> None:
    step = {"SLURM_JOB_ID": 4097, "SLURM_STEP_NODELIST": "n1", "SLURM_PROCID": 0, "SLURM_LOCALID": 0}
    set_all(environment, **step, SLURM_NTASKS="2(x2)")
    with pytest.raises(UserError, match="processes=1 to run on this host alone"):
        find_launch()


def test_nobody_there_is_one_line_in_time(environment: pytest.MonkeyPatch) -> None:
    command = "train none.py --coordinator 127.0.0.1:1 --processes 2 --process-id 1 --join-timeout 2".split()
    done = subprocess.run(
        [sys.executable, "-m", "dstill_jax.cli", *command],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 2
    expected = "dstill: process 1 of 2 has waited 2 s to join its job; nothing answers at 127.0.0.1:1: start process 0"
    assert done.stderr.count("\n") == 1 and done.stderr.startswith(expected), done.stderr


LAST_WORDS = """
import os, sys
from dstill_jax.sharding import hosts
sentinel = hosts._start_sentinel(hosts.Launch("h:1", 4, 3))
if sys.argv[1] != "killed":
    hosts._dismiss(sentinel, sys.argv[1])
    hosts._dismiss(sentinel)
os._exit(9)
"""


@pytest.mark.parametrize(
    ("words", "expected"),
    [("done", ""), ("dstill: a\\n b", "dstill: a\\n b\n"), ("killed", "dstill: process 3 of 4 was ended from outside")],
)
def test_one_line_is_said_by_the_process_or_when_it_was_killed_for_it(words: str, expected: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LAST_WORDS, words],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.stderr.startswith(expected) and done.stderr.count("\n") == bool(expected)


def assert_alike(several: dict, one: dict) -> None:
    for name in ("rows", "data", "steps", "answers", "committed", "timed"):
        assert several[name] == one[name], name
    for name in ("stage1", "stage2"):
        np.testing.assert_allclose(several[name], one[name], rtol=BOUND, err_msg=name)
    np.testing.assert_allclose(several["weights"], one["weights"], rtol=20 * BOUND, atol=1e-6)


@pytest.mark.slow  # two minutes, of which nearly all compile
def test_two_processes_do_what_one_does(tmp_path: Path) -> None:
    """Data, both stages with a save every other step, export and evaluation."""
    alone = hosts_case.start("everything", tmp_path / "one", 1, 2, mesh={"fsdp": 2})
    (one,) = hosts_case.finish(alone, tmp_path / "one")
    root = tmp_path / "two"
    several = hosts_case.finish(hosts_case.start("everything", root, 2, 1, mesh={"fsdp": 2}), root)
    assert several[0] == several[1], "all processes return the same"
    assert one["steps"] == list(range(1, hosts_case.STEPS + 1))
    assert_alike(several[0], one)
    saved = {path.name for path in (root / "stage1" / "checkpoints").iterdir()}
    assert {"4", "6"} <= saved, "the last two, and perhaps an earlier best one"


@pytest.mark.slow
def test_four_processes_on_other_meshes_do_what_one_does(tmp_path: Path) -> None:
    """Two devices in each; and with rows that several processes need, since `tensor` reaches across them."""
    alone = hosts_case.start("everything", tmp_path / "one", 1, 1, mesh={})
    (one,) = hosts_case.finish(alone, tmp_path / "one")
    meshes = [(2, {"data": 2, "fsdp": 2, "tensor": 2}), (1, {"fsdp": 2, "tensor": 2}), (1, {"data": 4})]
    for number, (devices, mesh) in enumerate(meshes):
        root = tmp_path / f"four{number}"
        assert_alike(hosts_case.finish(hosts_case.start("everything", root, 4, devices, mesh=mesh), root)[0], one)


@pytest.mark.slow
def test_a_run_of_four_processes_goes_on_in_one_and_in_two(tmp_path: Path) -> None:
    """Stopped by SIGTERM to one process of four, gone on with in one process, stopped, and ended by two."""
    settings = {"steps": 24, "seconds": 0.2}
    whole = hosts_case.start("stage_one", tmp_path / "whole", 1, 1, mesh={}, **settings)
    (expected,) = hosts_case.finish(whole, tmp_path / "whole")
    root, reached = tmp_path / "moved", []
    for processes, mesh, after in ((4, {"data": 2, "fsdp": 2}, 3), (1, {}, 10)):
        started = hosts_case.start("stage_one", root, processes, 1, mesh=mesh, **settings)
        wait_for_step(root, after, started)
        started[-1].send_signal(signal.SIGTERM)
        stopped = hosts_case.finish(started, root)
        assert all(s == {"stopped": stopped[0]["stopped"], "signal": "SIGTERM"} for s in stopped)
        reached.append(stopped[0]["stopped"])
    assert reached == sorted(set(reached)) and reached[-1] < 24
    ended = hosts_case.finish(hosts_case.start("stage_one", root, 2, 1, mesh={"fsdp": 2}, **settings), root)[0]
    np.testing.assert_allclose(ended["weights"], expected["weights"], rtol=20 * BOUND, atol=1e-6)


CONFIG_FILE = """
from pathlib import Path
import hosts_case
CONFIG = hosts_case.run_configs(Path({root!r}), {mesh!r}, {steps})[0]
"""


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    """(config file, drafter) of `dstill train` in four processes: long enough to be stopped in its middle."""
    root = tmp_path_factory.mktemp("prepared")
    hosts_case.made_data(root)
    config = root / "run.py"
    config.write_text(CONFIG_FILE.format(root=str(root), mesh={"data": 2, "fsdp": 2}, steps=40))
    whole = root / "whole"
    (path, *others) = hosts_case.printed(hosts_case.start_train(config, whole, 4), whole)
    drafter = str(whole / "stage1" / "drafter")
    assert path.splitlines()[-1] == drafter and not any(drafter in text for text in others), "said once"
    return config, drafter_bytes(whole)


@pytest.mark.slow  # half a minute each, and as much for the run without interruption
@pytest.mark.parametrize("victim", [0, 2])
def test_a_killed_process_ends_the_others_with_a_line_and_the_run_goes_on(
    tmp_path: Path, uninterrupted: tuple[Path, bytes], victim: int
) -> None:
    config, expected = uninterrupted
    root = tmp_path / "killed"
    started = hosts_case.start_train(config, root, 4)
    wait_for_step(root, 5, started)
    started[victim].kill()
    killed = time.monotonic()
    others = sorted(set(range(4)) - {victim})
    for process in started:
        process.communicate(timeout=max(1, 60 - (time.monotonic() - killed)))
        assert process.returncode != 0
    # Of a process that jax ends, a shell has the last word, a moment later.
    while not all(said := [own_lines(root, index) for index in others]):
        assert time.monotonic() - killed < 60, said
        time.sleep(0.05)
    print(f"process {victim} of 4 killed: the others have ended, and said so, after {time.monotonic() - killed:.1f} s")
    assert 5 <= read_steps(root) < 40
    for lines in said:
        assert len(lines) == 1 and "run the same command on all hosts" in lines[0], lines
        # That process 0 is gone is noticed by jax or by us, whoever is first.
        assert ("process 2 has not answered" if victim else "process 0") in lines[0]
    hosts_case.printed(hosts_case.start_train(config, root, 4), root)
    assert drafter_bytes(root) == expected


@pytest.mark.slow
def test_sigterm_to_one_process_saves_and_ends_all_with_0_and_one_line(
    tmp_path: Path, uninterrupted: tuple[Path, bytes]
) -> None:
    config, expected = uninterrupted
    root = tmp_path / "stopped"
    started = hosts_case.start_train(config, root, 4)
    wait_for_step(root, 5, started)
    started[3].send_signal(signal.SIGTERM)
    hosts_case.printed(started, root)
    reached = latest_step(root / "stage1")
    assert reached is not None and 5 <= reached < 40
    said = [Path(f"{root}.{index}.log").read_text().count("run the same command again to resume") for index in range(4)]
    assert said == [1, 0, 0, 0]
    assert f"stopped by SIGTERM after step {reached} of 40" in Path(f"{root}.0.log").read_text()
    hosts_case.printed(hosts_case.start_train(config, root, 4), root)
    assert drafter_bytes(root) == expected


@pytest.mark.slow
def test_signals_at_random_moments_to_one_process_of_four_change_no_bit(tmp_path: Path) -> None:
    """Six of them, from the start of the processes on: in compilation, in steps, in saves (every other step saves)."""
    settings = {"mesh": {"fsdp": 4}, "steps": 40, "seconds": 0.1}
    whole = hosts_case.start("stage_one", tmp_path / "whole", 4, 1, **settings)
    hosts_case.finish(whole, tmp_path / "whole")
    root, random_moments = tmp_path / "drilled", random.Random(5)
    for number in range(6):
        started = hosts_case.start("stage_one", root, 4, 1, **settings)
        if number % 3:
            wait_for_step(root, read_steps(root) + 1, started)
        time.sleep(random_moments.random() * 3)
        started[random_moments.randrange(4)].send_signal(random_moments.choice((signal.SIGKILL, signal.SIGTERM)))
        for process in started:
            # Who waits for one that was killed before it joined does so for a minute.
            process.communicate(timeout=180)
    hosts_case.finish(hosts_case.start("stage_one", root, 4, 1, **settings), root)
    assert drafter_bytes(root) == drafter_bytes(tmp_path / "whole")


def drafter_bytes(root: Path) -> bytes:
    return (root / "stage1" / "drafter" / "model.safetensors").read_bytes()


def own_lines(root: Path, index: int) -> list[str]:
    """What `dstill` itself, not jax, has said on a process's standard error."""
    return [line for line in Path(f"{root}.{index}.log").read_text().splitlines() if line.startswith("dstill: ")]


def read_steps(root: Path) -> int:
    metrics = root / "stage1" / "metrics.jsonl"
    return len(metrics.read_bytes().splitlines()) if metrics.exists() else 0


def wait_for_step(root: Path, step: int, started: list[subprocess.Popen]) -> None:
    while read_steps(root) < step:
        assert all(process.poll() is None for process in started), Path(f"{root}.0.log").read_text()[-4000:]
        time.sleep(0.05)
