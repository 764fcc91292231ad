"""Tree attention in plain XLA: what runs on CPUs and GPUs. Long contexts stream through in chunks of slots.

No score array is larger than [B, H N, chunk], 256 MB by default; a cache no longer than a chunk is read in one piece,
without a loop.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.tree_attention.trees import unpack_words

_LONGEST_CHUNK, _SHORTEST_CHUNK = 2048, 128
_SCORE_BYTES = 256 * 2**20
MASKED = -1e30
FLOOR = -0.5e30  # where running maxima start: above MASKED, so that masked scores weigh exp(-0.5e30) = 0 from the start


class _State(NamedTuple):
    """Online softmax of R = (H/G) N stacked rows, float32."""

    top: Array  # [B, G, R]
    total: Array  # [B, G, R]
    out: Array  # [B, G, R, E]


def _advance(
    state: _State,
    scores: Array,  # [B, G, R, C]
    v: Array,  # [B, G, C, E]
) -> _State:
    top = jnp.maximum(state.top, scores.max(axis=-1))
    shrink = jnp.exp(state.top - top)
    weights = jnp.exp(scores - top[..., None])
    added = jnp.einsum("bgrc,bgce->bgre", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
    return _State(top, state.total * shrink + weights.sum(axis=-1), state.out * shrink[..., None] + added)


def _over_tree(state: _State, rows: Array, tree_k: Array, tree_v: Array, words: Array, scale: float) -> _State:
    B, G, R, _ = rows.shape
    N = tree_k.shape[1]
    mask = unpack_words(words)
    v = jnp.where(mask.any(axis=1)[:, :, None, None], tree_v, 0)
    scores = jnp.einsum("bgre,bnge->bgrn", rows, tree_k, preferred_element_type=jnp.float32) * scale
    scores = jnp.where(mask[:, None, None], scores.reshape(B, G, R // N, N, N), MASKED)
    return _advance(state, scores.reshape(B, G, R, N), v.swapaxes(1, 2))


def tree_attention_xla(
    q: Array,  # [B, N, H, E]
    context_k: Array,  # [B, G, E, C] or [B, G, C, E]
    context_v: Array,  # [B, G, C, E]
    lengths: Array,  # int [B]
    tree_k: Array | None = None,  # [B, N, G, E]
    tree_v: Array | None = None,  # [B, N, G, E]
    words: Array | None = None,  # int32 [B or 1, N, 128]
    *,
    key_layout: str = "BGEC",
    scale: float | None = None,
    chunk: int | None = None,
) -> tuple[Array, Array]:
    """(out, lse) as the reference defines them. The number of chunks read follows the longest row, not the capacity."""
    B, N, H, E = q.shape
    G, C = context_v.shape[1:3]
    scale = E**-0.5 if scale is None else scale
    if chunk is None:
        chunk = max(min(_SCORE_BYTES // (4 * B * H * N), _LONGEST_CHUNK), _SHORTEST_CHUNK)
    slots_axis = 3 if key_layout == "BGEC" else 2
    equation = "bgre,bgec->bgrc" if key_layout == "BGEC" else "bgre,bgce->bgrc"
    rows = q.reshape(B, N, G, H // G, E).transpose(0, 2, 3, 1, 4).reshape(B, G, H // G * N, E)
    R = rows.shape[2]
    state = _State(
        jnp.full((B, G, R), FLOOR, jnp.float32), jnp.zeros((B, G, R), jnp.float32), jnp.zeros((B, G, R, E), jnp.float32)
    )
    if words is not None:
        state = _over_tree(state, rows, tree_k, tree_v, words, scale)

    def over_context(state: _State, k: Array, v: Array, seen: Array) -> _State:  # seen: [B, chunk]
        scores = jnp.einsum(equation, rows, k, preferred_element_type=jnp.float32) * scale
        scores = jnp.where(seen[:, None, None], scores, MASKED)
        return _advance(state, scores, jnp.where(seen[:, None, :, None], v, 0))  # 0 x NaN is NaN: unused slots go

    def step(i: Array, state: _State) -> _State:
        start = jnp.minimum(i * chunk, C - chunk)  # the last chunk begins early; its first slots were counted before
        slots = start + jnp.arange(chunk)
        seen = (slots >= i * chunk) & (slots < lengths[:, None])
        k = jax.lax.dynamic_slice_in_dim(context_k, start, chunk, axis=slots_axis)
        return over_context(state, k, jax.lax.dynamic_slice_in_dim(context_v, start, chunk, axis=2), seen)

    if chunk >= C:
        state = over_context(state, context_k, context_v, jnp.arange(C) < lengths[:, None])
    else:
        state = jax.lax.fori_loop(0, (jnp.minimum(lengths.max(), C) + chunk - 1) // chunk, step, state)

    seen = state.total > 0
    total = jnp.where(seen, state.total, 1.0)
    out = (state.out / total[..., None]).astype(q.dtype).reshape(B, G, H // G, N, E)
    lse = jnp.where(seen, state.top + jnp.log(total), -jnp.inf).reshape(B, G, H // G, N)
    return out.transpose(0, 3, 1, 2, 4).reshape(B, N, H, E), lse.transpose(0, 3, 1, 2).reshape(B, N, H)
