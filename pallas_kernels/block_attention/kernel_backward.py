"""Backward kernel of block attention: one pass gives dq, and dk, dv of the context and of the blocks. `vjp` calls it.

Scores stand transposed here, [keys, rows]: the residuals of a row are then plain lane vectors, four of the five
products need no transposition, and the gradients of the keys of a chunk stay in VMEM while all query tiles pass.
"""

import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.block_attention import cost
from pallas_kernels.block_attention.blocks import Tiling
from pallas_kernels.block_attention.copies import each_copy
from pallas_kernels.block_attention.kernel_forward import LOG2_E, NEVER, column, dot, wide
from pallas_kernels.block_attention.plan import ROW_FIELDS, TILE_FIELDS, Plan

_ROWS_BY_ROWS = (((1,), (1,)), ((), ()))  # contracts the head size
_PLAIN = (((1,), (0,)), ((), ()))
_OVER_KEYS = (((0,), (0,)), ((), ()))


class _Tile:
    """One query tile against key tiles: adds to dq [E, rows] and to the keys' gradients."""

    def __init__(self, t: Tiling, scale: float, q: jax.Ref, do: jax.Ref, lse: jax.Ref, delta: jax.Ref, dq: jax.Ref):
        self.t, self.scale2, self.q, self.do = t, scale * LOG2_E, q, do
        self.lse, self.delta, self.dq = lse, delta, dq

    def add(
        self,
        k: jax.Array,
        v: jax.Array,
        dk: jax.Ref,
        dv: jax.Ref,
        interval: tuple[jax.Array, jax.Array] | None,
        *,
        clean: bool = False,
    ) -> None:
        """One key tile. `interval` masks: the keys, counted from the tile's first, that each row sees, each [1, rows].

        clean: keys that no row of the tile sees may hold anything; they count as zeros.
        """
        if clean and interval is not None:
            seen = _visible(k.shape[0], *interval).astype(jnp.int32).max(axis=1, keepdims=True) > 0
            k, v = (jnp.where(seen, x, jnp.zeros_like(x)) for x in (k, v))
        width, height = math.gcd(self.t.keys_unrolled_backward, k.shape[0]), self.t.rows_unrolled_backward
        for key, row in itertools.product(range(0, k.shape[0], width), range(0, self.t.rows, height)):
            rows, keys = pl.ds(row, height), pl.ds(key, width)
            k_part, v_part = (x[key : key + width] for x in (k, v))
            q, do = self.q[rows, :], self.do[rows, :]
            p = jnp.exp2(dot(k_part, q, _ROWS_BY_ROWS) * self.scale2 - self.lse[:, rows])
            if interval is not None:
                p = jnp.where(_visible(width, *(x[:, row : row + height] - key for x in interval)), p, 0.0)
            dv[keys, :] += dot(p.astype(do.dtype), do, _PLAIN)
            ds = (p * (dot(v_part, do, _ROWS_BY_ROWS) - self.delta[:, rows])).astype(q.dtype)
            dk[keys, :] += dot(ds, q, _PLAIN)
            self.dq[:, rows] += dot(k_part, ds, _OVER_KEYS)


def _visible(keys: int, start: jax.Array, stop: jax.Array) -> jax.Array:
    index = jax.lax.broadcasted_iota(jnp.int32, (keys, start.shape[1]), 0)
    return (index >= start) & (index < stop)


def _kernel(
    order_ref: jax.Ref,  # [B * places], SMEM, as the next two
    tiles_ref: jax.Ref,  # [B * query_tiles * TILE_FIELDS]
    unused_ref: jax.Ref,  # [B * key_tiles]
    rows_ref: jax.Ref,  # [ROW_FIELDS, rows]
    lse_ref: jax.Ref,  # [1, rows], base 2; large for rows that must not count
    delta_ref: jax.Ref,  # [1, rows]
    q_hbm: jax.Ref,  # [B, A, G, N, E], HBM, as the next one
    do_hbm: jax.Ref,
    own_k_hbm: jax.Ref,  # [B, A, G, Kp, E], HBM, as the next one
    own_v_hbm: jax.Ref,
    k_ref: jax.Ref,  # [chunk, E]
    v_ref: jax.Ref,
    dk_ref: jax.Ref,  # [chunk, E]
    dv_ref: jax.Ref,
    dq_hbm: jax.Ref,  # [B, A, G, N, E], HBM
    down_k_hbm: jax.Ref,  # [B, A, G, Kp, E], HBM, as the next one
    down_v_hbm: jax.Ref,
    q_s: jax.Ref,  # [2, rows, E], as the next one
    do_s: jax.Ref,
    own_k_s: jax.Ref,  # [2, own_keys, E], as the next one
    own_v_s: jax.Ref,
    dq_s: jax.Ref,  # [2, rows, E]
    down_k_s: jax.Ref,  # [2, own_keys, E], as the next one
    down_v_s: jax.Ref,
    dk_acc: jax.Ref,  # [chunk, E] float32, as the next one
    dv_acc: jax.Ref,
    down_k_acc: jax.Ref,  # [own_keys, E] float32, as the next one
    down_v_acc: jax.Ref,
    dq_acc: jax.Ref,  # [E, rows] float32
    in_sems: jax.Ref,  # [2]
    out_sems: jax.Ref,  # [2]
    *,
    t: Tiling,
    scale: float,
    anchors: int,
    has_own: bool,
    chunk_index: int,
) -> None:
    b, g, i = (pl.program_id(axis) for axis in range(3))
    slot = i % 2
    arriving = [(q_hbm, q_s), (do_hbm, do_s), (own_k_hbm, own_k_s), (own_v_hbm, own_v_s)][: 4 if has_own else 2]
    leaving = [(dq_hbm, dq_s), (down_k_hbm, down_k_s), (down_v_hbm, down_v_s)][: 3 if has_own else 1]

    def move(action: str, tile: jax.Array, *, inward: bool) -> None:
        pairs, sems = (arriving, in_sems) if inward else (leaving, out_sems)
        count = t.blocks if inward else jnp.minimum(t.blocks, anchors - tile * t.blocks)
        buffers = [(hbm, vmem.at[tile % 2]) for hbm, vmem in pairs]
        first = (b * t.query_tiles + tile) * t.blocks
        each_copy(action, buffers, sems.at[tile % 2], order_ref, first, count, (b, g), inward=inward)

    @pl.when(i == 0)
    def _() -> None:
        move("start", i, inward=True)
        dk_acc[...], dv_acc[...] = jnp.zeros(dk_acc.shape), jnp.zeros(dv_acc.shape)

    move("wait", i, inward=True)
    pl.when(i + 1 < t.query_tiles)(lambda: move("start", i + 1, inward=True))
    row = (b * t.query_tiles + i) * TILE_FIELDS

    @pl.when(tiles_ref[row + 4] == 1)
    def _() -> None:
        """Rows that see nothing are factors of the keys' gradients too: 0 times their content must be 0."""
        counts = wide(column(lse_ref[...]), q_s.shape[2]) < NEVER
        for buffer in (q_s, do_s):
            buffer[slot] = jnp.where(counts, buffer[slot], jnp.zeros(buffer.shape[1:], buffer.dtype))

    dq_acc[...] = jnp.zeros(dq_acc.shape)
    state = _Tile(t, scale, q_s.at[slot], do_s.at[slot], lse_ref, delta_ref, dq_acc)
    if has_own:
        down_k_acc[...], down_v_acc[...] = jnp.zeros(down_k_acc.shape), jnp.zeros(down_v_acc.shape)
        own = (own_k_s[slot], own_v_s[slot], down_k_acc, down_v_acc)
        state.add(*own, (rows_ref[2:3], rows_ref[3:4]), clean=True)

    tiles_per_chunk = t.chunk // t.keys
    here = chunk_index * tiles_per_chunk
    bounds = (jnp.clip(tiles_ref[row + field], here, here + tiles_per_chunk) for field in range(4))
    first, interior_first, interior_last, last = bounds

    def add(tile: jax.Array, *, masked: bool, clean: bool = False) -> None:
        keys = pl.ds(pl.multiple_of((tile - here) * t.keys, t.keys), t.keys)
        interval = (rows_ref[0:1] - tile * t.keys, rows_ref[1:2] - tile * t.keys) if masked else None
        state.add(k_ref[keys, :], v_ref[keys, :], dk_acc.at[keys], dv_acc.at[keys], interval, clean=clean)

    def edge(tile: jax.Array, _: None) -> None:
        tile = jnp.where(tile < interior_first, tile, tile + interior_last - interior_first)
        unused = unused_ref[b * t.key_tiles + tile] == 1
        pl.when(~unused)(lambda: add(tile, masked=True))
        pl.when(unused)(lambda: add(tile, masked=True, clean=True))

    jax.lax.fori_loop(interior_first, interior_last, lambda tile, _: add(tile, masked=False), None)
    jax.lax.fori_loop(first, last - (interior_last - interior_first), edge, None)

    pl.when(i >= 2)(lambda: move("wait", i - 2, inward=False))
    dq_s[slot] = (dq_acc[...].T * scale).astype(dq_s.dtype)
    if has_own:
        down_k_s[slot] = (down_k_acc[...] * scale).astype(down_k_s.dtype)
        down_v_s[slot] = down_v_acc[...].astype(down_v_s.dtype)
    move("start", i, inward=False)

    @pl.when(i == t.query_tiles - 1)
    def _() -> None:
        dk_ref[...] = (dk_acc[...] * scale).astype(dk_ref.dtype)
        dv_ref[...] = dv_acc[...].astype(dv_ref.dtype)
        pl.when(i >= 1)(lambda: move("wait", i - 1, inward=False))
        move("wait", i, inward=False)


def _scratch(t: Tiling, head_dim: int, dtype: jnp.dtype, dq_dtype: jnp.dtype) -> list[Any]:
    """Buffers of `_kernel`, in its order."""
    return [
        *[pltpu.VMEM((2, t.rows, head_dim), dtype)] * 2,
        *[pltpu.VMEM((2, t.own_keys, head_dim), dtype)] * 2,
        pltpu.VMEM((2, t.rows, head_dim), dq_dtype),
        *[pltpu.VMEM((2, t.own_keys, head_dim), dtype)] * 2,
        *[pltpu.VMEM((t.chunk, head_dim), jnp.float32)] * 2,
        *[pltpu.VMEM((t.own_keys, head_dim), jnp.float32)] * 2,
        pltpu.VMEM((head_dim, t.rows), jnp.float32),
        *[pltpu.SemaphoreType.DMA((2,))] * 2,
    ]


def backward(
    q: jax.Array,
    own_k: jax.Array | None,
    own_v: jax.Array | None,
    k: jax.Array,
    v: jax.Array,
    do: jax.Array,
    lse: jax.Array,
    delta: jax.Array,
    plan: Plan,
    t: Tiling,
    scale: float,
    chunk_index: int,
    vmem_limit: int,
    interpret: bool | pltpu.InterpretParams,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]:
    """(dk, dv [B, G, chunk, E] of one chunk of the context, dq, d own_k, d own_v).

    Args:
      q, do: [B, A, G, N, E]; own_k, own_v: [B, A, G, Kp, E], or None: no own block, its gradients are then dummies.
      lse, delta: float32 [B, G, query_tiles, 1, rows] of sorted rows; lse to base 2.
      chunk_index: which `t.chunk` keys of k and v [B, G, S, E]; dq of the chunks add up.
    """
    B, A, G, _, E = q.shape
    has_own = own_k is not None
    if own_k is None or own_v is None:
        own_k = own_v = jnp.zeros((1, 1, 1, t.block_keys, E), q.dtype)
    whole = pl.BlockSpec(memory_space=pl.ANY)
    context = pl.BlockSpec((None, None, t.chunk, E), lambda b, g, i, *_: (b, g, chunk_index, 0))
    gradient = pl.BlockSpec((None, None, t.chunk, E), lambda b, g, i, *_: (b, g, 0, 0))
    sorted_rows = pl.BlockSpec((None, None, None, 1, t.rows), lambda b, g, i, *_: (b, g, i, 0, 0))
    struct = jax.ShapeDtypeStruct
    dq_dtype = q.dtype if t.chunks == 1 else jnp.float32
    made = [
        struct((B, G, t.chunk, E), k.dtype),
        struct((B, G, t.chunk, E), v.dtype),
        struct(q.shape, dq_dtype),
        struct(own_k.shape, own_k.dtype),
        struct(own_v.shape, own_v.dtype),
    ]
    keys = min(t.chunk, k.shape[2] - chunk_index * t.chunk)
    arrays = (q, do, own_k, own_v, *[struct((B, G, keys, E), k.dtype)] * 2, *made)
    return pl.pallas_call(
        functools.partial(_kernel, t=t, scale=scale, anchors=A, has_own=has_own, chunk_index=chunk_index),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(B, G, t.query_tiles),
            in_specs=[
                pl.BlockSpec((None, None, ROW_FIELDS, t.rows), lambda b, g, i, *_: (b, i, 0, 0)),
                *(sorted_rows, sorted_rows, whole, whole, whole, whole, context, context),
            ],
            out_specs=[gradient, gradient, whole, whole, whole],
            scratch_shapes=_scratch(t, E, q.dtype, dq_dtype),
        ),
        out_shape=made,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=vmem_limit
        ),
        cost_estimate=cost.estimate(cost.BACKWARD_PRODUCTS, q, keys, t.block_keys if has_own else 0, arrays),
        name="block_attention_backward",
        interpret=interpret,
    )(plan.order, plan.tiles, plan.unused, plan.rows, lse, delta, q, do, own_k, own_v, k, v)
