"""What a batch of requests carries from round to round, and the static description of a decoding run."""

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from dstill_jax.config import DrafterConfig, TargetConfig
from dstill_jax.decoding.sampling import Draw, SamplingConfig
from dstill_jax.decoding.trees import DraftTree
from dstill_jax.dims import Params
from dstill_jax.models import target as target_lib
from dstill_jax.models.drafter import ContextKV
from dstill_jax.models.kv_cache import KVCache

STOP_SLOTS = 8  # stop tokens that a session has room for


class DraftHead(NamedTuple):
    """The head for the tokens that a drafter was trained to draft."""

    rows: Float[Array, "V' D"]
    tokens: Int[Array, "V'"]  # their ids, ascending


class Weights(NamedTuple):
    """Everything a round reads and never changes."""

    target: Params
    drafter: Params | None
    draft_head: DraftHead | None  # None: the drafter drafts with the target's whole head
    draw: Draw
    stop_token_ids: Int[Array, "M"]  # STOP_SLOTS of them, padded with -1, which is no token


class DecodeState(NamedTuple):
    """B requests in flight. Row b has committed `length[b]` tokens, prompt included.

    The last committed token is the anchor of the next block: it stands at position length - 1 and has no cache entry
    yet; cache and context hold positions 0 .. length - 2.
    """

    tokens: Int[Array, "B C"]
    length: Int[Array, "B"]
    prompt_length: Int[Array, "B"]
    limit: Int[Array, "B"]  # length at which the row stops
    active: Bool[Array, "B"]
    stopped: Bool[Array, "B"]  # ended by a stop token
    keys: UInt32[Array, "B 2"]
    cache: KVCache
    context: ContextKV  # of the drafter; () without one
    features: Float[Array, "B C X"] | None  # taps and final hidden of every cached position, when recorded
    rounds: Int[Array, "B"]
    commits: Int[Array, "B C"]  # tokens committed in round r


class Proposer(Protocol):
    """Drafts a chain or a tree for every row. Implementations are frozen dataclasses: static, hashable."""

    @property
    def draft_tokens(self) -> int: ...  # W; no node of a tree is deeper

    def propose(self, spec: "DecodeSpec", weights: Weights, state: DecodeState) -> Int[Array, "B W"] | DraftTree: ...


@dataclass(frozen=True)
class DecodeSpec:
    """The static part of a run: what is compiled."""

    target: TargetConfig
    drafter: DrafterConfig | None
    proposer: Proposer
    greedy: bool
    filtered: bool
    record_taps: tuple[int, ...] | None = None  # record features of these target layers

    @property
    def tap_ids(self) -> tuple[int, ...]:
        if self.record_taps is not None:
            return self.record_taps
        return self.drafter.target_layer_ids if self.drafter else ()

    @classmethod
    def make(
        cls,
        target: TargetConfig,
        drafter: DrafterConfig | None,
        proposer: Proposer,
        sampling: SamplingConfig,
        record_taps: tuple[int, ...] | None = None,
    ) -> "DecodeSpec":
        filtered = sampling.top_k is not None or sampling.top_p is not None
        return cls(target, drafter, proposer, sampling.greedy, filtered, record_taps)


def init_state(spec: DecodeSpec, weights: Weights, batch: int, capacity: int) -> DecodeState:
    """A batch of idle rows."""
    dtype = weights.target["embed"]["embedding"].dtype
    cache = target_lib.init_cache(spec.target, batch, capacity, dtype, target_lib.is_stacked(weights.target))
    context: Any = ()
    if spec.drafter is not None:
        G, E = spec.drafter.num_kv_heads, spec.drafter.head_dim
        context = tuple(
            (jnp.zeros((batch, G, E, capacity), dtype), jnp.zeros((batch, G, capacity, E), dtype))
            for _ in range(spec.drafter.num_layers)
        )
    features = None
    if spec.record_taps is not None:
        features = jnp.zeros((batch, capacity, (len(spec.record_taps) + 1) * spec.target.hidden_size), jnp.float16)

    def zeros() -> Array:  # a fresh buffer each time: the state is donated, and a buffer cannot be donated twice
        return jnp.zeros(batch, jnp.int32)

    return DecodeState(
        tokens=jnp.zeros((batch, capacity), jnp.int32),
        length=zeros() + 1,  # an idle row still has a position 0 to compute at
        prompt_length=zeros(),
        limit=zeros(),
        active=jnp.zeros(batch, bool),
        stopped=jnp.zeros(batch, bool),
        keys=jnp.zeros((batch, 2), jnp.uint32),
        cache=cache,
        context=context,
        features=features,
        rounds=zeros(),
        commits=jnp.zeros((batch, capacity), jnp.int32),
    )


def put_rows(state: DecodeState, rows: Int[Array, "P"], part: DecodeState) -> DecodeState:
    """Replaces rows of every row-addressed array by those of `part`; rows out of range are dropped.

    `part` may be shorter along the other axes: what lies behind it keeps its old content, which no mask admits.
    """

    def put(axis: int) -> Any:
        def one(whole: Array, new: Array) -> Array:
            rest = tuple(slice(size) for size in new.shape[axis + 1 :])
            return whole.at[(slice(None),) * axis + (rows,) + rest].set(new, mode="drop")

        return one

    merged = {
        name: jax.tree.map(put(1 if name == "cache" else 0), getattr(state, name), getattr(part, name))
        for name in state._fields
    }
    return DecodeState(**merged)


def repeat_row(row: DecodeState, count: int) -> DecodeState:
    """A state of one row as `count` equal rows."""
    merged = {
        name: jax.tree.map(lambda x, a=1 if name == "cache" else 0: jnp.repeat(x, count, axis=a), getattr(row, name))
        for name in row._fields
    }
    return DecodeState(**merged)
