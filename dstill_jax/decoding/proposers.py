"""Proposers: what drafts the next W tokens, or a tree of them. They may be as wrong as they like; verification decides.

autoregressive drafts nothing; lookup copies what followed the same n-gram earlier; block diffusion runs the drafter,
once (DFlash, and a DStill student: the same graph) or several times (refinement); a diffusion tree (DDTree) takes
several tokens of a slot from one pass.
"""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dstill_jax.blocks import Sight
from dstill_jax.decoding.sampling import choose, perturb
from dstill_jax.decoding.state import DecodeSpec, DecodeState, Weights
from dstill_jax.decoding.trees import DraftTree, build_tree
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


def _denoise(
    spec: DecodeSpec, weights: Weights, state: DecodeState, tokens: Int[Array, "B 1 N"], slots: Int[Array, "B 1 R"]
) -> Float[Array, "B 1 R D"]:
    """One drafter pass over the block after the last committed token: what the head reads at some of its slots.

    However few slots are drafted, the drafter sees the whole block that it was trained on, the rest of it masked: without
    the masks behind them the first slots are guessed worse.
    """
    assert spec.drafter is not None and weights.drafter is not None
    rest = spec.drafter.block_size - tokens.shape[-1]
    tokens = jnp.pad(tokens, ((0, 0), (0, 0), (0, rest)), constant_values=spec.drafter.mask_token_id)
    anchor = state.length[:, None] - 1
    positions = (anchor + jnp.arange(tokens.shape[-1]))[:, None]
    x = target_lib.embed(weights.target, tokens)
    return drafter_lib.denoise(spec.drafter, weights.drafter, x, positions, state.context, Sight(anchor), slots)


@dataclass(frozen=True)
class BlockDiffusion:
    """The drafter on one block after the last committed token: slot 0 is that token, W slots are masked."""

    draft_tokens: int
    passes: int = 1
    order: CommitOrder = "confidence"
    threshold: float = 0.9

    def propose(self, spec: DecodeSpec, weights: Weights, state: DecodeState) -> Int[Array, "B W"]:
        assert spec.drafter is not None
        # One pass commits everything, and left to right asks nobody: only the other orders compare slots.
        ranked = self.passes > 1 and self.order != "left_to_right"

        def choose_fn(hidden: Array, slots: Array) -> tuple[Array, Array]:
            # The drafter draws with the noise the target will draw with: at a temperature, agreeing on the noise is
            # what lets a good draft be accepted; losslessness does not depend on it.
            where = state.length[:, None] - 1 + slots[:, 0]
            logits, columns = _draft_logits(spec, weights, hidden[:, 0])
            drawn = choose(logits, state.keys, where, weights.draw, spec.greedy, spec.filtered, columns)
            if not ranked:
                return drawn[:, None], jnp.ones_like(drawn, jnp.float32)[:, None]
            column = drawn if columns is None else jnp.searchsorted(columns[0], drawn)
            picked = jnp.take_along_axis(logits, column[..., None], axis=-1)[..., 0]
            sure = jnp.exp(picked - jax.nn.logsumexp(logits, axis=-1))
            return drawn[:, None], sure[:, None]

        trajectory = refine(
            functools.partial(_denoise, spec, weights, state),
            choose_fn,
            _last_token(state)[:, None],
            self.draft_tokens + 1,
            spec.drafter.mask_token_id,
            self.passes,
            self.order if ranked else "left_to_right",
            self.threshold,
        )
        return trajectory.tokens[:, 0, 1:]


@dataclass(frozen=True)
class DiffusionTree:
    """One drafter pass, and the likeliest prefixes of its independent slots as a tree (DDTree, arXiv 2604.12989)."""

    draft_tokens: int
    tree_budget: int
    passes: int = 1

    def propose(self, spec: DecodeSpec, weights: Weights, state: DecodeState) -> DraftTree:
        assert spec.drafter is not None
        B, W = state.length.shape[0], self.draft_tokens
        tokens = jnp.full((B, 1, W + 1), spec.drafter.mask_token_id).at[:, 0, 0].set(_last_token(state))
        slots = jnp.broadcast_to(jnp.arange(1, W + 1), (B, 1, W))
        logits, columns = _draft_logits(spec, weights, _denoise(spec, weights, state, tokens, slots)[:, 0])
        if not spec.greedy:
            # As in a chain: the noise that the target will draw with says which tokens it is likely to draw.
            where = state.length[:, None] - 1 + slots[:, 0]
            logits = perturb(logits, state.keys, where, weights.draw, False, columns)
        tree = build_tree(logits, self.tree_budget)
        return tree if columns is None else tree._replace(tokens=columns[0][tree.tokens])
