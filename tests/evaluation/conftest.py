"""A small evaluation with known figures, shared by the tests of this folder."""

import numpy as np
import pytest
from evaluation_samples import PROMPTS_HASH, TOKENS, make_arm

from dstill_jax.evaluation import EvaluationMetadata, EvaluationResult


@pytest.fixture
def metadata() -> EvaluationMetadata:
    return EvaluationMetadata(
        target="tiny <target>",
        target_fingerprint="f" * 64,
        prompts="four made-up prompts",
        prompts_hash=PROMPTS_HASH,
        prompt_count=4,
        thinking="not applicable",
        device="a test machine",
        dtype="float32",
        max_new_tokens=10,
        seeds={"sampling": 3},
        versions={"numpy": np.__version__},
        command="dstill eval --prompts 'a & b'",
    )


@pytest.fixture
def result(metadata: EvaluationMetadata) -> EvaluationResult:
    """Autoregressive at 1 s a token; A1 with 14 rounds in 14 s; A4 with 10 rounds, W = 1 too, and an untimed arm."""
    plain = make_arm(
        "autoregressive",
        [[1] * n for n in TOKENS],
        [float(n) for n in TOKENS],
        method="autoregressive",
        drafted_length=0,
        passes=0,
        drafter="",
    )
    a1 = make_arm("A1 <b>", [[2, 2, 2], [2] * 4, [2, 2], [2] * 5], [3.0, 4.0, 2.0, 5.0], training_steps=100)
    a4 = make_arm("A4", [[4, 2], [4, 4], [4], [4, 1, 1, 4]], [2.0, 2.0, 1.0, 4.0], training_steps=100, notes="a | note")
    short = make_arm(
        "A4, W = 1", [[2, 2, 2], [2] * 4, [2, 2], [2] * 5], [2.5, 3.5, 2.0, 4.5], drafted_length=1, drafter="A4"
    )
    untimed = make_arm("untimed", [[1] * n for n in TOKENS], None, drafter="random", output_digests=None)
    return EvaluationResult(metadata, (plain, a1, a4, short, untimed))
