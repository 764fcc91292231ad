"""Runs decoding methods over prompts, one prompt at a time, and records what the tables need.

Called by `dstill eval` and the demo. Batch 1: prompts are the unit over which intervals are drawn, so each has its own
rounds and its own decode seconds. All arms run in one process, interleaved prompt by prompt, so that a machine that
gets slower gets slower for all of them.
"""

import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
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

    Compilation and one warm-up prompt come first and are not timed. `report` is told (done, total) decodes.

    Raises:
      UserError: fewer than two prompts, two arms of one name, or an arm whose options its method does not read.
    """
    require_prompts(len(prompts))
    if len({arm.name for arm in arms}) != len(arms):
        raise UserError(f"arms need names of their own, got {[arm.name for arm in arms]}")
    sessions = [_session(target, arm, prompts, config) for arm in arms]
    for session in sessions:
        _decode(session, Request(len(prompts), prompts[0], config.seed))
    completions: list[list[Completion]] = [[] for _ in arms]
    seconds: list[list[float]] = [[] for _ in arms]
    total = len(arms) * len(prompts)
    for i, tokens in enumerate(prompts):
        for k, session in enumerate(sessions):
            completion, took = _decode(session, Request(i, tokens, config.seed))
            completions[k].append(completion)
            seconds[k].append(took)
            if report is not None:
                report(i * len(arms) + k + 1, total)
    prompts_hash = hash_prompts(prompts)
    results = tuple(
        _result(arm, session, prompts_hash, done, took, config.temperature)
        for arm, session, done, took in zip(arms, sessions, completions, seconds, strict=True)
    )
    metadata = EvaluationMetadata(
        target=target.source.rstrip("/").rsplit("/", 1)[-1],
        target_fingerprint=target.fingerprint,
        prompts=prompts_name,
        prompts_hash=prompts_hash,
        prompt_count=len(prompts),
        thinking=thinking,
        device=device_name(),
        dtype=str(target.dtype),
        max_new_tokens=config.max_new_tokens,
        seeds={"sampling": config.seed},
        versions=installed_versions(),
        commit=current_commit(),
        command=command,
        created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    )
    by_arm = {arm.name: done for arm, done in zip(arms, completions, strict=True)}
    return EvaluationResult(metadata, results), by_arm


def device_name() -> str:
    """The accelerator, or the processor and its cores."""
    device = jax.devices()[0]
    if device.platform != "cpu":
        return f"{jax.device_count()} x {device.device_kind}"
    import os

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


def _session(target: Target, arm: Arm, prompts: Sequence[Sequence[int]], config: EvaluationConfig) -> Session:
    return Session(
        target,
        drafter=arm.drafter,
        method=arm.method,
        batch_size=1,
        max_prompt_tokens=max(map(len, prompts)),
        max_new_tokens=config.max_new_tokens,
        sampling=SamplingConfig(config.temperature, config.top_k, config.top_p),
        stop_token_ids=config.stop_token_ids,
        **arm.options,
    )


def _decode(session: Session, request: Request) -> tuple[Completion, float]:
    """One prompt: prefill, then all rounds in one call on the device; the seconds are of the rounds."""
    session.check(request)
    state = session.start(session.idle(), [0], [request], 1)
    began = time.perf_counter()
    state = session.advance(state, session.max_new_tokens)
    took = time.perf_counter() - began
    return session.completion(state, 0, request), took


def _result(
    arm: Arm, session: Session, prompts_hash: str, done: list[Completion], seconds: list[float], temperature: float
) -> MethodResult:
    proposer = session.spec.proposer
    return MethodResult(
        name=arm.name,
        method=arm.method,
        drafted_length=proposer.draft_tokens,
        prompts_hash=prompts_hash,
        tokens=tuple(len(c.tokens) for c in done),
        acceptance_lengths=tuple(tuple(c.acceptance_lengths) for c in done),
        seconds=tuple(seconds),
        output_digests=tuple(digest_tokens(c.tokens) for c in done),
        description=arm.description,
        passes=getattr(proposer, "passes", 0),
        temperature=temperature,
        training_steps=arm.training_steps,
        drafter=arm.drafter_label,
        notes=arm.notes,
    )
