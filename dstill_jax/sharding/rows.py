"""The rows of a batch on a mesh: which of them this process has to read, and how they become global arrays.

Made by `runs` from the mesh; the data pipeline reads `local`, the training loop calls `place`.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec


@dataclass(frozen=True)
class RowPlaces:
    """A global batch of `batch_size` rows, spread as `sharding` says."""

    sharding: NamedSharding
    batch_size: int

    @functools.cached_property
    def local(self) -> tuple[int, ...]:
        """Rows that lie on this process's devices, in order: of one process all; two may need the same ones."""
        rows_only = NamedSharding(self.sharding.mesh, PartitionSpec(self.sharding.spec[0]))
        places = rows_only.addressable_devices_indices_map((self.batch_size,))
        return tuple(sorted({row for index in places.values() for row in range(*index[0].indices(self.batch_size))}))

    def place(self, batch: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
        """Arrays [B, ...] from those of the rows `local`; every process calls it for the same step."""
        return {name: self._place(values) for name, values in batch.items()}

    def _place(self, values: np.ndarray) -> jax.Array:
        if len(values) != len(self.local):
            raise ValueError(f"{len(values)} rows were read, this process places {len(self.local)}")

        def part(index: tuple[slice, ...]) -> np.ndarray:
            wanted = range(*index[0].indices(self.batch_size))
            first = self.local.index(wanted[0])  # a device's rows follow one another, here as there
            return values[first : first + len(wanted)][:, *index[1:]]

        return jax.make_array_from_callback((self.batch_size, *values.shape[1:]), self.sharding, part)
