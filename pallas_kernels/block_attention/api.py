"""Block attention: rows of many blocks over one shared context and, each, over the slots of its own block.

The attention of a block-diffusion drafter (arXiv 2602.06036, section 4.2): training cuts hundreds of blocks at random
anchors from one row, decoding drafts one block after a cached context. The mask is computed from indices; nothing of
size [queries, keys] exists, and the Pallas kernels visit only tiles of the context that some row sees.
"""

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import block_sizes as sizes_lib
from pallas_kernels import dispatch
from pallas_kernels.block_attention import blocks, vjp, xla
from pallas_kernels.block_attention.blocks import BlockSizes
from pallas_kernels.block_attention.reference import reference
from pallas_kernels.block_attention.visibility import visible_intervals

KEY_LAYOUTS = ("BGCE", "BGEC")


def block_attention(
    q: jax.Array,
    context_k: jax.Array,
    context_v: jax.Array,
    block_k: jax.Array,
    block_v: jax.Array,
    anchors: jax.Array,
    *,
    valid: jax.Array | None = None,
    context_documents: jax.Array | None = None,
    block_documents: jax.Array | None = None,
    slots: jax.Array | None = None,
    causal: bool = False,
    window: int | None = None,
    key_layout: str = "BGCE",
    scale: float | None = None,
    chunk: int | None = None,
    implementation: str = "auto",
    device_kind: str | None = None,
    block_sizes: BlockSizes | None = None,
    interpret: bool | pltpu.InterpretParams = False,
) -> jax.Array:
    """Attention output, [B, A, R, H, E] in q's dtype; scores and softmax in float32. Differentiable in q, k and v.

    A row of the block with anchor a sees the context before a, and the slots of its own block. Anchors need not be sorted
    or distinct. What no row sees may hold anything, NaN included.

    Args:
      q: [B, A, R, H, E], R query slots of A blocks. R may be below K.
      context_k, context_v: [B, G, S, E]; H is a multiple of G, query head h reads kv head h // (H // G). With
        key_layout="BGEC", context_k is [B, G, E, S].
      block_k, block_v: [B, A, K, G, E], the block's own slots.
      anchors: integers [B, A]. Below 1: no context; above S: all of it.
      valid: bool [B, A]; a dropped block sees nothing, its output is 0 and it gives no gradient.
      context_documents: integers [B, S]; a block then sees its own document only, the run of equal ids that ends just
        before its anchor. Documents are contiguous.
      block_documents: integers [B, A]; by default the document that the anchor stands in.
      slots: integers [B, A, R], which slot each query is; by default 0..R-1. Matters for `causal` and `window` only.
      causal: slot j sees slots 0..j of its block instead of all.
      window: a query at position p = anchor + slot sees p - window + 1 .. p of the context, and as far back of its block.
      key_layout: "BGCE", or "BGEC", in which XLA on a CPU multiplies faster and small heads are not padded in HBM; the
        backward Pallas kernel transposes it first.
      scale: of the scores, by default E ** -0.5.
      chunk: blocks of each row whose scores exist at a time in the XLA implementation; by default as many as 64 MiB
        hold. Pallas holds no scores.
      implementation: "auto" (Pallas on a TPU, else XLA), "pallas", "xla" or "reference".
      device_kind: e.g. "TPU v5 lite", for which block sizes are chosen; by default jax's default device.
      block_sizes: of the Pallas kernels; by default tuned for the chip or computed from the shapes.
      interpret: simulate the Pallas kernels, on any device.

    Raises:
      ValueError: shapes that do not fit, an unknown implementation, Pallas without a TPU, block sizes beyond VMEM.
    """
    _check_shapes(q, context_k, context_v, block_k, block_v, key_layout)
    out, _ = _attention(
        q, context_k, context_v, block_k, block_v, anchors,
        (valid, context_documents, block_documents, slots, causal, window),
        (key_layout, scale, chunk), (implementation, device_kind, block_sizes, interpret),
    )  # fmt: skip
    return out


def context_attention(
    q: jax.Array,
    context_k: jax.Array,
    context_v: jax.Array,
    anchors: jax.Array,
    *,
    valid: jax.Array | None = None,
    context_documents: jax.Array | None = None,
    block_documents: jax.Array | None = None,
    slots: jax.Array | None = None,
    window: int | None = None,
    key_layout: str = "BGCE",
    scale: float | None = None,
    chunk: int | None = None,
    implementation: str = "auto",
    device_kind: str | None = None,
    block_sizes: BlockSizes | None = None,
    interpret: bool | pltpu.InterpretParams = False,
) -> tuple[jax.Array, jax.Array]:
    """The context part of `block_attention` alone: (output [B, A, R, H, E], logsumexp [B, A, R, H] in float32).

    Merge it with another part by logsumexp. A row that sees nothing has output 0 and logsumexp -inf. Arguments and errors
    as in `block_attention`.
    """
    _check_shapes(q, context_k, context_v, None, None, key_layout)
    return _attention(
        q, context_k, context_v, None, None, anchors,
        (valid, context_documents, block_documents, slots, False, window),
        (key_layout, scale, chunk), (implementation, device_kind, block_sizes, interpret),
    )  # fmt: skip


def _attention(q, context_k, context_v, block_k, block_v, anchors, rules, form, how):
    valid, context_documents, block_documents, slots, causal, window = rules
    key_layout, scale, chunk = form
    implementation, device_kind, sizes, interpret = how
    (_, A, R, H, E), (_, G, S, _) = q.shape, context_v.shape
    K = 1 if block_k is None else block_k.shape[2]
    if chunk is not None and chunk < 1:
        raise ValueError(f"{chunk=} must be at least 1 block, or None")
    if window is not None and window < 1:
        raise ValueError(f"{window=} must be at least 1, the row's own position")
    name, kind = dispatch.resolve(implementation, device_kind, interpret=bool(interpret))
    sees = visible_intervals(
        anchors, R, K, S, valid=valid, context_documents=context_documents, block_documents=block_documents,
        slots=slots, causal=causal, window=window,
    )  # fmt: skip
    scale = E**-0.5 if scale is None else scale
    if name == "xla":
        whole = block_k is not None and valid is None and not causal and window is None
        return xla.attention(q, context_k, context_v, block_k, block_v, sees, whole, key_layout, scale, chunk)
    if name == "reference":
        keys = context_k.swapaxes(2, 3) if key_layout == "BGEC" else context_k
        return reference(q, keys, context_v, block_k, block_v, sees, scale)
    shape = {"anchors": A, "group_rows": H // G * R, "block_size": K, "context_length": S, "head_dim": E}
    forward, backward = (
        blocks.choose(sizes, kind, **shape, itemsize=q.dtype.itemsize, backward=backward) for backward in (False, True)
    )
    vmem_limit = int(sizes_lib.known_chip(kind).vmem_bytes * 0.9)
    settings = vjp.Settings(forward, backward, scale, key_layout == "BGEC", vmem_limit, interpret)
    return vjp.attention(settings, q, context_k, context_v, block_k, block_v, sees)


def _check_shapes(q, context_k, context_v, block_k, block_v, key_layout) -> None:
    if key_layout not in KEY_LAYOUTS:
        raise ValueError(f"{key_layout=} must be one of {', '.join(KEY_LAYOUTS)}")
    if q.ndim != 5 or context_v.ndim != 4:
        raise ValueError(f"{q.shape=} must be [B, A, R, H, E] and {context_v.shape=} [B, G, S, E]")
    (B, A, _, H, E), (_, G, S, _) = q.shape, context_v.shape
    of_keys = ("[B, G, E, S]", (B, G, E, S)) if key_layout == "BGEC" else ("[B, G, S, E]", (B, G, S, E))
    of_values = ("[B, G, S, E]", (B, G, S, E))
    for name, x, (axes, wanted) in (("context_v", context_v, of_values), ("context_k", context_k, of_keys)):
        if x.shape != wanted:
            raise ValueError(f"{name}.shape={x.shape} must be {axes} = {wanted}; did you pass [B, S, G, E]?")
    if H % G:
        raise ValueError(f"{q.shape=} has {H} heads, not a multiple of the {G} kv heads of {context_v.shape=}")
    if block_k is not None:
        wanted = (B, A, block_k.shape[2], G, E)
        for name, x in (("block_k", block_k), ("block_v", block_v)):
            if x.shape != wanted:
                raise ValueError(f"{name}.shape={x.shape} must be [B, A, K, G, E] = {wanted}")
    operands = [x for x in (q, context_k, context_v, block_k, block_v) if x is not None]
    if len({jnp.dtype(x.dtype) for x in operands}) > 1:
        raise ValueError(f"q, keys and values must have one dtype, got {[str(x.dtype) for x in operands]}")
