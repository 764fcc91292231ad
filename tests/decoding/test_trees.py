"""Draft trees: the best prefixes against a heap and against enumeration, the walk, and what cannot be built."""

import functools
import heapq
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import log_softmax
from tree_cases import accepted_in_tree

import dstill_jax as dj
from dstill_jax.decoding.trees import DraftTree, build_tree, chain, visibility, walk
from dstill_jax.errors import UserError
from pallas_kernels.tree_attention import unpack_words

pytestmark = pytest.mark.usefixtures("quick_compilation")

SHAPES = [(1, 4, 9), (2, 7, 5), (3, 5, 12), (5, 3, 40), (4, 9, 1)]  # slots, vocabulary, budget


def by_heap(logits, budget: int) -> list[tuple[int, ...]]:
    """The paper's algorithm: pop the best prefix, push its next sibling and its first child."""
    scores = log_softmax(logits)
    order = np.argsort(-scores, axis=1, kind="stable")
    ranked = np.take_along_axis(scores, order, axis=1)

    def item(ranks: tuple[int, ...]) -> tuple[float, tuple[int, ...]]:
        return -sum(ranked[d, r] for d, r in enumerate(ranks)), ranks

    heap, found = [item((0,))], []
    while heap and len(found) < budget:
        _, ranks = heapq.heappop(heap)
        found.append(tuple(int(order[d, r]) for d, r in enumerate(ranks)))
        if ranks[-1] + 1 < ranked.shape[1]:
            heapq.heappush(heap, item((*ranks[:-1], ranks[-1] + 1)))
        if len(ranks) < len(ranked):
            heapq.heappush(heap, item((*ranks, 0)))
    return found


def paths(tree: DraftTree) -> list[tuple[int, ...]]:
    """Tokens from the anchor to each valid node, read from the parents alone."""
    tokens, parents, depth, valid = (np.asarray(x).tolist() for x in tree)
    found: list[tuple[int, ...]] = []
    for node in range(sum(valid)):
        assert valid[node] and -1 <= parents[node] < node  # valid nodes first, parents before children
        found.append((*(found[parents[node]] if parents[node] >= 0 else ()), tokens[node]))
        assert depth[node] == len(found[node])
    return found


@given(st.integers(0, 10**6), st.sampled_from(SHAPES), st.sampled_from([0.1, 1.0, 8.0]))
def test_the_tree_is_that_of_the_heap(seed, shape, spread):
    slots, vocabulary, budget = shape
    logits = (np.random.default_rng(seed).normal(size=(slots, vocabulary)) * spread).astype(np.float32)
    assert paths(build_tree(logits, budget)) == by_heap(logits, budget)


@given(st.integers(0, 10**6), st.sampled_from(SHAPES))
def test_no_set_of_prefixes_outweighs_the_tree(seed, shape):
    """Also where many prefixes weigh the same: of equal ones any may be kept, in an order of its own."""
    slots, vocabulary, budget = shape
    logits = np.random.default_rng(seed).integers(-2, 3, (slots, vocabulary)).astype(np.float32)
    scores = log_softmax(logits)
    tokens = range(vocabulary)
    every = [p for d in range(1, slots + 1) for p in itertools.product(tokens, repeat=d)]
    weights = {p: sum(scores[d, token] for d, token in enumerate(p)) for p in every}
    tree = build_tree(logits, budget)
    found = paths(tree)
    assert len(set(found)) == len(found) == min(budget, len(every))
    best = sorted(weights.values(), reverse=True)[: len(found)]
    np.testing.assert_allclose([weights[p] for p in found], best, atol=1e-5)  # float32 sums of at most five terms
    again = build_tree(np.stack([logits, logits[::-1]]), budget)
    assert all(np.array_equal(a[0], b) for a, b in zip(again, tree, strict=True))  # rows of a batch are apart


@settings(max_examples=10)
@given(st.integers(0, 10**6))
def test_a_larger_tree_begins_with_the_smaller_and_no_chain_is_better(seed):
    """Hence a round from the same text accepts at least as much with more nodes, whatever the target writes."""
    logits = np.random.default_rng(seed).normal(size=(4, 9)).astype(np.float32) * 2
    trees = [build_tree(logits, budget) for budget in (1, 4, 16)]
    for small, large in itertools.pairwise(trees):
        count = small.tokens.shape[0]
        assert all(np.array_equal(a, b[:count]) for a, b in zip(small, large, strict=True))
    assert paths(trees[0]) == [(int(logits[0].argmax()),)]
    scores = log_softmax(logits)
    greedy = np.exp(
        np.cumsum(scores.max(axis=1))
    ).sum()  # tokens accepted of the greedy chain, if slots are independent
    expected = [sum(np.exp(sum(scores[d, t] for d, t in enumerate(p))) for p in paths(tree)) for tree in trees[1:]]
    assert expected[0] >= greedy - 1e-6 and expected[1] > expected[0]


def test_excluded_tokens_missing_prefixes_and_numbers_that_are_none():
    logits = np.full((2, 4), -np.inf, np.float32)
    logits[0, [0, 3]], logits[1, 0] = [1.0, 0.0], 5.0
    tree = build_tree(logits, 9)
    assert tree.tokens.shape == (9,) and paths(tree) == [(0,), (0, 0), (3,), (3, 0)]  # id 0 is a token like others
    assert not np.asarray(tree.valid)[4:].any()
    for nothing in (np.full((2, 4), -np.inf), np.full((2, 4), np.nan)):
        assert not np.asarray(build_tree(nothing.astype(np.float32), 9).valid).any()
    one = build_tree(np.zeros((3, 1), np.float32), 5)  # certain tokens weigh exactly 1, and so do their beginnings
    assert paths(one) == [(0,), (0, 0), (0, 0, 0)]


@pytest.mark.parametrize("budget", [0, 1024, -1, 2.0, True, "8"])
def test_budgets_that_cannot_be_are_refused(budget):
    with pytest.raises(UserError, match=r"tree_budget=.*(between 1 and 1023|whole number)"):
        build_tree(jnp.zeros((2, 4)), budget)


@pytest.mark.parametrize("shape", [(4,), (0, 4), (2, 0)])
def test_logits_that_cannot_be_are_refused(shape):
    with pytest.raises(UserError, match="draft_logits"):
        build_tree(jnp.zeros(shape), 4)


@functools.partial(jax.jit, static_argnames="longest")
def _walk(tree, chosen, longest):
    return walk(tree, chosen, longest)


@given(st.integers(0, 10**6))
def test_the_walk_goes_as_far_as_the_text_lies_in_the_tree(seed):
    """Trees of every shape, forests of duplicate siblings apart: a proposer may hand over anything."""
    random = np.random.default_rng(seed)
    parents = np.array([random.integers(-1, n) for n in range(12)])
    depth = np.array([0] * 12)
    for node in range(12):
        depth[node] = 1 + (depth[parents[node]] if parents[node] >= 0 else 0)
    tokens, valid = random.integers(0, 4, 12), random.random(12) < 0.9
    for node in range(12):  # nothing below an invalid node, and no two children of one token
        twins = (parents[:node] == parents[node]) & (tokens[:node] == tokens[node]) & valid[:node]
        valid[node] &= not twins.any() and (parents[node] < 0 or valid[parents[node]])
    text = random.integers(0, 4, 13)
    tree = DraftTree(*(jnp.asarray(x)[None] for x in (tokens, parents, depth, valid)))
    chosen = text[np.concatenate([[0], depth])][None]  # the target's token depends on the position only
    rows, accepted = _walk(tree, chosen, 12)
    expected = accepted_in_tree(tokens, parents, valid, text)
    assert int(accepted[0]) == expected and rows.shape == (1, 13)
    way = np.asarray(rows[0])[: expected + 1]
    assert way[0] == 0 and (rows[0, expected:] == way[-1]).all()
    for before, after in itertools.pairwise(way):
        assert parents[after - 1] + 1 == before and tokens[after - 1] == text[depth[after - 1] - 1]
    sees = np.asarray(unpack_words(visibility(tree)))[0]
    assert np.flatnonzero(sees[way[-1]]).tolist() == sorted(way)


def test_a_chain_is_a_tree():
    tree = chain(jnp.asarray([[5, 0, 5], [1, 2, 3]]))
    assert paths(DraftTree(*(x[0] for x in tree))) == [(5,), (5, 0), (5, 0, 5)]
    np.testing.assert_array_equal(unpack_words(visibility(tree)), np.tril(np.ones((2, 4, 4), bool)))
    assert accepted_in_tree([5, 0, 5], [-1, 0, 1], [True] * 3, [5, 0, 4]) == 2
    assert accepted_in_tree([5, 0, 5], [-1, 0, 1], [True] * 3, [5]) == 1  # the text ends
    rows, accepted = walk(chain(jnp.zeros((2, 0), jnp.int32)), jnp.zeros((2, 1), jnp.int32), 0)
    assert rows.tolist() == [[0], [0]] and accepted.tolist() == [0, 0]


def test_the_public_names_are_these():
    assert dj.build_tree is build_tree and dj.DraftTree is DraftTree
