"""Results of an evaluation: one arm (`MethodResult`) and all arms on the same prompts (`EvaluationResult`).

Filled by `measure`, read by tables, plots and the report. Everything measured is kept per prompt, in prompt order, so
that any statistic can be computed again from the JSON file; the file's layout is described in `serialize`.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from dstill_jax.errors import UserError
from dstill_jax.evaluation import acceptance, stats
from dstill_jax.evaluation.acceptance import AcceptanceCounts
from dstill_jax.evaluation.stats import Bootstrap, Interval

AUTOREGRESSIVE = "autoregressive"
LOSSLESS_DEFINITION = (
    "Lossless: with the same prompt, seed, temperature and filters a method emits exactly the token ids of plain "
    "autoregressive decoding with the same target, stop tokens and length cap included."
)
SPEEDUP_DEFINITION = (
    "Speed-up: decode seconds per token of our own autoregressive decoding divided by those of the method, in the same "
    "process, on the same prompts; compilation, the prefill and the token that comes from the prefill apart."
)
_THINKING = ("on", "off", "not applicable")


@dataclass(frozen=True)
class MethodResult:
    """What one arm (a drafter with a decoding method and its settings) did on a list of prompts.

    name:               short and unique, the first column of tables, e.g. `A4 DStill`.
    description:        one sentence for the reader of the report.
    method:             name of the decoding method; `autoregressive` makes the arm a baseline for speed-ups.
    drafted_length:     W, tokens drafted in a round (0 for autoregressive). A proposer that drafts fewer in some round
                        counts as having its next slot rejected.
    passes:             drafter passes for one draft (0 without a drafter).
    temperature:        0 means greedy.
    top_k, top_p:       filters of the target's distribution at a temperature; None: none.
    prompts_hash:       `environment.hash_prompts` of the rendered prompts.
    tokens:             [n] new tokens of each prompt, the stop token included.
    acceptance_lengths: [n][rounds] tokens committed in each round, bonus included. They sum to `tokens`, or to one less
                        where the first token came from the prefill.
    seconds:            [k] decode seconds of the first k <= n prompts, one prompt at a time, prefill and compilation apart;
                        None if the arm was not timed.
    output_digests:     [n] `environment.digest_tokens` of the new tokens, to show losslessness; may be None.
    training_steps:     optimiser steps of all stages together; None if nothing was trained.
    drafter:            label of the weights, shared by arms that differ in settings only; empty without a drafter.
    notes:              shown in the last column.
    """

    name: str
    method: str
    drafted_length: int
    prompts_hash: str
    tokens: tuple[int, ...]
    acceptance_lengths: tuple[tuple[int, ...], ...]
    seconds: tuple[float, ...] | None = None
    output_digests: tuple[str, ...] | None = None
    description: str = ""
    passes: int = 0
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    training_steps: int | None = None
    drafter: str = ""
    notes: str = ""

    def __post_init__(self) -> None:
        if not self.name:
            raise UserError("MethodResult.name must not be empty")
        if self.drafted_length < 0:
            raise UserError(f"{self._label('drafted_length')} must be >= 0, got {self.drafted_length}")
        try:
            rounds = acceptance.check_rounds(self.acceptance_lengths, self.drafted_length)
        except UserError as error:
            raise UserError(f"{self._label('acceptance_lengths')}: {error}") from error
        object.__setattr__(self, "acceptance_lengths", rounds)
        object.__setattr__(self, "tokens", tuple(int(count) for count in self.tokens))
        if self.seconds is not None:
            object.__setattr__(self, "seconds", tuple(float(value) for value in self.seconds))
        if self.output_digests is not None:
            object.__setattr__(self, "output_digests", tuple(self.output_digests))
        self._check_lengths()

    def _check_lengths(self) -> None:
        prompts = len(self.tokens)
        if self.seconds is not None and len(self.seconds) > prompts:
            raise UserError(f"{self._label('seconds')} has {len(self.seconds)} entries for {prompts} prompts")
        for name in ("acceptance_lengths", "output_digests"):
            values = getattr(self, name)
            if values is not None and len(values) != prompts:
                raise UserError(f"{self._label(name)} must have one entry per prompt ({prompts}), got {len(values)}")
        for index, (tokens, rounds) in enumerate(zip(self.tokens, self.acceptance_lengths, strict=True)):
            if tokens - sum(rounds) not in (0, 1):
                raise UserError(
                    f"{self._label('tokens')}[{index}] is {tokens}, but its rounds committed {sum(rounds)}: they must "
                    "be equal, or one less where the prefill gives the first token"
                )
        for index, value in enumerate(self.seconds or ()):
            if not (math.isfinite(value) and value >= 0):
                raise UserError(f"{self._label('seconds')}[{index}] must be finite and >= 0, got {value}")

    def _label(self, field_name: str) -> str:
        return f"arm {self.name!r}: {field_name}"

    @property
    def prompts(self) -> int:
        """Number of prompts."""
        return len(self.tokens)

    @property
    def draw(self) -> tuple[float, int | None, float | None]:
        """How its tokens were drawn: temperature, top_k, top_p."""
        return self.temperature, self.top_k, self.top_p

    @property
    def rounds(self) -> tuple[int, ...]:
        """[n] verification passes of each prompt."""
        return tuple(len(response) for response in self.acceptance_lengths)

    @property
    def tau_mean(self) -> float:
        """Mean over responses of the mean committed tokens per round, bonus included."""
        return acceptance.tau_mean(self.acceptance_lengths)

    @property
    def tau_pooled(self) -> float:
        """All committed tokens over all rounds."""
        return acceptance.tau_pooled(self.acceptance_lengths)

    @property
    def counts(self) -> AcceptanceCounts:
        """Additive counts: per-slot acceptance and histogram."""
        return AcceptanceCounts.from_acceptance_lengths(self.acceptance_lengths, self.drafted_length)

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens that the rounds of the timed prompts committed, over their decode seconds.

        The clock starts after the prefill, so the prefill's token is not counted. None if the arm was not timed, or if
        no timed response has a round.
        """
        seconds = self.seconds or ()
        committed = self.committed(len(seconds)).sum()
        return float(committed / sum(seconds)) if committed and sum(seconds) else None

    def committed(self, prompts: int) -> np.ndarray:
        """float64 [prompts]: tokens that the rounds of each of the first prompts committed."""
        return acceptance.committed_and_rounds(self.acceptance_lengths[:prompts])[0]

    def tau_interval(self, bootstrap: Bootstrap = Bootstrap()) -> Interval:
        """`tau_mean` with its interval over prompts."""
        means = acceptance.response_means(self.acceptance_lengths)
        return stats.mean_interval(means[~np.isnan(means)], bootstrap)

    def tau_pooled_interval(self, bootstrap: Bootstrap = Bootstrap()) -> Interval:
        """`tau_pooled` with its interval over prompts."""
        return stats.ratio_interval(*acceptance.committed_and_rounds(self.acceptance_lengths), bootstrap=bootstrap)


def require_comparable(arm: MethodResult, reference: MethodResult) -> None:
    """UserError unless both arms saw the same rendered prompts, at the same temperature and under the same filters."""
    if arm.prompts_hash != reference.prompts_hash or arm.prompts != reference.prompts:
        raise UserError(
            f"arms {arm.name!r} and {reference.name!r} were evaluated on different prompts "
            f"({arm.prompts} with hash {arm.prompts_hash[:12]}, {reference.prompts} with hash "
            f"{reference.prompts_hash[:12]}): evaluate both on one list, rendered with one template"
        )
    for name in ("temperature", "top_k", "top_p"):
        ours, theirs = getattr(arm, name), getattr(reference, name)
        if ours != theirs:
            raise UserError(
                f"arms {arm.name!r} and {reference.name!r} were evaluated at {name}={ours} and {theirs}: compare at one"
            )


def tau_change(arm: MethodResult, reference: MethodResult, bootstrap: Bootstrap = Bootstrap()) -> Interval:
    """Change of tau (mean over responses) against `reference` in per cent, paired by prompt."""
    require_comparable(arm, reference)
    ours = acceptance.response_means(arm.acceptance_lengths)
    theirs = acceptance.response_means(reference.acceptance_lengths)
    both = ~(np.isnan(ours) | np.isnan(theirs))
    return stats.paired_mean_change(ours[both], theirs[both], bootstrap)


def tau_pooled_change(arm: MethodResult, reference: MethodResult, bootstrap: Bootstrap = Bootstrap()) -> Interval:
    """Change of pooled tau against `reference` in per cent, paired by prompt."""
    require_comparable(arm, reference)
    ours = acceptance.committed_and_rounds(arm.acceptance_lengths)
    theirs = acceptance.committed_and_rounds(reference.acceptance_lengths)
    return stats.paired_ratio_change(*ours, *theirs, bootstrap=bootstrap)


def speedup(arm: MethodResult, baseline: MethodResult, bootstrap: Bootstrap = Bootstrap()) -> Interval | None:
    """Seconds per token of `baseline` over those of `arm`, paired by prompt, over the prompts on which both were timed.

    Tokens are those that rounds committed, as in `tokens_per_second`. None if those prompts are fewer than two, or if
    one of the arms has no round or no time on them.
    """
    require_comparable(arm, baseline)
    ours, theirs = (np.asarray(each.seconds or (), dtype=np.float64) for each in (arm, baseline))
    timed = min(len(ours), len(theirs))
    if timed < 2:
        return None
    columns = (theirs[:timed], baseline.committed(timed), ours[:timed], arm.committed(timed))
    return stats.speedup_interval(*columns, bootstrap) if all(column.sum() for column in columns) else None


def identical_outputs(arm: MethodResult, baseline: MethodResult) -> int | None:
    """Prompts on which both arms emitted the same tokens; None if one of them kept no digests."""
    require_comparable(arm, baseline)
    if arm.output_digests is None or baseline.output_digests is None:
        return None
    return sum(a == b for a, b in zip(arm.output_digests, baseline.output_digests, strict=True))


@dataclass(frozen=True)
class EvaluationMetadata:
    """What every arm of an evaluation shares: without it a number means nothing.

    target, target_fingerprint: readable name, and the hash of the weights that `load_target` gives.
    prompts:        where the prompts come from, e.g. `GSM8K test file, questions never trained on`.
    prompts_hash:   `environment.hash_prompts` of the rendered prompts; the same in every arm.
    thinking:       mode with which the chat template was rendered: `on`, `off` or `not applicable`.
    device, dtype:  e.g. `2 cores of an ... CPU`, `float32`.
    seeds:          name -> seed, e.g. {"sampling": 0, "training": 0}.
    commit:         `environment.current_commit()`; None outside a checkout.
    command:        what reproduces the file.
    created:        ISO 8601 time, given by the caller.
    batch_size:     prompts decoded at a time where nothing was timed; timed ones are decoded alone.
    """

    target: str
    target_fingerprint: str
    prompts: str
    prompts_hash: str
    prompt_count: int
    thinking: str
    device: str
    dtype: str
    max_new_tokens: int
    batch_size: int = 1
    seeds: dict[str, int] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    commit: str | None = None
    command: str = ""
    created: str = ""

    def __post_init__(self) -> None:
        if self.thinking not in _THINKING:
            raise UserError(f"EvaluationMetadata.thinking must be one of {', '.join(_THINKING)}, got {self.thinking!r}")
        for name in ("target", "target_fingerprint", "prompts_hash", "device", "dtype"):
            if not getattr(self, name):
                raise UserError(f"EvaluationMetadata.{name} must not be empty: no device, no number")
        stats.require_prompts(self.prompt_count, "an evaluation")


@dataclass(frozen=True)
class EvaluationResult:
    """All arms of an evaluation, on the same prompts, in the order of the table."""

    metadata: EvaluationMetadata
    arms: tuple[MethodResult, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "arms", tuple(self.arms))
        if not self.arms:
            raise UserError("EvaluationResult.arms must hold at least one arm, got none")
        names = [arm.name for arm in self.arms]
        if len(set(names)) != len(names):
            raise UserError(f"EvaluationResult.arms must have unique names, got {names}")
        for arm in self.arms:
            if arm.prompts_hash != self.metadata.prompts_hash or arm.prompts != self.metadata.prompt_count:
                raise UserError(
                    f"arm {arm.name!r} was evaluated on other prompts ({arm.prompts} with hash "
                    f"{arm.prompts_hash[:12]}) than the evaluation ({self.metadata.prompt_count} with hash "
                    f"{self.metadata.prompts_hash[:12]}): evaluate every arm on one list"
                )

    def __iter__(self) -> Iterator[MethodResult]:
        return iter(self.arms)

    def arm(self, name: str) -> MethodResult:
        """The arm of that name."""
        for arm in self.arms:
            if arm.name == name:
                return arm
        raise UserError(f"no arm {name!r} in this evaluation; it has {', '.join(arm.name for arm in self.arms)}")

    def baseline(self, arm: MethodResult) -> MethodResult | None:
        """The autoregressive arm whose tokens were drawn as those of `arm`, if there is one."""
        for other in self.arms:
            if other.method == AUTOREGRESSIVE and other.draw == arm.draw:
                return other
        return None

    def speedup(self, arm: MethodResult, bootstrap: Bootstrap = Bootstrap()) -> Interval | None:
        """Speed-up of `arm` over its autoregressive baseline; None without a timed baseline and for itself."""
        baseline = self.baseline(arm)
        return None if baseline is None or baseline is arm else speedup(arm, baseline, bootstrap)

    def identical_outputs(self, arm: MethodResult) -> int | None:
        """Prompts on which `arm` emitted exactly what its autoregressive baseline did; None where unknown."""
        baseline = self.baseline(arm)
        return None if baseline is None or baseline is arm else identical_outputs(arm, baseline)

    def to_json(self) -> str:
        """The document described in `serialize`."""
        from dstill_jax.evaluation import serialize

        return serialize.to_json(self)

    @classmethod
    def from_json(cls, text: str, source: str = "evaluation JSON") -> "EvaluationResult":
        """Read what `to_json` wrote; UserError naming `source` and the field otherwise."""
        from dstill_jax.evaluation import serialize

        return serialize.from_json(text, source)

    def save(self, path: str | Path) -> Path:
        """Write the JSON file in one step (a reader never sees half of it)."""
        from dstill_jax.evaluation import serialize

        return serialize.write_text(path, self.to_json())

    @classmethod
    def load(cls, path: str | Path) -> "EvaluationResult":
        """Read a JSON file."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"cannot read evaluation {path}: {error}") from error
        return cls.from_json(text, str(path))
