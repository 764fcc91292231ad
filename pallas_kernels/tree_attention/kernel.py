"""The Pallas kernel of tree attention: one pass over the cache for all query rows of a kv head.

Grid: (kv heads, parts of the query rows, steps). Steps come from `list_steps`, so their number is data; each
fetches one tile of keys and of values. A row's first step lets its rows see each other, which starts the online softmax;
its last writes. Exponents are base 2, scores are scaled in float32.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.block_sizes import LANES, VMEM_SHARE, known_chip
from pallas_kernels.tree_attention.blocks import TreeBlocks, TreeShape
from pallas_kernels.tree_attention.steps import TILE_BITS, list_steps

MASKED = -1e30
FLOOR = (
    -0.5e30
)  # where running maxima start: above MASKED, so that masked scores weigh exp2(-0.5e30) = 0 from the start
LN2 = math.log(2.0)
CHUNK = 256  # slots whose scores are in registers at once


def _dot(a: Array, b: Array, contract: tuple[int, int]) -> Array:
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    dimensions = (((contract[0],), (contract[1],)), ((), ()))
    return jax.lax.dot_general(a, b, dimensions, precision=precision, preferred_element_type=jnp.float32)


def _kernel(
    visited_ref,  # [S] SMEM
    fetched_ref,  # [S] SMEM, for the index maps
    lengths_ref,  # [B] SMEM
    first_row_ref,  # [1] SMEM, for the index maps
    q_ref,  # [1, 1, resident, E]
    k_ref,  # [1, 1, E, context] or [1, 1, context, E]
    v_ref,  # [1, 1, context, E]
    *refs,  # tree_k, tree_v [1, 1, N', E], words [1, N', 128]; out; lse; scratch
    blocks: TreeBlocks,
    scale: float,
    keys_transposed: bool,
    has_tree: bool,
    has_lse: bool,
):
    refs = list(refs)
    tree_k_ref, tree_v_ref, words_ref = (refs.pop(0) for _ in range(3)) if has_tree else (None, None, None)
    out_ref = refs.pop(0)  # [1, 1, resident, E]
    lse_ref = refs.pop(0) if has_lse else None  # [1, 1, resident, 128]
    top_ref, total_ref, sum_ref = refs[:3]  # [resident, 128] twice, [resident, E]; float32
    scores_ref, weights_ref = refs[3:]  # [rows, most slots at once] float32, and in the dtype of the values
    del fetched_ref, first_row_ref
    packed = visited_ref[pl.program_id(2)]
    batch_row, tile = packed >> TILE_BITS, packed & ((1 << TILE_BITS) - 1)
    left = lengths_ref[batch_row] - tile * blocks.context  # slots from this tile on
    parts = blocks.resident // blocks.rows

    def advance(rows, scores_of, width: int, chunk: int, v: Array) -> None:
        """One step of the online softmax of `rows` over `width` slots whose values are v [slots, E].

        Scores, in base 2, are made a chunk at a time by `scores_of(first slot)` and wait in VMEM for their maximum: a
        whole tile of them does not fit the registers. Sums stay one per lane until the end.
        """
        before = top_ref[rows]
        highest = jnp.full((blocks.rows, min(chunk, LANES)), FLOOR, jnp.float32)
        for first in range(0, width, chunk):
            scores = scores_of(first)
            scores_ref[:, pl.ds(first, chunk)] = scores
            for lanes in range(0, chunk, LANES):
                highest = jnp.maximum(highest, scores[:, lanes : lanes + LANES])
        top = jnp.maximum(before, highest.max(axis=1, keepdims=True))
        shrink = jnp.exp2(before - top)
        top_ref[rows] = top
        sums = total_ref[rows] * shrink
        for first in range(0, width, chunk):
            weights = jnp.exp2(scores_ref[:, pl.ds(first, chunk)] - top[:, :1])
            weights_ref[:, pl.ds(first, chunk)] = weights.astype(weights_ref.dtype)
            for lanes in range(0, chunk, LANES):
                part = weights[:, lanes : lanes + LANES]
                sums += part if part.shape[1] == LANES else jnp.pad(part, ((0, 0), (0, LANES - part.shape[1])))
        total_ref[rows] = sums
        added = _dot(weights_ref[:, :width], v, (1, 0))
        sum_ref[rows] = sum_ref[rows] * shrink[:, :1] + added

    def for_each_part(visit) -> None:
        """Calls visit(rows, index of the first row) for every product's worth of rows."""

        def one(i, carry):
            first = i * blocks.rows if isinstance(i, int) else pl.multiple_of(i * blocks.rows, blocks.rows)
            visit(pl.ds(first, blocks.rows), pl.program_id(1) * blocks.resident + first)
            return carry

        one(0, 0) if parts == 1 else jax.lax.fori_loop(0, parts, one, 0)

    def tree_mask(first_row, column: int, width: int) -> Array:
        height = words_ref.shape[1]
        if blocks.rows >= height:
            words = jnp.concatenate([words_ref[0]] * (blocks.rows // height), axis=0)
        else:
            words = words_ref[0, pl.ds(pl.multiple_of(jax.lax.rem(first_row, height), blocks.rows), blocks.rows)]
        return ((words >> (column // LANES)) & 1)[:, :width] > 0

    def over_tree(rows, first_row) -> None:
        columns = words_ref.shape[1]
        chunk = min(columns, LANES)

        def scores_of(first: int) -> Array:
            scores = _dot(q_ref[0, 0, rows], tree_k_ref[0, 0, pl.ds(first, chunk)], (1, 1)) * (scale / LN2)
            return jnp.where(tree_mask(first_row, first, chunk), scores, MASKED)

        advance(rows, scores_of, columns, chunk, tree_v_ref[0, 0])

    def over_slots(rows, first_slot, limit: Array | None) -> None:
        """Slots first_slot .. + blocks.slots of the tile; those from `limit` on are unused and may hold anything."""
        chunk = next(c for c in (CHUNK, LANES) if blocks.slots % c == 0)
        v = v_ref[0, 0, pl.ds(first_slot, blocks.slots)]

        def scores_of(first: int) -> Array:
            some = pl.ds(first_slot + first, chunk)
            k = k_ref[0, 0, :, some] if keys_transposed else k_ref[0, 0, some]
            scores = _dot(q_ref[0, 0, rows], k, (1, 0 if keys_transposed else 1)) * (scale / LN2)
            if limit is None:
                return scores
            return jnp.where(jax.lax.broadcasted_iota(jnp.int32, scores.shape, 1) < limit - first, scores, MASKED)

        if limit is not None:  # 0 x NaN is NaN
            v = jnp.where(jax.lax.broadcasted_iota(jnp.int32, v.shape, 0) < limit, v, jnp.zeros_like(v))
        advance(rows, scores_of, blocks.slots, chunk, v)

    def over_context(rows, first_row) -> None:
        del first_row
        here = jnp.minimum(left, blocks.context)
        full = here // blocks.slots

        def one(i, carry):
            over_slots(rows, pl.multiple_of(i * blocks.slots, blocks.slots), None)
            return carry

        jax.lax.fori_loop(0, full, one, 0)
        start = pl.multiple_of(full * blocks.slots, blocks.slots)
        pl.when(here > start)(lambda: over_slots(rows, start, here - start))

    def finish(rows, first) -> None:
        del first
        total = jnp.broadcast_to(total_ref[rows].sum(axis=1, keepdims=True), (blocks.rows, LANES))
        seen = total > 0
        total = jnp.where(seen, total, 1.0)
        out_ref[0, 0, rows] = (sum_ref[rows] / total[:, :1]).astype(out_ref.dtype)
        if has_lse:
            lse_ref[0, 0, rows] = jnp.where(seen, top_ref[rows] * LN2 + jnp.log(total), -jnp.inf)

    @pl.when(tile == 0)
    def _():
        top_ref[...] = jnp.full_like(top_ref, FLOOR)
        total_ref[...] = jnp.zeros_like(total_ref)
        sum_ref[...] = jnp.zeros_like(sum_ref)
        if has_tree:
            for_each_part(over_tree)

    pl.when(left > 0)(lambda: for_each_part(over_context))
    pl.when(left <= blocks.context)(lambda: for_each_part(finish))


def tree_attention_kernel(
    rows: Array,  # [B, G, R, E], R = (H/G) N', heads outermost
    context_k: Array,  # [>= B, G, E, C] or [>= B, G, C, E]
    context_v: Array,  # [>= B, G, C, E]
    lengths: Array,  # int [B]
    first_row: Array,  # int []: of the context
    tree: tuple[Array, Array, Array] | None,  # k, v [B, G, N', E], words [B or 1, N', 128]
    *,
    shape: TreeShape,
    blocks: TreeBlocks,
    device_kind: str,
    key_layout: str,
    scale: float,
    with_lse: bool,
    interpret,
) -> tuple[Array, Array | None]:
    """(out [B, G, R, E], lse [B, G, R, 128], every lane the same, or None)."""
    B, G, R, E = rows.shape
    C = context_v.shape[2]
    lengths = jnp.clip(lengths.astype(jnp.int32), 0, C)
    steps = list_steps(lengths, C, blocks.context)
    resident, slots = blocks.resident, blocks.context
    transposed = key_layout == "BGEC"

    def of_row(g, part, step, visited, fetched, lengths, first):
        return visited[step] >> TILE_BITS, g, part, 0

    def of_tree(g, part, step, visited, fetched, lengths, first):
        return visited[step] >> TILE_BITS, g, 0, 0

    def of_words(g, part, step, visited, fetched, lengths, first):
        return (visited[step] >> TILE_BITS if tree[2].shape[0] > 1 else 0), 0, 0

    def of_slots(g, part, step, visited, fetched, lengths, first):
        return first[0] + (fetched[step] >> TILE_BITS), g, fetched[step] & ((1 << TILE_BITS) - 1), 0

    def of_keys(*index):
        row, g, tile, _ = of_slots(*index)
        return (row, g, 0, tile) if transposed else (row, g, tile, 0)

    in_specs = [
        pl.BlockSpec((1, 1, resident, E), of_row),
        pl.BlockSpec((1, 1, E, slots) if transposed else (1, 1, slots, E), of_keys),
        pl.BlockSpec((1, 1, slots, E), of_slots),
    ]
    if tree is not None:
        height = tree[0].shape[2]
        in_specs += [pl.BlockSpec((1, 1, height, E), of_tree)] * 2
        in_specs.append(pl.BlockSpec((1, height, LANES), of_words))
    out_specs = [pl.BlockSpec((1, 1, resident, E), of_row)]
    out_shapes = [jax.ShapeDtypeStruct(rows.shape, rows.dtype)]
    if with_lse:
        out_specs.append(pl.BlockSpec((1, 1, resident, LANES), of_row))
        out_shapes.append(jax.ShapeDtypeStruct((B, G, R, LANES), jnp.float32))
    state = pltpu.VMEM((resident, LANES), jnp.float32)
    body = functools.partial(
        _kernel,
        blocks=blocks,
        scale=scale,
        keys_transposed=transposed,
        has_tree=tree is not None,
        has_lse=with_lse,
    )
    tree_slots = 0 if tree is None else tree[0].shape[2]
    moved = (R // resident) * B * G * (C + tree_slots) * 2 * E * context_v.dtype.itemsize
    out = pl.pallas_call(
        body,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(G, R // resident, steps.count),
            in_specs=in_specs,
            out_specs=out_specs,
            scratch_shapes=[
                state,
                state,
                pltpu.VMEM((resident, E), jnp.float32),
                pltpu.VMEM((blocks.rows, max(blocks.slots, tree_slots)), jnp.float32),
                pltpu.VMEM((blocks.rows, max(blocks.slots, tree_slots)), context_v.dtype),
            ],
        ),
        out_shape=out_shapes,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary"),
            vmem_limit_bytes=int(VMEM_SHARE * known_chip(device_kind).vmem_bytes),
        ),
        cost_estimate=pl.CostEstimate(  # of rows filled to capacity: lengths are data
            flops=4 * B * G * R * (C + tree_slots) * E,
            transcendentals=B * G * R * (C + tree_slots),
            bytes_accessed=moved + 2 * rows.size * rows.dtype.itemsize,
        ),
        interpret=interpret,
        name="tree_attention",
    )(
        steps.visited,
        steps.fetched,
        lengths,
        first_row.astype(jnp.int32).reshape(1),
        rows,
        context_k,
        context_v,
        *(tree or ()),
    )
    return (out[0], out[1]) if with_lse else (out[0], None)
