"""Distillation written out block by block in NumPy, one drafter call at a time."""

import numpy as np
from tiny_models import block_logits, log_softmax


def documents(batch):
    """(row, first position, tokens, loss mask) of every document."""
    for row in range(batch["tokens"].shape[0]):
        for document in range(1, batch["document_ids"][row].max() + 1):
            where = np.flatnonzero(batch["document_ids"][row] == document)
            yield row, where[0], batch["tokens"][row, where], batch["loss_mask"][row, where]


def valid_blocks(batch, block_size: int):
    """(document tokens, anchor within it, scored slots, (row, anchor in the row)) of every valid anchor."""
    for row, first, tokens, mask in documents(batch):
        for a in range(len(tokens) - 1):
            if mask[a] and mask[a + 1]:
                scored = [j for j in range(1, block_size) if a + j < len(tokens) and mask[a + j]]
                yield tokens, a, scored, (row, first + a)


def one_pass(case, params, tokens, a, known: dict[int, int]):
    """Logits [K, V] of the block at `a` when the slots in `known` show the given tokens."""
    config = case.drafter.config
    block = [tokens[a]] + [known.get(j, config.mask_token_id) for j in range(1, config.block_size)]
    return block_logits(case.target, config, params, tokens, a, block, width=16)


def greedy(logits: np.ndarray, allowed: np.ndarray) -> int:
    return int(allowed[np.argmax(logits[allowed])])


def trajectory(case, tokens, a, allowed: np.ndarray):
    """Left to right, a slot a pass: the teacher's tokens and its log-distribution when it committed each slot."""
    known, log_t = {}, {}
    for j in range(1, case.drafter.config.block_size):
        logits = one_pass(case, case.teacher.params, tokens, a, known)[j]
        log_t[j] = log_softmax(logits)
        known[j] = greedy(logits, allowed)
    return known, log_t
