"""Several processes that work on one job, one a host: how they find each other, agree, and end together.

Used by the command line (`together`) and by whatever writes files or splits work (`index`, `count`, `first`,
`exchange`). In a program of one process nothing here starts, waits or costs anything.

While a job runs, every process tells the coordinator once a second that it lives. One that fails, or falls silent, ends
all the others within `SILENCE` seconds and a few more, each with one line on standard error and an exit status that is
not 0: a pod never hangs in a collective whose partner is gone.
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from dstill_jax.errors import UserError

SILENCE = 30
"""Beats (one a second) that a process may miss before the others give it up."""

_ADVICE = "run the same command on all hosts again to continue"
_FOREVER_MS = 20 * 24 * 3600 * 1000  # whoever is waited for and dies is noticed by the watch, not by this


@dataclass(frozen=True)
class Launch:
    """Where a process stands in its job."""

    coordinator: str  # host:port of process 0, reachable from all others
    processes: int
    process_id: int
    timeout: int = 300  # seconds to wait for the others at the start

    def __post_init__(self) -> None:
        host, _, port = self.coordinator.rpartition(":")
        if not host or not port.isdecimal():
            raise UserError(f"coordinator={self.coordinator!r} must be HOST:PORT of process 0")
        if self.processes < 1:
            raise UserError(f"processes={self.processes} must be at least 1")
        if not 0 <= self.process_id < self.processes:
            raise UserError(f"process_id={self.process_id} must be in 0..{self.processes - 1}")
        if self.timeout < 1:
            raise UserError(f"timeout={self.timeout} must be at least 1 second")


def find_launch(
    coordinator: str | None = None, processes: int | None = None, process_id: int | None = None, timeout: int = 300
) -> Launch | None:
    """The job that the arguments describe or, without any, the environment; None for a program of one process.

    The environment is what jax knows: TPU VMs and multislice (metadata server), GKE (TPU_WORKER_*, JobSet), Slurm and
    MPI (variables of each task). `processes=1` keeps it from being asked.

    Raises UserError when only a part is given, or a value is out of range.
    """
    if processes == 1:
        return None
    given = (coordinator, processes, process_id)
    if any(value is not None for value in given):
        if any(value is None for value in given):
            raise UserError("coordinator, processes and process_id belong together: give all three, or none")
        return Launch(coordinator, processes, process_id, timeout)  # type: ignore[arg-type]
    from jax._src.clusters import ClusterEnv  # `jax.distributed.initialize` asks the same, but cannot be asked first

    try:
        found = ClusterEnv.auto_detect_unset_distributed_params(None, None, None, None, None, timeout)
    except Exception as error:  # a metadata server that does not answer, a variable that does not parse
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"this looks like a cluster, but its description cannot be read ({reason}); give coordinator, processes and"
            " process_id, or processes=1 to run on this host alone"
        ) from error
    if found[1] is None or found[1] == 1:
        return None
    return Launch(found[0], found[1], found[2], timeout)  # type: ignore[arg-type]


def index() -> int:
    """This process's place in the job; 0 in a program of one process. Touches no device then."""
    return jax.process_index() if jax.distributed.is_initialized() else 0


def count() -> int:
    """Processes of the job. Touches no device in a program of one process."""
    return jax.process_count() if jax.distributed.is_initialized() else 1


def first() -> bool:
    """Whether this process is the one that writes what is written once."""
    return index() == 0


_exchanges = 0


def exchange(value: Any = None) -> list[Any]:
    """Everybody's JSON value, in the order of the processes. All must call it, equally often and in the same order.

    It goes through the coordinator, not through the devices, and returns when the last process has called: it is
    the barrier of this module.
    """
    if count() == 1:
        return [value]
    global _exchanges
    _exchanges += 1
    client, name = _client(), f"dstill/exchange/{_exchanges}"
    client.key_value_set(f"{name}/{index()}", json.dumps(value))
    client.wait_at_barrier(name, _FOREVER_MS)
    found = {int(key.rsplit("/", 1)[1]): json.loads(text) for key, text in client.key_value_dir_get(f"{name}/")}
    return [found[i] for i in range(count())]


def gathered(tree: Any) -> Any:
    """Arrays that are spread over the devices of several processes, whole: on the first's host; elsewhere None for each.

    One array at a time is whole on every device. In a program of one process: the tree itself. All must call it.
    """
    if count() == 1:
        return tree

    def whole(x: jax.Array) -> np.ndarray | None:
        everywhere = jax.sharding.NamedSharding(x.sharding.mesh, jax.sharding.PartitionSpec())
        copy = jax.jit(lambda x: x, out_shardings=everywhere)(x)
        return np.asarray(copy) if first() else None

    return jax.tree.map(whole, tree)


def together(launch: Launch, work: Callable[[], int], *, preemption: bool = False) -> int:
    """Joins the job, does `work` (which returns an exit status) and leaves when all have done theirs.

    With `preemption` SIGTERM only sets jax's preemption flag, which `work` must look at. When `work` fails here or
    elsewhere, or the others are not there in time, this function does not return: the process ends with a line on
    standard error, since partners may wait in a collective for ever.
    """
    jax.config.update("jax_enable_preemption_service", preemption)
    sentinel = _start_sentinel(launch)
    _join(launch, sentinel)
    watch = _Watch(launch, sentinel)
    try:
        status = work()
    except BaseException as error:
        if isinstance(
            error, jax.errors.JaxRuntimeError
        ):  # likely a partner is gone: the watch finds out who, and ends us
            time.sleep(SILENCE + 10)
        sys.excepthook(type(error), error, error.__traceback__)
        status = 1
    if status:
        watch.leave(status)
    exchange()
    watch.stop()
    jax.distributed.shutdown()
    _dismiss(sentinel)
    return status


def _join(launch: Launch, sentinel: subprocess.Popen) -> None:
    # A timer of our own: jax aborts the process when its time-out is over, and says nothing that helps.
    timer = threading.Timer(launch.timeout, _nobody_came, (launch, sentinel))
    timer.daemon = True
    timer.start()
    jax.distributed.initialize(
        launch.coordinator,
        launch.processes,
        launch.process_id,
        cluster_detection_method="deactivate",
        initialization_timeout=launch.timeout + 60,
    )
    timer.cancel()


def _nobody_came(launch: Launch, sentinel: subprocess.Popen) -> None:
    host, _, port = launch.coordinator.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), 5).close()
        cause = f"only some of the {launch.processes} processes have come to {launch.coordinator}: start all of them"
    except OSError:
        cause = f"nothing answers at {launch.coordinator}: start process 0 there, and open its port to the others"
    text = f"process {launch.process_id} of {launch.processes} has waited {launch.timeout} s to join its job; {cause}"
    print(f"dstill: {text}", file=sys.stderr, flush=True)
    _dismiss(sentinel)
    os._exit(2)


def _client() -> Any:
    from jax._src import distributed  # the coordinator's key-value store has no public name; orbax uses it like this

    return distributed.global_state.client


class _Watch:
    """The thread that tells the others of this process, and this process of the others."""

    def __init__(self, launch: Launch, sentinel: subprocess.Popen) -> None:
        self._launch, self._sentinel, self._client = launch, sentinel, _client()
        self._stopping, self._ending = threading.Event(), threading.Lock()
        self._thread = threading.Thread(target=self._work, name="watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join()

    def leave(self, status: int) -> None:
        """Ends this process after it has said why; tells the others."""
        with self._ending:
            self._tell(f"process {self._launch.process_id} ({socket.gethostname()}) stopped with exit status {status}")
            self._end(status)

    def _work(self) -> None:
        me, beats = self._launch.process_id, 0
        seen: dict[str, tuple[str, int]] = {}
        while not self._stopping.wait(1):
            beats += 1
            try:
                self._client.key_value_set(f"dstill/beat/{me}", str(beats), allow_overwrite=True)
                failed = dict(self._client.key_value_dir_get("dstill/failed/"))
                if not failed and me == 0:
                    failed = self._silent(seen)
            except jax.errors.JaxRuntimeError:
                failed = {"": "process 0, the coordinator, cannot be reached"}
            if failed and not self._stopping.is_set():
                self._give_up(next(iter(failed.values())))

    def _silent(self, seen: dict[str, tuple[str, int]]) -> dict[str, str]:
        """Whose beat has not changed for long. Counted in beats of this process, so that a pause of all is none."""
        for key, beat in self._client.key_value_dir_get("dstill/beat/"):
            before, missed = seen.get(key, ("", 0))
            seen[key] = (beat, missed + 1 if beat == before else 0)
            if seen[key][1] > SILENCE:
                text = f"process {key.rsplit('/', 1)[1]} has not answered for {SILENCE} s"
                self._tell(text)
                return {key: text}
        return {}

    def _tell(self, text: str) -> None:
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # the coordinator is gone, which the others see, too
            self._client.key_value_set(f"dstill/failed/{self._launch.process_id}", text, allow_overwrite=True)

    def _give_up(self, reason: str) -> None:
        with self._ending:
            # Said by the shell, which then has nothing more to say: jax may end this process at the same moment.
            _dismiss(self._sentinel, f"dstill: {reason}; this process ends, too; {_ADVICE}")
            self._end(1)

    def _end(self, status: int) -> None:
        if self._launch.process_id == 0:  # what the coordinator knows goes with it: let the others read it first
            time.sleep(4)
        _dismiss(self._sentinel)
        sys.stdout.flush()
        os._exit(status)


def _start_sentinel(launch: Launch) -> subprocess.Popen:
    """A shell that has the last word when this process is killed, or ended by jax because process 0 is gone."""
    text = (
        f"dstill: process {launch.process_id} of {launch.processes} was ended from outside (killed, out of memory, or"
        f" process 0 is gone: see the lines above); {_ADVICE}"
    )
    script = 'read -r words || words="$0"; [ "$words" = done ] || printf "%s\\n" "$words" >&2'
    command = ["sh", "-c", script, text]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True)


def _dismiss(sentinel: subprocess.Popen, words: str = "done") -> None:
    """Ends the shell, which first says `words`, one line, unless they are "done". Once is enough; more does no harm."""
    assert sentinel.stdin is not None
    with contextlib.suppress(ValueError, BrokenPipeError):  # it was dismissed before
        sentinel.stdin.write(f"{words}\n".encode())
        sentinel.stdin.close()
    sentinel.wait()
