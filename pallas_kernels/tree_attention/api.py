"""Tree attention's public function: checks, dispatch, and the layout that the kernel wants."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.dispatch import resolve
from pallas_kernels.tree_attention.blocks import TreeBlocks, TreeShape, choose_blocks
from pallas_kernels.tree_attention.kernel import tree_attention_kernel
from pallas_kernels.tree_attention.reference import tree_attention_reference
from pallas_kernels.tree_attention.trees import LANES, check_rows
from pallas_kernels.tree_attention.xla import tree_attention_xla

KEY_LAYOUTS = ("BGEC", "BGCE")


def _shape(
    q: Array,
    context_k: Array,
    context_v: Array,
    lengths: Array,
    tree: tuple[Array | None, Array | None, Array | None],
    first_row: Array | None,
    key_layout: str,
) -> TreeShape:
    """Checks every shape and dtype; ValueError with name and value."""
    if key_layout not in KEY_LAYOUTS:
        raise ValueError(f"{key_layout=} must be one of {', '.join(KEY_LAYOUTS)}")
    if q.ndim != 4 or context_v.ndim != 4:
        raise ValueError(f"q must be [B, N, H, E] and context_v [B, G, C, E], got {q.shape=} {context_v.shape=}")
    B, N, H, E = q.shape
    G, C = context_v.shape[1:3]
    check_rows(N)
    R = B if first_row is None else max(B, context_v.shape[0])
    keys = (R, G, E, C) if key_layout == "BGEC" else (R, G, C, E)
    expected = {"context_v": (context_v, (R, G, C, E)), "context_k": (context_k, keys), "lengths": (lengths, (B,))}
    if first_row is not None:
        expected["first_row"] = (first_row, ())
    tree_k, tree_v, words = tree
    if len({x is None for x in tree}) > 1:
        raise ValueError("tree_k, tree_v and words come together: pass all three, or none for the context alone")
    if words is not None:
        expected |= {"tree_k": (tree_k, (B, N, G, E)), "tree_v": (tree_v, (B, N, G, E))}
        expected |= {"words": (words, (1 if words.shape[0] == 1 else B, N, LANES))}
    for name, (array, shape) in expected.items():
        if array.shape != shape:
            raise ValueError(f"{name}.shape={array.shape} must be {shape}, for {q.shape=} and {key_layout=}")
    if H % G or C < 1:
        raise ValueError(f"{H=} query heads must be a multiple of {G=} kv heads, and the capacity {C=} at least 1")
    for name, array in (("context_k", context_k), ("tree_k", tree_k), ("tree_v", tree_v), ("q", q)):
        if array is not None and array.dtype != context_v.dtype:
            raise ValueError(f"{name}.dtype={array.dtype} must be that of context_v, {context_v.dtype}")
    for name, array in (("lengths", lengths), ("words", words), ("first_row", first_row)):
        if array is not None and not jnp.issubdtype(array.dtype, jnp.integer):
            raise ValueError(f"{name}.dtype={array.dtype} must be an integer type")
    return TreeShape(N, H // G, G, E, C, context_v.dtype.itemsize)


def tree_attention(
    q: Array,  # [B, N, H, E]
    context_k: Array,  # [B, G, E, C] or, with key_layout="BGCE", [B, G, C, E]
    context_v: Array,  # [B, G, C, E]
    lengths: Array,  # int [B]
    tree_k: Array | None = None,  # [B, N, G, E]
    tree_v: Array | None = None,  # [B, N, G, E]
    words: Array | None = None,  # int32 [B or 1, N, 128]
    *,
    first_row: Array | None = None,  # int []
    key_layout: str = "BGEC",
    scale: float | None = None,
    with_lse: bool = False,
    implementation: str = "auto",
    device_kind: str | None = None,
    block_sizes: TreeBlocks | None = None,
    chunk: int | None = None,
    interpret: Any = False,
) -> Array | tuple[Array, Array]:
    """Attention of 1..1024 new rows of each sequence over its cached context and over each other.

    Row n sees the context slots below lengths[b] and the rows that `words` names (`ancestor_words` of a tree,
    `block_words` of a drafted block). Without the last three arguments it sees the context only: with `with_lse` that
    is one half of a cascade, for `merge_attention`. The context is read once for all rows and query heads, and no tile
    past a row's length is fetched. Rows that see nothing give zeros and a logsumexp of -inf; what unused slots hold,
    NaN included, does not matter. There is no gradient: this is for decoding.

    Args:
      first_row: the context then has R >= B rows, and sequence b reads row first_row + b (in range: nothing checks it).
        The layers of a stacked cache are such rows; sliced out of it for the kernel, one would be copied.
      scale: of the scores; E**-0.5 by default.
      chunk: slots that the XLA implementation scores at a time; by default as many as 256 MB of scores allow, at most
        2048.
      interpret: `pltpu.InterpretParams()` simulates the Pallas kernel on any device.

    Returns:
      out [B, N, H, E] in the dtype of q; with `with_lse` also lse [B, N, H] float32, natural.

    Raises:
      ValueError: shapes, dtypes, block sizes or an implementation that do not fit; the message says which.
    """
    if chunk is not None and chunk < 1:
        raise ValueError(f"{chunk=} must be at least 1")
    shape = _shape(q, context_k, context_v, lengths, (tree_k, tree_v, words), first_row, key_layout)
    which, kind = resolve(implementation, device_kind, interpret=bool(interpret))
    if which != "pallas" and first_row is not None:
        B = q.shape[0]
        context_k, context_v = (jax.lax.dynamic_slice_in_dim(x, first_row, B) for x in (context_k, context_v))
    arguments = (q, context_k, context_v, lengths, tree_k, tree_v, words)
    scale = shape.head_dim**-0.5 if scale is None else scale
    if which == "reference":
        out, lse = tree_attention_reference(*arguments, key_layout=key_layout, scale=scale)
    elif which == "xla":
        out, lse = tree_attention_xla(*arguments, key_layout=key_layout, scale=scale, chunk=chunk)
    else:
        blocks = choose_blocks(shape, block_sizes, kind)
        out, lse = _pallas(arguments, first_row, shape, blocks, kind, key_layout, scale, with_lse, interpret)
    return (out, lse) if with_lse else out


def _pallas(
    arguments: tuple[Any, ...],
    first_row: Array | None,
    shape: TreeShape,
    blocks: TreeBlocks,
    device_kind: str,
    key_layout: str,
    scale: float,
    with_lse: bool,
    interpret: Any,
) -> tuple[Array, Array | None]:
    q, context_k, context_v, lengths, tree_k, tree_v, words = arguments
    B, N, H, E = q.shape
    G, more = shape.num_kv_heads, shape.padded_rows - N
    heads = jnp.pad(q, ((0, 0), (0, more), (0, 0), (0, 0))).reshape(B, N + more, G, H // G, E)
    rows = heads.transpose(0, 2, 3, 1, 4).reshape(B, G, shape.rows, E)
    tree = None
    if words is not None:
        used = jnp.bitwise_or.reduce(words, axis=1)  # [B or 1, 128]: which columns any row sees
        columns = jnp.arange(N)
        used = (used[:, columns % LANES] >> (columns // LANES)) & 1
        tree_v = jnp.where(used[:, :, None, None] > 0, tree_v, 0)
        pad = ((0, 0), (0, 0), (0, more), (0, 0))
        tree_k, tree_v = (jnp.pad(x.swapaxes(1, 2), pad) for x in (tree_k, tree_v))
        tree = (tree_k, tree_v, jnp.pad(words.astype(jnp.int32), ((0, 0), (0, more), (0, 0))))
    out, lse = tree_attention_kernel(
        rows,
        context_k,
        context_v,
        lengths,
        jnp.zeros((), jnp.int32) if first_row is None else first_row,
        tree,
        shape=shape,
        blocks=blocks,
        device_kind=device_kind,
        key_layout=key_layout,
        scale=scale,
        with_lse=with_lse,
        interpret=interpret,
    )
    out = out.reshape(B, G, H // G, N + more, E)[:, :, :, :N].transpose(0, 3, 1, 2, 4).reshape(B, N, H, E)
    if lse is None:
        return out, None
    return out, lse[..., 0].reshape(B, G, H // G, N + more)[..., :N].transpose(0, 3, 1, 2).reshape(B, N, H)
