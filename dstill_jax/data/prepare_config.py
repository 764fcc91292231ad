"""The configuration of `dstill prepare`. Read by `generate` and `worker`."""

import dataclasses
from dataclasses import dataclass, field

from dstill_jax.data.prompts import PromptSource
from dstill_jax.data.templates import TemplateConfig
from dstill_jax.errors import UserError
from dstill_jax.paths import in_home

# Read only when something is generated.
_OF_ANSWERS = (
    *("max_prompt_tokens", "max_new_tokens", "answers_per_prompt", "batch_size", "workers", "dtype"),
    *("temperature", "top_k", "top_p", "seed", "record_features"),
)


@dataclass(frozen=True)
class PrepareConfig:
    """Prompts in, a dataset of conversations out. What the target answers is part of the data, so it is fixed here."""

    target: str  # Hugging Face folder, hub id, or "smollm2" or "tiny"
    source: PromptSource
    out: str  # folder of this dataset; a stopped run is continued in it
    template: TemplateConfig = field(default_factory=TemplateConfig)
    start: int = 0  # rows to leave out at the beginning
    limit: int | None = None  # rows to take after that; None = all
    max_prompt_tokens: int = 1024  # longer prompts are skipped and counted
    max_new_tokens: int = 512  # of each answer, the end-of-turn token included
    answers_per_prompt: int = 1  # several differ by their noise only, so they need a temperature
    temperature: float = 0.0  # 0 = greedy
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0
    stop_token_ids: tuple[int, ...] | None = None  # None: the target's own
    dtype: str = "float32"  # of the target
    batch_size: int = 32  # answers generated at once in each worker
    workers: int = 1  # processes, each on its own share of the cores; for CPU machines
    record_features: bool = False  # store the target's taps and final hidden states as float16
    tap_ids: tuple[int, ...] = ()  # target layers to store

    def __post_init__(self) -> None:
        # Imports JAX, which a worker does after it has taken its cores.
        from dstill_jax.decoding.sampling import SamplingConfig

        for name in ("target", "out"):
            object.__setattr__(self, name, in_home(getattr(self, name)))
        for name in ("max_prompt_tokens", "max_new_tokens", "answers_per_prompt", "batch_size", "workers"):
            if getattr(self, name) < 1:
                raise UserError(f"{name}={getattr(self, name)} must be at least 1")
        if self.start < 0 or (self.limit is not None and self.limit < 1):
            raise UserError(f"start={self.start} must not be negative and limit={self.limit} must be at least 1")
        SamplingConfig(self.temperature, self.top_k, self.top_p)
        if self.answers_per_prompt > 1 and self.temperature == 0:
            raise UserError(
                f"answers_per_prompt={self.answers_per_prompt} needs answers that are sampled: set a temperature above 0"
            )
        if not 0 <= self.seed < 2**31:
            raise UserError(f"seed={self.seed} must be in 0..{2**31 - 1}")
        if self.record_features and not self.tap_ids:
            raise UserError("record_features needs tap_ids: name the target layers to store")
        if self.tap_ids and not self.record_features:
            raise UserError(f"tap_ids={self.tap_ids} is only used with record_features=True")
        for f in dataclasses.fields(self) if self.source.conversations else ():
            if f.name in _OF_ANSWERS and getattr(self, f.name) != f.default:
                raise UserError(
                    f"{f.name}={getattr(self, f.name)} is for answers that the target gives, and finished conversations"
                    " are taken as they are; leave it out"
                )
        if not self.out:
            raise UserError("out is empty; name a folder for the dataset")


def config_to_dict(config: PrepareConfig) -> dict:
    """Plain JSON values."""
    return dataclasses.asdict(config)


def config_from_dict(values: dict) -> PrepareConfig:
    """The inverse of `config_to_dict`, also after a round trip through JSON.

    Raises:
        UserError: an unknown field.
    """
    values = dict(values)
    values["source"] = _build(PromptSource, values.get("source", {}))
    values["template"] = _build(TemplateConfig, values.get("template", {}))
    for name in ("stop_token_ids", "tap_ids"):
        if values.get(name) is not None:
            values[name] = tuple(values[name])
    return _build(PrepareConfig, values)


def _build(kind: type, values: dict):
    known = {f.name for f in dataclasses.fields(kind)}
    if unknown := sorted(set(values) - known):
        raise UserError(f"{kind.__name__} has no field {unknown[0]!r}; its fields are {', '.join(sorted(known))}")
    try:
        return kind(**values)
    except TypeError as error:
        raise UserError(f"{kind.__name__}: {error}") from error
