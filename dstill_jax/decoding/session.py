"""Many requests through a fixed number of rows: finished rows are refilled while the others go on.

The host side of decoding, used by `generate`, evaluation and data generation. Arrays keep their shapes from the first
request to the last; only lengths change, so nothing recompiles.
"""

import dataclasses
import itertools
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from dstill_jax.config import check_drafter_matches
from dstill_jax.decoding.proposers import Autoregressive, BlockDiffusion, DiffusionTree, PromptLookup
from dstill_jax.decoding.rounds import decode_rounds, prefill
from dstill_jax.decoding.sampling import Draw, SamplingConfig
from dstill_jax.decoding.state import STOP_SLOTS, DecodeSpec, DecodeState, DraftHead, Proposer, Weights, init_state
from dstill_jax.decoding.trees import check_budget
from dstill_jax.dims import Params
from dstill_jax.errors import UserError, number, whole
from dstill_jax.keys import seed_key
from dstill_jax.models import target as target_lib
from dstill_jax.models.drafter import Drafter
from dstill_jax.models.layers import store_output_first
from dstill_jax.models.target import Target
from dstill_jax.refinement import check_order

METHODS = ("autoregressive", "lookup", "dflash", "refine", "ddtree")
_BUCKET = 32  # prompt lengths and capacities are rounded up to multiples of this, long ones of more
# Rows of one prefill pass: as many as it takes until arithmetic, not reading the weights, sets its time.
_PREFILL_TOKENS, _PREFILL_TOKENS_CPU = 2048, 96
_PREFILL_SCORES = 1 << 27  # attention scores of one layer in one pass: half a gigabyte


@dataclass(frozen=True)
class Request:
    """One prompt. The text it gets depends on (tokens, id, seed) and the run's settings, never on its batch mates."""

    id: int
    tokens: Sequence[int]
    seed: int = 0

    def key_data(self) -> np.ndarray:
        return np.asarray(jax.random.key_data(jax.random.fold_in(seed_key(self.seed), self.id)))


@dataclass(frozen=True)
class Completion:
    """What a request got."""

    id: int
    tokens: list[int]  # new tokens; a stop token is kept, nothing follows it
    acceptance_lengths: list[int]  # tokens committed by each round, bonus included; the prefill's token is in none
    finish_reason: str  # "stop" or "length"
    features: np.ndarray | None = None  # [len(prompt) + len(tokens) - 1, (T + 1) * D] float16: taps, final hidden


@dataclass
class Clock:
    """Where the time of a session went, in seconds; compilation happens inside the first call of each shape."""

    prefill: float = 0.0
    decode: float = 0.0


def make_proposer(method: str | None, drafter: Drafter | None, **options: object) -> Proposer:
    """The proposer of a named method; None is "dflash" where there is a drafter and "autoregressive" where not.

    Options: draft_tokens (W; default K - 1, lookup 7), and for refine passes (1..W, default W), order, threshold;
    for lookup max_ngram; for ddtree tree_budget (nodes of the tree, 1..1023, default 16). An option that the method
    does not read is an error.
    """
    if method is None:
        method = "autoregressive" if drafter is None else "dflash"
    if method not in METHODS:
        raise UserError(f"method={method!r} is unknown; choose one of {', '.join(METHODS)}")
    allowed = {
        "autoregressive": (),
        "lookup": ("draft_tokens", "max_ngram"),
        "dflash": ("draft_tokens",),
        "refine": ("draft_tokens", "passes", "order", "threshold"),
        "ddtree": ("draft_tokens", "tree_budget"),
    }[method]
    unread = sorted(set(options) - set(allowed))
    if unread:
        raise UserError(f"method {method!r} does not read {', '.join(unread)}; it reads {', '.join(allowed) or 'none'}")
    options = {name: value for name, value in options.items() if value is not None}
    if method == "autoregressive":
        return Autoregressive()
    width = whole("draft_tokens", options.get("draft_tokens", 7 if method == "lookup" else 0))
    if method == "lookup":
        if width < 1:
            raise UserError(f"draft_tokens={width} must be at least 1")
        ngram = whole("max_ngram", options.get("max_ngram", 3))
        if ngram < 1:
            raise UserError(f"max_ngram={ngram} must be at least 1")
        return PromptLookup(width, ngram)
    if drafter is None:
        raise UserError(f"method {method!r} needs a drafter; pass drafter=load_drafter(folder, target)")
    most = drafter.config.block_size - 1
    width = width if "draft_tokens" in options else most
    if not 1 <= width <= most:
        raise UserError(f"draft_tokens={width} must be between 1 and block_size - 1 = {most} for this drafter")
    if method == "dflash":
        return BlockDiffusion(width)
    if method == "ddtree":
        return DiffusionTree(width, check_budget(options.get("tree_budget", 16)))
    passes = whole("passes", options.get("passes", width))
    order = str(options.get("order", "left_to_right"))
    check_order(order, passes, options.get("threshold"))
    if passes > width:
        raise UserError(f"passes={passes} is more than the {width} slots that are drafted, one of them a pass at least")
    if not 0 <= (threshold := number("threshold", options.get("threshold", 0.9))) <= 1:
        raise UserError(f"threshold={threshold} must be between 0 and 1")
    return BlockDiffusion(width, passes, order, threshold)  # type: ignore[arg-type]


def check_pair(target: Target, drafter: Drafter) -> None:
    """Raises UserError when a drafter cannot belong to this target."""
    check_drafter_matches(drafter.config, target.config)
    if drafter.target_fingerprint is not None and drafter.target_fingerprint != target.fingerprint:
        raise UserError(
            f"drafter was trained on target {drafter.target_fingerprint[:12]}, this one is {target.fingerprint[:12]};"
            " its features would differ"
        )


def _draft_weights(target: Target, drafter: Drafter) -> tuple[Params, DraftHead | None]:
    """The drafter's parameters, stored as the target stores its own, and its part of the head."""
    stacked = target_lib.is_stacked(target.params)
    params = drafter.params if stacked else store_output_first(drafter.params)
    if drafter.vocabulary is None:
        return params, None
    tokens = jnp.asarray(drafter.vocabulary, jnp.int32)
    return params, DraftHead(target_lib.head_rows(target.config, target.params, tokens), tokens)


def _bucket(n: int) -> int:
    """n rounded up, by a quarter at most from 128 on: prompts of all lengths share few compiled programs."""
    step = max(_BUCKET, 1 << max(n.bit_length() - 3, 0))
    return -(-n // step) * step


class Session:
    """A compiled decoding run: one method, one batch size, one capacity."""

    def __init__(
        self,
        target: Target,
        *,
        drafter: Drafter | None = None,
        method: str | None = None,
        batch_size: int,
        max_prompt_tokens: int,
        max_new_tokens: int,
        sampling: SamplingConfig = SamplingConfig(),
        stop_token_ids: Sequence[int] | None = None,
        record_taps: tuple[int, ...] | None = None,
        shared_prefix: Sequence[int] = (),
        **method_options: object,
    ) -> None:
        """`shared_prefix`: tokens with which every prompt begins, computed once for all of them."""
        if not isinstance(target, Target) or not isinstance(drafter, Drafter | None):
            raise UserError(
                f"target is a {type(target).__name__}, drafter a {type(drafter).__name__}; load them first, with"
                " load_target(folder) and load_drafter(folder, target)"
            )
        proposer = make_proposer(method, drafter, **method_options)
        if isinstance(proposer, Autoregressive | PromptLookup):
            drafter = None
        if drafter is not None:
            check_pair(target, drafter)
            if record_taps is not None and not set(drafter.config.target_layer_ids) <= set(record_taps):
                raise UserError(
                    f"record_taps={record_taps} must contain the drafter's {drafter.config.target_layer_ids}"
                )
        for name, value in (("batch_size", batch_size), ("max_new_tokens", max_new_tokens)):
            if whole(name, value) < 1:
                raise UserError(f"{name}={value} must be at least 1")
        if isinstance(stop_token_ids, int | np.integer):
            raise UserError(f"stop_token_ids={stop_token_ids} must be a list of token ids, such as [{stop_token_ids}]")
        stops = tuple(target.config.eos_token_ids if stop_token_ids is None else stop_token_ids)
        if len(stops) > STOP_SLOTS:
            raise UserError(f"{len(stops)} stop tokens; at most {STOP_SLOTS} are supported")
        for stop in stops:
            if not 0 <= whole("stop_token_ids", stop) < target.config.vocab_size:
                raise UserError(f"stop_token_ids has {stop}, outside the vocabulary of {target.config.vocab_size}")
        if max_prompt_tokens + max_new_tokens > target.config.max_position_embeddings:
            raise UserError(
                f"prompt of {max_prompt_tokens} tokens plus max_new_tokens={max_new_tokens} exceeds the target's"
                f" context of {target.config.max_position_embeddings}; shorten the prompt or lower max_new_tokens"
            )
        self.target, self.drafter = target, drafter
        self.batch_size, self.max_new_tokens = batch_size, max_new_tokens
        self.max_prompt_tokens = max_prompt_tokens
        # Of a whole block, however little of it is drafted: methods that share a drafter share the compiled prefill.
        slots = proposer.draft_tokens if drafter is None else drafter.config.block_size - 1
        self.capacity = _bucket(max_prompt_tokens + max_new_tokens + slots + 1)
        self.spec = DecodeSpec.make(
            target.config, None if drafter is None else drafter.config, proposer, sampling, record_taps
        )
        # Nothing is proposed while a prompt is read.
        self._prefill_spec = dataclasses.replace(self.spec, proposer=Autoregressive())
        drafter_params, draft_head = (None, None) if drafter is None else _draft_weights(target, drafter)
        self.weights = Weights(
            target.params,
            drafter_params,
            draft_head,
            Draw.of(sampling),
            jnp.asarray((*stops, *[-1] * (STOP_SLOTS - len(stops))), jnp.int32),
        )
        self.clock = Clock()
        self.shared_prefix = list(shared_prefix)
        self._prefix = self._see_prefix() if self.shared_prefix else None

    def _see_prefix(self) -> DecodeState:
        """One row, exactly as long as the prefix, with the prefix in its caches."""
        n = len(self.shared_prefix)
        row = init_state(self.spec, self.weights, 1, n)
        tokens, length = np.asarray(self.shared_prefix, np.int32)[None], np.full(1, n, np.int32)
        key, chunk = np.zeros((1, 2), np.uint32), self._chunk(1, n, 0)
        return prefill(
            self._prefill_spec, self.weights, row, None, np.zeros(1, np.int32), tokens, length, length, key, chunk
        )

    def _chunk(self, rows: int, tokens: int, seen: int) -> int:
        """How many of a prompt's `tokens` pass through the target at a time, behind `seen` ones."""
        together = _PREFILL_TOKENS_CPU if jax.default_backend() == "cpu" else _PREFILL_TOKENS
        scores = rows * self.target.config.num_heads * (seen + tokens)
        return min(tokens, max(_BUCKET, min(together // rows, _PREFILL_SCORES // scores)))

    def start(self, state: DecodeState, rows: Sequence[int], requests: Sequence[Request], width: int) -> DecodeState:
        """Prefills `requests` into `rows`; `width` >= len(requests) is the compiled number of rows."""
        began = time.perf_counter()
        P = width
        seen = len(self.shared_prefix)
        N = min(_bucket(self.max_prompt_tokens - seen), self.capacity - seen)
        prompts = np.zeros((P, N), np.int32)
        lengths, limits, keys = np.full(P, seen + 1, np.int32), np.zeros(P, np.int32), np.zeros((P, 2), np.uint32)
        places = np.full(P, self.batch_size, np.int32)  # out of range: dropped
        for i, (row, request) in enumerate(zip(rows, requests, strict=True)):
            n = len(request.tokens)
            prompts[i, : n - seen], lengths[i], limits[i] = request.tokens[seen:], n, n + self.max_new_tokens
            keys[i], places[i] = request.key_data(), row
        arrays = (places, prompts, lengths, limits, keys)
        state = prefill(self._prefill_spec, self.weights, state, self._prefix, *arrays, self._chunk(P, N, seen))
        state.length.block_until_ready()
        self.clock.prefill += time.perf_counter() - began
        return state

    def advance(self, state: DecodeState, num_rounds: int) -> DecodeState:
        began = time.perf_counter()
        state = decode_rounds(self.spec, self.weights, state, np.int32(num_rounds))
        state.length.block_until_ready()
        self.clock.decode += time.perf_counter() - began
        return state

    def idle(self) -> DecodeState:
        """A state with no request in it."""
        return init_state(self.spec, self.weights, self.batch_size, self.capacity)

    def check(self, request: Request) -> None:
        n, vocab = len(request.tokens), self.target.config.vocab_size
        if not (0 <= request.id < 2**31 and 0 <= request.seed < 2**31):
            raise UserError(f"request id {request.id} and seed {request.seed} must be in 0..{2**31 - 1}")
        if n < 1:
            raise UserError(f"prompt {request.id} is empty; give at least one token")
        if list(request.tokens[: len(self.shared_prefix)]) != self.shared_prefix or n == len(self.shared_prefix):
            raise UserError(f"prompt {request.id} does not begin with, and go on after, the session's shared prefix")
        if n > self.max_prompt_tokens:  # it would not fit the cache
            raise UserError(f"prompt {request.id} has {n} tokens, more than max_prompt_tokens={self.max_prompt_tokens}")
        bad = [t for t in request.tokens if not 0 <= t < vocab]
        if bad:
            raise UserError(f"prompt {request.id} has token id {bad[0]}, outside the vocabulary of {vocab}")

    def completion(self, state: DecodeState, row: int, request: Request) -> Completion:
        """Reads one finished row back from the device."""
        length, start = int(state.length[row]), int(state.prompt_length[row])
        features = None
        if state.features is not None:
            features = np.asarray(state.features[row])[: length - 1].copy()
        return Completion(
            request.id,
            np.asarray(state.tokens[row])[start:length].tolist(),
            np.asarray(state.commits[row])[: int(state.rounds[row])].tolist(),
            "stop" if bool(state.stopped[row]) else "length",
            features,
        )

    def run(self, requests: Iterable[Request], rounds_per_call: int = 8) -> Iterator[Completion]:
        """Decodes every request; completions come as rows finish."""
        waiting = iter(requests)
        state, row_of = self.idle(), dict[int, Request]()
        refill = max(1, self.batch_size // 16)  # a few rows at once: prefill is as expensive as many rounds
        exhausted = False
        while True:
            free = [row for row in range(self.batch_size) if row not in row_of]
            while not exhausted and len(free) >= refill:
                taken = list(itertools.islice(waiting, refill))
                exhausted = len(taken) < refill
                if not taken:
                    break
                for request in taken:
                    self.check(request)
                rows, free = free[: len(taken)], free[len(taken) :]
                state = self.start(state, rows, taken, refill)
                row_of.update(zip(rows, taken, strict=True))
            if not row_of:
                return
            state = self.advance(state, rounds_per_call)
            active = np.asarray(state.active)
            for row in [row for row in row_of if not active[row]]:
                yield self.completion(state, row, row_of.pop(row))


def decode_requests(
    target: Target,
    requests: Iterable[Request],
    *,
    max_prompt_tokens: int,
    batch_size: int,
    max_new_tokens: int,
    rounds_per_call: int = 8,
    **session_options: object,
) -> Iterator[Completion]:
    """Decodes a stream of requests with `batch_size` rows in flight; see `Session` for the options.

    Raises:
      UserError: for an empty prompt, one longer than `max_prompt_tokens`, or a token id outside the vocabulary, when its
        turn comes.
    """
    session = Session(
        target,
        batch_size=batch_size,
        max_prompt_tokens=max_prompt_tokens,
        max_new_tokens=max_new_tokens,
        **session_options,  # type: ignore[arg-type]
    )
    return session.run(requests, rounds_per_call)
