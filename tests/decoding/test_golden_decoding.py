"""Greedy decoding against an independent implementation: tokens and acceptance lengths."""

from pathlib import Path

import numpy as np
import pytest

from dstill_jax.decoding.generate import generate
from dstill_jax.decoding.trees import DraftTree, build_tree, visibility
from dstill_jax.weights.load import load_drafter, load_target
from pallas_kernels.tree_attention import unpack_words

pytestmark = pytest.mark.usefixtures("quick_compilation")

REFERENCE = Path(__file__).parents[1] / "reference"
BUDGETS = (4, 16, 40)
REST = [("qwen3_tiny", False), ("llama_tied", True)]


FAST = [("qwen3_tiny", True, (16,)), ("llama_tied", False, (16,))]


@pytest.mark.parametrize(
    "name, scan_layers, budgets",
    [*FAST, *(pytest.param(*case, BUDGETS, marks=pytest.mark.slow) for case in REST)],
)
def test_tokens_and_acceptance_lengths_equal_the_reference(name, scan_layers, budgets):
    expected = np.load(REFERENCE / name / "expected.npz")
    target = load_target(REFERENCE / name / "target", scan_layers=scan_layers)
    drafter = load_drafter(REFERENCE / name / "draft", target)
    prompt = expected["prompt"][0].tolist()
    text = expected["ar_generated"][0].tolist()[len(prompt) :]
    assert expected["generated"][0].tolist()[len(prompt) :] == text
    cases = {"acceptance_lengths": ("dflash", {})}
    cases |= {f"tree{b}_acceptance_lengths": ("ddtree", {"tree_budget": b}) for b in budgets}
    for key, (method, options) in cases.items():
        out = generate(target, [prompt], method, drafter, max_new_tokens=len(text), **options)
        assert out.tokens == [text]
        assert out.acceptance_lengths == [cut(expected[key].tolist(), len(text) - 1)]


def cut(lengths: list[int], left: int) -> list[int]:
    """The same rounds without what the reference counts past the cap."""
    kept = []
    while left:
        kept.append(min(lengths[len(kept)], left))
        left -= kept[-1]
    return kept


@pytest.mark.parametrize("name", ["qwen3_tiny", "llama_tied"])
@pytest.mark.parametrize("budget", BUDGETS)
def test_trees_equal_the_reference(name, budget):
    """There the anchor is index 0 of parents and visibility."""
    expected = np.load(REFERENCE / name / "expected.npz")
    tree = build_tree(expected["draft_logits"][0, 1:], budget)
    assert tree.valid.all()
    for ours, theirs in ((tree.tokens, "tokens"), (tree.depth, "depths"), (tree.parents + 1, "parents")):
        np.testing.assert_array_equal(ours, expected[f"tree{budget}_{theirs}"][-budget:])
    sees = unpack_words(visibility(DraftTree(*(x[None] for x in tree))))[0]
    np.testing.assert_array_equal(sees, expected[f"tree{budget}_visibility"])
