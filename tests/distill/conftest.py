"""One small training case for all distillation tests."""

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import random_drafter, random_target

from dstill_jax.distill.conditioning import Frozen, Task
from dstill_jax.models import target as target_lib
from pallas_kernels.fused_head_loss import HeadTiles

S, A = 16, 16  # as many anchors as tokens: every valid anchor is taken, whatever the key


@pytest.fixture(scope="package")
def case():
    """A target of two layers, a student, a teacher of its shape, and rows: two packed documents; one with padding.

    The first document of row 0 has no prompt tokens, nor has the second: answers touch. Row 1 has a prompt of 4 tokens
    and a hole in its loss mask.
    """
    target = random_target()
    drafter, teacher = random_drafter(target), random_drafter(target, seed=2)
    random = np.random.default_rng(0)
    tokens = random.integers(0, 36, (2, S)).astype(np.int32)
    ids = np.array([[1] * 9 + [2] * 7, [1] * 12 + [0] * 4], np.int32)
    positions = np.array([[*range(9), *range(7)], [*range(12), 0, 0, 0, 0]], np.int32)
    loss_mask = ids > 0
    loss_mask[1, [0, 1, 2, 3, 8]] = False
    tokens[ids == 0] = 0
    task = Task(target.config, drafter.config, A, head_tiles=HeadTiles(64, 37))
    frozen = Frozen(
        embedding=target.params["embed"]["embedding"],
        head=target_lib.head_matrix(target.config, target.params),
        vocabulary=None,
        tap_scale=jnp.ones(32),
        target=target.params,
        teacher=teacher.params,
    )
    batch = {"tokens": tokens, "loss_mask": loss_mask, "document_ids": ids, "positions": positions}
    return SimpleNamespace(target=target, drafter=drafter, teacher=teacher, task=task, frozen=frozen, batch=batch)
