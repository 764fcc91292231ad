"""What generation needs from a target model. Called by `generate` and `worker`.

A Protocol, so that tests and other engines can stand in for the JAX target.
"""

import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from dstill_jax.data.prepare_config import PrepareConfig
from dstill_jax.errors import UserError


@dataclass(frozen=True)
class GenerationRequest:
    """A prompt to answer. The answer is a function of these fields and the sampling configuration alone."""

    id: int
    tokens: list[int]
    seed: int


@dataclass(frozen=True)
class TargetFacts:
    """What must be known of a target before work starts."""

    fingerprint: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    max_position_embeddings: int
    stop_token_ids: tuple[int, ...]


class Backend(Protocol):
    """A target that answers prompts."""

    @property
    def facts(self) -> TargetFacts: ...

    @property
    def tokenizer(self) -> Any: ...

    def load(self) -> None:
        """Loads the weights; called once, before `answer`."""
        ...

    def answer(
        self,
        requests: Iterable[GenerationRequest],
        *,
        longest_prompt: int,
        shared_prefix: Sequence[int],
        stop_token_ids: Sequence[int],
    ) -> Iterator[Any]:
        """Completions (`id`, `tokens`, `finish_reason`, `features`) in any order."""
        ...


class TargetBackend:
    """The JAX target of `weights.load`, answering through `decoding.session`.

    Its facts and tokenizer are read without the weights, so that a parent of workers stays small.
    """

    def __init__(self, config: PrepareConfig) -> None:
        self._config = config

    @functools.cached_property
    def facts(self) -> TargetFacts:
        described = self._described
        stops = described.config.eos_token_ids
        if not stops and described.tokenizer.eos_token_id is not None:
            stops = (described.tokenizer.eos_token_id,)
        return TargetFacts(
            fingerprint=described.fingerprint,
            vocab_size=described.config.vocab_size,
            hidden_size=described.config.hidden_size,
            num_layers=described.config.num_layers,
            max_position_embeddings=described.config.max_position_embeddings,
            stop_token_ids=tuple(stops),
        )

    @property
    def tokenizer(self) -> Any:
        return self._described.tokenizer

    @functools.cached_property
    def _described(self) -> Any:
        """A Target without parameters."""
        from dstill_jax.weights.load import describe_target

        return describe_target(self._config.target)

    @functools.cached_property
    def _target(self) -> Any:
        from dstill_jax.weights.load import load_target

        return load_target(self._described.source, dtype=self._config.dtype)

    def load(self) -> None:
        import jax

        platform = jax.default_backend()
        if self._config.workers > 1 and platform != "cpu":
            raise UserError(
                f"workers={self._config.workers} splits the cores of a CPU machine, but JAX runs on {platform!r};"
                " use workers=1 and a larger batch_size"
            )
        _ = self._target

    def answer(
        self,
        requests: Iterable[GenerationRequest],
        *,
        longest_prompt: int,
        shared_prefix: Sequence[int],
        stop_token_ids: Sequence[int],
    ) -> Iterator[Any]:
        from dstill_jax.decoding.sampling import SamplingConfig
        from dstill_jax.decoding.session import Request, decode_requests

        config = self._config
        return decode_requests(
            self._target,
            (Request(id=r.id, tokens=r.tokens, seed=r.seed) for r in requests),
            batch_size=config.batch_size,
            max_prompt_tokens=longest_prompt,
            shared_prefix=shared_prefix,
            max_new_tokens=config.max_new_tokens,
            sampling=SamplingConfig(temperature=config.temperature, top_k=config.top_k, top_p=config.top_p),
            stop_token_ids=tuple(stop_token_ids),
            record_taps=config.tap_ids if config.record_features else None,
        )
