"""Forward kernel of block attention; `vjp` calls it.

The exponent of a row is taken relative to a *fixed* number, not to a running maximum: products flow from the matrix unit
through exp2 back into it, nothing waits for a maximum and nothing is rescaled. The number is right by construction:
a row's true maximum lies between its own block's maximum (lower bound) and |q| max|k| (upper bound, Cauchy-Schwarz). Where
these are at most 128 apart, in powers of two, exponents relative to the upper bound minus 64 neither overflow float32
nor lose anything that would count. Query tiles with a row for which they are further apart take the usual online softmax.
"""

import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.block_attention import apart, cost
from pallas_kernels.block_attention.blocks import LANES, Tiling
from pallas_kernels.block_attention.copies import each_copy
from pallas_kernels.block_attention.plan import ROW_FIELDS, TILE_FIELDS, Plan

LOG2_E = math.log2(math.e)
MASKED = -1e30
NEVER = 1e30  # a logsumexp so large that every probability is 0
REACH = (
    64.0  # exponents of 2 on either side of a row's fixed number: float32 and bfloat16 hold them, sums and products too
)

_ROWS_BY_KEYS = (((1,), (1,)), ((), ()))
_PLAIN = (((1,), (0,)), ((), ()))


def dot(a: jax.Array, b: jax.Array, dimensions: tuple) -> jax.Array:
    """Product with float32 accumulation; float32 operands are multiplied exactly enough for a reference test."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jax.lax.dot_general(a, b, dimensions, precision=precision, preferred_element_type=jnp.float32)


def wide(column: jax.Array, lanes: int) -> jax.Array:
    """[rows, LANES] of equal lanes -> [rows, lanes], without work: the same registers again."""
    if lanes <= LANES:
        return column[:, :lanes]
    return jnp.tile(column, (1, -(-lanes // LANES)))[:, :lanes]


def _lane_sums(p: jax.Array) -> jax.Array:
    """[rows, keys] -> [rows, LANES]: partial sums, added up across lanes once a query tile."""
    return sum(p[:, i : i + LANES] for i in range(0, p.shape[1], LANES))


def column(lane_vector: jax.Array) -> jax.Array:
    """[1, n] -> [n, LANES]."""
    return jnp.broadcast_to(lane_vector, (LANES, lane_vector.shape[1])).T


class _Tile:
    """State of one query tile in VMEM: [rows, LANES] columns and the accumulator [rows, E]."""

    def __init__(
        self,
        t: Tiling,
        scale: float,
        keys_transposed: bool,
        q: jax.Ref,
        columns: jax.Ref,
        intervals: jax.Ref,
        acc: jax.Ref,
        weights: tuple[jax.Ref, ...],
        zeros: jax.Ref,
    ) -> None:
        self.t, self.scale2, self.q, self.acc = t, scale * LOG2_E, q, acc
        self.keys_transposed = keys_transposed
        self.reference, self.total = columns.at[0], columns.at[1]
        self.start, self.stop = intervals.at[0], intervals.at[1]
        self.weights, self.apart = weights, apart.Apart(zeros)

    def add(self, k: jax.Ref, v: jax.Ref, base: jax.Array | None) -> None:
        """The hot path: key tiles relative to the fixed number. `base` = position of the first key, if to be masked."""
        if self.weights:
            self._add_staged(k, v, base)
            return
        k, v = k[...], v[...]
        height, width = self.t.rows_unrolled, self.t.keys_unrolled
        for row, key in itertools.product(range(0, self.t.rows, height), range(0, v.shape[0], width)):
            rows, keys = pl.ds(row, height), slice(key, key + width)
            scores = self._scores(self.q[rows, :], k[:, keys] if self.keys_transposed else k[keys])
            if base is not None:
                scores = jnp.where(self._visible(rows, width, base + key), scores, MASKED)
            p = jnp.exp2(scores - wide(self.reference[rows, :], width))
            self.total[rows, :] += _lane_sums(p)
            self.acc[rows, :] += dot(p.astype(v.dtype), v[keys], _PLAIN)

    def _add_staged(self, k: jax.Ref, v: jax.Ref, base: jax.Array | None) -> None:
        """The same with each tile's weights in VMEM before they are multiplied."""
        height, width, size = self.t.rows_unrolled, self.t.keys_unrolled, self.t.keys
        tiles = self.weights[: v.shape[0] // size]
        for (i, weights), row in itertools.product(enumerate(tiles), range(0, self.t.rows, height)):
            for key in range(i * size, (i + 1) * size, width):
                rows, keys, use = pl.ds(row, height), pl.ds(key, width), key // width
                k_part = self.apart(k, row // height)
                k_part = k_part[:, keys] if self.keys_transposed else k_part[keys, :]
                scores = self._scores(self.apart(self.q, use)[rows, :], k_part)
                if base is not None:
                    scores = jnp.where(self._visible(rows, width, base + key), scores, MASKED)
                p = jnp.exp2(scores - wide(self.apart(self.reference, use)[rows, :], width))
                self.total[rows, :] += _lane_sums(p)
                self.apart(weights, 0)[rows, pl.ds(key - i * size, width)] = p.astype(v.dtype)
        for i, weights in enumerate(tiles):
            self.acc[...] += dot(self.apart(weights, 1)[...], v[pl.ds(i * size, size), :], _PLAIN)

    def add_online(self, k: jax.Ref, v: jax.Ref, base: jax.Array) -> None:
        """Any scores, any masks, any content of keys that nobody sees: slower, and rarely needed."""
        k, v = k[...], v[...]
        keys, E = v.shape
        seen = self._visible(pl.ds(0, self.t.rows), keys, base).astype(jnp.int32).max(axis=0, keepdims=True)
        v = jnp.where(wide(column(seen), E) > 0, v, jnp.zeros_like(v))

        def some_rows(i: jax.Array, _: None) -> None:
            rows = pl.ds(pl.multiple_of(i * LANES, LANES), LANES)
            visible = self._visible(rows, keys, base)
            scores = jnp.where(visible, self._scores(self.q[rows, :], k), MASKED)
            old = self.reference[rows, :]
            new = jnp.maximum(old, scores.max(axis=1, keepdims=True))
            p = jnp.where(visible, jnp.exp2(scores - wide(new, keys)), 0.0)
            shrink = jnp.exp2(old - new)
            self.reference[rows, :] = new
            self.total[rows, :] = shrink * self.total[rows, :] + _lane_sums(p)
            self.acc[rows, :] = wide(shrink, E) * self.acc[rows, :] + dot(p.astype(v.dtype), v, _PLAIN)

        jax.lax.fori_loop(0, self.t.rows // LANES, some_rows, None)

    def _scores(self, q: jax.Array, k: jax.Array) -> jax.Array:
        dimensions = _PLAIN if self.keys_transposed else _ROWS_BY_KEYS
        return dot(q, k, dimensions) * self.scale2

    def _visible(self, rows: pl.Slice, keys: int, base: jax.Array) -> jax.Array:
        index = jax.lax.broadcasted_iota(jnp.int32, (rows.size, keys), 1) + base
        return (index >= wide(self.start[rows, :], keys)) & (index < wide(self.stop[rows, :], keys))

    def begin(self, row_data: jax.Array, key_bound: jax.Array, own: tuple[jax.Array, jax.Array] | None) -> jax.Array:
        """Own block, fixed numbers, empty sums. Returns whether every row's scores stay in reach of them (bool scalar)."""
        q = self.q[...]
        norm = jnp.sqrt(jnp.sum(jnp.square(q.astype(jnp.float32)), axis=1, keepdims=True))
        most = norm * (
            key_bound * abs(self.scale2) * 1.01
        )  # 1 %: products of rounded numbers may exceed the bound a little
        least = own_top = jnp.full_like(most, MASKED)
        if own is not None:
            self.start[...], self.stop[...] = column(row_data[2:3]), column(row_data[3:4])
            visible = self._visible(pl.ds(0, self.t.rows), self.t.own_keys, jnp.int32(0))
            scores = jnp.where(visible, dot(q, own[0], _ROWS_BY_KEYS) * self.scale2, MASKED)
            own_top = scores.max(axis=1, keepdims=True)
        least = jnp.maximum(own_top, -most)
        in_reach = most - least <= 2 * REACH  # False when anything is NaN
        fixed = jnp.where(in_reach, jnp.maximum(least, most - REACH), own_top)
        self.reference[...] = jnp.broadcast_to(fixed, (self.t.rows, LANES))
        if own is None:
            self.total[...], self.acc[...] = jnp.zeros(self.total.shape), jnp.zeros(self.acc.shape)
        else:
            seen = visible.astype(jnp.int32).max(axis=0, keepdims=True)
            v = jnp.where(wide(column(seen), own[1].shape[1]) > 0, own[1], jnp.zeros_like(own[1]))
            p = jnp.where(visible, jnp.exp2(scores - fixed), 0.0)
            self.total[...] = _lane_sums(p)
            self.acc[...] = dot(p.astype(v.dtype), v, _PLAIN)
        self.start[...], self.stop[...] = column(row_data[0:1]), column(row_data[1:2])
        return jnp.min(in_reach.astype(jnp.int32)) > 0

    def finish(self) -> tuple[jax.Array, jax.Array]:
        """(output [rows, E], base-2 logsumexp [1, rows]); 0 and MASKED for rows that saw nothing."""
        total = self.total[...].sum(axis=1, keepdims=True)
        seen = total > 0
        out = jnp.where(seen, self.acc[...] / jnp.where(seen, total, 1.0), 0.0)
        lse = jnp.where(seen, self.reference[...] + jnp.log2(jnp.where(seen, total, 1.0)), MASKED)
        return jnp.where(jnp.isnan(total), jnp.nan, out), lse.T[0:1]


def _kernel(
    order_ref: jax.Ref,  # [B * places], SMEM, as the next four
    tiles_ref: jax.Ref,  # [B * query_tiles * TILE_FIELDS]
    unused_ref: jax.Ref,  # [B * key_tiles]
    bound_ref: jax.Ref,  # [B * G] largest norm of a key that some row sees
    zeros_ref: jax.Ref,  # [apart.USES]
    rows_ref: jax.Ref,  # [ROW_FIELDS, rows]
    q_hbm: jax.Ref,  # [B, A, G, N, E], HBM, as the next two
    own_k_hbm: jax.Ref,  # [B, A, G, Kp, E]
    own_v_hbm: jax.Ref,
    k_ref: jax.Ref,  # [chunk, E], or [E, chunk]
    v_ref: jax.Ref,  # [chunk, E]
    out_hbm: jax.Ref,  # [B, A, G, N, E], HBM
    lse_ref: jax.Ref,  # [1, rows]
    q_s: jax.Ref,  # [2, rows, E]
    own_k_s: jax.Ref,  # [2, own_keys, E]
    own_v_s: jax.Ref,
    out_s: jax.Ref,  # [2, rows, E]
    columns_s: jax.Ref,  # [2, rows, LANES] float32: fixed number or running maximum, sums
    intervals_s: jax.Ref,  # [2, rows, LANES] int32: start, stop
    acc_s: jax.Ref,  # [rows, E]
    weights_s: tuple[jax.Ref, ...],  # [rows, keys] of two tiles, or nothing
    safe_s: jax.Ref,  # [1], SMEM
    in_sems: jax.Ref,  # [2]
    out_sems: jax.Ref,  # [2]
    *,
    t: Tiling,
    scale: float,
    anchors: int,
    has_own: bool,
    keys_transposed: bool,
) -> None:
    b, g, i, c = (pl.program_id(axis) for axis in range(4))
    row_tile = b * t.query_tiles + i
    slot = i % 2
    pairs = [(q_hbm, q_s), (own_k_hbm, own_k_s), (own_v_hbm, own_v_s)][: 3 if has_own else 1]

    def arrive(action: str, tile: jax.Array) -> None:
        buffers = [(hbm, vmem.at[tile % 2]) for hbm, vmem in pairs]
        first = (b * t.query_tiles + tile) * t.blocks
        each_copy(action, buffers, in_sems.at[tile % 2], order_ref, first, t.blocks, (b, g))

    def leave(action: str, tile: jax.Array) -> None:
        buffers = [(out_hbm, out_s.at[tile % 2])]
        first, count = (b * t.query_tiles + tile) * t.blocks, jnp.minimum(t.blocks, anchors - tile * t.blocks)
        each_copy(action, buffers, out_sems.at[tile % 2], order_ref, first, count, (b, g), inward=False)

    state = _Tile(t, scale, keys_transposed, q_s.at[slot], columns_s, intervals_s, acc_s, weights_s, zeros_ref)

    @pl.when(c == 0)
    def _() -> None:
        pl.when(i == 0)(lambda: arrive("start", i))
        arrive("wait", i)
        pl.when(i + 1 < t.query_tiles)(lambda: arrive("start", i + 1))
        own = (own_k_s[slot], own_v_s[slot]) if has_own else None
        safe = state.begin(rows_ref[...], bound_ref[b * pl.num_programs(1) + g], own)
        safe_s[0] = safe.astype(jnp.int32)

    tiles_per_chunk = t.chunk // t.keys
    here = c * tiles_per_chunk
    first, interior_first, interior_last, last = (
        jnp.clip(tiles_ref[row_tile * TILE_FIELDS + field], here, here + tiles_per_chunk) for field in range(4)
    )

    def key_tile(tile: jax.Array, count: int = 1) -> tuple[jax.Ref, jax.Ref]:
        keys = pl.ds(pl.multiple_of((tile - here) * t.keys, t.keys), count * t.keys)
        return k_ref.at[:, keys] if keys_transposed else k_ref.at[keys], v_ref.at[keys]

    def pair(i: jax.Array, _: None) -> None:
        state.add(*key_tile(interior_first + 2 * i, 2), None)

    def edge(tile: jax.Array, _: None) -> None:
        tile = jnp.where(tile < interior_first, tile, tile + interior_last - interior_first)
        plain = (safe_s[0] == 1) & (unused_ref[b * t.key_tiles + tile] == 0)
        pl.when(plain)(lambda: state.add(*key_tile(tile), tile * t.keys))
        pl.when(~plain)(lambda: state.add_online(*key_tile(tile), tile * t.keys))

    safe = safe_s[0] == 1
    interior_first = jnp.where(safe, interior_first, last)
    interior_last = jnp.where(safe, interior_last, last)
    # In pairs: the beginning and the end of a loop's body, where units wait, come once for two tiles.
    pairs = (interior_last - interior_first) // 2
    if tiles_per_chunk > 1:
        jax.lax.fori_loop(0, pairs, pair, None)
    odd = pairs * 2 < interior_last - interior_first
    pl.when(odd)(lambda: state.add(*key_tile(interior_last - 1), None))
    jax.lax.fori_loop(first, last - (interior_last - interior_first), edge, None)

    @pl.when(c == t.chunks - 1)
    def _() -> None:
        pl.when(i >= 2)(lambda: leave("wait", i - 2))
        out, lse_ref[...] = state.finish()
        out_s[slot] = out.astype(out_s.dtype)
        leave("start", i)

        @pl.when(i == t.query_tiles - 1)
        def _() -> None:
            pl.when(i >= 1)(lambda: leave("wait", i - 1))
            leave("wait", i)


def _context_specs(t: Tiling, head_dim: int, keys_transposed: bool) -> tuple[pl.BlockSpec, pl.BlockSpec]:
    """Where the pipeline finds keys and values of a chunk of the context."""
    tiles_per_chunk = t.chunk // t.keys

    def chunk_of(b, i, c, tiles):
        """A chunk without a needed tile asks for its neighbour, which is there already: nothing is copied."""
        row = (b * t.query_tiles + i) * TILE_FIELDS
        lowest = tiles[row] // tiles_per_chunk
        highest = jnp.maximum((tiles[row + 3] - 1) // tiles_per_chunk, lowest)
        return jnp.minimum(jnp.clip(c, lowest, highest), t.chunks - 1)

    def by_slot(b, g, i, c, order, tiles, *_):
        return b, g, chunk_of(b, i, c, tiles), 0

    def slots_last(b, g, i, c, order, tiles, *_):
        return b, g, 0, chunk_of(b, i, c, tiles)

    values = pl.BlockSpec((None, None, t.chunk, head_dim), by_slot)
    return (pl.BlockSpec((None, None, head_dim, t.chunk), slots_last) if keys_transposed else values), values


def _scratch(t: Tiling, head_dim: int, dtype: jnp.dtype) -> list[Any]:
    """Buffers of `_kernel`, in its order."""
    return [
        pltpu.VMEM((2, t.rows, head_dim), dtype),
        *[pltpu.VMEM((2, t.own_keys, head_dim), dtype)] * 2,
        pltpu.VMEM((2, t.rows, head_dim), dtype),
        pltpu.VMEM((2, t.rows, LANES), jnp.float32),
        pltpu.VMEM((2, t.rows, LANES), jnp.int32),
        pltpu.VMEM((t.rows, head_dim), jnp.float32),
        [pltpu.VMEM((t.rows, t.keys), dtype)] * (2 if t.weights_staged else 0),
        pltpu.SMEM((1,), jnp.int32),
        *[pltpu.SemaphoreType.DMA((2,))] * 2,
    ]


def forward(
    q: jax.Array,
    own_k: jax.Array | None,
    own_v: jax.Array | None,
    k: jax.Array,
    v: jax.Array,
    key_bound: jax.Array,
    plan: Plan,
    t: Tiling,
    scale: float,
    keys_transposed: bool,
    vmem_limit: int,
    interpret: bool | pltpu.InterpretParams,
) -> tuple[jax.Array, jax.Array]:
    """(output [B, A, G, N, E], base-2 logsumexp [B, G, query_tiles, 1, rows] of sorted rows).

    Args:
      q: [B, A, G, N, E]; own_k, own_v: [B, A, G, Kp, E] or None; k, v: [B, G, S, E], k [B, G, E, S] with `keys_transposed`.
      key_bound: float32 [B * G], largest norm of a key that some row sees.
    """
    B, A, G, _, E = q.shape
    has_own = own_k is not None
    if own_k is None or own_v is None:
        own_k = own_v = jnp.zeros((1, 1, 1, t.block_keys, E), q.dtype)
    keys, values = _context_specs(t, E, keys_transposed)
    whole = pl.BlockSpec(memory_space=pl.ANY)
    made = [
        jax.ShapeDtypeStruct(q.shape, q.dtype),
        jax.ShapeDtypeStruct((B, G, t.query_tiles, 1, t.rows), jnp.float32),
    ]
    own = t.block_keys if has_own else 0
    return pl.pallas_call(
        functools.partial(_kernel, t=t, scale=scale, anchors=A, has_own=has_own, keys_transposed=keys_transposed),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=5,
            grid=(B, G, t.query_tiles, t.chunks),
            in_specs=[
                pl.BlockSpec((None, None, ROW_FIELDS, t.rows), lambda b, g, i, c, *_: (b, i, 0, 0)),
                *(whole, whole, whole, keys, values),
            ],
            out_specs=[
                whole,
                pl.BlockSpec((None, None, None, 1, t.rows), lambda b, g, i, c, *_: (b, g, i, 0, 0)),
            ],
            scratch_shapes=_scratch(t, E, q.dtype),
        ),
        out_shape=made,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary", "arbitrary"), vmem_limit_bytes=vmem_limit
        ),
        cost_estimate=cost.estimate(cost.FORWARD_PRODUCTS, q, v.shape[2], own, (q, own_k, own_v, k, v, *made)),
        name="block_attention_forward",
        interpret=interpret,
    )(plan.order, plan.tiles, plan.unused, key_bound, apart.zeros(), plan.rows, q, own_k, own_v, k, v)
