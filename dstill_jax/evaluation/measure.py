"""Runs decoding methods over prompts and records what the tables need. Called by `dstill eval` and the demo.

What is accepted does not depend on batch mates; time does. Prompts to be timed are decoded one at a time, all arms
interleaved prompt by prompt in one process, so that a machine that gets slower gets slower for all of them; the others
are decoded in batches.
"""

import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import jax

from dstill_jax.decoding.sampling import SamplingConfig
from dstill_jax.decoding.session import Completion, Request, Session
from dstill_jax.errors import UserError
from dstill_jax.evaluation.environment import current_commit, digest_tokens, hash_prompts, installed_versions
from dstill_jax.evaluation.results import EvaluationMetadata, EvaluationResult, MethodResult
from dstill_jax.evaluation.stats import require_prompts
from dstill_jax.models.drafter import Drafter
from dstill_jax.models.target import Target
from dstill_jax.sharding import hosts
from dstill_jax.weights.folders import readable_name


@dataclass(frozen=True)
class Arm:
    """One line of the table: a drafter (or none) with a method and its options."""

    name: str
    method: str
    drafter: Drafter | None = None
    drafter_label: str = ""  # shared by arms that differ in settings only
    options: Mapping[str, Any] = field(default_factory=dict)
    description: str = ""
    training_steps: int | None = None
    notes: str = ""


@dataclass(frozen=True)
class EvaluationConfig:
    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0
    stop_token_ids: tuple[int, ...] | None = None  # None: the target's own
    batch_size: int = 16  # prompts decoded at once where nothing is timed
    timed_prompts: int | None = None  # the first prompts, decoded one at a time and timed; None: all

    def __post_init__(self) -> None:
        if self.max_new_tokens < 2:
            raise UserError(
                f"max_new_tokens={self.max_new_tokens} leaves nothing to measure: the first token comes from the prefill;"
                " give at least 2"
            )


def measure(
    target: Target,
    arms: Sequence[Arm],
    prompts: Sequence[Sequence[int]],
    config: EvaluationConfig,
    *,
    prompts_name: str,
    thinking: str = "not applicable",
    command: str = "",
    report: Callable[[int, int], None] | None = None,
) -> tuple[EvaluationResult, dict[str, list[Completion]]]:
    """Decodes every prompt with every arm; returns the results and, by arm, the completions in prompt order.

    Compilation and a warm-up round come before the timing. `report` is told (done, total) decodes. In a job of several
    processes each decodes its share of the prompts, and while the first times the others rest; all return the same.

    Raises:
      UserError: fewer than two prompts, two arms of one name, or an arm whose options its method does not read.
    """
    require_prompts(len(prompts))
    if len({arm.name for arm in arms}) != len(arms):
        raise UserError(f"arms need names of their own, got {[arm.name for arm in arms]}")
    timed = len(prompts) if config.timed_prompts is None else min(config.timed_prompts, len(prompts))
    requests = [Request(i, tokens, config.seed) for i, tokens in enumerate(prompts)]
    rest = requests[timed:]
    share = rest[hosts.index() :: hosts.count()]
    steps = _Steps(len(arms) * (len(share) + timed), report if hosts.first() else None)
    sessions = [_session(target, arm, prompts, config, 1) for arm in arms]  # all of them are sound, before any decodes
    batched = [
        _decode_all(_session(target, arm, prompts, config, config.batch_size), share, steps) if rest else []
        for arm in arms
    ]
    alone = _decode_alone(sessions, requests[:timed], steps)
    completions = [[c for c, _ in mine] + others for mine, others in zip(alone, batched, strict=True)]
    prompts_hash = hash_prompts(prompts)
    results = tuple(
        _result(arm, session, prompts_hash, done, [s for _, s in mine] or None, config)
        for arm, session, done, mine in zip(arms, sessions, completions, alone, strict=True)
    )
    metadata = EvaluationMetadata(
        target=readable_name(target.source),
        target_fingerprint=target.fingerprint,
        prompts=prompts_name,
        prompts_hash=prompts_hash,
        prompt_count=len(prompts),
        thinking=thinking,
        device=device_name(),
        dtype=str(target.dtype),
        max_new_tokens=config.max_new_tokens,
        batch_size=config.batch_size if rest else 1,
        seeds={"sampling": config.seed},
        versions=installed_versions(),
        commit=current_commit(),
        command=command,
        created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    )
    by_arm = {arm.name: done for arm, done in zip(arms, completions, strict=True)}
    return EvaluationResult(metadata, results), by_arm


def device_name() -> str:
    """What decodes: one accelerator, however many the job has, or the processor and its cores."""
    device = jax.devices()[0]
    if device.platform != "cpu":
        return f"1 x {device.device_kind}"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"CPU, {cores} cores ({_processor()})"


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


class _Steps:
    """Counts decodes and tells the caller."""

    def __init__(self, total: int, report: Callable[[int, int], None] | None) -> None:
        self._total, self._done, self._report = total, 0, report

    def done(self) -> None:
        self._done += 1
        if self._report is not None:
            self._report(self._done, self._total)


def _session(
    target: Target, arm: Arm, prompts: Sequence[Sequence[int]], config: EvaluationConfig, batch_size: int
) -> Session:
    return Session(
        target,
        drafter=arm.drafter,
        method=arm.method,
        batch_size=min(batch_size, len(prompts)),
        max_prompt_tokens=max(map(len, prompts)),
        max_new_tokens=config.max_new_tokens,
        sampling=SamplingConfig(config.temperature, config.top_k, config.top_p),
        stop_token_ids=config.stop_token_ids,
        **arm.options,
    )


def _decode_all(session: Session, requests: Sequence[Request], steps: _Steps) -> list[Completion]:
    """This process's requests, in batches; completions of all processes' requests by their number."""
    done = []
    for completion in session.run(requests, rounds_per_call=16):
        done.append(completion)
        steps.done()
    if hosts.count() > 1:
        shares = hosts.exchange([asdict(completion) for completion in done])
        done = [Completion(**values) for share in shares for values in share]
    return sorted(done, key=lambda completion: completion.id)


def _decode_alone(
    sessions: Sequence[Session], requests: Sequence[Request], steps: _Steps
) -> list[list[tuple[Completion, float]]]:
    """Completion and decode seconds of each request, by session; the first process decodes and tells the others."""
    found: list[list[tuple[Completion, float]]] = [[] for _ in sessions]
    if hosts.first():
        for session in sessions if requests else ():
            _decode(session, requests[0], rounds=1)  # compiles; the number of rounds is not part of the program
        for request in requests:
            for mine, session in zip(found, sessions, strict=True):
                mine.append(_decode(session, request))
                steps.done()
    if hosts.count() == 1:
        return found
    told = hosts.exchange([[(asdict(c), seconds) for c, seconds in mine] for mine in found])[0]
    return [[(Completion(**values), seconds) for values, seconds in mine] for mine in told]


def _decode(session: Session, request: Request, rounds: int | None = None) -> tuple[Completion, float]:
    """One prompt alone, and its decode seconds: after the prefill, all rounds (or the first few) in one call."""
    session.check(request)
    state = session.start(session.idle(), [0], [request], 1)
    began = time.perf_counter()
    state = session.advance(state, rounds or session.max_new_tokens)
    seconds = time.perf_counter() - began
    return session.completion(state, 0, request), seconds


def _result(
    arm: Arm,
    session: Session,
    prompts_hash: str,
    done: list[Completion],
    seconds: list[float] | None,
    config: EvaluationConfig,
) -> MethodResult:
    if (drafting := sum(bool(c.acceptance_lengths) for c in done)) < 2:
        raise UserError(
            f"{drafting} of {len(done)} responses of arm {arm.name!r} go past their first token, which comes from the"
            " prefill; tau over prompts needs two: give other prompts"
        )
    proposer = session.spec.proposer
    return MethodResult(
        name=arm.name,
        method=arm.method,
        drafted_length=proposer.draft_tokens,
        prompts_hash=prompts_hash,
        tokens=tuple(len(c.tokens) for c in done),
        acceptance_lengths=tuple(tuple(c.acceptance_lengths) for c in done),
        seconds=None if seconds is None else tuple(seconds),
        output_digests=tuple(digest_tokens(c.tokens) for c in done),
        description=arm.description,
        passes=getattr(proposer, "passes", 0),
        temperature=config.temperature,
        top_k=config.top_k,
        top_p=config.top_p,
        training_steps=arm.training_steps,
        drafter=arm.drafter_label,
        notes=arm.notes,
    )
