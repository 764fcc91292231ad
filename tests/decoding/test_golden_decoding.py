"""Greedy decoding against an independent implementation: tokens and acceptance lengths."""

from pathlib import Path

import numpy as np
import pytest

from dstill_jax.decoding.generate import generate
from dstill_jax.weights.load import load_drafter, load_target

pytestmark = pytest.mark.usefixtures("quick_compilation")

REFERENCE = Path(__file__).parents[1] / "reference"
REST = [("qwen3_tiny", False), ("llama_tied", True)]


@pytest.mark.parametrize(
    "name, scan_layers",
    [("qwen3_tiny", True), ("llama_tied", False), *(pytest.param(*case, marks=pytest.mark.slow) for case in REST)],
)
def test_tokens_and_acceptance_lengths_equal_the_reference(name, scan_layers):
    expected = np.load(REFERENCE / name / "expected.npz")
    target = load_target(REFERENCE / name / "target", scan_layers=scan_layers)
    drafter = load_drafter(REFERENCE / name / "draft", target)
    prompt = expected["prompt"][0].tolist()
    text = expected["ar_generated"][0].tolist()[len(prompt) :]
    assert expected["generated"][0].tolist()[len(prompt) :] == text
    out = generate(target, [prompt], "dflash", drafter, max_new_tokens=len(text))
    assert out.tokens == [text]
    lengths, left = [], len(text) - 1
    for committed in expected["acceptance_lengths"].tolist():  # the reference also counts what lies past the cap
        lengths.append(min(committed, left))
        left -= lengths[-1]
        if not left:
            break
    assert out.acceptance_lengths == [lengths]
