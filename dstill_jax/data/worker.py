"""One process that answers its share of the prompts: `python -m dstill_jax.data.worker JOB.json`.

Started by `pool`. It takes its cores before JAX starts its threads, writes finished answers to a shard of its own,
reports on standard output (one JSON object a line) and leaves as soon as its parent is gone. `run_share` is also what
a single-process run calls.
"""

import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dstill_jax.allocator import keep_freed_memory
from dstill_jax.data.backend import Backend, GenerationRequest, TargetBackend
from dstill_jax.data.features import feature_width
from dstill_jax.data.prepare_config import PrepareConfig, config_from_dict
from dstill_jax.data.shards import Answer, ShardWriter
from dstill_jax.errors import UserError

Report = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Job:
    """A worker's share. `requests` is a JSONL file of GenerationRequests; `config` a PrepareConfig as plain values."""

    config: dict[str, Any]
    requests: str
    folder: str  # for the shard
    longest_prompt: int  # over all shares
    shared_prefix: list[int]  # of all prompts of all shares
    stop_token_ids: tuple[int, ...]
    cores: tuple[int, ...] = ()  # empty: leave the process as it is


def run_share(job: Job, config: PrepareConfig, backend: Backend, report: Report) -> None:
    """Answers every request of a job. Reports {"ready": True} once, then {"rows": 1, "tokens": n} for each answer."""
    backend.load()
    facts = backend.facts
    width = feature_width(len(config.tap_ids), facts.hidden_size) if config.record_features else 0
    requests = {request.id: request for request in read_requests(Path(job.requests))}
    report({"ready": True})
    with ShardWriter(Path(job.folder), width) as shard:
        completions = backend.answer(
            list(requests.values()),
            longest_prompt=job.longest_prompt,
            shared_prefix=job.shared_prefix,
            stop_token_ids=job.stop_token_ids,
        )
        for completion in completions:
            prompt = requests.pop(completion.id).tokens
            new = [int(token) for token in completion.tokens]
            if not 1 <= len(new) <= config.max_new_tokens:
                raise ValueError(f"row {completion.id}: {len(new)} new tokens, expected 1..{config.max_new_tokens}")
            answer = Answer(completion.id, len(prompt), [*prompt, *new], completion.finish_reason)
            shard.add(answer, completion.features if width else None)
            report({"rows": 1, "tokens": len(new)})
    if requests:
        raise RuntimeError(f"the decoder finished without answering rows {sorted(requests)[:5]}")


def write_requests(path: Path, requests: list[GenerationRequest]) -> None:
    """One JSON object a line."""
    with open(path, "w", encoding="utf-8") as file:
        for request in requests:
            file.write(json.dumps(asdict(request)) + "\n")


def read_requests(path: Path) -> Iterator[GenerationRequest]:
    """The inverse of `write_requests`."""
    with open(path, encoding="utf-8") as file:
        for line in file:
            yield GenerationRequest(**json.loads(line))


def main(arguments: list[str], make_backend: Callable[[PrepareConfig], Backend] = TargetBackend) -> int:
    """Runs one job file. Returns the exit status: 0, or 2 after a UserError."""
    with open(arguments[0], encoding="utf-8") as file:
        job = Job(**json.load(file))
    if job.cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, job.cores)  # before JAX counts the cores
    keep_freed_memory()
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    try:
        config = config_from_dict(job.config)
        run_share(job, config, make_backend(config), _print_report)
    except UserError as error:
        _print_report({"error": str(error)})
        return 2
    except OSError as error:
        _print_report({"error": describe_os_error(error)})
        return 2
    return 0


def describe_os_error(error: OSError) -> str:
    """A failed write in one sentence."""
    where = f" at {error.filename}" if error.filename else ""
    return (
        f"{error.strerror or error}{where}; finished answers are kept: mend it (disk full?), then run the same command"
    )


def _print_report(report: dict[str, Any]) -> None:
    print(json.dumps(report), flush=True)


def _leave_with_parent() -> None:
    """The parent holds the other end of standard input, which ends when the parent closes it or dies in any way."""
    while os.read(0, 1):  # not sys.stdin: its lock, held by this thread, would abort the interpreter's exit
        pass
    os._exit(3)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
