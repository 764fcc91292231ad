"""`dstill`: the command line. Parses, hands over to `commands`, and turns every user mistake into one line and exit 2."""

import argparse
import io
import os
import sys
from collections.abc import Sequence

from dstill_jax import __version__
from dstill_jax.allocator import keep_freed_memory
from dstill_jax.errors import UserError
from dstill_jax.paths import in_home


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status.

    0: done, or training stopped by SIGTERM with all saved. 1: another process of the job failed. 2: bad input.
    130: interrupted.
    """
    args = _parse(arguments)
    for stream in (sys.stdout, sys.stderr):  # a terminal that lacks a character shows another one
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        _set_environment()
    except UserError as error:
        return _fail(str(error))
    if not hasattr(args, "coordinator"):
        return _run(args)
    from dstill_jax.sharding import hosts

    try:
        launch = hosts.find_launch(args.coordinator, args.processes, args.process_id, args.join_timeout)
    except UserError as error:
        return _fail(str(error))
    if launch is None:
        return _run(args)
    return hosts.together(launch, lambda: _run(args), preemption=args.command == "train")


def _run(args: argparse.Namespace) -> int:
    try:
        from dstill_jax import commands

        commands.check_common(args)
        return getattr(commands, args.handler)(args) or 0
    except UserError as error:
        return _fail(str(error))
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("dstill_jax"):
            raise
        return _fail(f"{error.name!r} is not installed; run: pip install 'dstill-jax[data,embedded,report]'")
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        return _fail(f"{error.strerror or error}{where}")
    except KeyboardInterrupt:
        goes_on = args.command in ("fetch", "prepare", "train", "demo")
        return _fail(f"interrupted{'; run the same command again to go on' if goes_on else ''}", 130)


def _set_environment() -> None:
    """Programs compiled once are found again by later commands and by worker processes; so is memory, by the next step."""
    from dstill_jax.weights.cache_folder import cache_root
    from pallas_kernels import offline

    if not offline.tpu_attached():
        offline.prepare_environment()
        keep_freed_memory()
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(cache_root() / "compiled"))
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # that PyTorch is absent is no news here


def _fail(message: str, status: int = 2) -> int:
    print(f"dstill: {' '.join(message.split())}", file=sys.stderr)
    return status


class _OneLineParser(argparse.ArgumentParser):
    """argparse, with errors of one line."""

    def error(self, message: str):  # type: ignore[override]
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """argparse takes FIELD=VALUE only directly behind the config; here they may stand after options, too."""
    parser = _parser()
    args, rest = parser.parse_known_args(arguments)
    if rest and not (hasattr(args, "overrides") and all("=" in word and word[0] != "-" for word in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        args.overrides = [*args.overrides, *rest]
    for name in ("config", "out", "json", "chat_template"):  # --out=~/x reaches us so
        if isinstance(getattr(args, name, None), str):
            setattr(args, name, in_home(getattr(args, name)))
    return args


def _parser() -> argparse.ArgumentParser:
    parser = _OneLineParser(
        prog="dstill", description="Train, distil, measure and run block-diffusion drafters for language models."
    )
    parser.add_argument("--version", action="version", version=f"dstill_jax {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for add in (_fetch, _prepare, _train, _generate, _eval, _export, _plan, _demo):
        add(commands)
    return parser


def _command(commands, name: str, help_: str) -> argparse.ArgumentParser:
    sub = commands.add_parser(name, help=help_, description=help_[0].upper() + help_[1:] + ".")
    sub.set_defaults(handler=f"run_{name}")
    return sub


def _fetch(commands) -> None:
    sub = _command(commands, "fetch", "get the embedded models and prompts: smollm2, gsm8k, humaneval, aime, tiny")
    sub.add_argument("names", nargs="+", metavar="NAME")


def _prepare(commands) -> None:
    sub = _command(
        commands, "prepare", "prompts in, a dataset of the target's own answers out; continues a stopped run"
    )
    sub.add_argument("--target", required=True, help="Hugging Face folder, hub id, or an embedded name")
    sub.add_argument(
        "--prompts",
        required=True,
        help="JSONL of `prompt` or `messages`, a TFDS folder, tfds:NAME, gsm8k, humaneval, aime",
    )
    sub.add_argument("--out", required=True, help="folder of the dataset")
    sub.add_argument(
        "--conversations", action="store_true", help="the rows are finished conversations: nothing is generated"
    )
    sub.add_argument("--style", default="chat", choices=("chat", "raw"), help="chat template, or the text as it is")
    _chat_template(sub)
    sub.add_argument(
        "--supervise", default="all", choices=("all", "last"), help="which answers of finished conversations count"
    )
    sub.add_argument("--split", default="train", help="of a TFDS dataset")
    sub.add_argument("--text-field", default="prompt", help="feature of a TFDS dataset that holds the prompt")
    sub.add_argument("--start", type=int, default=0, help="rows to leave out at the beginning")
    sub.add_argument("--limit", type=int, help="rows to take")
    sub.add_argument("--max-prompt-tokens", type=int, default=1024)
    sub.add_argument("--max-new-tokens", type=int, default=512)
    sub.add_argument("--answers-per-prompt", type=int, default=1, help="sampled answers of each prompt")
    _sampling(sub)
    sub.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    sub.add_argument("--batch-size", type=int, default=32, help="answers generated at once in each worker")
    sub.add_argument("--workers", type=int, default=1, help="processes, each on its share of the cores (CPU only)")
    sub.add_argument(
        "--taps", type=int, nargs="+", default=[], metavar="LAYER", help="also store features of these layers"
    )
    _hosts(sub)
    _json(sub)


def _train(commands) -> None:
    sub = _command(commands, "train", "train one stage from a Python config; continues a stopped run")
    sub.add_argument("config", help="Python file with CONFIG (and TINY), e.g. configs/smollm2_stage1.py --tiny")
    sub.add_argument("--tiny", action="store_true", help="run the file's TINY instead of its CONFIG")
    sub.add_argument("overrides", nargs="*", metavar="FIELD=VALUE", help="e.g. train.total_steps=500 out=runs/a")
    _hosts(sub)


def _generate(commands) -> None:
    sub = _command(commands, "generate", "complete a prompt, streaming; accepted draft tokens are coloured")
    _pair(sub)
    sub.add_argument("prompt", help="the text, or - for standard input")
    _template(sub)
    sub.add_argument(
        "--method", help="autoregressive, lookup, dflash, refine or ddtree; default: dflash with a drafter"
    )
    sub.add_argument("--max-new-tokens", type=int, default=256)
    _sampling(sub)
    _method_options(sub)
    _json(sub)


def _eval(commands) -> None:
    sub = _command(commands, "eval", "measure acceptance length and speed-up against autoregressive decoding")
    _pair(sub)
    sub.add_argument("--prompts", required=True, help="JSONL, gsm8k (held-out rows only), humaneval or aime")
    sub.add_argument("--limit", type=int, default=64, help="prompts to take")
    sub.add_argument("--timed", type=int, default=8, help="prompts decoded one at a time, for the speeds")
    _template(sub)
    sub.add_argument("--max-new-tokens", type=int, default=128)
    sub.add_argument("--drafted", type=int, nargs="+", help="drafted lengths to measure; default: 3 and block_size - 1")
    sub.add_argument(
        "--refine-passes", type=int, nargs="*", default=[], help="also measure refinement with these passes"
    )
    sub.add_argument(
        "--tree-budget", type=int, nargs="*", default=[], metavar="NODES", help="also measure ddtree with these budgets"
    )
    _sampling(sub)
    sub.add_argument("--out", help="folder for results.json, figures and report.html")
    _hosts(sub)
    _json(sub)


def _export(commands) -> None:
    sub = _command(commands, "export", "write a drafter as bfloat16 safetensors that servers load")
    sub.add_argument("drafter", help="drafter folder, or the folder of a run")
    sub.add_argument("out", help="folder to write")
    sub.add_argument("--target", required=True)


def _plan(commands) -> None:
    sub = _command(commands, "plan", "compile a run for a TPU slice that is not attached: does it fit, what bounds it")
    sub.add_argument("config", help="Python file with CONFIG, as for `dstill train`")
    sub.add_argument("--slice", required=True, metavar="NAME", help="v5e-16, v5p-128, 2xv6e-256, or v5p:4x4x8")
    sub.add_argument("--search", action="store_true", help="try mesh shapes, rows per device and remat")
    sub.add_argument(
        "--decode",
        metavar="ROWSxTOKENS",
        help="instead of the train step: a decoding round, e.g. 64x4096: 64 requests with caches of 4096 tokens",
    )
    sub.add_argument("--limit", type=int, default=12, help="settings that --search compiles at most")
    sub.add_argument(
        "--quick", action="store_true", help="compile at the lowest effort, four times sooner: a first look"
    )
    sub.add_argument("overrides", nargs="*", metavar="FIELD=VALUE", help="e.g. mesh.fsdp=16 memory.anchor_chunk=64")
    _json(sub)


def _demo(commands) -> None:
    sub = _command(commands, "demo", "everything on one machine: data, both stages, controls, table, report")
    sub.add_argument("--target", default="smollm2", choices=("smollm2", "tiny"))
    sub.add_argument("--minutes", type=float, help="budget; default 16 for smollm2, 1 for tiny")
    sub.add_argument("--out", help="folder; default .demo/TARGET-MINUTESmin. A stopped demo is continued in it")
    _json(sub)


def _pair(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--target", required=True, help="Hugging Face folder, hub id, or an embedded name")
    sub.add_argument("--drafter", help="drafter folder, or the folder of a run")
    sub.add_argument(
        "--dtype", default=None, choices=("float32", "bfloat16"), help="default: float32 on a CPU, else bfloat16"
    )


def _template(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--raw", action="store_true", help="no chat template: continue the text itself")
    _chat_template(sub)


def _chat_template(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--thinking", action="store_true", help="turn the template's thinking mode on")
    sub.add_argument("--chat-template", metavar="FILE", help="Jinja file, instead of the tokenizer's own template")


def _sampling(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--temperature", type=float, default=0.0)
    sub.add_argument("--top-k", type=int)
    sub.add_argument("--top-p", type=float)
    sub.add_argument("--seed", type=int, default=0)


def _method_options(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--draft-tokens", type=int, help="tokens drafted in a round")
    sub.add_argument("--passes", type=int, help="refine: passes over a block")
    sub.add_argument(
        "--order",
        choices=("confidence", "quota", "prefix", "left_to_right"),
        help="refine: which slots a pass commits",
    )
    sub.add_argument("--threshold", type=float, help="refine: confidence that commits a slot at once")
    sub.add_argument("--max-ngram", type=int, help="lookup: longest n-gram")
    sub.add_argument("--tree-budget", type=int, metavar="NODES", help="ddtree: nodes of the tree, 1 to 1023")


def _hosts(sub: argparse.ArgumentParser) -> None:
    group = sub.add_argument_group("several hosts", "found in the environment on TPU VMs, GKE, Slurm and MPI")
    group.add_argument("--coordinator", metavar="HOST:PORT", help="address of process 0, the same for all")
    group.add_argument("--processes", type=int, help="how many take part; 1: this one alone, whatever the environment")
    group.add_argument("--process-id", type=int, help="this one's number, from 0")
    group.add_argument("--join-timeout", type=int, default=300, help="seconds to wait for the others at the start")


def _json(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--json", metavar="FILE", help="also write the result as JSON")


if __name__ == "__main__":
    sys.exit(main())
