"""Multi-pass completion of a block: mask, predict, commit some slots, repeat.

One rule set for two callers: `decoding/` refines drafts with it, `distill/` records trajectories with it.
A committed token stays; the last pass commits what is left.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from dstill_jax.errors import UserError

CommitOrder = Literal["confidence", "quota", "prefix", "left_to_right"]
"""Which slots a pass commits.

confidence: every slot at least `threshold` sure, and never fewer than the quota.
quota: the surest ceil(remaining / passes left) slots.
prefix: from the left, every slot up to which the block is at least `threshold` sure as a whole (the product of the
    confidences of its open slots), and never fewer than the quota: what a verifier would accept.
left_to_right: the next ceil(remaining / passes left) slots, in order; with K - 1 passes this is the quality ceiling.
"""

_THRESHOLDED = ("confidence", "prefix")  # the orders that read a threshold

HiddenFn = Callable[[Int[Array, "B A K"], Int[Array, "B A R"]], Float[Array, "B A R D"]]
"""(block tokens, slots wanted) -> the drafter's output at those slots."""
ChooseFn = Callable[[Float[Array, "B A R D"], Int[Array, "B A R"]], tuple[Int[Array, "B A R"], Float[Array, "B A R"]]]
"""(outputs, their slots) -> token and confidence in (0, 1] of each."""


class Trajectory(NamedTuple):
    """How a block was completed; slot 0 is the anchor."""

    tokens: Int[Array, "B A K"]  # the completion
    commit_pass: Int[Array, "B A K"]  # 0 for slots given at the start, s for slots committed in pass s = 1..S
    confidence: Float[Array, "B A K"]  # of the committed token when it was committed; 1 for given slots
    hidden: Float[Array, "B A K D"] | None  # the drafter's output at commit time, when kept


def check_order(order: str, passes: int, threshold: object = None) -> None:
    """Raises UserError for an unknown order, a pass count below 1, or a threshold (None: not set) that is not read."""
    if order not in get_args(CommitOrder):
        raise UserError(f"order={order!r} is unknown; choose one of {', '.join(get_args(CommitOrder))}")
    if passes < 1:
        raise UserError(f"passes={passes} must be at least 1")
    if threshold is not None and order not in _THRESHOLDED:
        raise UserError(
            f"threshold={threshold} is read by order={' or '.join(map(repr, _THRESHOLDED))} only, this is {order!r};"
            " leave it out, or change the order"
        )


def select_commits(
    confidence: Float[Array, "B A K"],
    open_slots: Bool[Array, "B A K"],
    passes_left: Int[Array, ""] | int,
    threshold: float | None,
) -> Bool[Array, "B A K"]:
    """Slots to commit now: the surest ceil(open / passes_left), and all above `threshold` when there is one.

    Ties go to the earlier slot.
    """
    score = jnp.where(open_slots, confidence, -1.0)
    rank = jnp.argsort(jnp.argsort(-score, axis=-1, stable=True), axis=-1, stable=True)
    quota = -(-open_slots.sum(-1, keepdims=True) // passes_left)
    chosen = rank < quota
    if threshold is not None:
        chosen |= confidence >= threshold
    return chosen & open_slots


def _left_to_right_groups(num_slots: int, passes: int) -> np.ndarray:
    """[passes, R] slots of each pass; short groups repeat their last slot, which is harmless."""
    groups = [g for g in np.array_split(np.arange(1, num_slots), min(passes, num_slots - 1)) if g.size]
    width = max(g.size for g in groups)
    return np.stack([np.pad(g, (0, width - g.size), mode="edge") for g in groups])


def refine(
    hidden_fn: HiddenFn,
    choose_fn: ChooseFn,
    anchors: Int[Array, "B A"],
    block_size: int,
    mask_token_id: int,
    passes: int,
    order: CommitOrder = "confidence",
    threshold: float = 0.9,
    keep_hidden: bool = False,
) -> Trajectory:
    """Completes blocks of `block_size` slots that start fully masked, in `passes` passes of the drafter."""
    check_order(order, passes)
    B, A = anchors.shape
    K = block_size
    tokens = jnp.full((B, A, K), mask_token_id, anchors.dtype).at[..., 0].set(anchors)
    commit_pass = jnp.zeros((B, A, K), jnp.int32)
    confidence = jnp.ones((B, A, K), jnp.float32)
    hidden = None
    if keep_hidden:
        probe = jax.eval_shape(hidden_fn, tokens, jnp.zeros((B, A, 1), jnp.int32))
        hidden = jnp.zeros((B, A, K, probe.shape[-1]), probe.dtype)
    start = Trajectory(tokens, commit_pass, confidence, hidden)

    if order == "left_to_right":
        groups = _left_to_right_groups(K, passes)

        def step(trajectory: Trajectory, inputs: tuple[Array, Array]) -> tuple[Trajectory, None]:
            number, group = inputs
            slots = jnp.broadcast_to(group, (B, A, group.shape[0]))
            out = hidden_fn(trajectory.tokens, slots)
            chosen, sure = choose_fn(out, slots)
            return _commit(trajectory, group, chosen, sure, out, number), None

        numbers = jnp.arange(1, len(groups) + 1, dtype=jnp.int32)
        return jax.lax.scan(step, start, (numbers, jnp.asarray(groups)))[0]

    slots = jnp.broadcast_to(jnp.arange(1, K), (B, A, K - 1))
    is_open = jnp.broadcast_to(jnp.arange(K) > 0, (B, A, K))

    def sweep(carry: tuple[Trajectory, Array], number: Array) -> tuple[tuple[Trajectory, Array], None]:
        trajectory, open_slots = carry
        out = hidden_fn(trajectory.tokens, slots)
        chosen, sure = choose_fn(out, slots)
        full = _commit(trajectory, jnp.arange(1, K), chosen, sure, out, number)
        sure = full.confidence
        if order == "prefix":  # never rises from left to right, so the surest slots are the leftmost ones
            sure = jnp.cumprod(jnp.where(open_slots, sure, 1.0), axis=-1)
        now = select_commits(sure, open_slots, passes - number + 1, None if order == "quota" else threshold)
        merged = jax.tree.map(
            lambda new, old: jnp.where(now[..., None] if new.ndim == 4 else now, new, old), full, trajectory
        )
        return (merged, open_slots & ~now), None

    return jax.lax.scan(sweep, (start, is_open), jnp.arange(1, passes + 1, dtype=jnp.int32))[0][0]


def _commit(trajectory: Trajectory, slots: Array, chosen: Array, sure: Array, out: Array, number: Array) -> Trajectory:
    """Writes tokens, confidence, pass number (and outputs) of the given slots, [R], the same for all blocks."""
    return Trajectory(
        trajectory.tokens.at[..., slots].set(chosen),
        trajectory.commit_pass.at[..., slots].set(number),
        trajectory.confidence.at[..., slots].set(sure),
        None if trajectory.hidden is None else trajectory.hidden.at[..., slots, :].set(out),
    )
