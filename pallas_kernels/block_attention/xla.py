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
    sighted: jax.Array | None,  # bool [B, A, R]; None: every row sees something
    context_k: jax.Array,
    context_v: jax.Array,
    key_layout: str,
    scale: float,
) -> tuple[jax.Array, jax.Array]:
    """Some blocks of every row. One softmax over both parts, without joining them."""
    B, A, R, H, E = q.shape
    G, S = context_v.shape[1:3]
    heads = q.reshape(B, A, R, G, H // G, E)
    rows = heads.transpose(0, 3, 1, 4, 2, 5).reshape(B, G, A * (H // G) * R, E)
    context_k, context_v = context_k.astype(q.dtype), context_v.astype(q.dtype)
    keys = "bgec" if key_layout == "BGEC" else "bgce"
    scores = jnp.einsum(f"bgne,{keys}->bgnc", rows, context_k, preferred_element_type=jnp.float32)
    mask = sees.context_mask(S)[:, None, :, None]
    scores = jnp.where(mask, scores.reshape(B, G, A, H // G, R, S) * scale, _MASKED)
    top = scores.max(-1)
    if block is not None:
        own = sees.own_mask(block[0].shape[2])[:, None, :, None]
        own_scores = jnp.einsum("barghe,bakge->bgahrk", heads, block[0], preferred_element_type=jnp.float32)
        own_scores = jnp.where(own, own_scores * scale, _MASKED)
        top = jnp.maximum(top, own_scores.max(-1))
    top = jax.lax.stop_gradient(top)[..., None]
    weights = jnp.exp(scores - top)
    total = weights.sum(-1)
    flat = weights.astype(q.dtype).reshape(B, G, A * (H // G) * R, S)
    out = jnp.einsum("bgnc,bgce->bgne", flat, context_v, preferred_element_type=jnp.float32)
    out = out.reshape(B, G, A, H // G, R, E)
    if block is not None:
        own_weights = jnp.exp(own_scores - top)
        total = total + own_weights.sum(-1)
        out = out + jnp.einsum(
            "bgahrk,bakge->bgahre", own_weights.astype(q.dtype), block[1], preferred_element_type=jnp.float32
        )
    out = (out / total[..., None]).astype(q.dtype).transpose(0, 2, 4, 1, 3, 5).reshape(B, A, R, H, E)
    lse = (top[..., 0] + jnp.log(total)).transpose(0, 2, 4, 1, 3).reshape(B, A, R, H)
    if sighted is None:
        return out, lse
    # A row that sees nothing weighs everything alike, and what it weighs is finite: it is set right here.
    return jnp.where(sighted[..., None, None], out, 0), jnp.where(sighted[..., None], lse, -jnp.inf)


def attention(
    q: jax.Array,
    context_k: jax.Array,
    context_v: jax.Array,
    block_k: jax.Array | None,
    block_v: jax.Array | None,
    sees: Visibility,
    whole_blocks: bool,
    key_layout: str,
    scale: float,
    chunk: int | None,
) -> tuple[jax.Array, jax.Array]:
    """(output, logsumexp) as `reference`; products in the dtype of q, softmax in float32, differentiable.

    The scores of `chunk` blocks of each row exist at a time, forward and backward: each chunk is recomputed in the
    backward pass. By default `CHUNK_SCORES` of them do.

    Args:
      whole_blocks: every row is known to see its whole block, so neither rows nor slots have to be cleaned.
    """
    B, A, R, H, _ = q.shape
    S = context_v.shape[2]
    used = sees.used(S)[:, None]
    context_k = jnp.where(used[:, :, None] if key_layout == "BGEC" else used[..., None], context_k, 0)
    context_v = jnp.where(used[..., None], context_v, 0)
    sighted = None
    block = None if block_k is None or block_v is None else (block_k, block_v)
    if not whole_blocks:
        sighted = sees.sighted(0 if block is None else block[0].shape[2])
        q = jnp.where(sighted[..., None, None], q, 0)
    if not whole_blocks and block is not None:
        seen = sees.own_mask(block[0].shape[2]).any(axis=2)[..., None, None]
        block = (jnp.where(seen, block[0], 0), jnp.where(seen, block[1], 0))
    size = max(1, min(A, CHUNK_SCORES // (B * R * H * S) if chunk is None else chunk))
    one = functools.partial(_chunk, key_layout=key_layout, scale=scale)
    if size == A:
        return one(q, block, sees, sighted, context_k, context_v)
    count = -(-A // size)

    def split(x: jax.Array) -> jax.Array:
        """[B, A, ...] -> [count, B, size, ...]; the last chunk is filled with rows that see nothing."""
        x = jnp.pad(x, ((0, 0), (0, count * size - A), *((0, 0),) * (x.ndim - 2)))
        return jnp.moveaxis(x.reshape(B, count, size, *x.shape[2:]), 1, 0)

    # Gradients of the context add up over chunks in the dtype that enters the loop: float32.
    one = functools.partial(one, context_k=context_k.astype(jnp.float32), context_v=context_v.astype(jnp.float32))
    out, lse = jax.lax.map(lambda part: jax.checkpoint(one)(*part), jax.tree.map(split, (q, block, sees, sighted)))
    return tuple(jnp.moveaxis(x, 0, 1).reshape(B, count * size, *x.shape[3:])[:, :A] for x in (out, lse))
