"""Prefill and rounds: the device side of decoding. Pure functions; `session.py` drives them from the host."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from dstill_jax.decoding.sampling import choose
from dstill_jax.decoding.state import DecodeSpec, DecodeState, Weights, init_state, put_rows, repeat_row
from dstill_jax.decoding.trees import DraftTree, chain, visibility, walk
from dstill_jax.models import drafter as drafter_lib
from dstill_jax.models import kv_cache
from dstill_jax.models import target as target_lib
from dstill_jax.models.attention import tree_kernel_runs
from dstill_jax.models.target import TargetOutput

_LOGITS = 1 << 26  # of a verification that exist at a time, a quarter of a gigabyte; sampling makes four such arrays


def _draw(
    spec: DecodeSpec, weights: Weights, logits: Array, keys: Array, positions: Array, levels: Array | None = None
) -> Int[Array, "B N"]:
    return choose(logits, keys, positions, weights.draw, spec.greedy, spec.filtered, levels=levels)


def _own_tokens(
    spec: DecodeSpec,
    weights: Weights,
    hidden: Float[Array, "B R D"],
    keys: Array,
    positions: Int[Array, "B R|M"],
    levels: Int[Array, "B R"] | None,
) -> Int[Array, "B R"]:
    """What the target draws at each row, of as many rows at a time as their logits have room; `choose` has the rest."""

    def draw(rows: tuple[Array, Array]) -> Int[Array, "B r"]:
        hidden, where = rows
        logits = target_lib.head(spec.target, weights.target, hidden)
        return _draw(spec, weights, logits, keys, *((where,) if levels is None else (positions, where)))

    def in_parts(x: Array) -> Array:
        x = jnp.pad(x, ((0, 0), (0, -R % together), *[(0, 0)] * (x.ndim - 2)))
        return jnp.moveaxis(x.reshape(B, -1, together, *x.shape[2:]), 1, 0)

    B, R, _ = hidden.shape
    together = max(1, _LOGITS // (B * spec.target.vocab_size))
    rows = hidden, positions if levels is None else levels
    if R <= together:
        return draw(rows)
    found = jax.lax.map(draw, tuple(map(in_parts, rows)))
    return jnp.moveaxis(found, 0, 1).reshape(B, -1)[:, :R]


def _is_stop(weights: Weights, tokens: Int[Array, "*batch"]) -> Bool[Array, "*batch"]:
    return (tokens[..., None] == weights.stop_token_ids).any(-1)


def _remember(
    spec: DecodeSpec,
    weights: Weights,
    state: DecodeState,
    out: TargetOutput,
    positions: Int[Array, "B N"],
) -> DecodeState:
    """Stores what the target computed at `positions`: its cache, the drafter's context, recorded features.

    What lies past the accepted prefix is written too: no mask admits it before a later round has overwritten it.
    """
    context = state.context
    batch = jnp.arange(positions.shape[0])[:, None]
    assert out.cache is not None
    if spec.drafter is not None:
        assert weights.drafter is not None
        wanted = spec.drafter.target_layer_ids
        D = spec.target.hidden_size
        taps = jnp.concatenate([out.taps[..., i * D : (i + 1) * D] for i in map(spec.tap_ids.index, wanted)], -1)
        c = drafter_lib.project_context(spec.drafter, weights.drafter, taps)
        new = drafter_lib.context_kv(spec.drafter, weights.drafter, c, positions)
        context = tuple(
            kv_cache.write_slots(old, (k.transpose(0, 3, 1, 2), v.swapaxes(1, 2)), positions[:, 0])
            for old, (k, v) in zip(state.context, new, strict=True)
        )
    features = state.features
    if features is not None:
        largest = float(jnp.finfo(features.dtype).max)  # some targets have outliers that float16 cannot hold
        rows = jnp.concatenate([out.taps, out.hidden], axis=-1).astype(jnp.float32)
        rows = jnp.clip(rows, -largest, largest).astype(features.dtype)
        features = features.at[batch, positions].set(rows, mode="drop")
    return state._replace(cache=out.cache, context=context, features=features)


@functools.partial(jax.jit, static_argnames=("spec", "chunk"), donate_argnames="state")
def prefill(
    spec: DecodeSpec,
    weights: Weights,
    state: DecodeState,
    prefix: DecodeState | None,
    rows: Int[Array, "P"],
    prompts: Int[Array, "P N"],
    prompt_lengths: Int[Array, "P"],
    limits: Int[Array, "P"],
    keys: UInt32[Array, "P 2"],
    chunk: int,
) -> DecodeState:
    """Starts P requests in the given rows (a row >= B starts nothing) and draws the first token of each.

    The prompts pass through the target `chunk` tokens at a time, as often as the longest of them needs: one compiled
    program for prompts of every length up to N.

    Args:
      prefix: one row that has already seen the tokens with which all prompts begin; `prompts` then holds what follows.
      prompt_lengths: of the whole prompts, prefix included.
    """
    P, N = prompts.shape
    seen = 0 if prefix is None else prefix.tokens.shape[1]
    part = init_state(spec, weights, P, seen + N)  # as short as the prompts: idle capacity would cost attention
    if prefix is not None:
        part = put_rows(part, jnp.arange(P), repeat_row(prefix, P))
    last_slots = prompt_lengths - seen - 1

    def read_chunk(i: Int[Array, ""], carry: tuple[DecodeState, Array]) -> tuple[DecodeState, Array]:
        part, last = carry
        offset = jnp.minimum(i * chunk, N - chunk)  # the last chunk may read again what the one before it has read
        tokens = jax.lax.dynamic_slice_in_dim(prompts, offset, chunk, axis=1)
        start = jnp.full(P, seen, jnp.int32) + offset
        positions = start[:, None] + jnp.arange(chunk)
        out = target_lib.forward(spec.target, weights.target, tokens, positions, part.cache, start, spec.tap_ids)
        here = last_slots - offset
        found = jnp.take_along_axis(out.hidden, jnp.clip(here, 0, chunk - 1)[:, None, None], axis=1)
        last = jnp.where(((0 <= here) & (here < chunk))[:, None, None], found, last)
        return _remember(spec, weights, part, out, positions), last

    nothing = jnp.zeros((P, 1, spec.target.hidden_size), weights.target["embed"]["embedding"].dtype)
    passes = jnp.max(last_slots) // chunk + 1
    part, last = jax.lax.fori_loop(0, passes, read_chunk, (part, nothing))
    first = _draw(spec, weights, target_lib.head(spec.target, weights.target, last), keys, prompt_lengths[:, None])
    stopped = _is_stop(weights, first[:, 0])
    part = part._replace(
        tokens=part.tokens.at[:, seen:].set(prompts),
        length=prompt_lengths + 1,
        prompt_length=prompt_lengths,
        limit=limits,
        active=~stopped & (prompt_lengths + 1 < limits),
        stopped=stopped,
        keys=keys,
    )
    state = put_rows(state, rows, part)
    return state._replace(tokens=state.tokens.at[rows, prompt_lengths].set(first[:, 0], mode="drop"))


def verify(
    spec: DecodeSpec, weights: Weights, state: DecodeState, drafts: Int[Array, "B W"] | DraftTree
) -> tuple[Int[Array, "B R"], Int[Array, "B"], TargetOutput, Int[Array, "B R"]]:
    """One target pass over the anchor and what was drafted, and the target's way along it.

    Returns, for R - 1 as many tokens as may be accepted: the target's own tokens after the rows of that way; how many
    are committed before stop tokens and limits (accepted ones plus one); the pass's output at those rows, with the
    cache that holds them; and their positions.
    """
    branches = isinstance(drafts, DraftTree)
    tree = drafts if branches else chain(drafts)
    most = min(spec.proposer.draft_tokens, tree.tokens.shape[1])
    anchor = jnp.take_along_axis(state.tokens, state.length[:, None] - 1, axis=1)
    start = state.length - 1
    positions = start[:, None] + jnp.arange(most + 1)
    levels = jnp.pad(tree.depth, ((0, 0), (1, 0)))
    out = target_lib.forward(
        spec.target,
        weights.target,
        jnp.concatenate([anchor, tree.tokens], axis=1),
        start[:, None] + levels,
        state.cache,
        start,
        spec.tap_ids,
        visibility=visibility(tree) if branches or tree_kernel_runs() else None,
    )
    chosen = _own_tokens(spec, weights, out.hidden, state.keys, positions + 1, levels if branches else None)
    if branches:
        rows, accepted = walk(tree, chosen, most)
        hidden, taps = (jnp.take_along_axis(x, rows[..., None], axis=1) for x in (out.hidden, out.taps))
        chosen, out = jnp.take_along_axis(chosen, rows, axis=1), out._replace(hidden=hidden, taps=taps)
    else:
        rows = jnp.broadcast_to(jnp.arange(most + 1), chosen.shape)
        right = drafts == chosen[:, :-1]
        accepted = jnp.cumprod(right, axis=1, dtype=jnp.int32).sum(axis=1, dtype=jnp.int32)
    if out.new_rows is not None:
        out = out._replace(cache=kv_cache.append_rows(state.cache, out.new_rows, rows, start))
    return chosen, accepted + 1, out, positions


def _round(spec: DecodeSpec, weights: Weights, state: DecodeState) -> DecodeState:
    drafts = spec.proposer.propose(spec, weights, state)
    chosen, count, out, positions = verify(spec, weights, state, drafts)
    # A stop token ends the row inside the block, before the length limit is looked at.
    stops = _is_stop(weights, chosen)
    first_stop = jnp.where(stops.any(1), jnp.argmax(stops, axis=1), chosen.shape[1]).astype(jnp.int32)
    stopped = first_stop < count
    count = jnp.minimum(jnp.minimum(count, first_stop + 1), state.limit - state.length)
    stopped &= first_stop < count
    count = jnp.where(state.active, count, 0)
    slots = jnp.where(jnp.arange(chosen.shape[1]) < count[:, None], positions + 1, state.tokens.shape[1])
    batch = jnp.arange(chosen.shape[0])
    length = state.length + count
    state = _remember(spec, weights, state, out, positions)
    return state._replace(
        tokens=state.tokens.at[batch[:, None], slots].set(chosen, mode="drop"),
        length=length,
        stopped=jnp.where(state.active, stopped, state.stopped),
        active=state.active & ~stopped & (length < state.limit),
        rounds=state.rounds + state.active,
        commits=state.commits.at[batch, jnp.where(state.active, state.rounds, state.commits.shape[1])].set(
            count, mode="drop"
        ),
    )


@functools.partial(jax.jit, static_argnames="spec", donate_argnames="state")
def decode_rounds(spec: DecodeSpec, weights: Weights, state: DecodeState, num_rounds: Int[Array, ""]) -> DecodeState:
    """Up to `num_rounds` rounds, fewer when every row is done; one while_loop on the device."""

    def go_on(carry: tuple[Array, DecodeState]) -> Array:
        return (carry[0] < num_rounds) & carry[1].active.any()

    def body(carry: tuple[Array, DecodeState]) -> tuple[Array, DecodeState]:
        return carry[0] + 1, _round(spec, weights, carry[1])

    return jax.lax.while_loop(go_on, body, (jnp.int32(0), state))[1]
