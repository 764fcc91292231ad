"""Attention of tree rows over a cached context and each other: dense, plain JAX. This file is the specification."""

import jax.numpy as jnp
from jax import Array

from pallas_kernels.tree_attention.trees import unpack_words


def tree_attention_reference(
    q: Array,  # [B, N, H, E]
    context_k: Array,  # [B, G, E, C] or, with key_layout="BGCE", [B, G, C, E]
    context_v: Array,  # [B, G, C, E]
    lengths: Array,  # int [B]
    tree_k: Array | None = None,  # [B, N, G, E]
    tree_v: Array | None = None,  # [B, N, G, E]
    words: Array | None = None,  # int32 [B or 1, N, 128]
    *,
    key_layout: str = "BGEC",
    scale: float | None = None,
) -> tuple[Array, Array]:
    """(out [B, N, H, E] in the dtype of q, lse [B, N, H] float32); everything in between is float32.

    Row n of batch row b sees context slots below lengths[b], and tree row c where bit c // 128 of words[b, n, c % 128]
    is set. Query head h reads kv head h // (H / G). A row that sees nothing gives zeros and -inf. What is in slots that
    nobody sees does not matter, NaN included.
    """
    B, N, H, E = q.shape
    k = context_k if key_layout == "BGCE" else context_k.swapaxes(2, 3)
    G, C = k.shape[1:3]
    v, mask = context_v, jnp.broadcast_to((jnp.arange(C) < lengths[:, None])[:, None], (B, N, C))
    if words is not None:
        k = jnp.concatenate([k, tree_k.swapaxes(1, 2)], axis=2)
        v = jnp.concatenate([v, tree_v.swapaxes(1, 2)], axis=2)
        mask = jnp.concatenate([mask, jnp.broadcast_to(unpack_words(words), (B, N, N))], axis=2)
    used = mask.any(axis=1)[:, None, :, None]
    k, v = (jnp.where(used, x.astype(jnp.float32), 0.0) for x in (k, v))
    heads = q.astype(jnp.float32).reshape(B, N, G, H // G, E)
    scores = jnp.einsum("bnghe,bgce->bnghc", heads, k) * (E**-0.5 if scale is None else scale)
    mask = mask[:, :, None, None]
    top = jnp.max(scores, axis=-1, where=mask, initial=-jnp.inf)
    top = jnp.where(top > -jnp.inf, top, 0.0)
    weights = jnp.where(mask, jnp.exp(scores - top[..., None]), 0.0)
    total = weights.sum(axis=-1)
    out = jnp.einsum("bnghc,bgce->bnghe", weights, v) / jnp.where(total > 0, total, 1.0)[..., None]
    lse = jnp.where(total > 0, top + jnp.log(jnp.where(total > 0, total, 1.0)), -jnp.inf)
    return out.reshape(B, N, H, E).astype(q.dtype), lse.reshape(B, N, H)
