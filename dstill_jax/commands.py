"""What each `dstill` command does: reads its arguments, calls the library, prints. Called by `cli`."""

import argparse
import dataclasses
import json
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dstill_jax.errors import UserError


def run_fetch(args: argparse.Namespace) -> None:
    from dstill_jax.weights.embedded import EMBEDDED_NAMES, fetch

    for name in args.names:  # before any work starts
        if name not in EMBEDDED_NAMES:
            raise UserError(f"nothing embedded is called {name!r}; known names: {', '.join(EMBEDDED_NAMES)}")
    for name in args.names:
        print(fetch(name, report=_say))


def run_prepare(args: argparse.Namespace) -> None:
    from dstill_jax.data.generate import prepare
    from dstill_jax.data.prepare_config import PrepareConfig
    from dstill_jax.data.prompt_sets import training_prompts
    from dstill_jax.data.prompts import PromptSource
    from dstill_jax.data.templates import TemplateConfig
    from dstill_jax.sharding import hosts

    summary = prepare(
        PrepareConfig(
            target=resolve_target(args.target),
            source=PromptSource(training_prompts(args.prompts, _say), args.conversations, args.split, args.text_field),
            out=args.out,
            template=TemplateConfig(
                args.style,
                args.thinking,
                supervise=args.supervise,
                chat_template=args.chat_template and _text_file("chat-template", args.chat_template),
            ),
            start=args.start,
            limit=args.limit,
            max_prompt_tokens=args.max_prompt_tokens,
            max_new_tokens=args.max_new_tokens,
            answers_per_prompt=args.answers_per_prompt,
            temperature=args.temperature,
            top_k=args.top_k,
            top_p=args.top_p,
            seed=args.seed,
            dtype=args.dtype,
            batch_size=args.batch_size,
            workers=args.workers,
            record_features=bool(args.taps),
            tap_ids=tuple(args.taps),
        )
    )
    if not hosts.first():
        return
    for sample in summary.samples:
        print(sample, end="\n\n")
    print(
        f"{summary.rows} rows, {summary.supervised_tokens} supervised tokens, {summary.skipped_too_long} prompts too long,"
        f" {summary.rows_without_anchor} rows with nothing to train on; {summary.tokens_per_second:.0f} new tokens/s"
    )
    _write_json(args.json, vars(summary))


def run_train(args: argparse.Namespace) -> int:
    from dstill_jax.runs import run_stage
    from dstill_jax.sharding import hosts
    from dstill_jax.training.interrupt import Interrupted, stop_between

    say = _say if hosts.first() else lambda line: None
    runs = load_runs(args.config, "TINY" if args.tiny else "CONFIG", args.overrides)
    runs = tuple(dataclasses.replace(config, target=resolve_target(config.target)) for config in runs)
    try:
        for config in stop_between(runs):
            drafter = run_stage(config, report=say)
            if hosts.first():
                print(drafter)
    except Interrupted as stop:
        say(str(stop))
        return 0 if stop.signum == 15 else 128 + stop.signum
    return 0


def run_generate(args: argparse.Namespace) -> None:
    from dstill_jax.data.prompt_sets import render
    from dstill_jax.decoding.generate import stream
    from dstill_jax.decoding.sampling import SamplingConfig
    from dstill_jax.decoding.session import make_proposer
    from dstill_jax.evaluation.colour import IncrementalDecoder, Segment, to_ansi, token_slots

    text = _text(sys.stdin.buffer.read()) if args.prompt == "-" else _text(os.fsencode(args.prompt))
    template = template_of(args)
    target, drafter = load_pair(args)
    options = {
        name: getattr(args, name)
        for name in ("draft_tokens", "passes", "order", "threshold", "max_ngram", "tree_budget")
        if getattr(args, name) is not None
    }
    ids = render(target, [text], template)[0]
    sampling = SamplingConfig(args.temperature, args.top_k, args.top_p)
    tokenizer = target.tokenizer
    decoder = IncrementalDecoder(lambda t: tokenizer.decode(t, clean_up_tokenization_spaces=False))
    slots = make_proposer(args.method, drafter, **options).draft_tokens
    tokens: list[int] = []
    rounds: list[int] = []
    for new, committed in stream(
        target,
        ids,
        seed=args.seed,
        drafter=drafter,
        method=args.method,
        max_new_tokens=args.max_new_tokens,
        sampling=sampling,
        **options,
    ):
        first = len(tokens)
        tokens += new
        rounds += committed
        for token, slot in list(zip(tokens, token_slots(len(tokens), rounds), strict=True))[first:]:
            piece = decoder.push(token)
            if token not in target.config.eos_token_ids:
                print(to_ansi([Segment(piece, slot)], slots) if sys.stdout.isatty() else piece, end="", flush=True)
    print(decoder.flush())
    tau = sum(rounds) / len(rounds) if rounds else 1.0
    _say(f"{len(tokens)} tokens in {len(rounds)} rounds after prefill: {tau:.2f} tokens a target pass")
    _write_json(args.json, {"tokens": tokens, "acceptance_lengths": rounds, "text": tokenizer.decode(tokens)})


def run_eval(args: argparse.Namespace) -> None:
    from dstill_jax.data.prompt_sets import read_prompts, render
    from dstill_jax.data.templates import ChatTemplate
    from dstill_jax.evaluation.measure import Arm, EvaluationConfig, measure
    from dstill_jax.evaluation.progress import progress
    from dstill_jax.evaluation.tables import print_headline
    from dstill_jax.sharding import hosts

    if args.out and Path(args.out).exists() and not Path(args.out).is_dir():
        raise UserError(f"out={args.out} is a file; give a folder")
    if args.timed is not None and args.timed < 0:
        raise UserError(f"timed={args.timed} must not be negative")
    if not args.drafter and (args.drafted or args.refine_passes or args.tree_budget):
        raise UserError("drafted, refine-passes and tree-budget are settings of a drafter; give --drafter FOLDER")
    if args.out:
        from dstill_jax.evaluation.plots import require_matplotlib

        require_matplotlib()
    template = template_of(args)
    target, drafter = load_pair(args)
    prompts = render(target, read_prompts(args.prompts, args.limit, _say), template)
    arms = [Arm("autoregressive", "autoregressive"), Arm("prompt lookup", "lookup")]
    if drafter is not None:
        most = drafter.config.block_size - 1
        lengths = args.drafted or sorted({min(3, most), most})
        arms += [
            Arm(f"dflash W={w}", "dflash", drafter, "drafter", {"draft_tokens": w}, "one drafter pass") for w in lengths
        ]
        arms += [
            Arm(f"refine {s} passes", "refine", drafter, "drafter", {"passes": s}, "left to right")
            for s in args.refine_passes
        ]
        arms += [
            Arm(f"ddtree N={n}", "ddtree", drafter, "drafter", {"tree_budget": n}, "a tree") for n in args.tree_budget
        ]
    config = EvaluationConfig(
        args.max_new_tokens, args.temperature, args.top_k, args.top_p, args.seed, timed_prompts=args.timed
    )
    with progress("decoding") as advance:
        result, _ = measure(
            target,
            arms,
            prompts,
            config,
            prompts_name=args.prompts,
            thinking=ChatTemplate(target.tokenizer, template).thinking,
            command="dstill " + " ".join(sys.argv[1:]),
            report=advance,
        )
    if not hosts.first():
        return
    print_headline(result)
    if args.json:
        result.save(args.json)
    if args.out:
        from dstill_jax.evaluation.plots import result_figures, save_png
        from dstill_jax.evaluation.report import write_report

        folder = Path(args.out)
        folder.mkdir(parents=True, exist_ok=True)
        result.save(folder / "results.json")
        for name, figure in result_figures(result).items():
            save_png(figure, folder / f"{name}.png")
        write_report(folder / "report.html", result)
        print(f"written to {folder}/report.html")


def run_export(args: argparse.Namespace) -> None:
    from dstill_jax.decoding.session import check_pair
    from dstill_jax.weights.load import describe_target, load_drafter, save_drafter

    target = describe_target(resolve_target(args.target))
    drafter = load_drafter(args.drafter, target)
    check_pair(target, drafter)
    if Path(args.out).resolve() == Path(drafter.source).resolve():
        raise UserError(f"out={args.out} is the drafter itself; export to a folder of its own")
    save_drafter(args.out, drafter, target.config, dtype="bfloat16")
    if drafter.vocabulary is not None:
        _say(
            f"note: this drafter learnt to draft {len(drafter.vocabulary)} of {target.config.vocab_size} tokens (listed in"
            " dstill.json); a server that does not read the list considers the others, too, and may accept fewer drafts"
        )
    print(args.out)


def run_plan(args: argparse.Namespace) -> None:
    os.environ["JAX_PLATFORMS"] = "cpu"  # compiling for a slice needs no device, and must not take one
    os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)  # it cannot hand out programs of devices that are not there
    from dstill_jax import planning
    from dstill_jax.planning.report import decode_text, plan_text

    config = load_config(args.config, "CONFIG", args.overrides)
    config = dataclasses.replace(config, target=resolve_target(config.target))
    shape = runpy.run_path(args.config).get("SHAPE")
    if args.decode is not None:
        rows, _, capacity = args.decode.partition("x")
        if not (rows.isdigit() and capacity.isdigit()) or args.search:
            raise UserError(
                f"decode={args.decode!r} must be requests x cache tokens, such as 64x4096, without --search"
            )
        values = planning.plan_decoding(config, args.slice, int(rows), int(capacity), shape=shape, quick=args.quick)
        print(decode_text(values))
        _write_json(args.json, values)
        return
    if not args.search:
        values = planning.plan(config, args.slice, shape=shape, quick=args.quick)
        print(plan_text(values))
        _write_json(args.json, values)
        return
    found = planning.search(config, args.slice, limit=args.limit, report=_say, shape=shape, quick=args.quick)
    if not found:
        raise UserError(f"no setting of the search divides over {args.slice}; give mesh.* yourself, without --search")
    print(plan_text(found[0]))
    _write_json(args.json, found)


def run_demo(args: argparse.Namespace) -> int:
    from dstill_jax.demo import demo
    from dstill_jax.training.interrupt import Interrupted

    try:
        demo(args.target, args.minutes, args.out, args.json)
    except Interrupted as stop:
        _say(str(stop))
        return 0 if stop.signum == 15 else 128 + stop.signum
    return 0


# Shared by the commands


def resolve_target(name: str) -> str:
    """An embedded target is fetched, and it is said what that takes; anything else is a folder or hub id."""
    from dstill_jax.weights.embedded import EMBEDDED_TARGETS, resolve

    return resolve(name, EMBEDDED_TARGETS, report=_say)


def load_pair(args: argparse.Namespace) -> tuple[Any, Any]:
    import jax

    from dstill_jax.weights.load import load_drafter, load_target

    dtype = args.dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16")
    target = load_target(resolve_target(args.target), dtype=dtype)
    return target, load_drafter(args.drafter, target, dtype=dtype) if args.drafter else None


def template_of(args: argparse.Namespace) -> Any:
    """How prompts become text, in the options of `generate` and `eval`."""
    from dstill_jax.data.templates import TemplateConfig

    template = args.chat_template and _text_file("chat-template", args.chat_template)
    return TemplateConfig("raw" if args.raw else "chat", args.thinking, chat_template=template)


def load_config(path: str, name: str, overrides: Sequence[str]) -> Any:
    """The one RunConfig that a Python file exports under `name`; otherwise as `load_runs`."""
    runs = load_runs(path, name, overrides)
    if len(runs) > 1:
        raise UserError(f"{path}: {name} is {len(runs)} runs, and one is wanted; give a file that exports a single run")
    return runs[0]


_TIED = ("out", "checkpoints", "new", "start_from", "teacher", "objective.passes", "objective.student_passes")
"""What makes several runs a series: an override, which reaches all of them, would cut it."""


def load_runs(path: str, name: str, overrides: Sequence[str]) -> tuple[Any, ...]:
    """The runs that a Python file exports under `name`, a RunConfig or a tuple of them, with FIELD=VALUE overrides.

    Raises UserError for a missing or failing file, an unknown field and a value that does not parse, and for an
    override of what ties the runs of a tuple together.
    """
    from dstill_jax.overrides import override
    from dstill_jax.runs import RunConfig

    if not Path(path).is_file():
        raise UserError(f"config {path!r} is not a file; give a Python file that exports CONFIG")
    try:
        exported = runpy.run_path(path)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    except (Exception, SystemExit) as error:
        raise UserError(f"{path} failed: {type(error).__name__}: {error}") from error
    found = exported.get(name)
    runs = found if isinstance(found, tuple) else (found,)
    if not runs or not all(isinstance(run, RunConfig) for run in runs):
        raise UserError(
            f"{path} must export {name} as a dstill_jax.runs.RunConfig, or as a tuple of them to be run in turn"
        )
    tied = [field for field in (o.partition("=")[0] for o in overrides) if len(runs) > 1 and field.startswith(_TIED)]
    if tied:
        raise UserError(f"{path}: {tied[0]} ties the {len(runs)} runs of {name} together; change it in the file")
    return tuple(override(run, overrides) for run in runs)


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def _text(data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"the prompt is not UTF-8 ({error.reason} at byte {error.start})") from None


def _text_file(name: str, path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{name}={path} cannot be read: {error}") from None


def check_common(args: argparse.Namespace) -> None:
    """Before any command's work: its JSON file can be written, and there is something to do."""
    path, limit = getattr(args, "json", None), getattr(args, "limit", None)
    if limit is not None and limit < 1:
        raise UserError(f"limit={limit} must be at least 1")
    if path is not None and Path(path).is_dir():
        raise UserError(f"json={path} is a folder; name a file")
    if path is not None:
        Path(path).absolute().parent.mkdir(parents=True, exist_ok=True)


def _write_json(path: str | None, value: Any) -> None:
    if path is None:
        return
    from dstill_jax.weights.folders import atomic_path

    with atomic_path(Path(path)) as temporary:
        temporary.write_text(json.dumps(value, indent=2, default=str) + "\n", encoding="utf-8")
