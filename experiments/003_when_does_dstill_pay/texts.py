"""The texts: what the tiny target writes greedily, without the answers that end in a loop.

A weak model's greedy text often repeats itself, and a loop is drafted by anything; so prompts whose answer ends in one
are left out, of training and of held-out prompts alike. Which prompts these are depends on the target only.
"""

import json
from pathlib import Path

import numpy as np
from grid import NEW_TOKENS, PROMPT_TOKENS, TAPS
from tokenizers import Tokenizer

from dstill_jax.data.dataset import ConversationDataset
from dstill_jax.data.generate import prepare
from dstill_jax.data.prepare_config import PrepareConfig
from dstill_jax.data.prompts import PromptSource
from dstill_jax.weights.tiny_corpus import encode_files, prompt_rows, read_corpus

TARGET = Path(__file__).resolve().parent / "target"
_TAIL, _LONGEST_PERIOD = 32, 16
SIZES = {
    "small": {"train": (8192, 192), "heldout": (512, 192)},
    "large": {"train": (49152, 48), "heldout": (1536, 96)},
}
"""Prompts at most, and how many tokens apart they begin. The small set is the tiny target's own."""


def is_loop(tokens: np.ndarray) -> bool:
    """Whether the last 32 tokens repeat with a period of at most 16."""
    tail = tokens[-_TAIL:]
    return any((tail[p:] == tail[:-p]).all() for p in range(1, _LONGEST_PERIOD + 1))


def make_texts(root: Path, size: str) -> str:
    """Training and held-out data in `root`, with features; returns the target's folder. What is there is kept.

    The prompts are of the standard library of the Python that runs this, so compare within one version of Python.
    """
    for split, (number, stride) in SIZES[size].items():
        prompts = root / f"prompts_{split}_all.jsonl"
        if not prompts.exists():
            root.mkdir(parents=True, exist_ok=True)
            rows = _cut_prompts(split == "heldout", number, stride)
            prompts.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        everything = root / f"{split}_all"
        _generate(prompts, everything, features=False)
        kept = root / f"prompts_{split}.jsonl"
        if not kept.exists():
            kept.write_text("".join(_without_loops(prompts, ConversationDataset(everything))), encoding="utf-8")
        _generate(kept, root / split, features=True)
    return str(TARGET)


def _cut_prompts(held_out: bool, number: int, stride: int) -> list[dict[str, str]]:
    """Prompts from the files that the target's own prompts come from, closer together than those."""
    tokenizer = Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    files = read_corpus()[held_out]
    split = "heldout" if held_out else "train"
    names = [file.name for file in files]
    return prompt_rows(tokenizer, names, encode_files(tokenizer, files), f"tiny/{split}", number, 0, stride)


def _generate(prompts: Path, out: Path, *, features: bool) -> None:
    prepare(
        PrepareConfig(
            target=str(TARGET),
            source=PromptSource(str(prompts)),
            out=str(out),
            max_prompt_tokens=PROMPT_TOKENS,
            max_new_tokens=NEW_TOKENS,
            batch_size=64,
            workers=2,
            record_features=features,
            tap_ids=TAPS if features else (),
        )
    )


def _without_loops(prompts: Path, answers: ConversationDataset) -> list[str]:
    """Lines of `prompts` whose answer does not end in a loop; both in the same order, one row each."""
    lines = prompts.read_text(encoding="utf-8").splitlines(keepends=True)
    if len(lines) != len(answers):
        raise SystemExit(f"{prompts} has {len(lines)} prompts, its answers {len(answers)}: delete the answers' folder")
    rows = (answers[i] for i in range(len(answers)))
    return [line for line, row in zip(lines, rows, strict=True) if not is_loop(row.tokens[row.loss_mask])]


def rows_of(dataset: ConversationDataset, which: str) -> range:
    """Held-out rows for "choosing" among arms, or those for the "final" table, which no choice has seen."""
    choosing = len(dataset) * 5 // 9
    return range(choosing) if which == "choosing" else range(choosing, len(dataset))


def held_out(dataset: ConversationDataset, which: str) -> list[tuple[list[int], list[int]]]:
    """(prompt, greedy answer) of those rows."""
    return conversations(dataset, rows_of(dataset, which))


def conversations(dataset: ConversationDataset, rows: range) -> list[tuple[list[int], list[int]]]:
    """(prompt, greedy answer) of each row."""
    found = []
    for row in (dataset[i] for i in rows):
        start = int(np.argmax(row.loss_mask))
        found.append((row.tokens[:start].tolist(), row.tokens[start:].tolist()))
    return found


def count(path: Path) -> dict[str, int]:
    """How many prompts were kept, for the results file."""
    return {split: len((path / f"prompts_{split}.jsonl").read_text().splitlines()) for split in ("train", "heldout")}
