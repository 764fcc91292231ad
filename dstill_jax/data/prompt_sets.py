"""Prompt sets by name or file, and prompts as token ids. Called by the commands, the demo and experiments.

GSM8K is its test file, so its rows are divided once and for all: `training_prompts` and `read_prompts` never share one.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from dstill_jax.data.prompts import PromptRow, PromptSource, read_rows
from dstill_jax.data.templates import ChatTemplate, TemplateConfig
from dstill_jax.models.target import Target
from dstill_jax.weights.embedded import EMBEDDED_PROMPTS, Report, gsm8k_split, is_gsm8k, read_jsonl, resolve
from dstill_jax.weights.folders import atomic_path


def training_prompts(name: str, report: Report | None = None) -> str:
    """The file of a set (an embedded one is fetched) to train on: of GSM8K one without the held-out rows."""
    path = resolve(name, EMBEDDED_PROMPTS, report)
    if not is_gsm8k(path):
        return path
    rows = Path(path).with_name("gsm8k_train.jsonl")
    with atomic_path(rows) as temporary:
        lines = [json.dumps(row) + "\n" for row in gsm8k_split(read_jsonl(path))[0]]
        temporary.write_text("".join(lines), encoding="utf-8")
    return str(rows)


def read_prompts(name: str, limit: int | None = None, report: Report | None = None) -> list[PromptRow]:
    """The first rows of a set to measure on: of GSM8K the held-out ones."""
    path = resolve(name, EMBEDDED_PROMPTS, report)
    rows = read_rows(PromptSource(path))
    if is_gsm8k(path):
        held_out = {row["id"] for row in gsm8k_split({"id": row.id} for row in rows)[1]}
        rows = [row for row in rows if row.id in held_out]
    return rows[:limit]


def render(
    target: Target, rows: Sequence[PromptRow | str], template: TemplateConfig = TemplateConfig()
) -> list[list[int]]:
    """Prompt rows, or plain texts, as token ids.

    Raises:
        UserError: the target has no tokenizer or no chat template, or its template refuses a row.
    """
    chat = ChatTemplate(target.tokenizer, template, target.config.eos_token_ids)
    plain = [
        PromptRow(f"prompt {i}", ({"role": "user", "content": row},), f"prompt {i}") if isinstance(row, str) else row
        for i, row in enumerate(rows)
    ]
    return [chat.prompt_ids(row) for row in plain]
