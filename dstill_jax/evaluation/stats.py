"""Intervals over prompts: percentile bootstrap, seeded and vectorised.

Called by `results` and the tables. The prompt is the unit of resampling, because rounds of one answer resemble each
other; two arms are always resampled together, with the same prompts. The intervals say how much the numbers depend on
which prompts were drawn; they do not contain the noise of training seeds nor that of the clock.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from dstill_jax.errors import UserError

INTERVAL_DEFINITION = (
    "[low, high]: 95 % percentile bootstrap interval over prompts (arms compared on the same resampled prompts). "
    "It covers the choice of prompts only, neither training seeds nor timing noise."
)
_CHUNK = 2_000_000  # prompt weights held in memory at once


@dataclass(frozen=True)
class Bootstrap:
    """How intervals are drawn: confidence level, number of resamples, seed."""

    level: float = 0.95
    resamples: int = 10_000
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.level < 1:
            raise UserError(f"Bootstrap.level must lie between 0 and 1, got {self.level}")
        if self.resamples < 100:
            raise UserError(f"Bootstrap.resamples must be at least 100, got {self.resamples}")


@dataclass(frozen=True)
class Interval:
    """A value with the bounds of its interval, from `prompts` prompts."""

    value: float
    low: float
    high: float
    prompts: int
    level: float = 0.95

    @property
    def half_width(self) -> float:
        """Half of the distance between the bounds."""
        return (self.high - self.low) / 2

    def format(self, decimals: int, sign: bool = False) -> str:
        """`1.750 [1.690, 1.808]`, with a sign on each number when asked."""
        spec = f"{'+' if sign else ''}z.{decimals}f"
        return f"{self.value:{spec}} [{self.low:{spec}}, {self.high:{spec}}]"


def require_prompts(count: int, what: str = "an interval over prompts") -> None:
    """UserError unless there are at least two prompts: one prompt says nothing about the next."""
    if count < 2:
        raise UserError(f"{what} needs at least 2 prompts, got {count}: give more prompts")


def mean_interval(values: np.ndarray, bootstrap: Bootstrap = Bootstrap()) -> Interval:
    """Interval of the mean of one value per prompt, [n]."""
    (values,) = _columns(values=values)
    return _interval(lambda w: (w @ values) / w.sum(axis=1), len(values), bootstrap)


def ratio_interval(numerators: np.ndarray, denominators: np.ndarray, bootstrap: Bootstrap = Bootstrap()) -> Interval:
    """Interval of the pooled ratio sum(numerators) / sum(denominators), both [n] per prompt."""
    top, bottom = _columns(numerators=numerators, denominators=denominators)
    return _interval(lambda w: _ratio(w @ top, w @ bottom), len(top), bootstrap)


def paired_mean_change(values: np.ndarray, reference: np.ndarray, bootstrap: Bootstrap = Bootstrap()) -> Interval:
    """Interval of the change of the mean in per cent of the reference, both [n] on the same prompts."""
    ours, theirs = _columns(values=values, reference=reference)
    return _interval(lambda w: 100 * (_ratio(w @ ours, w @ theirs) - 1), len(ours), bootstrap)


def paired_ratio_change(
    numerators: np.ndarray,
    denominators: np.ndarray,
    reference_numerators: np.ndarray,
    reference_denominators: np.ndarray,
    bootstrap: Bootstrap = Bootstrap(),
) -> Interval:
    """Interval of the change of a pooled ratio in per cent of the reference's, all [n] on the same prompts."""
    quotient = paired_ratio_quotient(
        numerators, denominators, reference_numerators, reference_denominators, bootstrap=bootstrap
    )
    low, value, high = (100 * (x - 1) for x in (quotient.low, quotient.value, quotient.high))
    return Interval(value, low, high, quotient.prompts, quotient.level)


def paired_ratio_quotient(
    numerators: np.ndarray,
    denominators: np.ndarray,
    reference_numerators: np.ndarray,
    reference_denominators: np.ndarray,
    bootstrap: Bootstrap = Bootstrap(),
) -> Interval:
    """Interval of one pooled ratio over another, all [n] on the same prompts, resampled jointly."""
    top, bottom, other_top, other_bottom = _columns(
        numerators=numerators,
        denominators=denominators,
        reference_numerators=reference_numerators,
        reference_denominators=reference_denominators,
    )
    return _interval(
        lambda w: _ratio(_ratio(w @ top, w @ bottom), _ratio(w @ other_top, w @ other_bottom)), len(top), bootstrap
    )


def speedup_interval(
    baseline_seconds: np.ndarray,
    baseline_tokens: np.ndarray,
    seconds: np.ndarray,
    tokens: np.ndarray,
    bootstrap: Bootstrap = Bootstrap(),
) -> Interval:
    """Seconds per token of the baseline over those of the method, all [n] on the same prompts, resampled jointly.

    The tokens are those made within the seconds: a token of the prefill belongs to neither.
    """
    return paired_ratio_quotient(baseline_seconds, baseline_tokens, seconds, tokens, bootstrap=bootstrap)


def _interval(statistic: Callable[[np.ndarray], np.ndarray], prompts: int, bootstrap: Bootstrap) -> Interval:
    require_prompts(prompts)
    value = float(statistic(np.ones((1, prompts)))[0])
    if not np.isfinite(value):
        raise UserError(f"the statistic over {prompts} prompts is not finite: a denominator sums to zero")
    samples = np.concatenate([statistic(weights) for weights in _weights(prompts, bootstrap)])
    tail = (1 - bootstrap.level) / 2
    low, high = np.nanquantile(samples, [tail, 1 - tail])
    return Interval(value, float(low), float(high), prompts, bootstrap.level)


def _weights(prompts: int, bootstrap: Bootstrap) -> Iterator[np.ndarray]:
    """How often each prompt occurs in each resample: float64 [rows, n] pieces; the split does not change the draws."""
    rows = max(1, _CHUNK // prompts)
    if rows >= bootstrap.resamples:
        yield _drawn(prompts, bootstrap)
        return
    generator = np.random.default_rng(bootstrap.seed)
    for start in range(0, bootstrap.resamples, rows):
        yield _draw(generator, prompts, min(rows, bootstrap.resamples - start))


@functools.lru_cache(maxsize=2)  # a table asks for the same draws once an arm; at most 2 x 16 MB are kept
def _drawn(prompts: int, bootstrap: Bootstrap) -> np.ndarray:
    weights = _draw(np.random.default_rng(bootstrap.seed), prompts, bootstrap.resamples)
    weights.flags.writeable = False
    return weights


def _draw(generator: np.random.Generator, prompts: int, rows: int) -> np.ndarray:
    return generator.multinomial(prompts, np.full(prompts, 1 / prompts), size=rows).astype(np.float64)


def _columns(**named: np.ndarray) -> list[np.ndarray]:
    columns = {name: np.asarray(values, dtype=np.float64) for name, values in named.items()}
    lengths = {name: column.shape for name, column in columns.items()}
    if any(column.ndim != 1 for column in columns.values()) or len(set(lengths.values())) != 1:
        raise UserError(f"per-prompt values must be vectors of one length (the same prompts), got shapes {lengths}")
    for name, column in columns.items():
        if not np.isfinite(column).all():
            raise UserError(f"{name} must be finite for every prompt, got {column[~np.isfinite(column)][:3].tolist()}")
    return list(columns.values())


def _ratio(top: np.ndarray, bottom: np.ndarray) -> np.ndarray:
    return np.divide(top, bottom, out=np.full_like(top, np.nan), where=bottom != 0)
