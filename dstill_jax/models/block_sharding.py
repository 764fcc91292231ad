"""Block attention of the drafter: each device on its own rows, anchors and heads. On one device, the operation itself."""

from jaxtyping import Array, Float, Int

from dstill_jax.blocks import Sight
from dstill_jax.sharding.activations import active_mesh, local_shards
from pallas_kernels.block_attention import block_attention

_CONTEXT = ("batch", "kv_heads", None, None)
_BLOCK_ROWS = ("batch", "anchors", None, "heads", None)
_BLOCK_KV = ("batch", "anchors", None, "kv_heads", None)
_SIGHT = Sight(("batch", "anchors"), ("batch", "anchors"), ("batch", None))  # type: ignore[arg-type]
_SLOTS = ("batch", "anchors", None)


def spread_block_attention(
    q: Float[Array, "B A R H E"],
    context_k: Float[Array, "B G E C"],
    context_v: Float[Array, "B G C E"],
    sight: Sight,
    block_k: Float[Array, "B A K G E"],
    block_v: Float[Array, "B A K G E"],
    slots: Int[Array, "B A R"] | None = None,
    *,
    causal: bool = False,
    anchor_chunk: int | None = None,
) -> Float[Array, "B A R H E"]:
    """`pallas_kernels.block_attention` over the active mesh; blocks do not see each other, so no device waits.

    Args:
      slots: which slots of its block the R queries of a block are; None: slots 0 .. R - 1.
      anchor_chunk: XLA holds the scores of that many anchors of each row at a time. Pallas, on TPUs, holds none.
    """

    def local(
        q: Array, context_k: Array, context_v: Array, sight: Sight, block_k: Array, block_v: Array, slots: Array | None
    ) -> Array:
        return block_attention(
            q,
            context_k,
            context_v,
            block_k,
            block_v,
            sight.anchors,
            valid=sight.valid,
            context_documents=sight.document_ids,
            slots=slots,
            causal=causal,
            key_layout="BGEC",
            chunk=anchor_chunk,
        )

    arguments = (q, context_k, context_v, sight, block_k, block_v, slots)
    if active_mesh() is None:
        return local(*arguments)
    seen = Sight(*(None if given is None else axes for given, axes in zip(sight, _SIGHT, strict=True)))  # type: ignore[arg-type]
    given = (_BLOCK_ROWS, _CONTEXT, _CONTEXT, seen, _BLOCK_KV, _BLOCK_KV, None if slots is None else _SLOTS)
    return local_shards(local, given, _BLOCK_ROWS)(*arguments)
