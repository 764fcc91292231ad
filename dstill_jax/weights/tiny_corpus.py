"""The text the tiny target learns: source files of the installed Python's own standard library.

Called by `tiny`. Held-out files are chosen by a hash of their path, so no line of them is ever trained on.
"""

import hashlib
import random
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from dstill_jax.errors import UserError

if TYPE_CHECKING:
    import tokenizers

# Tests, generated tables and what is installed beside the library: repetitive, or different on each machine.
_SKIPPED = {
    "test", "tests", "idlelib", "encodings", "pydoc_data", "site-packages", "dist-packages", "lib2to3", "turtledemo",
    "ensurepip", "__pycache__",
}  # fmt: skip
HELD_OUT_IN = 16
"""One file in this many is held out."""

PROMPT_TOKENS = 64
PROMPT_TOKENS_AT_MOST = 72
PROMPT_STRIDE = 192  # tokens between the starts of two prompts of a file: a prompt and about two answers


@dataclass(frozen=True)
class SourceFile:
    name: str  # path under the standard library, with forward slashes
    text: str


def is_held_out(name: str) -> bool:
    """Whether the file of this relative path is held out."""
    return int(hashlib.sha256(name.encode()).hexdigest()[:8], 16) % HELD_OUT_IN == 0


def read_corpus(folder: Path | None = None, max_files: int | None = None) -> tuple[list[SourceFile], list[SourceFile]]:
    """(training files, held-out files), sorted by path.

    Args:
        folder: where to look; None: the standard library of this Python.
        max_files: at most this many training files (tests).

    Raises:
        UserError: too little source text there (some systems ship the standard library compiled only).
    """
    folder = folder or Path(sysconfig.get_path("stdlib"))
    train: list[SourceFile] = []
    held_out: list[SourceFile] = []
    for path in sorted(folder.rglob("*.py")):
        relative = path.relative_to(folder)
        if _SKIPPED & set(relative.parts) or relative.name.startswith("_sysconfigdata"):
            continue
        try:
            text = path.read_text(encoding="utf-8").replace("\r\n", "\n")
        except (UnicodeDecodeError, OSError):
            continue
        if text.strip():
            (held_out if is_held_out(relative.as_posix()) else train).append(SourceFile(relative.as_posix(), text))
    if not train or not held_out:
        raise UserError(
            f"{folder} holds {len(train)} training and {len(held_out)} held-out source files; the tiny target needs"
            " both. Install a Python with its standard library as .py files"
        )
    return train[:max_files], held_out


def encode_files(tokenizer: "tokenizers.Tokenizer", files: Sequence[SourceFile]) -> list[np.ndarray]:
    """Token ids of each file, without special tokens: [tokens] int32 each."""
    encodings = tokenizer.encode_batch([file.text for file in files], add_special_tokens=False)
    return [np.asarray(encoding.ids, np.int32) for encoding in encodings]


def join_files(files: Sequence[np.ndarray], end_id: int) -> np.ndarray:
    """One stream of all files, the end token after each: [total] int32."""
    return np.concatenate([part for ids in files for part in (ids, np.asarray([end_id], np.int32))])


def prompt_rows(
    tokenizer: "tokenizers.Tokenizer",
    names: Iterable[str],
    files: Iterable[np.ndarray],
    prefix: str,
    count: int,
    seed: int,
    stride: int = PROMPT_STRIDE,
) -> list[dict[str, str]]:
    """Up to `count` prompts {"id", "prompt"}: pieces of `PROMPT_TOKENS` tokens as text, in a fixed random order.

    A piece begins every `stride` tokens of a file; below `PROMPT_TOKENS` they overlap.

    Pieces that are cut inside a character, repeat another one, or come back from the tokenizer as more than
    `PROMPT_TOKENS_AT_MOST` tokens are left out.
    """
    places = [
        (name, start, ids)
        for name, ids in zip(names, files, strict=True)
        for start in range(0, len(ids) - PROMPT_TOKENS + 1, stride)
    ]
    random.Random(seed).shuffle(places)
    return list(_usable_prompts(tokenizer, places, prefix, count))


def _usable_prompts(
    tokenizer: "tokenizers.Tokenizer", places: list[tuple[str, int, np.ndarray]], prefix: str, count: int
) -> Iterator[dict[str, str]]:
    seen: set[str] = set()
    for name, start, ids in places:
        if len(seen) == count:
            return
        text = tokenizer.decode(ids[start : start + PROMPT_TOKENS].tolist(), skip_special_tokens=False)
        if "\ufffd" in text or text in seen or not text.strip():
            continue
        if len(tokenizer.encode(text, add_special_tokens=False).ids) > PROMPT_TOKENS_AT_MOST:
            continue
        seen.add(text)
        yield {"id": f"{prefix}/{name}:{start}", "prompt": text}
