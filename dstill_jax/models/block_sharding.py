"""Block attention of a training step: each device on its own rows, anchors and heads, some anchors at a time.

Called by the drafter. On one device, and with all anchors at once, it is `attention.block_attention` itself.
"""

import jax
from jaxtyping import Array, Bool, Float

from dstill_jax.errors import UserError
from dstill_jax.models.attention import block_attention
from dstill_jax.sharding.activations import active_mesh, local_shards

_CONTEXT = ("batch", "kv_heads", None, None)
_BLOCK_ROWS = ("batch", "anchors", None, "heads", None)
_BLOCK_KV = ("batch", "anchors", None, "kv_heads", None)
_MASKS = (("batch", "anchors", None), ("batch", "anchors", None, None))


def spread_block_attention(
    q: Float[Array, "B A R H E"],
    context_k: Float[Array, "B G E C"],
    context_v: Float[Array, "B G C E"],
    context_mask: Bool[Array, "B A C"],
    block_k: Float[Array, "B A K G E"],
    block_v: Float[Array, "B A K G E"],
    block_mask: Bool[Array, "B A R K"],
    anchor_chunk: int | None,
) -> Float[Array, "B A R H E"]:
    """`block_attention` over the active mesh; blocks do not see each other, so no device waits for another.

    With `anchor_chunk`, scores of that many anchors of each row exist at a time, in the backward pass too.

    Raises UserError when a device's anchors do not divide into such chunks.
    """

    def local(q: Array, ck: Array, cv: Array, cmask: Array, bk: Array, bv: Array, bmask: Array) -> Array:
        anchors = q.shape[1]
        if anchor_chunk is None or anchor_chunk >= anchors:
            return block_attention(q, ck, cv, cmask, bk, bv, bmask)
        if anchors % anchor_chunk:
            raise UserError(f"anchor_chunk={anchor_chunk} must divide the {anchors} anchors of a row on a device")
        count = anchors // anchor_chunk

        def split(x: Array) -> Array:
            return x.reshape(x.shape[0], count, anchor_chunk, *x.shape[2:]).swapaxes(0, 1)

        @jax.checkpoint
        def some(parts: tuple[Array, ...]) -> Array:
            q, cmask, bk, bv, bmask = parts
            return block_attention(q, ck, cv, cmask, bk, bv, bmask)

        out = jax.lax.map(some, tuple(map(split, (q, cmask, bk, bv, bmask))))
        return out.swapaxes(0, 1).reshape(q.shape)

    if active_mesh() is None:
        return local(q, context_k, context_v, context_mask, block_k, block_v, block_mask)
    given = (_BLOCK_ROWS, _CONTEXT, _CONTEXT, _MASKS[0], _BLOCK_KV, _BLOCK_KV, _MASKS[1])
    return local_shards(local, given, _BLOCK_ROWS)(q, context_k, context_v, context_mask, block_k, block_v, block_mask)
