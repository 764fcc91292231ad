"""The most likely column of each row, and how likely it is: no gradient, nothing kept but that."""

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.fused_head_loss.api import check_implementation, check_rows
from pallas_kernels.fused_head_loss.blocks import HeadTiles, choose_tiles
from pallas_kernels.fused_head_loss.reference import head_choice_reference
from pallas_kernels.fused_head_loss.shares import HeadShares
from pallas_kernels.fused_head_loss.sweeps import advance, better, logits, merged, over_groups, start, sweep
from pallas_kernels.fused_head_loss.terms import HeadChoice


def fused_head_choice(
    hidden: Array,  # [R, D]
    head: Array,  # [D, V]
    *,
    banned: Array | None = None,  # bool [V]
    shares: HeadShares = HeadShares(),
    implementation: str = "auto",
    device_kind: str | None = None,
    block_sizes: HeadTiles | None = None,
) -> HeadChoice:
    """The first of the most likely columns of each row, and its probability; no gradient, and no [R, V] array.

    Args:
      banned: columns that do not count, neither for the choice nor in the softmax; not all of them.
      shares: as for `fused_head_loss`; `banned` is of this device's columns.
      implementation, device_kind, block_sizes: as for `fused_head_loss`.

    Raises:
      ValueError: shapes, dtypes or an implementation that do not fit; the message says which.
    """
    check_rows(hidden, head)
    if banned is None:
        banned = jnp.zeros(head.shape[1], bool)
    if banned.shape != head.shape[1:] or banned.dtype != bool:
        raise ValueError(f"{banned.shape=} {banned.dtype=} must be bool {head.shape[1:]}, a column of the head each")
    hidden, head = jax.lax.stop_gradient((hidden, head))
    which, kind = check_implementation(implementation, device_kind, shares)
    with jax.named_scope("fused_head_choice"):
        if which == "reference":
            return head_choice_reference(hidden, head, banned)
        tiles = choose_tiles(hidden.shape[0] * shares.groups, head.shape[1], block_sizes, kind).dealt(shares.groups)

        def one(carry: None, rows: tuple[Array]) -> tuple[None, HeadChoice]:
            return carry, _choose(rows[0], head, banned, shares, tiles.columns)

        return over_groups(tiles.rows, one, (hidden,))[1]


def _choose(rows: Array, head: Array, banned: Array, shares: HeadShares, columns: int) -> HeadChoice:
    """One group of rows, and of the results this device's."""
    rows = shares.gather(rows)

    def visit(carry, tile, first, new):  # type: ignore[no-untyped-def]
        running, best = carry
        allowed = jax.lax.dynamic_slice_in_dim(~banned, first, tile.shape[1])
        p = logits(rows, tile, new & allowed)
        return advance(running, p, ()), better(best, running, p, first)

    own, best = sweep(head, columns, visit, (start(rows.shape[0]), jnp.zeros(rows.shape[0], jnp.int32)))
    (whole,) = merged(shares, (own,))
    return shares.own(HeadChoice(shares.best(own.top, best, whole.top, head.shape[1]), 1 / whole.total))
