"""The specification of block attention: dense masks, float32, one softmax over context and own block."""

import jax
import jax.numpy as jnp

from pallas_kernels.block_attention.visibility import Visibility


def reference(
    q: jax.Array,
    context_k: jax.Array,
    context_v: jax.Array,
    block_k: jax.Array | None,
    block_v: jax.Array | None,
    sees: Visibility,
    scale: float,
) -> tuple[jax.Array, jax.Array]:
    """(output [B, A, R, H, E] in q's dtype, logsumexp [B, A, R, H] in float32). Shapes as in `block_attention`.

    A row that sees nothing has output 0 and logsumexp -inf. Without `block_k` only the context counts.
    """
    H, G = q.shape[3], context_k.shape[1]
    S = context_k.shape[2]
    q32, k32, v32 = (x.astype(jnp.float32) for x in (q, context_k, context_v))
    # What nobody sees may hold anything, NaN included: it must not meet a product with 0.
    used = sees.context_mask(S).any(axis=(1, 2))[:, None, :, None]
    k32, v32 = (jnp.repeat(jnp.where(used, x, 0.0), H // G, axis=1) for x in (k32, v32))
    keys = jnp.einsum("barhe,bhse->barhs", q32, k32, precision="highest")
    masks = jnp.broadcast_to(sees.context_mask(S)[:, :, :, None], keys.shape)
    if block_k is not None and block_v is not None:
        own = sees.own_mask(block_k.shape[2])
        seen = own.any(axis=2)[..., None, None]
        own_k, own_v = (
            jnp.repeat(jnp.where(seen, x.astype(jnp.float32), 0.0), H // G, axis=3) for x in (block_k, block_v)
        )
        own_keys = jnp.einsum("barhe,bakhe->barhk", q32, own_k, precision="highest")
        keys = jnp.concatenate([keys, own_keys], axis=-1)
        masks = jnp.concatenate([masks, jnp.broadcast_to(own[:, :, :, None], own_keys.shape)], axis=-1)
    scores = jnp.where(masks, keys * scale, -jnp.inf)
    any_seen = masks.any(axis=-1)
    top = jax.lax.stop_gradient(jnp.where(any_seen, scores.max(axis=-1), 0.0))
    weights = jnp.where(masks, jnp.exp(jnp.where(masks, scores, 0.0) - top[..., None]), 0.0)
    total = weights.sum(axis=-1)
    weights = weights / jnp.where(any_seen, total, 1.0)[..., None]
    out = jnp.einsum("barhs,bhse->barhe", weights[..., :S], v32, precision="highest")
    if block_k is not None:
        out = out + jnp.einsum("barhk,bakhe->barhe", weights[..., S:], own_v, precision="highest")
    out = jnp.where(any_seen[..., None], out, 0.0)
    lse = jnp.where(any_seen, top + jnp.log(jnp.where(any_seen, total, 1.0)), -jnp.inf)
    return out.astype(q.dtype), lse
