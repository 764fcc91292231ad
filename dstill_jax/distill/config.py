"""What a stage trains on and against. Losses are in `losses/config.py`."""

from dataclasses import dataclass, field
from typing import Literal, get_args

from dstill_jax.blocks import ViewMix
from dstill_jax.errors import UserError
from dstill_jax.losses.config import LossConfig, TermWeights
from dstill_jax.refinement import CommitOrder, check_order

CurriculumKind = Literal["power", "linear", "cyclic", "fixed", "full"]
"""How masked a student's input is, over training (methods of the papers named).

power: P(state) ~ m^e, e from 0 to `power` over the first `fraction` of steps, then fully masked.
linear: m at least 0.3 rising to 1 over that time (d3LLM, arXiv 2601.07568, but ending at 1).
cyclic: the level follows the block's index (Jacobi Forcing, arXiv 2512.14681); no schedule.
fixed: P(state) ~ m^power throughout (T3D, arXiv 2602.12262).
full: fully masked throughout; the control.
"""


@dataclass(frozen=True)
class StageOneConfig:
    """Completing partially revealed blocks. With `views` all full it is plain DFlash."""

    loss: LossConfig = field(default_factory=LossConfig)
    views: ViewMix = field(default_factory=lambda: ViewMix(0.35, 0.35, 0.30))
    late_views: ViewMix = field(default_factory=lambda: ViewMix(0.80, 0.10, 0.10))
    late_from: float = 2 / 3  # share of the steps after which `late_views` applies: slot 1 has to stay strong
    own_tokens: float = 0.0  # chance, reached linearly, that a revealed slot holds the drafter's own first-pass token

    def __post_init__(self) -> None:
        if not 0 <= self.late_from <= 1:
            raise UserError(f"StageOneConfig.late_from={self.late_from} must be between 0 and 1")
        if not 0 <= self.own_tokens <= 1:
            raise UserError(f"StageOneConfig.own_tokens={self.own_tokens} must be between 0 and 1")
        if self.own_tokens and self.views.full == self.late_views.full == 1:
            raise UserError(
                f"StageOneConfig.own_tokens={self.own_tokens} swaps revealed tokens, and fully masked views reveal none;"
                " set it to 0, or give other views"
            )
        if self.loss.teacher_fields:
            raise UserError(
                f"StageOneConfig.loss sets {', '.join(self.loss.teacher_fields)}, which compare with a teacher's"
                " completion; only stage 2 has one: leave them out, or use StageTwoConfig"
            )


@dataclass(frozen=True)
class CurriculumConfig:
    kind: CurriculumKind = "power"
    fraction: float = 0.4  # share of the steps from partly to fully masked
    power: float = 8.0
    replay: float = 0.0  # after that, share of blocks that still get a partly masked state

    def __post_init__(self) -> None:
        if self.kind not in get_args(CurriculumKind):
            raise UserError(f"CurriculumConfig.kind={self.kind!r}; choose one of {', '.join(get_args(CurriculumKind))}")
        if not 0 < self.fraction <= 1 or self.power < 0 or not 0 <= self.replay <= 1:
            raise UserError(f"CurriculumConfig out of range: {self}")
        if self.replay and self.kind in ("full", "fixed", "cyclic"):
            raise UserError(
                f"CurriculumConfig.replay={self.replay} begins where a curriculum has ended, and kind={self.kind!r} has no"
                " end; set it to 0, or give another kind"
            )


def _half_teacher() -> LossConfig:
    """What did best of all losses of stage 2 in experiments/003_when_does_dstill_pay."""
    # Slot 1 depends on nothing drafted, so there is nothing to distil there: it keeps the text's own token.
    rest = TermWeights(teacher_kl=0.5, data_ce=0.5)
    return LossConfig(first=TermWeights(data_ce=1.0), rest=rest, weighting="auf")


@dataclass(frozen=True)
class StageTwoConfig:
    """Distilling the frozen stage-1 drafter's own multi-pass completions into one pass."""

    loss: LossConfig = field(default_factory=_half_teacher)
    curriculum: CurriculumConfig = field(default_factory=CurriculumConfig)
    passes: int | None = None  # of the teacher; None: K - 1
    order: CommitOrder = "left_to_right"
    threshold: float = 0.9  # for orders "confidence" and "prefix" only
    student_passes: int = 1  # that the student is to need for what takes the teacher `passes` (SDTT, arXiv 2410.21035)

    def __post_init__(self) -> None:
        if not 0 <= self.threshold <= 1:
            raise UserError(f"StageTwoConfig.threshold={self.threshold} must be between 0 and 1")
        unset = self.threshold == type(self).threshold
        check_order(self.order, 1 if self.passes is None else self.passes, None if unset else self.threshold)
        if self.student_passes < 1:
            raise UserError(f"StageTwoConfig.student_passes={self.student_passes} must be at least 1")
        if self.loss.first.consistency_kl and self.order in ("left_to_right", "prefix"):
            raise UserError(
                f"LossConfig.first.consistency_kl={self.loss.first.consistency_kl} would never count: with"
                f" StageTwoConfig.order={self.order!r} the first pass commits slot 1; set rest.consistency_kl, or"
                " order='confidence'"
            )
        if self.passes is not None:
            self.check_passes(self.passes)

    def check_passes(self, passes: int, slots: int | None = None) -> None:
        """Raises UserError for a teacher of so few passes that nothing could be learned from some of the fields, or of
        more than there are `slots` to fill."""
        if slots is not None and passes > slots:
            raise UserError(
                f"StageTwoConfig.passes={passes}, but a block has {slots} slots to fill, one a pass at least; give at"
                f" most {slots}, or None"
            )
        if 1 < self.student_passes >= passes:
            raise UserError(
                f"StageTwoConfig.student_passes={self.student_passes} must be below the teacher's passes={passes};"
                " give fewer, or a teacher of more passes"
            )
        if passes == 1 and self.loss.uses("consistency_kl"):
            raise UserError(
                "TermWeights.consistency_kl compares two states of a trajectory, and StageTwoConfig.passes=1 leaves only"
                " one with masked slots; set it to 0, or passes to 2 or more"
            )


def dflash_baseline(loss: LossConfig | None = None) -> StageOneConfig:
    """Fully masked blocks only: one-pass DFlash."""
    return StageOneConfig(loss or LossConfig(), ViewMix(), ViewMix())
