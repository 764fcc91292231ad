"""The engine of `dstill prepare`: prompts -> chat template -> answers by the target itself -> a dataset.

Called by the command line and the demo. The dataset is a function of the inputs in its manifest alone: not of the
number of workers or hosts, nor of how often the work was stopped. In a job of several processes each answers its share
of the prompts, in a folder that all of them see, and the first puts the dataset together. The folder of a run:

    manifest.json    every input that decides the content
    work/            answers so far (`shards`); removed at the end
    dataset/         the result (`dataset`); appears all at once
    summary.json     what the last run did, with times
"""

import contextlib
import dataclasses
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dstill_jax.data import features as features_lib
from dstill_jax.data.backend import Backend, GenerationRequest, TargetBackend, TargetFacts
from dstill_jax.data.dataset import DATASET_FOLDER, Conversation, ConversationDataset, dataset_exists, write_dataset
from dstill_jax.data.manifest import check_manifest, make_folder, require_manifest, write_json
from dstill_jax.data.pool import WORKER_COMMAND, run_workers, split_cores
from dstill_jax.data.prepare_config import PrepareConfig, config_to_dict
from dstill_jax.data.progress import GenerationProgress
from dstill_jax.data.prompts import PromptRow, read_rows, rows_sha256
from dstill_jax.data.shards import Answer, read_answers
from dstill_jax.data.templates import ChatTemplate, tokenizer_sha256
from dstill_jax.data.worker import Job, describe_os_error, run_share, write_requests
from dstill_jax.errors import UserError
from dstill_jax.locks import only_one
from dstill_jax.sharding import hosts

STAGE_VERSION = 1  # raise when the same inputs would give another dataset


@dataclass(frozen=True)
class PrepareSummary:
    """What a dataset holds and what this run did. `new_tokens` and the times are of this run."""

    path: str
    rows: int
    tokens: int
    supervised_tokens: int
    rows_without_anchor: int
    skipped_too_long: int
    ended_by_stop: int
    ended_by_length: int
    resumed_rows: int
    new_tokens: int
    seconds: float
    tokens_per_second: float  # from loaded target to last answer, compilation included
    samples: tuple[str, ...]  # three rows decoded, the supervised part between ⟦ and ⟧


@dataclass(frozen=True)
class _Plan:
    """Rows that are kept, each as often as it is to be answered, with their prompts as tokens."""

    rows: list[PromptRow]
    prompts: list[list[int]]
    skipped: list[str]
    template: ChatTemplate
    stop_token_ids: tuple[int, ...]
    # Of all kept prompts: shapes, and so rounding, must not depend on a worker's share.
    longest_prompt: int
    shared_prefix: list[int]  # usually the template's system message; computed once


def prepare(
    config: PrepareConfig,
    *,
    backend: Backend | None = None,
    worker_command: Sequence[str] = WORKER_COMMAND,
    show_progress: bool = True,
) -> PrepareSummary:
    """Makes the dataset of a configuration, or continues it, or finds it complete.

    Args:
        config: what to make, and where.
        backend: the target; by default `config.target` loaded by `dstill_jax.load_target`.
        worker_command: starts a worker process, a job file being added. Used when `config.workers` > 1.
        show_progress: a progress bar on standard error.

    Raises:
        UserError: bad input, a folder made from other inputs, or no room on the disk.
    """
    backend = backend or TargetBackend(config)
    started = time.monotonic()
    folder = Path(config.out)
    all_rows = read_rows(config.source)
    rows = all_rows[config.start :][: config.limit]
    if not rows:
        raise UserError(f"{config.source.path}: start={config.start} leaves none of its {len(all_rows)} rows")
    stop_ids = config.stop_token_ids if config.stop_token_ids is not None else backend.facts.stop_token_ids
    template = ChatTemplate(backend.tokenizer, config.template, stop_ids)
    _check_target(config, backend.facts, stop_ids)
    inputs = _manifest(config, backend.facts, template, rows, stop_ids)
    try:
        with _opened(folder, inputs):
            run: dict[str, Any] = {}
            found = hosts.exchange(dataset_exists(folder / DATASET_FOLDER))[0]
            if not found:
                plan = None if config.source.conversations else _make_plan(config, rows, template, stop_ids)
                if plan is not None:
                    run = _generate(config, plan, backend, folder, worker_command, show_progress)
                if hosts.first() and plan is None:
                    _write_conversations(folder, rows, template, inputs)
                elif hosts.first():
                    _assemble(config, plan, folder, inputs, backend.facts)
            summary = None
            if hosts.first():
                summary = _summary(folder, template, found, run, time.monotonic() - started)
                if not found:
                    write_json(folder / "summary.json", summary)
                shutil.rmtree(folder / "work", ignore_errors=True)
            values = hosts.exchange(summary)[0]
            return PrepareSummary(**{**values, "samples": tuple(values["samples"])})
    except OSError as error:
        raise UserError(describe_os_error(error)) from error


def estimate_feature_bytes(plan_tokens: int, num_taps: int, hidden_size: int) -> int:
    """Disk space for storing features while preparing: the shards and, at the end, the assembled file beside them."""
    return 2 * features_lib.feature_bytes(plan_tokens, num_taps, hidden_size)


def _manifest(
    config: PrepareConfig,
    facts: TargetFacts,
    template: ChatTemplate,
    rows: Sequence[PromptRow],
    stop_ids: Sequence[int],
) -> dict[str, Any]:
    inputs = {
        "stage": "prepare",
        "stage_version": STAGE_VERSION,
        "kind": "conversations" if config.source.conversations else "generated",
        "target_fingerprint": facts.fingerprint,
        "tokenizer_sha256": tokenizer_sha256(template.tokenizer),
        "template_sha256": template.sha256,
        "template_style": config.template.style,
        "thinking": config.template.thinking,
        "date_string": config.template.date_string,
        "rows_sha256": rows_sha256(rows),
        "stop_token_ids": sorted(stop_ids),
    }
    if config.source.conversations:
        return {**inputs, "supervise": config.template.supervise}
    # Left out where it is 1: that is what datasets are that know nothing of it.
    several = {} if config.answers_per_prompt == 1 else {"answers_per_prompt": config.answers_per_prompt}
    return {
        **inputs,
        **several,
        "target_dtype": config.dtype,
        "max_prompt_tokens": config.max_prompt_tokens,
        "max_new_tokens": config.max_new_tokens,
        "temperature": config.temperature,
        "top_k": config.top_k,
        "top_p": config.top_p,
        "seed": config.seed,
        "record_features": config.record_features,
        "tap_ids": list(config.tap_ids),
    }


def _check_target(config: PrepareConfig, facts: TargetFacts, stop_ids: Sequence[int]) -> None:
    for token in stop_ids:
        if not 0 <= token < facts.vocab_size:
            raise UserError(f"stop_token_ids has {token}, but the target's vocabulary has {facts.vocab_size} tokens")
    for layer in config.tap_ids:
        if not 0 <= layer < facts.num_layers:
            raise UserError(f"tap_ids has {layer}, but the target has layers 0..{facts.num_layers - 1}")
    longest = config.max_prompt_tokens + config.max_new_tokens
    if not config.source.conversations and longest > facts.max_position_embeddings:
        raise UserError(
            f"max_prompt_tokens={config.max_prompt_tokens} + max_new_tokens={config.max_new_tokens} = {longest} is more"
            f" than the target's context of {facts.max_position_embeddings}; lower one of them"
        )


def _make_plan(
    config: PrepareConfig, rows: Sequence[PromptRow], template: ChatTemplate, stop_ids: Sequence[int]
) -> _Plan:
    kept, prompts, skipped = [], [], []
    for row in rows:
        tokens = template.prompt_ids(row)
        if not tokens:
            raise UserError(f"{row.where}: the prompt has no tokens")
        if len(tokens) > config.max_prompt_tokens:
            skipped.append(row.id)
            continue
        kept.append(row)
        prompts.append(tokens)
    if not kept:
        raise UserError(
            f"all {len(rows)} prompts are longer than max_prompt_tokens={config.max_prompt_tokens}; raise it"
        )
    # All first answers come first: asking for more of them later changes none of those.
    numbered = [dataclasses.replace(row, id=f"{row.id}#{n}") for n in range(config.answers_per_prompt) for row in kept]
    kept, prompts = numbered if config.answers_per_prompt > 1 else kept, prompts * config.answers_per_prompt
    shared = os.path.commonprefix(prompts)[: min(map(len, prompts)) - 1]
    return _Plan(kept, prompts, skipped, template, tuple(stop_ids), max(map(len, prompts)), shared)


def _generate(
    config: PrepareConfig, plan: _Plan, backend: Backend, folder: Path, command: Sequence[str], show_progress: bool
) -> dict[str, Any]:
    work = folder / "work"
    make_folder(work)
    width = _width(config, backend.facts)
    done = read_answers(work, width)
    hosts.exchange()  # before anybody adds to them
    # Prompts of like length are prefilled together, so that little of a batch is padding; ids keep the rows' order.
    missing = sorted((i for i in range(len(plan.rows)) if i not in done), key=lambda i: len(plan.prompts[i]))
    mine = missing[hosts.index() :: hosts.count()]
    pending = [GenerationRequest(i, plan.prompts[i], config.seed) for i in mine]
    if config.record_features:
        upper = sum(len(plan.prompts[i]) + config.max_new_tokens for i in missing)
        needed = estimate_feature_bytes(upper, len(config.tap_ids), backend.facts.hidden_size)
        features_lib.check_disk(folder, needed, f"storing features of {len(missing)} rows")
    total = len(done) + len(pending)  # what the first process shows is its own share
    with GenerationProgress(total, len(done), show_progress and hosts.first()) as progress:
        if pending:
            _run(config, plan, pending, backend, work, command, progress.report)
    added = hosts.exchange([progress.tokens, progress.tokens_per_second])
    tokens, rates = zip(*added, strict=True)
    return {"resumed_rows": len(done), "new_tokens": sum(tokens), "tokens_per_second": sum(rates)}


def _run(config: PrepareConfig, plan: _Plan, pending, backend: Backend, work: Path, command, report) -> None:
    workers = min(config.workers, len(pending))
    own = work / f"process-{hosts.index()}"
    make_folder(own)
    jobs = []
    for k, cores in enumerate(split_cores(workers)):
        write_requests(own / f"requests-{k}.jsonl", pending[k::workers])
        jobs.append(
            Job(
                config=config_to_dict(config),
                requests=str(own / f"requests-{k}.jsonl"),
                folder=str(work),
                longest_prompt=plan.longest_prompt,
                shared_prefix=plan.shared_prefix,
                stop_token_ids=plan.stop_token_ids,
                cores=cores if config.workers > 1 else (),
            )
        )
    if config.workers == 1:
        run_share(jobs[0], config, backend, report)
    else:
        run_workers(jobs, own, report, command)


def _assemble(config: PrepareConfig, plan: _Plan, folder: Path, inputs: dict[str, Any], facts: TargetFacts) -> None:
    width = _width(config, facts)
    found = read_answers(folder / "work", width)
    if missing := [i for i in range(len(plan.rows)) if i not in found]:
        raise UserError(
            f"{folder / 'work'}: {len(missing)} rows have no answer yet, the first is {missing[0]}; run the same command"
            " again, and in a job of several hosts see that all of them write to this folder"
        )
    answers = [found[i] for i in range(len(plan.rows))]
    if bad := [i for i, answer in enumerate(answers) if list(answer.tokens[: answer.prompt_length]) != plan.prompts[i]]:
        raise UserError(
            f"{folder / 'work'}: the stored prompt of row {bad[0]} is another one; remove {folder} and start again"
        )
    reasons = [answer.finish_reason for answer in answers]
    provenance = {
        "inputs": inputs,
        "target": config.target,
        "prompts": config.source.path,
        "skipped_too_long": len(plan.skipped),
        "skipped_ids": plan.skipped[:20],
        "finish_reasons": {reason: reasons.count(reason) for reason in sorted(set(reasons))},
    }
    rows = (_conversation(plan.rows[i].id, answer) for i, answer in enumerate(answers))
    stored = _stored_features(answers, width) if width else None
    write_dataset(folder / DATASET_FOLDER, rows, provenance, stored, width)


def _conversation(source_id: str, answer: Answer) -> Conversation:
    tokens = np.asarray(answer.tokens, np.int32)
    return Conversation(source_id, tokens, np.arange(len(tokens)) >= answer.prompt_length)


def _stored_features(answers: Sequence[Answer], width: int) -> Iterator[np.ndarray]:
    with contextlib.ExitStack() as stack:
        files: dict[str, Any] = {}
        for answer in answers:
            path = str(answer.feature_file)
            if path not in files:
                files[path] = stack.enter_context(open(path, "rb"))
            files[path].seek(answer.feature_offset)
            data = files[path].read(len(answer.tokens) * width * 2)
            yield np.frombuffer(data, np.float16).reshape(len(answer.tokens), width)


def _write_conversations(
    folder: Path, rows: Sequence[PromptRow], template: ChatTemplate, inputs: dict[str, Any]
) -> None:
    rendered = [template.conversation(row) for row in rows]
    provenance = {"inputs": inputs, "unended_answers": sum(r.unended_answers for r in rendered)}
    conversations = (Conversation(row.id, r.tokens, r.loss_mask) for row, r in zip(rows, rendered, strict=True))
    write_dataset(folder / DATASET_FOLDER, conversations, provenance)


def _summary(folder: Path, template: ChatTemplate, found: bool, run: dict[str, Any], seconds: float) -> dict[str, Any]:
    """The fields of a PrepareSummary."""
    dataset = ConversationDataset(folder)
    provenance = dataset.provenance
    reasons = provenance.get("finish_reasons", {})
    samples = []
    for i in sorted({0, len(dataset) // 2, len(dataset) - 1}):
        row = dataset[i]
        samples.append(template.mark_supervised(row.tokens, row.loss_mask))
    summary = PrepareSummary(
        path=str(dataset.path),
        rows=len(dataset),
        tokens=provenance["tokens"],
        supervised_tokens=provenance["supervised_tokens"],
        rows_without_anchor=provenance["rows_without_anchor"],
        skipped_too_long=provenance.get("skipped_too_long", 0),
        ended_by_stop=reasons.get("stop", 0),
        ended_by_length=reasons.get("length", 0),
        resumed_rows=len(dataset) if found else run.get("resumed_rows", 0),
        new_tokens=run.get("new_tokens", 0),
        seconds=seconds,
        tokens_per_second=run.get("tokens_per_second", 0.0),
        samples=tuple(samples),
    )
    return asdict(summary)


def _width(config: PrepareConfig, facts: TargetFacts) -> int:
    return features_lib.feature_width(len(config.tap_ids), facts.hidden_size) if config.record_features else 0


@contextlib.contextmanager
def _opened(folder: Path, inputs: dict[str, Any]) -> Iterator[None]:
    """The run's folder, made or found by the first process and held against other runs; the rest of a job follow it."""
    with contextlib.ExitStack() as stack:
        if hosts.first():
            check_manifest(folder, inputs)
            stack.enter_context(only_one(folder))
        hosts.exchange()
        if not hosts.first():
            require_manifest(folder, inputs)
        yield
