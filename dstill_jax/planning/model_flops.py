"""The arithmetic a training step cannot avoid: the numerator of model FLOP/s utilisation.

Products only, nothing computed twice, attention over what is visible (half the row on average); remat and the masked
half of dense scores are not in it, so that a program which does less of them has a higher utilisation.
"""

from dataclasses import dataclass

from dstill_jax.config import DrafterConfig, TargetConfig
from dstill_jax.distill.config import StageOneConfig, StageTwoConfig
from dstill_jax.refinement import _left_to_right_groups


@dataclass(frozen=True)
class StepFlops:
    """Of one optimiser step over all devices."""

    target: float
    drafter: float
    teacher: float
    head: float

    @property
    def total(self) -> float:
        return self.target + self.drafter + self.teacher + self.head


def layer_matrices(model: TargetConfig | DrafterConfig) -> float:
    """Weights of the matrices of one layer."""
    D, E = model.hidden_size, model.head_dim
    attention = D * E * (2 * model.num_heads + 2 * model.num_kv_heads)
    return attention + 3 * D * model.intermediate_size


def step_flops(
    target: TargetConfig,
    drafter: DrafterConfig,
    objective: StageOneConfig | StageTwoConfig,
    rows: int,
    seq_len: int,
    anchors: int,
    columns: int,
) -> StepFlops:
    """Model FLOPs of a step over `rows` rows of `seq_len` tokens with `anchors` blocks each; the head has `columns`."""
    K, L, D, T = drafter.block_size, drafter.num_layers, drafter.hidden_size, drafter.num_taps
    context, slots = rows * seq_len, rows * anchors * K
    visible = 4 * target.num_heads * target.head_dim * seq_len / 2
    of_target = context * target.num_layers * (2 * layer_matrices(target) + visible)
    projection = 2 * context * T * D * D
    context_kv = 2 * context * L * D * 2 * drafter.num_kv_heads * drafter.head_dim
    one_layer = 2 * layer_matrices(drafter) + 4 * drafter.num_heads * drafter.head_dim * (seq_len / 2 + K)
    one_pass = slots * L * one_layer
    # The taps take no gradient, so their projection is two products, not three.
    of_drafter = 2 * projection + 3 * context_kv + 3 * one_pass
    head_row = 2 * D * columns
    scored = rows * anchors * (K - 1)
    loss = objective.loss
    of_head = scored * head_row * (2 + loss.needs_target + loss.uses("teacher_kl"))
    of_teacher = 0.0
    if isinstance(objective, StageTwoConfig):
        passes, head_rows = objective.passes or K - 1, K - 1
        last = slots
        if objective.order == "left_to_right":
            groups = _left_to_right_groups(K, passes)
            passes, last = groups.shape[0], rows * anchors * groups.shape[1]
            head_rows = groups.shape[1]
        kv = 4 * D * drafter.num_kv_heads * drafter.head_dim
        earlier = slots * (L - 1) * one_layer
        final = last * (one_layer - kv) + slots * kv
        of_teacher = projection + context_kv + passes * (earlier + final + rows * anchors * head_rows * head_row)
        later, contrast = loss.uses("consistency_kl"), loss.whole.contrasts
        of_teacher += (later + contrast) * one_pass
        of_head += scored * head_row * (later + contrast)
    elif objective.views.own_order or objective.late_views.own_order or objective.own_tokens:
        of_teacher = one_pass + slots * head_row
    return StepFlops(of_target, of_drafter, of_teacher, of_head)
