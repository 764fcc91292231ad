"""What every stage starts from: target features, blocks, and one pass of the drafter scored against labels."""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dstill_jax import blocks as blocks_lib
from dstill_jax.blocks import Blocks, Sight
from dstill_jax.config import DrafterConfig, TargetConfig
from dstill_jax.dims import Params
from dstill_jax.losses import weights as weights_lib
from dstill_jax.losses.block_terms import Contrasted, chain_loss, contrast_loss, first_error_loss
from dstill_jax.losses.config import BlockTerms, LossConfig
from dstill_jax.losses.head import SlotInputs, SlotLosses, slot_choices, slot_losses
from dstill_jax.models import drafter as drafter_lib
from dstill_jax.models import target as target_lib
from dstill_jax.models.drafter import ContextKV, Memory
from dstill_jax.sharding.activations import constrain
from dstill_jax.sharding.weights import rows_of_table
from pallas_kernels.fused_head_loss import HeadTiles

Metrics = dict[str, tuple[Array, Array]]
"""Name -> (sum, weight): added over devices, micro-batches and steps, divided once."""


@dataclass(frozen=True)
class Task:
    """The static side of a stage: shapes and choices that are compiled in."""

    target: TargetConfig
    drafter: DrafterConfig
    anchors_per_row: int
    compute_dtype: str = "float32"
    head_tiles: HeadTiles | None = None  # how many logits exist at a time; None: what suits the device
    memory: Memory = Memory()


class Frozen(NamedTuple):
    """Arrays that training reads and never changes."""

    embedding: Float[Array, "V D"]  # of the target
    head: Float[Array, "D V'"]  # of the target, or the columns of a training vocabulary
    vocabulary: Int[Array, "V'"] | None  # token ids of the head's columns, ascending; None: every token
    tap_scale: Float[Array, "T*D"]  # taps are multiplied by it; `fold_tap_scale` moves it into the weights
    target: Params | None = None  # to compute features inside the step; None when the batch brings them
    teacher: Params | None = None  # stage 2


class Conditioned(NamedTuple):
    """One batch, ready for any number of passes."""

    blocks: Blocks
    taps: Float[Array, "B S T*D"]  # scaled
    target_hidden: Float[Array, "B S D"]
    positions: Int[Array, "B S"]
    sight: Sight


def fold_tap_scale(params: Params, tap_scale: Float[Array, "T*D"]) -> Params:
    """Drafter parameters that act on raw taps: the form that decodes and is exported."""
    kernel = params["fc"]["kernel"] * tap_scale[:, None].astype(params["fc"]["kernel"].dtype)
    return {**params, "fc": {**params["fc"], "kernel": kernel}}


def condition(task: Task, frozen: Frozen, batch: dict[str, Array], key: Array) -> Conditioned:
    """Features from the batch, or from the frozen target inside the same program; then random anchors."""
    tokens, ids, positions = batch["tokens"], batch["document_ids"], batch["positions"]
    width = task.drafter.num_taps * task.target.hidden_size
    if "features" in batch:
        features = batch["features"]
        taps, hidden = features[..., :width], features[..., width:]
    else:
        mask = target_lib.causal_mask(tokens.shape[1], ids)
        out = target_lib.forward(
            task.target,
            frozen.target,  # type: ignore[arg-type]
            tokens,
            positions,
            tap_ids=task.drafter.target_layer_ids,
            attention_mask=mask,
        )
        taps, hidden = out.taps, out.hidden
    taps, hidden = jax.lax.stop_gradient((taps, hidden))
    dtype = jnp.dtype(task.compute_dtype)
    taps = (taps.astype(jnp.float32) * frozen.tap_scale).astype(dtype)
    anchors, valid = blocks_lib.sample_anchors(key, batch["loss_mask"], ids, task.anchors_per_row)
    anchors, valid = constrain(anchors, "batch", "anchors"), constrain(valid, "batch", "anchors")
    blocks = blocks_lib.cut_blocks(tokens, batch["loss_mask"], ids, positions, anchors, valid, task.drafter.block_size)
    return Conditioned(blocks, taps, hidden.astype(dtype), positions, Sight(anchors, valid, ids))


def project(task: Task, params: Params, data: Conditioned) -> ContextKV:
    """Context keys and values of a drafter: once a step, whatever the number of passes."""
    c = drafter_lib.project_context(task.drafter, params, data.taps)
    return drafter_lib.context_kv(task.drafter, params, c, data.positions)


def run_pass(
    task: Task,
    frozen: Frozen,
    params: Params,
    data: Conditioned,
    context: ContextKV,
    tokens: Int[Array, "B A K"],
    slots: Int[Array, "B A R"] | None = None,
) -> Float[Array, "B A R|K D"]:
    """One pass of the drafter over block tokens."""
    x = rows_of_table(frozen.embedding, tokens).astype(data.taps.dtype)
    return drafter_lib.denoise(task.drafter, params, x, data.blocks.positions, context, data.sight, slots, task.memory)


def to_columns(frozen: Frozen, tokens: Int[Array, "*batch"]) -> Int[Array, "*batch"]:
    """Head columns of tokens; -1 for tokens outside the training vocabulary."""
    if frozen.vocabulary is None:
        return tokens
    column = jnp.searchsorted(frozen.vocabulary, tokens)
    found = frozen.vocabulary[jnp.minimum(column, frozen.vocabulary.shape[0] - 1)] == tokens
    return jnp.where(found, column, -1)


def pick(
    task: Task, frozen: Frozen, hidden: Float[Array, "B A R D"]
) -> tuple[Int[Array, "B A R"], Float[Array, "B A R"]]:
    """The most likely token of each slot under the training head, and its probability; never the mask, no gradient."""
    tokens = jnp.arange(frozen.head.shape[1]) if frozen.vocabulary is None else frozen.vocabulary
    hidden = jax.lax.stop_gradient(hidden)
    best, sure = slot_choices(hidden, frozen.head, tokens == task.drafter.mask_token_id, task.head_tiles)
    return tokens[best].astype(jnp.int32), sure


class LaterState(NamedTuple):
    """A further state of the trajectory than the one shown; no gradient."""

    hidden: Float[Array, "B A K D"]  # the output of a model there
    masked: Bool[Array, "B A K"]


class StalePass(NamedTuple):
    """What the teacher makes of the student's input in one pass; no gradient."""

    tokens: Int[Array, "B A K"]
    hidden: Float[Array, "B A K D"]


class TeacherView(NamedTuple):
    """What stage 2 adds to a comparison."""

    tokens: Int[Array, "B A K"]
    hidden: Float[Array, "B A K D"]
    wanted: Bool[Array, "B A K"] | None = None  # slots that this pass has to fill; None: all that are masked
    later: LaterState | None = None  # for `consistency_kl`
    stale: StalePass | None = None  # for `ddo_real` and `ddo_fake`


def score(
    task: Task,
    frozen: Frozen,
    loss: LossConfig,
    data: Conditioned,
    hidden: Float[Array, "B A K D"],
    revealed: Bool[Array, "B A K"],
    progress: Float[Array, ""],
    teacher: TeacherView | None = None,
) -> tuple[Array, Array, Metrics]:
    """(loss sum, weight, metrics) of one pass: every masked slot with a label, weighed and mixed as configured."""
    blocks = data.blocks
    B, A, K = blocks.tokens.shape
    labels = to_columns(frozen, blocks.tokens)
    verified = blocks.scored & ~revealed
    if teacher is not None and teacher.wanted is not None:
        verified &= teacher.wanted
    counted = verified & (labels >= 0)  # a token outside the training vocabulary is an error that teaches nothing
    losses = _slot_losses(task, frozen, loss, data, hidden, labels, teacher)
    probability = jnp.where(counted, jnp.exp(-losses.data_ce), 0.0)
    weights = weights_lib.slot_weights(
        loss, blocks_lib.masked_rank(revealed), counted, verified, losses.correct, probability, progress
    )
    gates, later = _gates(loss, blocks, teacher)
    total = jnp.zeros((B, A, K), jnp.float32)
    weights = weights * later
    terms = {term: getattr(losses, term) for term in ("data_ce", "hard_ce", "teacher_kl", "target_kl", "target_l1")}
    contrasted = None
    if teacher is not None and (teacher.later is not None or teacher.stale is not None):
        terms["consistency_kl"], contrasted = _further_losses(task, frozen, loss, hidden, teacher)
    for term, values in terms.items():
        if values is not None and loss.uses(term):
            total = total + weights_lib.term_weights(loss, term, K) * gates.get(term, 1.0) * values
    of_blocks = _block_losses(loss.whole, losses, counted, verified, weights, contrasted, gates)
    # One-pass acceptance is meaningful only where nothing was revealed.
    full = blocks.valid & ~revealed[..., 1:].any(-1)
    accepted = blocks_lib.accepted_prefix(losses.correct, blocks.scored)
    metrics: Metrics = {
        "data_ce": ((losses.data_ce * weights).sum(), weights.sum()),
        "accuracy": ((losses.correct & counted).sum().astype(jnp.float32), counted.sum().astype(jnp.float32)),
        "tau": ((full * (1.0 + accepted)).sum(), full.sum().astype(jnp.float32)),
        "slot1": (
            (full & losses.correct[..., 1] & blocks.scored[..., 1]).sum().astype(jnp.float32),
            (full & blocks.scored[..., 1]).sum().astype(jnp.float32),
        ),
        "blocks": (blocks.valid.sum().astype(jnp.float32), jnp.float32(1)),
    }
    return (total * weights).sum() + of_blocks.sum(), weights.sum(), metrics


def _block_losses(
    terms: BlockTerms,
    losses: SlotLosses,
    counted: Bool[Array, "B A K"],
    verified: Bool[Array, "B A K"],
    weights: Float[Array, "B A K"],
    contrasted: Contrasted | None,
    gates: dict[str, Float[Array, "B A K"]],
) -> Float[Array, "B A"]:
    """The terms of whole blocks; all but the first error, which is a slot, weigh as much as the block's slots."""
    total = jnp.zeros(weights.shape[:-1], jnp.float32)
    mass = weights.sum(-1)
    if terms.first_error:
        total += terms.first_error * first_error_loss(losses.data_ce, losses.correct, counted, verified, weights)
    if terms.chain:
        total += mass * terms.chain * chain_loss(losses.data_ce, counted, verified)
    if contrasted is not None:  # the teacher's completion is raised where its tokens are taught at all
        total += mass * contrast_loss(terms, contrasted, weights * gates["hard_ce"], weights)
    return total


def _gates(
    loss: LossConfig, blocks: Blocks, teacher: TeacherView | None
) -> tuple[dict[str, Float[Array, "B A K"]], Float[Array, "B A K"] | float]:
    """Where each term counts, relative to the teacher's first error n, and the factor on slots after n."""
    if teacher is None:
        return {}, 1.0
    right = teacher.tokens == blocks.tokens
    until = weights_lib.before_first_error(right, blocks.scored)  # k <= n
    at_error = until & ~right & blocks.scored  # k = n: the teacher is wrong there
    everywhere = jnp.ones_like(until)
    data = {"all": everywhere, "until_error": until}[loss.data_slots]
    taught = {"all": everywhere, "not_at_error": ~at_error, "after_error": ~until}[loss.teacher_slots]
    gates = {"data_ce": data, "hard_ce": taught, "teacher_kl": taught}
    if teacher.later is not None:
        gates["consistency_kl"] = teacher.later.masked
    later = jnp.where(until, 1.0, loss.after_error_weight)
    return {term: gate.astype(jnp.float32) for term, gate in gates.items()}, later


def _slot_losses(
    task: Task,
    frozen: Frozen,
    loss: LossConfig,
    data: Conditioned,
    hidden: Float[Array, "B A K D"],
    labels: Int[Array, "B A K"],
    teacher: TeacherView | None,
) -> SlotLosses:
    """The comparisons of each slot that share one application of the head."""
    K = hidden.shape[2]
    target_hidden = None
    if loss.needs_target:  # the target's distribution for position a + j is computed at a + j - 1
        index = jnp.clip(data.blocks.anchors[..., None] + jnp.arange(K) - 1, 0, data.target_hidden.shape[1] - 1)
        target_hidden = jax.vmap(lambda h, i: h[i])(data.target_hidden, index)
    inputs = SlotInputs(
        labels=labels,
        hard_labels=to_columns(frozen, teacher.tokens) if teacher is not None and loss.uses("hard_ce") else None,
        teacher_hidden=teacher.hidden if teacher is not None and loss.uses("teacher_kl") else None,
        target_hidden=target_hidden,
    )
    return _head_losses(task, frozen, loss, hidden, inputs)


def _head_losses(
    task: Task, frozen: Frozen, loss: LossConfig, hidden: Float[Array, "B A K D"], inputs: SlotInputs
) -> SlotLosses:
    """Losses [B, A, K] of each slot; slot 0 is not computed and comes back as zero."""
    losses = slot_losses(
        hidden[:, :, 1:],
        jax.tree.map(lambda x: x[:, :, 1:], inputs),
        frozen.head,
        kl_direction=loss.kl_direction,
        target_kl=loss.uses("target_kl"),
        target_l1=loss.uses("target_l1"),
        tiles=task.head_tiles,
    )
    return jax.tree.map(lambda x: jnp.pad(x, ((0, 0), (0, 0), (1, 0))), losses)


def _further_losses(
    task: Task, frozen: Frozen, loss: LossConfig, hidden: Float[Array, "B A K D"], teacher: TeacherView
) -> tuple[Float[Array, "B A K"] | None, Contrasted | None]:
    """KL with the later state, and what the contrast compares: the head once more on the student."""
    real = to_columns(frozen, teacher.tokens)
    if teacher.stale is None:
        assert teacher.later is not None
        own = _head_losses(task, frozen, loss, hidden, SlotInputs(real, None, teacher.later.hidden))
        return own.teacher_kl, None
    fake = to_columns(frozen, teacher.stale.tokens)
    later_hidden = None if teacher.later is None else teacher.later.hidden
    own = _head_losses(task, frozen, loss, hidden, SlotInputs(real, fake, later_hidden))
    reference = _head_losses(task, frozen, loss, teacher.stale.hidden, SlotInputs(real, fake))
    values = (own.data_ce, own.hard_ce, reference.data_ce, reference.hard_ce)
    return own.teacher_kl, Contrasted(*(-x for x in values))  # type: ignore[operator]
