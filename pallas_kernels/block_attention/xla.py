"""Block attention in plain XLA, a chunk of blocks at a time: what CPUs and GPUs run."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.block_attention.visibility import Visibility

CHUNK_SCORES = 2**24  # scores of one chunk, in elements of float32: 64 MiB
_MASKED = -1e30  # finite, so that a row with nothing to attend stays finite


def _chunk(
    q: jax.Array,
    block: tuple[jax.Array, jax.Array] | None,
    sees: Visibility,
    context_k: jax.Array,
    context_v: jax.Array,
    scale: float,
) -> tuple[jax.Array, jax.Array]:
    """Some blocks of every row. One softmax over both parts, without joining them."""
    B, A, R, H, E = q.shape
    G, S = context_k.shape[1:3]
    heads = q.reshape(B, A, R, G, H // G, E)
    rows = heads.transpose(0, 3, 1, 4, 2, 5).reshape(B, G, A * (H // G) * R, E)
    context_k, context_v = context_k.astype(q.dtype), context_v.astype(q.dtype)
    scores = jnp.einsum("bgne,bgse->bgns", rows, context_k, preferred_element_type=jnp.float32) * scale
    mask = sees.context_mask(S)[:, None, :, None]
    scores = jnp.where(mask, scores.reshape(B, G, A, H // G, R, S), _MASKED)
    top = scores.max(-1)
    if block is not None:
        own = sees.own_mask(block[0].shape[2])[:, None, :, None]
        own_scores = jnp.einsum("barghe,bakge->bgahrk", heads, block[0], preferred_element_type=jnp.float32) * scale
        own_scores = jnp.where(own, own_scores, _MASKED)
        top = jnp.maximum(top, own_scores.max(-1))
    top = jax.lax.stop_gradient(top)[..., None]
    weights = jnp.where(mask, jnp.exp(scores - top), 0.0)
    total = weights.sum(-1)
    flat = weights.astype(q.dtype).reshape(B, G, A * (H // G) * R, S)
    out = jnp.einsum("bgns,bgse->bgne", flat, context_v, preferred_element_type=jnp.float32)
    out = out.reshape(B, G, A, H // G, R, E)
    if block is not None:
        own_weights = jnp.where(own, jnp.exp(own_scores - top), 0.0)
        total = total + own_weights.sum(-1)
        out = out + jnp.einsum(
            "bgahrk,bakge->bgahre", own_weights.astype(q.dtype), block[1], preferred_element_type=jnp.float32
        )
    seen = total > 0
    safe_total = jnp.where(seen, total, 1.0)
    lse = jnp.where(seen, top[..., 0] + jnp.log(safe_total), -jnp.inf)
    out = (out / safe_total[..., None]).astype(q.dtype)
    return out.transpose(0, 2, 4, 1, 3, 5).reshape(B, A, R, H, E), lse.transpose(0, 2, 4, 1, 3).reshape(B, A, R, H)


def attention(
    q: jax.Array,
    context_k: jax.Array,
    context_v: jax.Array,
    block_k: jax.Array | None,
    block_v: jax.Array | None,
    sees: Visibility,
    scale: float,
) -> tuple[jax.Array, jax.Array]:
    """(output, logsumexp) as `reference`; products in the dtype of q, softmax in float32, differentiable.

    At most `CHUNK_SCORES` scores exist at a time, forward and backward: each chunk is recomputed in the backward pass.
    """
    B, A, R, H, _ = q.shape
    S = context_k.shape[2]
    used = sees.used(S)[:, None, :, None]
    context_k, context_v = jnp.where(used, context_k, 0), jnp.where(used, context_v, 0)
    q = jnp.where(sees.sighted(0 if block_k is None else block_k.shape[2])[..., None, None], q, 0)
    block = None
    if block_k is not None and block_v is not None:
        seen = sees.own_mask(block_k.shape[2]).any(axis=2)[..., None, None]
        block = (jnp.where(seen, block_k, 0), jnp.where(seen, block_v, 0))
    size = max(1, min(A, CHUNK_SCORES // (B * R * H * S)))
    if size == A:
        return _chunk(q, block, sees, context_k, context_v, scale)
    chunks = -(-A // size)

    def split(x: jax.Array) -> jax.Array:
        """[B, A, ...] -> [chunks, B, size, ...]; the last chunk is filled with rows that see nothing."""
        x = jnp.pad(x, ((0, 0), (0, chunks * size - A), *((0, 0),) * (x.ndim - 2)))
        return jnp.moveaxis(x.reshape(B, chunks, size, *x.shape[2:]), 1, 0)

    # Gradients of the context add up over chunks in the dtype that enters the loop: float32.
    one = functools.partial(
        _chunk, context_k=context_k.astype(jnp.float32), context_v=context_v.astype(jnp.float32), scale=scale
    )
    out, lse = jax.lax.map(lambda part: jax.checkpoint(one)(*part), jax.tree.map(split, (q, block, sees)))
    return tuple(jnp.moveaxis(x, 0, 1).reshape(B, chunks * size, *x.shape[3:])[:, :A] for x in (out, lse))
