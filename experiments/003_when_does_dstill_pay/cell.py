"""One cell: trains an arm at a block size and seed, then decodes the held-out prompts with it.

Called by `run.py` in a process of its own. Both halves go on where they were stopped: the training from its
checkpoint, the measuring with the settings that its file does not hold yet.
"""

import json
import time
from collections.abc import Iterator
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from calibration import calibrate
from grid import NEW_TOKENS, PROMPT_TOKENS, Arm, arms, run_config
from texts import held_out

from dstill_jax.allocator import keep_freed_memory
from dstill_jax.data.dataset import ConversationDataset
from dstill_jax.decoding.session import Request, Session
from dstill_jax.locks import only_one
from dstill_jax.models.target import Target, forward, head
from dstill_jax.runs import run_stage
from dstill_jax.weights.load import load_drafter, load_target

BATCH = 64
_TREES = (16, 64)


def run_cell(root: Path, target_folder: str, size: str, block_size: int, seed: int, name: str, *, final: bool) -> None:
    """Trains and measures one cell; `final` measures on the last prompts, too."""
    keep_freed_memory()
    grid = arms(block_size, size)
    arm = grid[name]
    target = load_target(target_folder)
    train_cell(root, target_folder, target, grid, block_size, seed, name)
    for which in ("choosing", "final") if final else ("choosing",):
        measure_cell(root, target, arm, block_size, seed, name, which)


def cell_folder(root: Path, block_size: int, seed: int, name: str) -> Path:
    return root / f"block{block_size}" / f"seed{seed}" / name


def train_cell(
    root: Path, target_folder: str, target: Target, grid: dict[str, Arm], block_size: int, seed: int, name: str
) -> None:
    out = cell_folder(root, block_size, seed, name)
    if (out / "drafter" / "config.json").exists():  # written last, when the training is complete
        return
    folders = {other: str(cell_folder(root, block_size, seed, other) / "drafter") for other in grid}
    config = run_config(grid[name], block_size, seed, target_folder, str(root / "train"), str(out), folders)
    run_stage(config, target=target)


def settings(arm: Arm, block_size: int) -> dict[str, tuple[str, dict]]:
    """What a cell is decoded with: a label, the method and its options."""
    most = block_size - 1
    found: dict[str, tuple[str, dict]] = {"one pass": ("dflash", {})}
    for budget in _TREES:
        found[f"tree {budget}"] = ("ddtree", {"tree_budget": budget})
    if arm.lookup:
        found["lookup"] = ("lookup", {"draft_tokens": most})
    if arm.refined:
        for order, passes in (
            ("left_to_right", most),
            ("left_to_right", 4),
            ("confidence", 2),
            ("confidence", 4),
            ("confidence", most),
            ("quota", most),
        ):
            found[f"{order} {passes}"] = ("refine", {"passes": passes, "order": order})
    return found


def measure_cell(root: Path, target: Target, arm: Arm, block_size: int, seed: int, name: str, which: str) -> None:
    """Writes `measured_<which>.json`: the target, and per setting committed tokens and rounds of each prompt, in order."""
    folder = cell_folder(root, block_size, seed, name)
    path = folder / f"measured_{which}.json"
    done = json.loads(path.read_text()) if path.exists() else {"target": target.fingerprint}
    dataset = ConversationDataset(root / "heldout")
    prompts = held_out(dataset, which)
    drafter = load_drafter(str(folder / "drafter"), target)
    with only_one(folder / which):
        for label, (method, options) in settings(arm, block_size).items():
            if label in done:
                continue
            began = time.perf_counter()
            rounds = list(decode(target, drafter, method, options, prompts))
            done[label] = {
                "committed": [sum(r) for r in rounds],
                "rounds": [len(r) for r in rounds],
                "histogram": np.bincount([c for r in rounds for c in r], minlength=block_size + 1).tolist(),
                "seconds": round(time.perf_counter() - began, 1),
            }
            _write(path, done)
        if "calibration" not in done:
            done["calibration"] = calibrate(target, drafter, dataset, which)
            simulated = done["calibration"].pop("simulated")
            decoded = [done["one pass"]["committed"], done["one pass"]["rounds"]]
            # Batches of another shape add in another order, which can turn a near-tie of two tokens here and there.
            differ = sum(
                ours != theirs
                for ours, theirs in zip(np.transpose(simulated).tolist(), np.transpose(decoded).tolist(), strict=True)
            )
            if differ > len(prompts) // 50:
                raise SystemExit(f"{path}: simulated acceptance differs from decoding for {differ} prompts")
            done["calibration"]["prompts_that_differ"] = differ
            _write(path, done)


def decode(target: Target, drafter, method: str, options: dict, prompts) -> Iterator[list[int]]:
    """Acceptance lengths of each prompt; the text must be the stored greedy answer, up to a tie of its likeliest tokens."""
    session = Session(
        target,
        drafter=None if method == "lookup" else drafter,
        method=method,
        batch_size=BATCH,
        max_prompt_tokens=PROMPT_TOKENS,
        max_new_tokens=NEW_TOKENS,
        **options,
    )
    completions = session.run([Request(i, prompt) for i, (prompt, _) in enumerate(prompts)], rounds_per_call=16)
    for completion in sorted(completions, key=lambda c: c.id):
        prompt, answer = prompts[completion.id]
        if completion.tokens != answer and not _parts_at_a_tie(target, prompt, answer, completion.tokens):
            raise SystemExit(f"prompt {completion.id}: {method} {options} changed the text: decoding is not lossless")
        yield completion.acceptance_lengths


def _parts_at_a_tie(target: Target, prompt: list[int], answer: list[int], other: list[int]) -> bool:
    """Whether two greedy texts part where a pass over the text gives both tokens the same logit, to float32's rounding."""
    at = next((i for i, (a, b) in enumerate(zip(answer, other, strict=False)) if a != b), None)
    if at is None:
        return False
    tokens = jnp.asarray([prompt + answer[:at]])
    hidden = forward(target.config, target.params, tokens, jnp.arange(tokens.shape[1])[None]).hidden[0, -1:]
    logits = np.asarray(head(target.config, target.params, hidden))[0]
    return bool(logits[[answer[at], other[at]]].min() > logits.max() - 1e-4)


def _write(path: Path, values: dict) -> None:
    part = path.with_suffix(".part")
    part.write_text(json.dumps(values), encoding="utf-8")
    part.replace(path)
