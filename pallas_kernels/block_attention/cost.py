"""What a kernel of block attention declares to the compiler, which cannot see how often its loops run.

How many key tiles are visited depends on the anchors, which are data. Declared is the mean over anchors spread evenly: half
of the context a row. XLA's form of the operation multiplies all of it.
"""

from collections.abc import Sequence

import jax
from jax.experimental import pallas as pl

MEAN_SHARE = 0.5  # of the context, that rows at evenly spread anchors see
FORWARD_PRODUCTS = 2  # scores, output
BACKWARD_PRODUCTS = 5  # scores again, gradients of the weights, of values, of keys and of queries


def product_flops(products: int, rows: int, head_dim: int, context: float, own: int) -> int:
    """Of `products` products of every row with `context` keys of the context and `own` of its block."""
    return round(2 * products * rows * head_dim * (context + own))


def estimate(
    products: int, q: jax.Array, context: int, own: int, arrays: Sequence[jax.Array | jax.ShapeDtypeStruct]
) -> pl.CostEstimate:
    """The cost of one kernel.

    Args:
      q: [B, A, G, N, E], all its rows.
      context, own: keys that a row could see.
      arrays: in HBM, that the kernel reads or writes, each once.
    """
    rows, head_dim = q.size // q.shape[-1], q.shape[-1]
    seen = context * MEAN_SHARE
    return pl.CostEstimate(
        flops=product_flops(products, rows, head_dim, seen, own),
        transcendentals=round(rows * (seen + own)),
        bytes_accessed=sum(x.size * x.dtype.itemsize for x in arrays),
    )
