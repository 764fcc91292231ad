"""Draft trees: what a proposer hands to the verifier, DDTree's best tree under a budget, and the walk along one.

The root is the anchor, the last committed token; it is not among the nodes. A chain is a tree.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from dstill_jax.errors import UserError, whole
from pallas_kernels.tree_attention import ancestor_words

_MOST_NODES = 1023  # with the root, as many rows as one verification pass takes


class DraftTree(NamedTuple):
    """N nodes below the anchor, parents before children. A node's token stands `depth` positions after the anchor.

    Nodes that are not valid are padding: nobody sees them and nothing follows from what they hold.
    """

    tokens: Int[Array, "*batch N"]
    parents: Int[Array, "*batch N"]  # index of the parent node; -1: the anchor
    depth: Int[Array, "*batch N"]  # 1 for children of the anchor
    valid: Bool[Array, "*batch N"]


def chain(tokens: Int[Array, "B W"]) -> DraftTree:
    """W tokens, each the only child of the one before it."""
    nodes = jnp.arange(tokens.shape[1], dtype=jnp.int32)
    parents, depth = (jnp.broadcast_to(x, tokens.shape) for x in (nodes - 1, nodes + 1))
    return DraftTree(tokens, parents, depth, jnp.ones(tokens.shape, bool))


def build_tree(draft_logits: Float[Array, "*batch W V"], budget: int) -> DraftTree:
    """The `budget` likeliest prefixes when slots are independent, each with its drafted distribution (arXiv 2604.12989).

    A prefix weighs the product of its tokens' probabilities: float32 log-probabilities, no temperature. The best
    prefixes contain their own beginnings, so they are a tree. Nodes come likeliest first; of equal ones the shorter
    first, then by the ranks of their tokens. Tokens of logit -inf are never drafted; nodes are invalid where fewer
    prefixes than `budget` exist.

    No heap is needed: the best `budget` prefixes of a depth are among the pairs (i-th best prefix one shorter, j-th best
    token) with i j <= budget, since i j - 1 other pairs are at least as good as (i, j).

    Raises:
      UserError: a budget outside 1..1023, or logits of fewer than two axes.
    """
    budget = check_budget(budget)
    if draft_logits.ndim < 2 or not draft_logits.size:
        raise UserError(f"draft_logits must be [.., W, V] with something in it, got the shape {draft_logits.shape}")
    batch = draft_logits.shape[:-2]
    flat = draft_logits.reshape(-1, *draft_logits.shape[-2:])
    trees = jax.vmap(lambda logits: _best_prefixes(logits, budget))(flat)
    return DraftTree(*(x.reshape(*batch, x.shape[-1]) for x in trees))


def check_budget(budget: object) -> int:
    """A number of nodes, or a UserError that says what is wrong with it."""
    if not 1 <= (nodes := whole("tree_budget", budget)) <= _MOST_NODES:
        raise UserError(f"tree_budget={nodes} must be between 1 and {_MOST_NODES}, the root apart")
    return nodes


@functools.partial(jax.jit, static_argnames="budget")
def _best_prefixes(logits: Float[Array, "W V"], budget: int) -> DraftTree:
    logits = logits.astype(jnp.float32)
    best, tokens = jax.lax.top_k(logits, min(budget, logits.shape[1]))
    # Never above 0, so that no prefix outweighs its own beginning by rounding.
    scores = jnp.minimum(best - jax.nn.logsumexp(logits, axis=-1, keepdims=True), 0.0)
    scores = jnp.where(jnp.isnan(scores), -jnp.inf, scores)  # all -inf, or no numbers: nothing to draft

    weight, first = jnp.zeros(1), -1  # of the prefixes one shorter, best first, and where these begin among all
    levels: list[tuple[Array, Array, Array]] = []
    depths: list[int] = []
    for depth, (slot_scores, slot_tokens) in enumerate(zip(scores, tokens, strict=True), start=1):
        i, j = _pairs(weight.shape[0], slot_scores.shape[0], budget)
        kept, pair = jax.lax.top_k(weight[i] + slot_scores[j], min(budget, len(i)))  # ties: the first pair
        levels.append((kept, slot_tokens[j[pair]], i[pair] + first))
        weight, first = kept, len(depths)
        depths += [depth] * kept.shape[0]

    weights, node_tokens, parents = (jnp.concatenate(x) for x in zip(*levels, strict=True))
    chosen_weights, chosen = jax.lax.top_k(weights, min(budget, len(depths)))  # ties: the shallower one
    node_of = jnp.full(len(depths), -1).at[chosen].set(jnp.arange(chosen.shape[0]))
    parents = jnp.where(parents < 0, -1, node_of[parents])[chosen]
    valid = chosen_weights > -jnp.inf
    tree = DraftTree(node_tokens[chosen], parents, jnp.asarray(depths)[chosen], valid)
    more = budget - chosen.shape[0]
    return DraftTree(*(jnp.pad(x if x.dtype == bool else x.astype(jnp.int32), (0, more)) for x in tree))


def _pairs(prefixes: int, tokens: int, budget: int) -> tuple[Int[Array, "P"], Int[Array, "P"]]:
    """Indices (i, j) of a prefix and a token, both from 0, with (i + 1) (j + 1) <= budget; i ascending, then j."""
    pairs = [(i, j) for i in range(prefixes) for j in range(min(tokens, budget // (i + 1)))]
    i, j = np.asarray(pairs, np.int32).T
    return jnp.asarray(i), jnp.asarray(j)


def visibility(tree: DraftTree) -> Int[Array, "B N+1 128"]:
    """Which rows of a verification pass (the anchor, then the nodes) see which: themselves and what they follow."""
    parents = jnp.pad(tree.parents + 1, ((0, 0), (1, 0)), constant_values=-1)
    return ancestor_words(parents, jnp.pad(tree.valid, ((0, 0), (1, 0)), constant_values=True))


def walk(
    tree: DraftTree, chosen: Int[Array, "B N+1"], longest: int
) -> tuple[Int[Array, "B longest+1"], Int[Array, "B"]]:
    """Follows the target from the root: at each row to the child that holds the target's own token there.

    Args:
      chosen: the token that the target draws after each row (the anchor, then the nodes).

    Returns:
      The rows passed, from row 0 on, the last one repeated to length longest + 1; and how many nodes were accepted.
    """

    def step(row: Int[Array, "B"], _: None) -> tuple[Int[Array, "B"], tuple[Array, Array]]:
        wanted = jnp.take_along_axis(chosen, row[:, None], axis=1)
        child = tree.valid & (tree.parents + 1 == row[:, None]) & (tree.tokens == wanted)
        found = child.any(axis=1)
        row = jnp.where(found, jnp.argmax(child, axis=1).astype(row.dtype) + 1, row)
        return row, (row, found)

    root = jnp.zeros(chosen.shape[0], jnp.int32)
    if not longest:
        return root[:, None], root
    _, (rows, found) = jax.lax.scan(step, root, None, longest)
    return jnp.concatenate([root[:, None], rows.T], axis=1), found.sum(axis=0, dtype=jnp.int32)
