"""Writing into a cache that eight simulated devices share, as TPUs do it; called through `simulated.py`."""

from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from dstill_jax.models import kv_cache
from dstill_jax.sharding import MeshConfig, build_mesh
from dstill_jax.sharding.activations import use_mesh
from dstill_jax.sharding.rules import to_spec

L, B, N, G, E, C = 3, 8, 5, 2, 4, 32


def gap() -> float:
    """Largest difference between all layers written on shares, row by row, and on one device, by a scatter."""
    random = np.random.default_rng(0)
    old = random.normal(size=(L, B, G, E, C)), random.normal(size=(L, B, G, C, E))
    old = tuple(jnp.asarray(x, jnp.float32) for x in old)
    new = tuple(jnp.asarray(random.normal(size=(B, N, L, G, E)), jnp.float32) for _ in range(2))
    start = jnp.asarray(random.integers(0, C - N + 1, B), jnp.int32)
    wanted = kv_cache.write_slots(old, new, start, slice(None))
    mesh = build_mesh(MeshConfig(data=4, tensor=2))
    place = NamedSharding(mesh, to_spec((None, "batch", "kv_heads", None, None)))

    @jax.jit
    def write(old, new, start):
        with use_mesh(mesh):
            return kv_cache.write_slots(old, new, start, slice(None))

    with mock.patch.object(kv_cache, "on_tpu", lambda: True):
        found = write(jax.device_put(old, place), new, start)
    return max(float(jnp.abs(a - b).max()) for a, b in zip(jax.device_get(found), wanted, strict=True))
