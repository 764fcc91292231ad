"""Backward kernel of block attention: one pass gives dq, and dk, dv of the context and of the blocks. `vjp` calls it.

Scores stand transposed here, [keys, rows]: the residuals of a row are then plain lane vectors, four of the five
products need no transposition, and the gradients of the keys of a chunk stay in VMEM while all query tiles pass.

Probabilities and gradients of scores go through VMEM between the products that make them and those that sum over them,
each use of a buffer apart from the others (`apart`).
"""

import functools
import itertools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.block_attention import apart, cost
from pallas_kernels.block_attention.blocks import Tiling
from pallas_kernels.block_attention.copies import each_copy
from pallas_kernels.block_attention.kernel_forward import LOG2_E, NEVER, column, dot, wide
from pallas_kernels.block_attention.plan import ROW_FIELDS, TILE_FIELDS, Plan

_ROWS_BY_ROWS = (((1,), (1,)), ((), ()))  # contracts the head size
_PLAIN = (((1,), (0,)), ((), ()))


class _Staged(NamedTuple):
    """What goes through VMEM between the products of one key tile."""

    p: jax.Ref  # [keys, rows] float32
    ds: jax.Ref  # [keys, rows]
    transposed_k: jax.Ref  # [E, keys]
    clean_k: jax.Ref  # [keys, E], as the next one
    clean_v: jax.Ref


class _Tile:
    """One query tile against key tiles: adds to dq [E, rows] and to the keys' gradients."""

    def __init__(
        self,
        t: Tiling,
        scale: float,
        rows: tuple[jax.Ref, jax.Ref, jax.Ref, jax.Ref],
        dq: jax.Ref,
        staged: _Staged,
        zeros: jax.Ref,
    ) -> None:
        self.t, self.scale2 = t, scale * LOG2_E
        self.q, self.do, self.lse, self.delta = rows
        self.dq, self.staged = dq, staged
        self.apart = apart.Apart(zeros)

    def add(
        self, k: jax.Ref, v: jax.Ref, dk: jax.Ref, dv: jax.Ref, interval: tuple[jax.Array, jax.Array] | None
    ) -> None:
        """One key tile. `interval` masks: the keys, counted from the tile's first, that each row sees, each [1, rows]."""
        self._stage(k, v, interval)
        (count, _), height, dtype = k.shape, self.t.rows_summed, k.dtype
        dv[...] += dot(self.apart(self.staged.p, 1)[:count].astype(dtype), self.do[...], _PLAIN)
        dk[...] += dot(self.apart(self.staged.ds, 1)[:count].astype(dtype), self.q[...], _PLAIN)
        ds = self.apart(self.staged.ds, 2)
        for row in range(0, self.t.rows, height):
            rows, transposed = pl.ds(row, height), self.apart(self.staged.transposed_k, 1 + row // height)
            self.dq[:, rows] += dot(transposed[:, :count], ds[:count, rows].astype(dtype), _PLAIN)

    def _stage(self, k: jax.Ref, v: jax.Ref, interval: tuple[jax.Array, jax.Array] | None) -> None:
        """Transposed keys, all probabilities, then all gradients of scores: while the last are made, dv needs no more."""
        (count, _), height = k.shape, self.t.rows_unrolled_backward
        width = math.gcd(self.t.keys_unrolled_backward, count)
        p_out, ds_out, k_out = (self.apart(x, 0) for x in (self.staged.p, self.staged.ds, self.staged.transposed_k))
        k_out[:, :count] = k[...].T
        pieces = list(itertools.product(range(0, count, width), range(0, self.t.rows, height)))
        for key, row in pieces:
            rows, keys = pl.ds(row, height), pl.ds(key, width)
            k_part, q = self.apart(k, row // height)[keys, :], self.apart(self.q, key // width)[rows, :]
            p = jnp.exp2(dot(k_part, q, _ROWS_BY_ROWS) * self.scale2 - self.lse[:, rows])
            if interval is not None:
                p = jnp.where(_visible(width, *(x[:, row : row + height] - key for x in interval)), p, 0.0)
            p_out[keys, rows] = p
        p_in = self.apart(self.staged.p, 2)
        for key, row in pieces:
            rows, keys = pl.ds(row, height), pl.ds(key, width)
            v_part, do = self.apart(v, row // height)[keys, :], self.apart(self.do, key // width)[rows, :]
            ds = p_in[keys, rows] * (dot(v_part, do, _ROWS_BY_ROWS) - self.delta[:, rows])
            ds_out[keys, rows] = ds.astype(ds_out.dtype)

    def copies(self, k: jax.Ref, v: jax.Ref) -> tuple[jax.Ref, jax.Ref]:
        """Where `clean` leaves copies of a key tile of this size."""
        return tuple(x.at[: k.shape[0]] for x in (self.staged.clean_k, self.staged.clean_v))

    def clean(self, k: jax.Ref, v: jax.Ref, interval: tuple[jax.Array, jax.Array], dirty: bool | jax.Array) -> None:
        """Copies a key tile. dirty: keys that no row of the query tile sees may hold anything; the copy has zeros there."""
        clean_k, clean_v = self.copies(k, v)

        def with_zeros() -> None:
            seen = _visible(k.shape[0], *interval).astype(jnp.int32).max(axis=1, keepdims=True) > 0
            clean_k[...], clean_v[...] = (jnp.where(seen, x[...], jnp.zeros(x.shape, x.dtype)) for x in (k, v))

        def whole() -> None:
            clean_k[...], clean_v[...] = k[...], v[...]

        pl.when(dirty)(with_zeros)
        pl.when(jnp.logical_not(dirty))(whole)


def _visible(keys: int, start: jax.Array, stop: jax.Array) -> jax.Array:
    index = jax.lax.broadcasted_iota(jnp.int32, (keys, start.shape[1]), 0)
    return (index >= start) & (index < stop)


def _kernel(
    order_ref: jax.Ref,  # [B * places], SMEM, as the next three
    tiles_ref: jax.Ref,  # [B * query_tiles * TILE_FIELDS]
    unused_ref: jax.Ref,  # [B * key_tiles]
    zeros_ref: jax.Ref,  # [apart.USES]
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
    p_s: jax.Ref,  # [keys, rows] float32
    ds_s: jax.Ref,  # [keys, rows]
    transposed_k_s: jax.Ref,  # [E, keys]
    clean_k_s: jax.Ref,  # [keys, E], as the next one
    clean_v_s: jax.Ref,
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
    rows = (q_s.at[slot], do_s.at[slot], lse_ref, delta_ref)
    state = _Tile(t, scale, rows, dq_acc, _Staged(p_s, ds_s, transposed_k_s, clean_k_s, clean_v_s), zeros_ref)
    if has_own:
        down_k_acc[...], down_v_acc[...] = jnp.zeros(down_k_acc.shape), jnp.zeros(down_v_acc.shape)
        own, interval = (own_k_s.at[slot], own_v_s.at[slot]), (rows_ref[2:3], rows_ref[3:4])
        state.clean(*own, interval, True)
        state.add(*state.copies(*own), down_k_acc, down_v_acc, interval)

    tiles_per_chunk = t.chunk // t.keys
    here = chunk_index * tiles_per_chunk
    bounds = (jnp.clip(tiles_ref[row + field], here, here + tiles_per_chunk) for field in range(4))
    first, interior_first, interior_last, last = bounds

    def part(tile: jax.Array, count: int = 1) -> list[jax.Ref]:
        keys = pl.ds(pl.multiple_of((tile - here) * t.keys, t.keys), count * t.keys)
        return [x.at[keys] for x in (k_ref, v_ref, dk_acc, dv_acc)]

    def edge(tile: jax.Array, _: None) -> None:
        tile = jnp.where(tile < interior_first, tile, tile + interior_last - interior_first)
        *kv, dk, dv = part(tile)
        interval = (rows_ref[0:1] - tile * t.keys, rows_ref[1:2] - tile * t.keys)
        state.clean(*kv, interval, unused_ref[b * t.key_tiles + tile] == 1)
        state.add(*state.copies(*kv), dk, dv, interval)

    def together(i: jax.Array, _: None) -> None:
        state.add(*part(interior_first + i * count, count), None)

    count = t.keys_at_once // t.keys
    groups = (interior_last - interior_first) // count
    jax.lax.fori_loop(0, groups, together, None)
    if count > 1:
        left = interior_first + groups * count
        jax.lax.fori_loop(left, interior_last, lambda tile, _: state.add(*part(tile), None), None)
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
    keys = max(t.keys_at_once, t.own_keys)
    staged = jnp.dtype(jnp.float32) if t.staged_bits == 32 else dtype
    return [
        *[pltpu.VMEM((2, t.rows, head_dim), dtype)] * 2,
        *[pltpu.VMEM((2, t.own_keys, head_dim), dtype)] * 2,
        pltpu.VMEM((2, t.rows, head_dim), dq_dtype),
        *[pltpu.VMEM((2, t.own_keys, head_dim), dtype)] * 2,
        *[pltpu.VMEM((t.chunk, head_dim), jnp.float32)] * 2,
        *[pltpu.VMEM((t.own_keys, head_dim), jnp.float32)] * 2,
        pltpu.VMEM((head_dim, t.rows), jnp.float32),
        pltpu.VMEM((keys, t.rows), jnp.float32),
        pltpu.VMEM((keys, t.rows), staged),
        pltpu.VMEM((head_dim, keys), dtype),
        *[pltpu.VMEM((keys, head_dim), dtype)] * 2,
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
    # One buffer each: they change once a kv head, and with two v4 could not hold 3072 keys at once.
    chunk, once = (None, None, t.chunk, E), pl.Buffered(buffer_count=1)
    context = pl.BlockSpec(chunk, lambda b, g, i, *_: (b, g, chunk_index, 0), pipeline_mode=once)
    gradient = pl.BlockSpec(chunk, lambda b, g, i, *_: (b, g, 0, 0), pipeline_mode=once)
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
            num_scalar_prefetch=4,
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
    )(plan.order, plan.tiles, plan.unused, apart.zeros(), plan.rows, lse, delta, q, do, own_k, own_v, k, v)
