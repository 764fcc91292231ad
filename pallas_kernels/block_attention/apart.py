"""Uses of one VMEM buffer that the compiler cannot connect. Both kernels stage values in VMEM between their products.

Left to itself the compiler forwards what is stored to where it is loaded, and loads once what is used twice; registers then
run out, and it spills. So each such use has an offset of its own: a zero that comes as data, which the compiler must take
for any number.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

USES = 16  # more of them share offsets
_ALIGNED = 16  # rows: what every offset is a multiple of


def zeros() -> jax.Array:
    """The offsets, int32 [USES]: an operand of the kernel."""
    return jnp.zeros((USES,), jnp.int32)


class Apart:
    """Inside a kernel: views of a buffer by use."""

    def __init__(self, offsets: jax.Ref) -> None:
        self._offsets = [pl.multiple_of(offsets[i], _ALIGNED) for i in range(USES)]

    def __call__(self, ref: jax.Ref, use: int) -> jax.Ref:
        """All of `ref`, at an address that the compiler cannot tell to be that of another use."""
        return ref.at[pl.ds(self._offsets[use % USES], ref.shape[0])]
