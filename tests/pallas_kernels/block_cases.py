"""Inputs for the tests of block attention, and the three ways to run them."""

import contextlib
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from races import EAGER, no_race

from pallas_kernels.block_attention import BlockSizes, block_attention

SMALL = BlockSizes(rows=128, keys=128, context=256)
STAGED = dataclasses.replace(SMALL, weights_staged=True)
NAMES = ("out", "dq", "dcontext_k", "dcontext_v", "dblock_k", "dblock_v")


@dataclasses.dataclass(frozen=True)
class Shape:
    B: int = 1
    A: int = 5
    R: int = 4
    K: int = 4
    H: int = 2
    G: int = 1
    E: int = 64
    S: int = 130
    dtype: str = "float32"


def arrays(shape: Shape, seed: int = 0) -> tuple[jax.Array, ...]:
    """q, context_k, context_v, block_k, block_v and a cotangent of the output."""
    s, rng = shape, np.random.default_rng(seed)
    sizes = [(s.B, s.A, s.R, s.H, s.E), *[(s.B, s.G, s.S, s.E)] * 2, *[(s.B, s.A, s.K, s.G, s.E)] * 2]
    return tuple(jnp.asarray(rng.standard_normal(size), s.dtype) for size in (*sizes, sizes[0]))


def adversarial_anchors(shape: Shape) -> dict[str, np.ndarray]:
    """Anchors [A] that sorting, tiles and masks could get wrong."""
    A, S = shape.A, shape.S
    rng = np.random.default_rng(1)
    return {
        "random": rng.integers(0, S, A),
        "zero": np.zeros(A, int),
        "one": np.ones(A, int),
        "last": np.full(A, S - 1),
        "all of it": np.full(A, S),
        "reversed": np.linspace(S - 1, 0, A).astype(int),
        "closer than K": np.arange(A) % max(S, 1),
        "beyond": np.arange(A) * S - S,  # below 0 and above S
    }


def run(implementation: str, inputs: tuple[jax.Array, ...], anchors: Any, **options: Any) -> dict[str, np.ndarray]:
    """Output and all gradients, float32; of simulated kernels, none has a race."""
    *operands, cotangent = inputs
    if implementation == "pallas":
        options = {"interpret": EAGER, "block_sizes": SMALL} | options
    else:
        options.pop("block_sizes", None)

    def call(*x: jax.Array) -> jax.Array:
        return block_attention(*x, jnp.asarray(anchors), implementation=implementation, **options)

    @jax.jit
    def both(*x: jax.Array) -> tuple[jax.Array, ...]:
        out, pull = jax.vjp(call, *x)
        return out, *pull(cotangent)

    with no_race() if implementation == "pallas" else contextlib.nullcontext():
        results = both(*operands)
    return {name: np.asarray(x, np.float32) for name, x in zip(NAMES, results, strict=True)}


def assert_close(actual: dict[str, np.ndarray], wanted: dict[str, np.ndarray], tolerance: float) -> None:
    """Largest difference, relative to the largest entry, of the output and of every gradient."""
    for name, reference in wanted.items():
        assert np.isfinite(actual[name]).all(), f"{name} is not finite"
        scale = max(1.0, float(np.abs(reference).max(initial=0.0)))
        difference = float(np.abs(actual[name] - reference).max(initial=0.0))
        assert difference <= tolerance * scale, f"{name} differs by {difference} (scale {scale})"
