"""Random keys, of one kind everywhere: a process-wide default of JAX must not change what a seed draws."""

import jax
from jaxtyping import Array, UInt32

_IMPL = "threefry2x32"


def seed_key(seed: int) -> jax.Array:
    """The typed key of a seed."""
    return jax.random.key(seed, impl=_IMPL)


def key_of(data: UInt32[Array, "*batch 2"]) -> jax.Array:
    """The typed keys whose `jax.random.key_data` this is."""
    return jax.random.wrap_key_data(data, impl=_IMPL)
