"""`generate`: prompts in, tokens out, one call; and the drafter's raw logits for one block."""

import functools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from dstill_jax.blocks import Sight
from dstill_jax.config import DrafterConfig, TargetConfig
from dstill_jax.decoding.sampling import SamplingConfig
from dstill_jax.decoding.session import Request, Session, check_pair
from dstill_jax.dims import Params
from dstill_jax.errors import UserError, whole
from dstill_jax.models import drafter as drafter_lib
from dstill_jax.models import target as target_lib
from dstill_jax.models.drafter import Drafter
from dstill_jax.models.target import Target


@dataclass(frozen=True)
class GenerateOutput:
    """Results in the order of the prompts."""

    tokens: list[list[int]]  # new tokens only; the stop token is kept, nothing follows it
    acceptance_lengths: list[list[int]]  # tokens committed in each round, bonus included
    finish_reasons: list[str]  # "stop" or "length"
    stats: dict[str, float]  # rounds, tau_mean, tau_pooled, seconds, prefill_seconds


def encode_prompts(target: Target, prompts: Sequence[str] | Sequence[Sequence[int]]) -> list[list[int]]:
    """Token ids of each prompt; strings are encoded as they are, without a chat template."""
    if isinstance(prompts, str) or not isinstance(prompts, Sequence | np.ndarray | jax.Array) or not len(prompts):
        raise UserError("prompts must be a non-empty list of strings or of token-id lists")
    return [
        target.tokenizer.encode(prompt, add_special_tokens=False) if isinstance(prompt, str) else _ids(i, prompt)
        for i, prompt in enumerate(prompts)
    ]


def _ids(i: int, prompt: Any) -> list[int]:
    """Token ids as they were given, or a UserError: a number alone, a chat message and 1.7 are no prompts."""
    ids = prompt.tolist() if isinstance(prompt, np.ndarray | jax.Array) else prompt
    if isinstance(ids, int):
        raise UserError(f"prompt {i} is the number {ids}; prompts is a list of prompts: [[1, 2, 3]], not [1, 2, 3]")
    if isinstance(ids, dict) or (isinstance(ids, list | tuple) and any(isinstance(x, dict) for x in ids)):
        raise UserError(
            f"prompt {i} is a chat message; apply the tokenizer's chat template first, and give its token ids"
        )
    if isinstance(ids, bytes) or not isinstance(ids, Sequence):
        raise UserError(f"prompt {i} is of type {type(prompt).__name__}; give a string or a list of token ids")
    return [whole(f"a token of prompt {i}", token) for token in ids]


def generate(
    target: Target,
    prompts: Sequence[str] | Sequence[Sequence[int]],
    method: str | None = None,
    drafter: Drafter | None = None,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    stop_token_ids: Sequence[int] | None = None,
    batch_size: int = 32,
    **method_options: Any,
) -> GenerateOutput:
    """Completes prompts of any lengths. Every method emits the same tokens; they differ in the number of target passes.

    At a temperature, a prompt's draw depends on `seed` and on its place in the list.

    Args:
      prompts: strings, which are encoded as they are (a chat template is the caller's affair), or lists of token ids.
      method: "autoregressive", "lookup", "dflash" (one drafter pass; also a DStill student), "refine" or "ddtree"; None
        is "dflash" where a drafter is given and "autoregressive" where not.
      stop_token_ids: None takes the target's own; an empty list never stops.
      batch_size: prompts decoded at a time; the next one begins where one is done. It changes the time and the memory
        that caches take, not what is drawn. Calls compile anew for another number of prompts below it, and for longest
        prompts that lie a multiple of 32 tokens apart (of a quarter of their length, when they are long).
      method_options: draft_tokens; for refine also passes, order, threshold; for lookup max_ngram; for ddtree
        tree_budget.

    Raises:
      UserError: names the argument, the value and what to do.
    """
    ids = encode_prompts(target, prompts)
    session = Session(
        target,
        drafter=drafter,
        method=method,
        batch_size=min(whole("batch_size", batch_size), len(ids)),
        max_prompt_tokens=max(map(len, ids)),
        max_new_tokens=max_new_tokens,
        sampling=SamplingConfig(temperature, top_k, top_p),
        stop_token_ids=stop_token_ids,
        **method_options,
    )
    began = time.perf_counter()
    requests = [Request(i, tokens, whole("seed", seed)) for i, tokens in enumerate(ids)]
    for request in requests:
        session.check(request)  # all of them, before any is decoded
    # Rounds go on without looking at the host, unless prompts wait for a place.
    rounds_per_call = max_new_tokens if len(ids) <= batch_size else 16
    done = {c.id: c for c in session.run(requests, rounds_per_call=rounds_per_call)}
    completions = [done[i] for i in range(len(ids))]
    lengths = [c.acceptance_lengths for c in completions]
    rounds = sum(map(len, lengths))
    per_prompt = [sum(row) / len(row) for row in lengths if row]
    stats = {
        "rounds": float(rounds),
        "tau_mean": sum(per_prompt) / len(per_prompt) if per_prompt else 1.0,  # no round: one pass, one token
        "tau_pooled": sum(map(sum, lengths)) / rounds if rounds else 1.0,
        "seconds": time.perf_counter() - began,
        "prefill_seconds": session.clock.prefill,
    }
    return GenerateOutput([c.tokens for c in completions], lengths, [c.finish_reason for c in completions], stats)


def stream(
    target: Target, prompt: str | Sequence[int], *, rounds_per_call: int = 4, seed: int = 0, **options: Any
) -> Iterator[tuple[list[int], list[int]]]:
    """Completes one prompt, yielding (new tokens, tokens committed by each round) every few rounds.

    The first item holds the token that the prefill draws. Options as for `Session`.
    """
    if whole("rounds_per_call", rounds_per_call) < 1:
        raise UserError(f"rounds_per_call={rounds_per_call} must be at least 1")
    (ids,) = encode_prompts(target, [prompt])  # type: ignore[list-item]
    session = Session(target, batch_size=1, max_prompt_tokens=len(ids), **options)
    request = Request(0, ids, whole("seed", seed))
    session.check(request)
    state = session.start(session.idle(), [0], [request], 1)
    sent = rounds = 0
    while True:
        done = session.completion(state, 0, request)
        yield done.tokens[sent:], done.acceptance_lengths[rounds:]
        sent, rounds = len(done.tokens), len(done.acceptance_lengths)
        if not bool(state.active[0]):
            return
        state = session.advance(state, rounds_per_call)


def draft_logits(
    target: Target, drafter: Drafter, prompt_ids: Sequence[int], block_ids: Sequence[int]
) -> Float[Array, "K V"]:
    """The drafter's float32 logits for one block that follows a prompt.

    Args:
      prompt_ids: the context; the block's anchor stands right after it.
      block_ids: K token ids: the anchor, then mask tokens or revealed tokens.
    """
    check_pair(target, drafter)
    if not len(prompt_ids) or not 1 <= len(block_ids) <= drafter.config.block_size:
        raise UserError(
            f"{len(prompt_ids)=} must be at least 1 and {len(block_ids)=} between 1 and"
            f" block_size={drafter.config.block_size}"
        )
    bad = [t for t in (*prompt_ids, *block_ids) if not 0 <= whole("token id", t) < target.config.vocab_size]
    if bad:
        raise UserError(f"token id {bad[0]} is outside the vocabulary of {target.config.vocab_size}")
    prompt, block = (jnp.asarray(np.asarray(ids, np.int32))[None] for ids in (prompt_ids, block_ids))
    return _draft_logits(target.config, drafter.config, target.params, drafter.params, prompt, block)


@functools.partial(jax.jit, static_argnames=("target", "drafter"))
def _draft_logits(
    target: TargetConfig,
    drafter: DrafterConfig,
    target_params: Params,
    drafter_params: Params,
    prompt: Int[Array, "1 N"],
    block: Int[Array, "1 K"],
) -> Float[Array, "K V"]:
    n = prompt.shape[1]
    positions = jnp.arange(n)[None]
    out = target_lib.forward(target, target_params, prompt, positions, tap_ids=drafter.target_layer_ids)
    c = drafter_lib.project_context(drafter, drafter_params, out.taps)
    hidden = drafter_lib.denoise(
        drafter,
        drafter_params,
        target_lib.embed(target_params, block[None]),
        (n + jnp.arange(block.shape[1]))[None, None],
        drafter_lib.context_kv(drafter, drafter_params, c, positions),
        Sight(jnp.full((1, 1), n)),
    )
    return target_lib.head(target, target_params, hidden)[0, 0]
