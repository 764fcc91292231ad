"""Copies between HBM and VMEM of the blocks of one query tile, which lie scattered since blocks are sorted.

Both kernels double-buffer them: the next tile's blocks arrive while this one is worked on.
"""

from collections.abc import Sequence

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu


def _copy(hbm: jax.Ref, vmem: jax.Ref, semaphore: jax.Ref, at: tuple, place: int | jax.Array, inward: bool):
    height = hbm.shape[-2]
    part = vmem.at[pl.ds(pl.multiple_of(place * height, 16), height)]
    source, target = (hbm.at[at], part) if inward else (part, hbm.at[at])
    return pltpu.make_async_copy(source, target, semaphore)


def each_copy(
    action: str,
    pairs: Sequence[tuple[jax.Ref, jax.Ref]],
    semaphore: jax.Ref,
    order: jax.Ref,
    first: jax.Array,
    count: int | jax.Array,
    where: tuple[jax.Array, jax.Array],
    *,
    inward: bool = True,
) -> None:
    """Starts or waits for the copies of `count` blocks.

    Args:
      action: "start" or "wait".
      pairs: (array in HBM [B, A, G, rows, E], buffer in VMEM [blocks * rows, E]).
      order: SMEM; the block at place `first` and the following ones.
      where: (batch row, kv head).
      inward: HBM to VMEM, or back.
    """
    batch, group = where

    def step(place: jax.Array, _: None) -> None:
        for hbm, vmem in pairs:
            copy = _copy(hbm, vmem, semaphore, (batch, order[first + place], group), place, inward)
            copy.start() if action == "start" else copy.wait()

    jax.lax.fori_loop(0, count, step, None)
