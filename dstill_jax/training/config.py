"""Training configurations: the optimiser and the run, as validated frozen dataclasses.

Read by `optimizer.py`, `step.py` and `loop.py`; saved as JSON beside every checkpoint. Imports no JAX.
"""

import dataclasses
import math
import typing
from dataclasses import dataclass
from typing import Any

from dstill_jax.errors import UserError

OPTIMIZERS = ("adamw", "muon")


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW or Muon, with linear warm-up, cosine decay, a global-norm clip and an exponential moving average."""

    learning_rate: float  # the peak, reached at the end of the warm-up
    kind: str = "adamw"  # or "muon": matrices by Muon, everything else by AdamW
    warmup_fraction: float = 0.04  # of total_steps, rising linearly
    final_lr_fraction: float = 0.02  # of learning_rate, reached by the cosine at the last step
    b1: float = 0.9
    b2: float = 0.98
    eps: float = 1e-8
    weight_decay: float = 0.01  # decoupled, matrices only; norm scales and biases are never decayed
    clip_norm: float | None = 1.0  # global norm of the gradient; None: no clip
    ema_decay: float = 0.999  # upper bound; early steps use a shorter memory, see state.py

    def __post_init__(self) -> None:
        _check_types(self)
        if self.kind not in OPTIMIZERS:
            raise UserError(f"OptimizerConfig.kind={self.kind!r}; choose one of {', '.join(OPTIMIZERS)}")
        _check_range(self, "learning_rate", above=0.0)
        _check_range(self, "warmup_fraction", at_least=0.0, below=1.0)
        _check_range(self, "final_lr_fraction", at_least=0.0, at_most=1.0)
        _check_range(self, "b1", at_least=0.0, below=1.0)
        _check_range(self, "b2", at_least=0.0, below=1.0)
        _check_range(self, "eps", above=0.0)
        _check_range(self, "weight_decay", at_least=0.0)
        if self.clip_norm is not None:
            _check_range(self, "clip_norm", above=0.0)
        _check_range(self, "ema_decay", at_least=0.0, below=1.0)


@dataclass(frozen=True)
class TrainConfig:
    """A run: how many optimiser steps, what is saved, what is written."""

    total_steps: int  # optimiser steps; the learning-rate schedule ends here
    accumulate_steps: int = 1  # micro-batches of one optimiser step; batch arrays hold them all
    seed: int = 0  # of every random draw inside the step
    save_every: int = 200  # steps between checkpoints; the last step is always saved
    keep_last: int = 2  # newest checkpoints that are kept
    keep_best: tuple[str, str] | None = None  # (metric, "min" or "max"): the best checkpoint by it is kept as well
    log_every: int = 1  # steps between records in metrics.jsonl
    prefetch: int = 2  # batches prepared and sent to the device ahead of the step
    profile_steps: tuple[int, int] | None = None  # first and last step of a jax.profiler trace
    tensorboard: bool = False  # also write TensorBoard events (needs the `report` extra)
    progress: bool = True  # progress bar on a terminal, sparse lines elsewhere

    def __post_init__(self) -> None:
        for name in ("profile_steps", "keep_best"):
            if isinstance(getattr(self, name), list):  # what JSON makes of a tuple
                object.__setattr__(self, name, tuple(getattr(self, name)))
        _check_types(self)
        for name in ("total_steps", "accumulate_steps", "save_every", "keep_last", "log_every", "prefetch"):
            _check_range(self, name, at_least=1)
        _check_range(self, "seed", at_least=0, below=2**32)
        if self.keep_best is not None and self.keep_best[1] not in ("min", "max"):
            raise UserError(f"TrainConfig.keep_best={self.keep_best!r} must be (metric, 'min') or (metric, 'max')")
        if self.profile_steps is not None:
            first, last = self.profile_steps
            if not 1 <= first <= last:
                raise UserError(
                    f"TrainConfig.profile_steps must be (first, last) with 1 <= first <= last, got {first, last}"
                )


OPERATIONAL_FIELDS = frozenset(
    {"save_every", "keep_last", "keep_best", "log_every", "prefetch", "profile_steps", "tensorboard", "progress"}
)
"""Fields of `TrainConfig` that change no number of the run, hence may differ when a run is resumed."""


def to_dict(config: object) -> dict[str, Any]:
    """The config as JSON values; tuples become lists."""
    return {k: list(v) if isinstance(v, tuple) else v for k, v in dataclasses.asdict(config).items()}  # type: ignore[arg-type]


def _check_types(config: object) -> None:
    """Every field holds its declared type; an int is accepted where a float is declared and stored as one."""
    for name, declared in typing.get_type_hints(type(config)).items():
        value = getattr(config, name)
        allowed = typing.get_args(declared) if _is_union(declared) else (declared,)
        if float in allowed and isinstance(value, int) and not isinstance(value, bool):
            object.__setattr__(config, name, value := float(value))
        if not any(_is_a(value, t) for t in allowed):
            wanted = getattr(declared, "__name__", str(declared)) if not _is_union(declared) else str(declared)
            raise UserError(f"{type(config).__name__}.{name} must be {wanted}, got {value!r} ({type(value).__name__})")


def _is_union(declared: Any) -> bool:
    return type(None) in typing.get_args(declared)


def _is_a(value: Any, declared: Any) -> bool:
    if declared is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if typing.get_origin(declared) is tuple:
        parts = typing.get_args(declared)
        return isinstance(value, tuple) and len(value) == len(parts) and all(map(_is_a, value, parts))
    return isinstance(value, declared)


def _check_range(
    config: object,
    name: str,
    *,
    above: float = -math.inf,
    at_least: float = -math.inf,
    below: float = math.inf,
    at_most: float = math.inf,
) -> None:
    value = getattr(config, name)
    if above < value < below and at_least <= value <= at_most:  # false for NaN and for infinities
        return
    bounds = [f"> {above:g}"] * (above > -math.inf) + [f">= {at_least:g}"] * (at_least > -math.inf)
    bounds += [f"< {below:g}"] * (below < math.inf) + [f"<= {at_most:g}"] * (at_most < math.inf)
    raise UserError(f"{type(config).__name__}.{name} must be finite and {' and '.join(bounds)}, got {value}")
