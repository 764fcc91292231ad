"""The head on drafted slots: losses and choices by `pallas_kernels.fused_head_loss`, on one device or on shares of a mesh.

On a mesh, logits and head stay where they are. Hidden rows travel to the shares of the head, a group at a time; maxima and
sums over the vocabulary travel back.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jaxtyping import Array, Bool, Float, Int

from dstill_jax.sharding.activations import active_mesh, local_shards, logical_rows
from pallas_kernels.fused_head_loss import HeadShares, HeadTiles, Term, fused_head_choice, fused_head_loss

# The vocabulary is dealt over both axes; rows are dealt over fsdp, too, so they are gathered over it.
_SHARES = HeadShares(columns=("fsdp", "tensor"), rows="fsdp")


class SlotLosses(NamedTuple):
    """One number a slot; terms that were not asked for are None."""

    data_ce: Float[Array, "B A J"]
    hard_ce: Float[Array, "B A J"] | None
    teacher_kl: Float[Array, "B A J"] | None
    target_kl: Float[Array, "B A J"] | None
    target_l1: Float[Array, "B A J"] | None
    correct: Bool[Array, "B A J"]  # argmax is the label


class SlotInputs(NamedTuple):
    """What a slot is compared with. Labels are columns of the head; below 0 they cannot be predicted: their loss is 0."""

    labels: Int[Array, "B A J"]
    hard_labels: Int[Array, "B A J"] | None = None
    teacher_hidden: Float[Array, "B A J D"] | None = None  # the head turns it into the teacher's distribution
    target_hidden: Float[Array, "B A J D"] | None = None  # and this one into the target's


def slot_losses(
    hidden: Float[Array, "B A J D"],
    inputs: SlotInputs,
    head: Float[Array, "D V"],
    *,
    kl_direction: str = "forward",
    target_kl: bool = False,
    target_l1: bool = False,
    tiles: HeadTiles | None = None,
) -> SlotLosses:
    """Losses of slots, float32. Gradients flow to `hidden` alone: the head is frozen, and so are others' hidden states.

    Which terms are computed follows from which fields of `inputs` are given, `target_hidden` for the terms that are asked
    for; `tiles`, how many logits exist at a time
    (None: what suits the device).
    """
    kl = f"kl_{kl_direction}"
    labels = {"data_ce": inputs.labels, "hard_ce": inputs.hard_labels}
    labels = {name: label for name, label in labels.items() if label is not None}
    others = [other for other in (inputs.teacher_hidden, inputs.target_hidden) if other is not None]
    terms = {name: Term("ce", i) for i, name in enumerate(labels)}
    if inputs.teacher_hidden is not None:
        terms["teacher_kl"] = Term(kl, 0)  # type: ignore[arg-type]
    if target_kl and inputs.target_hidden is not None:
        terms["target_kl"] = Term(kl, len(others) - 1)  # type: ignore[arg-type]
    if target_l1 and inputs.target_hidden is not None:
        terms["target_l1"] = Term("l1", len(others) - 1)

    def local(hidden: Array, labels: Any, others: Any, head: Array, shares: HeadShares) -> Any:
        losses = fused_head_loss(
            _flat(hidden, 3),
            head,
            terms=tuple(terms.values()),
            labels=tuple(_flat(x, 3) for x in labels),
            others=tuple(_flat(x, 3) for x in others),
            shares=shares,
            block_sizes=tiles,
        )
        return jax.tree.map(lambda x: x.reshape(hidden.shape[:3]), (losses.values, losses.best))

    given = (hidden, tuple(labels.values()), tuple(others))
    axes = jax.tree.map(lambda x: logical_rows(x.ndim), given)
    made = (tuple(logical_rows(3) for _ in terms), logical_rows(3))
    values, best = _where_the_head_is(local, (*axes, (None, "vocab")), made)(*given, jax.lax.stop_gradient(head))
    found: dict[str, Any] = dict.fromkeys(SlotLosses._fields) | dict(zip(terms, values, strict=True))
    found["correct"] = (best == inputs.labels) & (inputs.labels >= 0)
    return SlotLosses(**found)


def slot_choices(
    hidden: Float[Array, "B A J D"],
    head: Float[Array, "D V"],
    banned: Bool[Array, "V"],
    tiles: HeadTiles | None = None,
) -> tuple[Int[Array, "B A J"], Float[Array, "B A J"]]:
    """The most likely column of each slot, those in `banned` excepted, and its probability among the others."""

    def local(hidden: Array, head: Array, banned: Array, shares: HeadShares) -> tuple[Array, Array]:
        best, sure = fused_head_choice(_flat(hidden, 3), head, banned=banned, shares=shares, block_sizes=tiles)
        return best.reshape(hidden.shape[:3]), sure.reshape(hidden.shape[:3])

    given = (logical_rows(4, None), (None, "vocab"), ("vocab",))
    return _where_the_head_is(local, given, (logical_rows(3), logical_rows(3)))(hidden, head, banned)


def _where_the_head_is(local: Callable[..., Any], given: Any, made: Any) -> Callable[..., Any]:
    """`local` here, or on each device's share; logical axes of what it is given and makes."""
    if active_mesh() is None:
        return functools.partial(local, shares=HeadShares())
    return local_shards(functools.partial(local, shares=_SHARES), given, made)


def _flat(x: Array, axes: int) -> Array:
    return x.reshape(-1, *x.shape[axes:])
