"""What a block is: anchors, slots, labels, visibility, positions and reveal views. Training and decoding agree here.

A block has an anchor position a and K slots. Slot j stands at position a + j and predicts the token *at* a + j: there
is no shift. Slot 0 holds the clean anchor token and is never scored. A block sees target features of its own document
strictly before its anchor, and its own slots.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dstill_jax.errors import UserError


class Blocks(NamedTuple):
    """A blocks of K slots cut from each row. Invalid blocks (`valid` False) score nothing."""

    anchors: Int[Array, "B A"]  # index of the anchor token in its row
    valid: Bool[Array, "B A"]
    tokens: Int[Array, "B A K"]  # the true tokens; slot 0 is the anchor
    scored: Bool[Array, "B A K"]  # slots whose label exists and is supervised; never slot 0
    positions: Int[Array, "B A K"]  # absolute positions within the document


class Sight(NamedTuple):
    """What blocks see of a context: slots strictly before their anchor, of the document that the anchor stands in.

    `pallas_kernels.block_attention` makes the mask of it, tile by tile.
    """

    anchors: Int[Array, "B A"]
    valid: Bool[Array, "B A"] | None = None  # an invalid block sees nothing, not even itself; None: all are valid
    document_ids: Int[Array, "B S"] | None = None  # equal ids stand together; None: the context is one document


def valid_anchors(loss_mask: Bool[Array, "B S"], document_ids: Int[Array, "B S"]) -> Bool[Array, "B S"]:
    """An anchor is supervised at a and at a + 1, within one document."""
    following = jnp.pad(loss_mask[:, 1:], ((0, 0), (0, 1)))
    next_id = jnp.pad(document_ids[:, 1:], ((0, 0), (0, 1)), constant_values=-1)
    return loss_mask & following & (document_ids == next_id)


def sample_anchors(
    key: Array, loss_mask: Bool[Array, "B S"], document_ids: Int[Array, "B S"], anchors_per_row: int
) -> tuple[Int[Array, "B A"], Bool[Array, "B A"]]:
    """Random distinct anchors of each row, and which of them are valid (a row may hold fewer than A)."""
    candidates = valid_anchors(loss_mask, document_ids)
    score = jnp.where(candidates, jax.random.uniform(key, loss_mask.shape), -1.0)
    top, anchors = jax.lax.top_k(score, min(anchors_per_row, loss_mask.shape[1]))
    return anchors, top >= 0


def cut_blocks(
    tokens: Int[Array, "B S"],
    loss_mask: Bool[Array, "B S"],
    document_ids: Int[Array, "B S"],
    positions: Int[Array, "B S"],
    anchors: Int[Array, "B A"],
    valid: Bool[Array, "B A"],
    block_size: int,
) -> Blocks:
    """Gathers the slots of each anchor. Labels outside the row, the document or the loss mask are not scored."""
    S = tokens.shape[1]
    index = anchors[..., None] + jnp.arange(block_size)  # [B, A, K]
    inside = index < S
    index = jnp.minimum(index, S - 1)

    def gather(x: Array) -> Array:
        return jax.vmap(lambda row, i: row[i])(x, index)

    own = gather(document_ids) == jnp.take_along_axis(document_ids, anchors, axis=1)[..., None]
    scored = inside & own & gather(loss_mask) & valid[..., None] & (jnp.arange(block_size) > 0)
    slots = jnp.take_along_axis(positions, anchors, axis=1)[..., None] + jnp.arange(block_size)
    return Blocks(anchors, valid, gather(tokens), scored, slots)


@dataclass(frozen=True)
class ViewMix:
    """Shares of reveal views among blocks (stage 1). They sum to 1."""

    full: float = 1.0  # nothing revealed: plain DFlash
    prefix: float = 0.0  # slots 1..l revealed, P(l) ~ prefix_decay^l, l = 1..K-2 (D2SD, arXiv 2606.04446)
    random: float = 0.0  # each slot with probability r, r ~ U(0, 1) per block
    own_order: float = 0.0  # the share r of its slots that the drafter itself is surest of
    prefix_decay: float = 0.9

    def __post_init__(self) -> None:
        shares = (self.full, self.prefix, self.random, self.own_order)
        if min(shares) < 0 or abs(sum(shares) - 1) > 1e-6:
            raise UserError(f"ViewMix shares must be non-negative and sum to 1, got {shares}")
        if not 0 < self.prefix_decay <= 1:
            raise UserError(f"ViewMix.prefix_decay={self.prefix_decay} must be in (0, 1]")
        if self.prefix_decay != type(self).prefix_decay and not self.prefix:
            raise UserError(
                f"ViewMix.prefix_decay={self.prefix_decay} is read by the prefix view only, whose share is 0; set one, or"
                " leave it out"
            )

    @property
    def shares(self) -> tuple[float, float, float, float]:
        return self.full, self.prefix, self.random, self.own_order


def sample_views(
    key: Array,
    shares: Float[Array, "4"],
    prefix_decay: Float[Array, ""] | float,
    blocks: Blocks,
    confidence: Float[Array, "B A K"] | None = None,
) -> Bool[Array, "B A K"]:
    """Which slots hold their true token. Slot 0 always does; slots without a label never do.

    Args:
      shares: probability of the full, prefix, random and own-order view.
      confidence: of the drafter's own first pass; needed for the own-order view only.
    """
    B, A, K = blocks.tokens.shape
    kind_key, prefix_key, ratio_key, slot_key = jax.random.split(key, 4)
    kind = jax.random.categorical(kind_key, jnp.log(jnp.maximum(shares, 1e-30)), shape=(B, A))[..., None]
    slots = jnp.arange(K)
    lengths = jnp.arange(1, max(K - 1, 2))
    length = jax.random.categorical(prefix_key, lengths * jnp.log(prefix_decay), shape=(B, A))[..., None] + 1
    prefix = (slots <= length) & (slots < K - 1)  # at least the last slot stays masked
    ratio = jax.random.uniform(ratio_key, (B, A, 1))
    random = jax.random.uniform(slot_key, (B, A, K)) < ratio
    revealed = jnp.where(kind == 1, prefix, jnp.where(kind == 2, random, False))
    if confidence is not None:
        rank = jnp.argsort(jnp.argsort(-jnp.where(blocks.scored, confidence, -1.0), axis=-1), axis=-1)
        count = jnp.ceil(ratio * (blocks.scored.sum(-1, keepdims=True) - 1))  # at least one stays masked
        revealed = jnp.where(kind == 3, rank < count, revealed)
    return (revealed & blocks.scored) | (slots == 0)


def mask_tokens(tokens: Int[Array, "B A K"], revealed: Bool[Array, "B A K"], mask_token_id: int) -> Array:
    """The block's input: revealed tokens, mask token elsewhere."""
    return jnp.where(revealed, tokens, mask_token_id)


def masked_rank(revealed: Bool[Array, "B A K"]) -> Int[Array, "B A K"]:
    """How many masked slots stand to the left: 0 for the first masked slot. Meaningless where revealed."""
    masked = (~revealed).astype(jnp.int32)
    return jnp.cumsum(masked, axis=-1) - masked


def accepted_prefix(correct: Bool[Array, "*batch K"], scored: Bool[Array, "*batch K"]) -> Int[Array, "*batch"]:
    """Drafted tokens a verifier would accept: right answers in slots 1, 2, ... up to the first wrong or unscored."""
    return jnp.cumprod((correct & scored)[..., 1:].astype(jnp.int32), axis=-1).sum(axis=-1)
