"""What a drafter says at every position of the held-out answers, in one pass: acceptance by slot, and calibration.

Teacher forced: one block at each position of the stored greedy answer. The rounds of greedy decoding follow from the
same numbers without decoding, and must be those that decoding takes.
"""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from grid import NEW_TOKENS, PROMPT_TOKENS
from texts import rows_of

from dstill_jax.blocks import accepted_prefix, mask_tokens
from dstill_jax.data.dataset import ConversationDataset
from dstill_jax.distill import conditioning
from dstill_jax.distill.conditioning import Frozen, Task
from dstill_jax.models import target as target_lib
from dstill_jax.models.drafter import Drafter
from dstill_jax.models.target import Target

_BINS = 15


def calibrate(target: Target, drafter: Drafter, dataset: ConversationDataset, which: str) -> dict[str, Any]:
    """By slot, over the positions at which the slots before it are right: how many, acceptance, calibration error.

    `simulated`: committed tokens and rounds of each answer, as greedy decoding would have them.
    """
    draft = _drafting(target, drafter)
    walks, reached, right, sure = [], [], [], []
    for batch in _batches(dataset, which):
        anchors, valid, scored, ok, confidence, run = (
            np.asarray(x)[0] for x in draft(drafter.params, target.params, batch)
        )
        walks.append(_walk(dict(zip(anchors[valid].tolist(), run[valid].tolist(), strict=True)), batch["loss_mask"][0]))
        reached.append((scored[:, 1:] & (run[:, None] >= np.arange(scored.shape[1] - 1)))[valid])
        right.append(ok[valid, 1:])
        sure.append(confidence[valid, 1:])
    slots = _by_slot(np.concatenate(reached), np.concatenate(right), np.concatenate(sure))
    return {**slots, "simulated": [list(x) for x in zip(*walks, strict=True)]}


def _drafting(target: Target, drafter: Drafter) -> Callable[..., Any]:
    task = Task(target.config, drafter.config, NEW_TOKENS)  # as many anchors as an answer can have
    taps = jnp.ones(drafter.config.num_taps * target.config.hidden_size)  # a finished drafter reads them unscaled
    head = target_lib.head_matrix(target.config, target.params)

    @jax.jit
    def draft(params: Any, target_params: Any, batch: dict[str, Any]) -> tuple[Any, ...]:
        # Features in float32, computed here as in decoding: stored ones are rounded, which turns a few near-ties.
        frozen = Frozen(target_params["embed"]["embedding"], head, None, taps, target_params)
        data = conditioning.condition(task, frozen, batch, jax.random.key(0))
        blocks = data.blocks
        first = jnp.arange(drafter.config.block_size) == 0
        tokens = mask_tokens(blocks.tokens, first, drafter.config.mask_token_id)
        hidden = conditioning.run_pass(task, frozen, params, data, conditioning.project(task, params, data), tokens)
        drafted, sure = conditioning.pick(task, frozen, hidden)
        right = drafted == blocks.tokens
        return blocks.anchors, blocks.valid, blocks.scored, right, sure, accepted_prefix(right, blocks.scored)

    return draft


def _batches(dataset: ConversationDataset, which: str) -> Iterator[dict[str, np.ndarray]]:
    """Each answer as a batch of one row, all of one length."""
    length = PROMPT_TOKENS + NEW_TOKENS
    for i in rows_of(dataset, which):
        row = dataset[i]
        n = len(row.tokens)
        pad = length - n
        yield {
            "tokens": np.pad(row.tokens, (0, pad))[None],
            "loss_mask": np.pad(row.loss_mask, (0, pad))[None],
            "document_ids": np.pad(np.ones(n, np.int32), (0, pad))[None],
            "positions": np.arange(length, dtype=np.int32)[None],
        }


def _walk(accepted: dict[int, int], answer: np.ndarray) -> tuple[int, int]:
    """(committed tokens, rounds) of greedy decoding, from the accepted run at each anchor."""
    at, last = int(np.argmax(answer)), int(np.flatnonzero(answer)[-1])
    committed, rounds = 0, 0
    while at < last:  # the token at `at` is committed; the last one ends the answer
        step = min(accepted[at] + 1, last - at)
        at, committed, rounds = at + step, committed + step, rounds + 1
    return committed, rounds


def _by_slot(reached: np.ndarray, right: np.ndarray, sure: np.ndarray) -> dict[str, list[float]]:
    """Each [positions, K - 1]. The calibration error is that of 15 equal bins of confidence (ECE)."""
    errors = []
    for slot in range(reached.shape[1]):
        ok, said = right[reached[:, slot], slot], sure[reached[:, slot], slot]
        bins = np.minimum((said * _BINS).astype(int), _BINS - 1)
        gap = np.bincount(bins, said - ok, _BINS)  # the sum over a bin of confidence less accuracy
        errors.append(float(np.abs(gap).sum() / max(len(ok), 1)))
    counts = reached.sum(axis=0)
    return {
        "reached": counts.tolist(),
        "acceptance": ((right & reached).sum(axis=0) / np.maximum(counts, 1)).tolist(),
        "confidence": ((sure * reached).sum(axis=0) / np.maximum(counts, 1)).tolist(),
        "error": errors,
    }
