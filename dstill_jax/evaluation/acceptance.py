"""Acceptance: how many tokens a round of speculative decoding commits, as integer counts.

Called by `results`, from which tables, plots, JSON and the report take their figures, so that all show one number.
Everything is an exact integer until the last division. Means are never averaged and never multiplied together.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from dstill_jax.errors import UserError

TAU_DEFINITION = (
    "tau (acceptance length): tokens committed per target verification pass, the bonus token included "
    "(1 <= tau <= drafted + 1). 'tau' is the mean over responses of each response's own mean; 'tau pooled' is all "
    "committed tokens divided by all rounds. The last round of a response counts only what was kept after a stop token "
    "or the length cap."
)
SLOT_DEFINITION = (
    "slot k: share of rounds in which draft slot k was accepted, among rounds in which slots 1..k-1 all were. "
    "The slot whose token would be the last of a response is not counted, whatever it held."
)

Rounds = Sequence[Sequence[int]]
"""Per response, the tokens committed in each round (bonus included)."""


@dataclass(frozen=True)
class AcceptanceCounts:
    """Additive acceptance counts of rounds that drafted W tokens each.

    reached[k-1]:  rounds in which slot k was looked at, that is slots 1..k-1 were accepted (W entries).
    accepted[k-1]: rounds among those in which slot k was accepted too (W entries).
    histogram[c]:  rounds that committed c tokens, bonus included (W + 2 entries, index 0 stays empty).
    """

    reached: tuple[int, ...]
    accepted: tuple[int, ...]
    histogram: tuple[int, ...]

    def __post_init__(self) -> None:
        for name in ("reached", "accepted", "histogram"):
            object.__setattr__(self, name, tuple(int(x) for x in getattr(self, name)))
        if len(self.reached) != len(self.accepted) or len(self.histogram) != len(self.reached) + 2:
            raise UserError(
                "AcceptanceCounts must have W reached, W accepted and W + 2 histogram entries, got "
                f"{len(self.reached)}, {len(self.accepted)} and {len(self.histogram)}"
            )
        if min(self.reached + self.accepted + self.histogram) < 0 or self.histogram[0]:
            raise UserError(f"AcceptanceCounts entries must be >= 0 and histogram[0] must be 0, got {self}")
        if any(a > r for a, r in zip(self.accepted, self.reached, strict=True)):
            raise UserError(f"AcceptanceCounts.accepted must not exceed reached, got {self.accepted} of {self.reached}")

    @classmethod
    def from_matched(cls, matched: Iterable[int], drafted: int) -> "AcceptanceCounts":
        """Counts of uncut rounds, from the length of the accepted run of each (0..W); each commits one token more."""
        _require_drafted(drafted)
        runs = np.asarray(list(matched), dtype=np.int64).reshape(-1)
        if runs.size and (runs.min() < 0 or runs.max() > drafted):
            raise UserError(f"accepted runs must lie in 0..{drafted} (the drafted length), got {runs.tolist()[:20]}")
        slots = np.arange(1, drafted + 1)
        accepted = (runs[:, None] >= slots).sum(axis=0)
        reached = (runs[:, None] >= slots - 1).sum(axis=0)
        return cls(tuple(reached), tuple(accepted), tuple(np.bincount(runs + 1, minlength=drafted + 2)))

    @classmethod
    def from_acceptance_lengths(
        cls, acceptance_lengths: Rounds, drafted: int, *, last_round_cut: bool | Sequence[bool] = True
    ) -> "AcceptanceCounts":
        """Counts from committed tokens per round, as decoding returns them.

        A round of c < last tokens accepted slots 1..c-1 and rejected slot c. In the last round of a response the last
        token may be the bonus token or an accepted draft token behind which a stop or the cap cut: these look the same,
        so with `last_round_cut` (for all responses, or one value for each) slot c of that round is left out. It is left
        out whichever it was, so the shares stay unbiased. Pass False for responses that are still running.
        """
        _require_drafted(drafted)
        rounds = check_rounds(acceptance_lengths, drafted)
        if isinstance(last_round_cut, bool | np.bool_):
            cuts: Sequence[bool] = [bool(last_round_cut)] * len(rounds)
        else:
            cuts = list(last_round_cut)
        if len(cuts) != len(rounds):
            raise UserError(f"last_round_cut must have one value per response ({len(rounds)}), got {len(cuts)}")
        every = [count for response in rounds for count in response]
        last = [response[-1] for response, cut in zip(rounds, cuts, strict=True) if cut and response]
        whole = cls.from_matched([count - 1 for count in every], drafted)
        unseen = np.bincount(np.asarray(last, dtype=np.int64), minlength=drafted + 2)[1 : drafted + 1]
        return cls(tuple(np.asarray(whole.reached, dtype=np.int64) - unseen), whole.accepted, whole.histogram)

    @property
    def drafted_length(self) -> int:
        """W, tokens drafted in a round."""
        return len(self.reached)

    @property
    def rounds(self) -> int:
        """Verification passes counted."""
        return sum(self.histogram)

    @property
    def committed(self) -> int:
        """Tokens committed by them, bonus tokens included."""
        return sum(size * count for size, count in enumerate(self.histogram))

    @property
    def tau_pooled(self) -> float:
        """Committed tokens per round, bonus included; UserError when no round was counted."""
        return self.committed / self._some_rounds()

    def conditional(self) -> np.ndarray:
        """float64 [W]: accepted over reached for each slot, NaN where a slot was never reached."""
        reached = np.asarray(self.reached, dtype=np.float64)
        accepted = np.asarray(self.accepted, dtype=np.float64)
        return np.divide(accepted, reached, out=np.full_like(reached, np.nan), where=reached > 0)

    def _some_rounds(self) -> int:
        if not self.rounds:
            raise UserError("tau needs at least one round, got 0: nothing was decoded")
        return self.rounds


def check_rounds(acceptance_lengths: Rounds, drafted: int) -> tuple[tuple[int, ...], ...]:
    """The lists as tuples of int, after checking that each round committed between 1 and `drafted` + 1 tokens."""
    rounds = tuple(tuple(int(count) for count in response) for response in acceptance_lengths)
    for index, response in enumerate(rounds):
        for number, count in enumerate(response):
            if not 1 <= count <= drafted + 1:
                raise UserError(
                    f"acceptance_lengths[{index}][{number}] must lie in 1..{drafted + 1} "
                    f"({drafted} drafted tokens and the bonus token), got {count}"
                )
    return rounds


def committed_and_rounds(acceptance_lengths: Rounds) -> tuple[np.ndarray, np.ndarray]:
    """Per response: tokens committed in rounds, and rounds; float64 [n] each, for pooled ratios over prompts."""
    committed = np.asarray([sum(response) for response in acceptance_lengths], dtype=np.float64)
    return committed, np.asarray([len(response) for response in acceptance_lengths], dtype=np.float64)


def response_means(acceptance_lengths: Rounds) -> np.ndarray:
    """float64 [n]: mean committed tokens per round of each response; NaN for a response without any round.

    A response has no round when its first token, which the prefill produces, already ends it.
    """
    committed, rounds = committed_and_rounds(acceptance_lengths)
    return np.divide(committed, rounds, out=np.full_like(committed, np.nan), where=rounds > 0)


def tau_mean(acceptance_lengths: Rounds) -> float:
    """Mean over responses of the per-response mean (responses without a round apart)."""
    means = response_means(acceptance_lengths)
    means = means[~np.isnan(means)]
    if not means.size:
        raise UserError("tau needs at least one response with a round, got none: nothing was decoded")
    return float(means.mean())


def tau_pooled(acceptance_lengths: Rounds) -> float:
    """All committed tokens over all rounds."""
    committed, rounds = committed_and_rounds(acceptance_lengths)
    if not rounds.sum():
        raise UserError("tau needs at least one round, got 0: nothing was decoded")
    return float(committed.sum() / rounds.sum())


def _require_drafted(drafted: int) -> None:
    if drafted < 0:
        raise UserError(f"drafted length must be >= 0, got {drafted}")
