"""Worker processes on disjoint cores. Called by `generate`.

Two single-thread processes on two cores answer about 1.5 times as many tokens a second as one process with both: a
decoding step of a small model is too short to be worth splitting.
"""

import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import dstill_jax
from dstill_jax.data.worker import Job
from dstill_jax.errors import UserError

WORKER_COMMAND = (sys.executable, "-m", "dstill_jax.data.worker")


def split_cores(workers: int) -> list[tuple[int, ...]]:
    """The cores of this process in `workers` disjoint groups; with more workers than cores, some share a core.

    Groups are empty where the system cannot pin processes.
    """
    if not hasattr(os, "sched_getaffinity"):
        return [()] * workers
    cores = sorted(os.sched_getaffinity(0))
    if workers > len(cores):
        return [(cores[k % len(cores)],) for k in range(workers)]
    bounds = [k * len(cores) // workers for k in range(workers + 1)]
    return [tuple(cores[a:b]) for a, b in zip(bounds[:-1], bounds[1:], strict=True)]


def run_workers(
    jobs: Sequence[Job], folder: Path, report: Callable[[dict[str, Any]], None], command: Sequence[str] = WORKER_COMMAND
) -> None:
    """Runs one process a job until all have finished. `report` is called in this thread with what they print.

    Raises:
        UserError: a worker refused its input, was killed or crashed. The others are stopped; their answers are kept.
    """
    messages: queue.Queue[tuple[int, dict[str, Any] | None]] = queue.Queue()
    processes: list[subprocess.Popen] = []
    listeners: list[threading.Thread] = []
    errors: dict[int, str] = {}
    try:
        for k, job in enumerate(jobs):
            processes.append(_start(k, job, folder, command))
            listeners.append(threading.Thread(target=_listen, args=(k, processes[k], messages), daemon=True))
            listeners[k].start()
        running = len(jobs)
        while running:
            k, message = messages.get()
            if message is None:
                running -= 1
                if status := processes[k].wait():
                    raise UserError(_failure(k, status, errors.get(k), folder))
            elif "error" in message:
                errors[k] = message["error"]
            else:
                report(message)
    finally:
        for process in processes:
            _end(process)
        for listener in listeners:
            listener.join()
        for process in processes:
            if process.stdout:
                process.stdout.close()


def _start(k: int, job: Job, folder: Path, command: Sequence[str]) -> subprocess.Popen:
    path = folder / f"job-{k}.json"
    path.write_text(json.dumps(asdict(job)), encoding="utf-8")
    package_root = str(Path(dstill_jax.__file__).parent.parent)
    known = os.environ.get("PYTHONPATH")
    environment = {**os.environ, "PYTHONPATH": package_root + (os.pathsep + known if known else "")}
    with open(folder / f"worker-{k}.log", "wb") as log:
        return subprocess.Popen(
            [*command, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=environment
        )  # fmt: skip


def _end(process: subprocess.Popen) -> None:
    if process.stdin:
        process.stdin.close()  # a worker leaves when this ends
    try:
        process.wait(timeout=10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _listen(k: int, process: subprocess.Popen, messages: queue.Queue) -> None:
    assert process.stdout is not None, "workers are started with a pipe"
    for line in process.stdout:
        try:
            message = json.loads(line)
        except ValueError:
            continue  # something a library printed
        if isinstance(message, dict):
            messages.put((k, message))
    messages.put((k, None))


def _failure(k: int, status: int, error: str | None, folder: Path) -> str:
    if error:
        return error
    log = folder / f"worker-{k}.log"
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    cause = (
        f"was killed by signal {-status} (out of memory?)"
        if status < 0
        else f"failed: {lines[-1] if lines else status}"
    )
    advice = (
        "run the same command to continue (finished answers are kept); if memory was short, lower batch_size or workers"
    )
    return f"worker {k} {cause}; see {log}; {advice}"
