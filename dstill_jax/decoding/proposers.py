"""Proposers: what drafts the next W tokens. They may be as wrong as they like; verification decides.

autoregressive drafts nothing; lookup copies what followed the same n-gram earlier; block diffusion runs the drafter,
once (DFlash, and a DStill student: the same graph) or several times (refinement).
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dstill_jax.blocks import Sight
from dstill_jax.decoding.sampling import choose
from dstill_jax.decoding.state import DecodeSpec, DecodeState, Weights
from dstill_jax.models import drafter as drafter_lib
from dstill_jax.models import target as target_lib
from dstill_jax.models.layers import output_first
from dstill_jax.refinement import CommitOrder, refine


def _last_token(state: DecodeState) -> Int[Array, "B"]:
    return jnp.take_along_axis(state.tokens, state.length[:, None] - 1, axis=1)[:, 0]


@dataclass(frozen=True)
class Autoregressive:
    """Plain decoding: every round commits the one token that the target draws."""

    draft_tokens: int = 0

    def propose(self, spec: DecodeSpec, weights: Weights, state: DecodeState) -> Int[Array, "B W"]:
        return jnp.zeros((state.tokens.shape[0], 0), jnp.int32)


@dataclass(frozen=True)
class PromptLookup:
    """Copies the continuation of the latest earlier occurrence of the last n tokens, longest n first."""

    draft_tokens: int
    max_ngram: int = 3

    def propose(self, spec: DecodeSpec, weights: Weights, state: DecodeState) -> Int[Array, "B W"]:
        C = state.tokens.shape[1]
        ends = jnp.arange(C)  # candidate position of an n-gram's last token
        last = state.length[:, None] - 1
        found = jnp.full(state.length.shape, -1)
        same = jnp.ones_like(state.tokens, bool)
        for n in range(1, self.max_ngram + 1):
            suffix = jnp.take_along_axis(state.tokens, jnp.maximum(last - (n - 1), 0), axis=1)
            shifted = jnp.roll(state.tokens, n - 1, axis=1)  # token n - 1 places before each candidate end
            same &= (shifted == suffix) & (ends >= n - 1) & (ends < last)
            latest = jnp.where(same, ends, -1).max(axis=1)
            found = jnp.where(latest >= 0, latest, found)  # a longer match overrides a shorter one
        slots = found[:, None] + 1 + jnp.arange(self.draft_tokens)
        slots = jnp.where(found[:, None] >= 0, slots, last)  # nothing found: repeat the last token
        # A copy that runs into the end of the text goes on with what it has itself copied.
        period = jnp.maximum(last - found[:, None], 1)
        overrun = jnp.maximum(slots - last, 0)
        slots = jnp.where(slots > last, last - period + 1 + (overrun - 1) % period, slots)
        return jnp.take_along_axis(state.tokens, jnp.clip(slots, 0, C - 1), axis=1)


def _draft_logits(
    spec: DecodeSpec, weights: Weights, hidden: Float[Array, "B R D"]
) -> tuple[Float[Array, "B R V|V'"], tuple[Int[Array, "V'"], int] | None]:
    """Logits of what may be drafted, the mask token excluded, and which tokens they are of (None: of all)."""
    assert spec.drafter is not None
    mask = spec.drafter.mask_token_id
    if weights.draft_head is None:
        return target_lib.head(spec.target, weights.target, hidden).at[..., mask].set(-jnp.inf), None
    rows, tokens = weights.draft_head
    logits = output_first(rows, hidden, jnp.float32)
    return jnp.where(tokens == mask, -jnp.inf, logits), (tokens, spec.target.vocab_size)


@dataclass(frozen=True)
class BlockDiffusion:
    """The drafter on one block after the last committed token: slot 0 is that token, W slots are masked."""

    draft_tokens: int
    passes: int = 1
    order: CommitOrder = "confidence"
    threshold: float = 0.9

    def propose(self, spec: DecodeSpec, weights: Weights, state: DecodeState) -> Int[Array, "B W"]:
        config, params = spec.drafter, weights.drafter
        assert config is not None and params is not None
        K = self.draft_tokens + 1
        anchor = state.length - 1
        positions = (anchor[:, None] + jnp.arange(K))[:, None]  # [B, 1, K]
        sight = Sight(anchor[:, None])

        # One pass commits everything, and left to right asks nobody: only the other orders compare slots.
        ranked = self.passes > 1 and self.order != "left_to_right"

        def hidden_fn(tokens: Array, slots: Array) -> Array:
            x = target_lib.embed(weights.target, tokens)
            return drafter_lib.denoise(config, params, x, positions, state.context, sight, slots)

        def choose_fn(hidden: Array, slots: Array) -> tuple[Array, Array]:
            # The drafter draws with the noise the target will draw with: at a temperature, agreeing on the noise is
            # what lets a good draft be accepted; losslessness does not depend on it.
            where = anchor[:, None] + slots[:, 0]
            logits, columns = _draft_logits(spec, weights, hidden[:, 0])
            drawn = choose(logits, state.keys, where, weights.draw, spec.greedy, spec.filtered, columns)
            if not ranked:
                return drawn[:, None], jnp.ones_like(drawn, jnp.float32)[:, None]
            column = drawn if columns is None else jnp.searchsorted(columns[0], drawn)
            picked = jnp.take_along_axis(logits, column[..., None], axis=-1)[..., 0]
            sure = jnp.exp(picked - jax.nn.logsumexp(logits, axis=-1))
            return drawn[:, None], sure[:, None]

        trajectory = refine(
            hidden_fn,
            choose_fn,
            _last_token(state)[:, None],
            K,
            config.mask_token_id,
            self.passes,
            self.order if ranked else "left_to_right",
            self.threshold,
        )
        return trajectory.tokens[:, 0, 1:]
