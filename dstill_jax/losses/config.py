"""Which losses, on which slots, with which weights."""

from dataclasses import dataclass, field
from typing import Literal, get_args

from dstill_jax.errors import UserError

Weighting = Literal["decay", "uniform", "dpace", "auf"]
"""How masked slots are weighed against each other.

decay: exp(-rank / gamma), rank = masked slots to the left (arXiv 2602.06036, eq. 4).
uniform: 1.
dpace: smoothed survival: the sum over later slots of the chance that the draft gets that far, detached.
auf: 1 up to and including the drafter's own first error, a residual after it, annealed.
"""

TeacherSlots = Literal["all", "not_at_error", "after_error"]
DataSlots = Literal["all", "until_error"]
ConsistencyWith = Literal["student", "teacher"]


@dataclass(frozen=True)
class TermWeights:
    """How much each comparison counts on a slot. p is the drafter's distribution there."""

    data_ce: float = 0.0  # cross-entropy with the text's own token
    hard_ce: float = 0.0  # cross-entropy with the token of the teacher's completion (stage 2)
    teacher_kl: float = 0.0  # KL with the teacher's distribution when it committed the slot (stage 2)
    target_kl: float = 0.0  # KL with the target model's distribution
    target_l1: float = 0.0  # sum |p - target's| (DSpark, arXiv 2607.05147: 0.1 CE + 0.9 L1)
    # KL with the distribution at the trajectory's next state, on slots masked there, too (stage 2; CDLM, 2511.19269)
    consistency_kl: float = 0.0

    def __post_init__(self) -> None:
        values = vars(self)
        if min(values.values()) < 0 or not any(values.values()):
            raise UserError(f"loss weights must be non-negative and not all zero, got {values}")


@dataclass(frozen=True)
class BlockTerms:
    """Comparisons of whole blocks, added to those of the slots; a block weighs as much as its slots do together."""

    first_error: float = 0.0  # cross-entropy with the text once more on the drafter's own first error (2606.11552)
    chain: float = 0.0  # share of the slots that the draft is expected not to reach (ibid.)
    ddo_real: float = 0.0  # raise the teacher's completion above the teacher's own one pass (stage 2; T3D, 2602.12262)
    ddo_fake: float = 0.0  # and lower that one-pass completion; T3D has 1 and 0.5
    ddo_beta: float = 0.1  # how soon the two are content

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 0:
                raise UserError(f"BlockTerms.{name}={value} must not be negative; 0 switches a term off")
        if self.ddo_beta != type(self).ddo_beta and not self.contrasts:
            raise UserError(
                f"BlockTerms.ddo_beta={self.ddo_beta} is read by ddo_real and ddo_fake only; set one, or leave it out"
            )
        if self.ddo_beta == 0:
            raise UserError(
                "BlockTerms.ddo_beta=0.0 compares nothing; give a positive number, or set ddo_real=ddo_fake=0"
            )

    @property
    def contrasts(self) -> bool:
        return bool(self.ddo_real or self.ddo_fake)


@dataclass(frozen=True)
class LossConfig:
    """The loss of a training stage."""

    first: TermWeights = field(default_factory=lambda: TermWeights(data_ce=1.0))  # on slot 1
    rest: TermWeights = field(default_factory=lambda: TermWeights(data_ce=1.0))  # on slots 2 .. K - 1
    whole: BlockTerms = field(default_factory=BlockTerms)  # on whole blocks
    kl_direction: Literal["forward", "reverse"] = "forward"  # forward: KL(other || p)
    consistency_with: ConsistencyWith = "student"  # whose distribution at the next state: its own, held fixed
    weighting: Weighting = "decay"
    gamma: float = 4.0  # decay length in slots, of weighting="decay": 7, 5, 4 for blocks of 16, 10, 8
    dpace_alpha: float = 0.5  # smoothing of D-PACE
    auf_residual: float = 0.1  # final weight after the first error
    auf_anneal_fraction: float = 0.6  # share of the steps over which that weight falls from 1
    teacher_slots: TeacherSlots = "all"  # where hard_ce and teacher_kl count, relative to the teacher's first error
    data_slots: DataSlots = "all"  # where data_ce counts
    after_error_weight: float = 1.0  # factor on all terms after the teacher's first error

    def __post_init__(self) -> None:
        for name, allowed in (
            ("kl_direction", ("forward", "reverse")),
            ("weighting", get_args(Weighting)),
            ("teacher_slots", get_args(TeacherSlots)),
            ("data_slots", get_args(DataSlots)),
            ("consistency_with", get_args(ConsistencyWith)),
        ):
            if getattr(self, name) not in allowed:
                raise UserError(f"LossConfig.{name}={getattr(self, name)!r}; choose one of {', '.join(allowed)}")
        if self.gamma <= 0:
            raise UserError(f"LossConfig.gamma={self.gamma} must be positive")
        for name in ("dpace_alpha", "auf_residual", "auf_anneal_fraction", "after_error_weight"):
            if not 0 <= getattr(self, name) <= 1:
                raise UserError(f"LossConfig.{name}={getattr(self, name)} must be between 0 and 1")
        self._check_read()

    def _check_read(self) -> None:
        """A field that nothing reads is a mistake: raises UserError naming what would read it."""
        kl = self.uses("teacher_kl") or self.uses("target_kl") or self.uses("consistency_kl")
        readers = {
            "consistency_with": ("rest.consistency_kl", self.uses("consistency_kl")),
            "kl_direction": ("teacher_kl, target_kl and consistency_kl", kl),
            "teacher_slots": (
                "hard_ce, teacher_kl and ddo_real",
                self.uses("hard_ce") or self.uses("teacher_kl") or self.whole.ddo_real > 0,
            ),
            "data_slots": ("data_ce", self.uses("data_ce")),
            "dpace_alpha": ("weighting='dpace'", self.weighting == "dpace"),
            "auf_residual": ("weighting='auf'", self.weighting == "auf"),
            "auf_anneal_fraction": ("weighting='auf'", self.weighting == "auf"),
        }
        for name, (reader, read) in readers.items():
            value = getattr(self, name)
            if value != getattr(type(self), name) and not read:
                raise UserError(
                    f"LossConfig.{name}={value!r} is read by {reader} only, which this loss does not have; set one, or"
                    " leave the field out"
                )

    def uses(self, term: str) -> bool:
        return bool(getattr(self.first, term) or getattr(self.rest, term))

    @property
    def needs_target(self) -> bool:
        return self.uses("target_kl") or self.uses("target_l1")

    @property
    def teacher_fields(self) -> tuple[str, ...]:
        """The fields set that compare with a teacher's completion."""
        terms = [
            f"{where}.{term}"
            for where, weights in (("first", self.first), ("rest", self.rest))
            for term in ("hard_ce", "teacher_kl", "consistency_kl")
            if getattr(weights, term)
        ]
        terms += [f"whole.{term}" for term in ("ddo_real", "ddo_fake") if getattr(self.whole, term)]
        unset = {"teacher_slots": "all", "data_slots": "all", "after_error_weight": 1}
        return (*terms, *(name for name, value in unset.items() if getattr(self, name) != value))
