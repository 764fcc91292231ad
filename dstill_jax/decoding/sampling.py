"""The draw: which token stands at a position, given the target's logits there.

It is a fixed function of the logits and of (request key, absolute position), so every decoding method that asks the
same question gets the same answer: that is what makes all of them emit the tokens of plain decoding, at every
temperature (docs/losslessness.md).
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from dstill_jax.errors import UserError, number, whole
from dstill_jax.keys import key_of


@dataclass(frozen=True)
class SamplingConfig:
    """How tokens are drawn. Filters apply to logits / temperature, top-k before top-p."""

    temperature: float = 0.0  # 0 is greedy: argmax, lowest id on ties
    top_k: int | None = None  # keep the k most likely tokens (and their ties)
    top_p: float | None = None  # then the smallest set whose probability reaches p

    def __post_init__(self) -> None:
        number("temperature", self.temperature)
        if self.temperature != 0 and not 1e-4 <= self.temperature < float("inf"):
            raise UserError(f"temperature={self.temperature} must be 0 (greedy) or a number from 0.0001 on")
        if self.top_k is not None and whole("top_k", self.top_k) < 1:
            raise UserError(f"top_k={self.top_k} must be at least 1; leave it out to keep every token")
        if self.top_p is not None and not 0 < number("top_p", self.top_p) <= 1:
            raise UserError(f"top_p={self.top_p} must be in (0, 1]; leave it out to keep every token")
        for name in ("top_k", "top_p"):
            if self.greedy and getattr(self, name) is not None:
                raise UserError(
                    f"{name}={getattr(self, name)} filters what is drawn, and temperature=0 (greedy) draws nothing; set a"
                    f" temperature above 0, or leave {name} out"
                )

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


class Draw(NamedTuple):
    """The traced numbers of a SamplingConfig: changing them does not recompile."""

    temperature: Float[Array, ""]
    top_k: Int[Array, ""]
    top_p: Float[Array, ""]

    @classmethod
    def of(cls, config: SamplingConfig) -> "Draw":
        return cls(
            jnp.float32(config.temperature or 1.0),
            jnp.int32(min(config.top_k or 2**31 - 1, 2**31 - 1)),
            jnp.float32(max(config.top_p or 1.0, 1e-9)),  # a positive number in float32, too
        )


def filter_logits(logits: Float[Array, "*batch V"], draw: Draw) -> Float[Array, "*batch V"]:
    """Sets to -inf what top-k and top-p exclude.

    Nothing is sorted: the lowest logit to keep is found bit by bit, each bit a sum over the vocabulary.
    """
    logits = jnp.where(logits == 0, 0.0, logits)  # -0 and 0 are one number

    def keep_k(x: Array) -> Array:
        return jnp.where(_reaching(x, jnp.ones_like(x), draw.top_k), x, -jnp.inf)

    def keep_p(x: Array) -> Array:
        return jnp.where(_reaching(x, jax.nn.softmax(x, axis=-1), draw.top_p), x, -jnp.inf)

    # A filter that is off costs nothing, and rounding cannot cut a tail when nothing is to be cut.
    logits = jax.lax.cond(draw.top_k < logits.shape[-1], keep_k, lambda x: x, logits)
    return jax.lax.cond(draw.top_p < 1, keep_p, lambda x: x, logits)


def _reaching(
    scores: Float[Array, "*batch V"], weights: Float[Array, "*batch V"], enough: Float[Array, ""]
) -> Bool[Array, "*batch V"]:
    """The highest scores whose weights together reach `enough`, ties of the last one included; all if none do."""
    bits = jax.lax.bitcast_convert_type(scores, jnp.int32)
    # As unsigned numbers in the order of the floats: negative ones reversed, below the others.
    order = jnp.where(bits < 0, ~bits, bits ^ jnp.int32(-(2**31))).astype(jnp.uint32)

    def set_bit(i: Int[Array, ""], floor: UInt32[Array, "*batch 1"]) -> UInt32[Array, "*batch 1"]:
        higher = floor | (jnp.uint32(1) << (31 - i).astype(jnp.uint32))
        total = jnp.sum(jnp.where(order >= higher, weights, 0), axis=-1, keepdims=True)
        return jnp.where(total >= enough, higher, floor)

    floor = jax.lax.fori_loop(0, 32, set_bit, jnp.zeros((*scores.shape[:-1], 1), jnp.uint32))
    return order >= floor


def position_noise(keys: UInt32[Array, "B 2"], positions: Int[Array, "B N"], vocab_size: int) -> Array:
    """Gumbel noise [B, N, V] of each absolute position of each request."""

    def one(key: Array, position: Array) -> Array:
        folded = jax.random.fold_in(key_of(key), position)
        return jax.random.gumbel(folded, (vocab_size,), jnp.float32)

    return jax.vmap(jax.vmap(one, in_axes=(None, 0)))(keys, positions)


def first_argmax(scores: Float[Array, "*batch V"]) -> Int[Array, "*batch"]:
    """argmax over the last axis, lowest index on ties.

    Two plain reductions with the axis in front, where `output_first` has left it: on a CPU both vectorise, which the
    paired reduction of `jnp.argmax` does not (48 rows of 49,152: 3 ms instead of 10).
    """
    scores = jnp.moveaxis(scores, -1, 0)
    index = jax.lax.broadcasted_iota(jnp.int32, scores.shape, 0)
    return jnp.where(scores == scores.max(axis=0), index, scores.shape[0] - 1).min(axis=0)


def perturb(
    logits: Float[Array, "B N V|V'"],
    keys: UInt32[Array, "B 2"],
    positions: Int[Array, "B N|M"],
    draw: Draw,
    filtered: bool,
    columns: tuple[Int[Array, "V'"], int] | None = None,
    levels: Int[Array, "B N"] | None = None,
) -> Float[Array, "B N V|V'"]:
    """filter(logits / temperature) + the noise of each position: what a sampled token is the largest of; see `choose`."""
    logits = logits / draw.temperature
    if filtered:
        logits = filter_logits(logits, draw)
    noise = position_noise(keys, positions, logits.shape[-1] if columns is None else columns[1])
    noise = noise if columns is None else noise[..., columns[0]]
    return logits + (noise if levels is None else jnp.take_along_axis(noise, levels[..., None], axis=1))


def choose(
    logits: Float[Array, "B N V|V'"],
    keys: UInt32[Array, "B 2"],
    positions: Int[Array, "B N|M"],
    draw: Draw,
    greedy: bool,
    filtered: bool,
    columns: tuple[Int[Array, "V'"], int] | None = None,
    levels: Int[Array, "B N"] | None = None,
) -> Int[Array, "B N"]:
    """The token at each position. `greedy` and `filtered` are static: they decide what is computed at all.

    Args:
      columns: for logits of some tokens only, their ids and the size of the whole vocabulary, over which noise is drawn.
      levels: row n stands at positions[b, levels[b, n]], as many nodes of a tree do: noise is drawn once a position.
    """
    if not greedy:
        logits = perturb(logits, keys, positions, draw, filtered, columns, levels)
    column = first_argmax(logits)
    return column if columns is None else columns[0][column]
