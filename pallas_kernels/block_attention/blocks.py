"""Block sizes of the block-attention kernels, and what they cost in VMEM."""

import dataclasses

from pallas_kernels import block_sizes
from pallas_kernels.block_sizes import LANES, check_multiple, check_vmem, round_up
from pallas_kernels.chips import Chip

OP = "block_attention"
_PART_READ_ONCE = 2048  # context keys of a part that a single query tile passes
SUBLANES = 16  # rows of a packed bfloat16 register; float32 needs 8, a divisor


@dataclasses.dataclass(frozen=True)
class BlockSizes:
    """Sizes of one query tile and one key tile, forward and backward.

    A query tile is as many whole blocks as come nearest to `rows`; its exact height follows from the shapes.
    """

    rows: int = 512  # rows (block, head of the group, slot) of a query tile
    keys: int = 512  # context keys of a tile: the unit that is visited or skipped
    rows_unrolled: int = 128  # rows of one product forward; the tile's products are laid out one after another
    keys_unrolled: int = 512  # keys of one product forward
    weights_staged: bool = False  # forward, through VMEM on the way from product to product
    rows_unrolled_backward: int = 128
    keys_unrolled_backward: int = 512
    rows_summed: int = 512  # rows of one product that gives dq
    keys_at_once: int = 512  # backward, in tiles that need no mask: what one loop body takes, rounded to whole tiles
    staged_bits: int = 16  # of a score's gradient on its way through VMEM; float32 inputs take 32 in any case
    context: int = 4096  # context keys that stay in VMEM while all query tiles pass

    def __post_init__(self) -> None:
        if self.staged_bits not in (16, 32):
            raise ValueError(f"BlockSizes.staged_bits={self.staged_bits} must be 16 or 32")
        for field in dataclasses.fields(self):
            if field.name == "weights_staged":
                continue
            multiple = {"staged_bits": 16, "keys_unrolled_backward": SUBLANES}.get(field.name, LANES)
            check_multiple(f"BlockSizes.{field.name}", getattr(self, field.name), multiple)
        check_multiple("BlockSizes.context", self.context, self.keys)


@dataclasses.dataclass(frozen=True)
class Tiling:
    """What the kernels need to know of a shape: static, derived from `BlockSizes` by `tiling`."""

    block_rows: int  # N: rows of one block and one kv head, padded to whole registers
    block_keys: int  # K padded likewise
    blocks: int  # of one query tile
    query_tiles: int
    keys: int
    chunk: int  # context keys in VMEM at a time
    chunks: int
    own_keys: int  # columns of the own part of a query tile
    rows_unrolled: int
    keys_unrolled: int
    weights_staged: bool
    rows_unrolled_backward: int
    keys_unrolled_backward: int
    rows_summed: int
    keys_at_once: int
    staged_bits: int

    @property
    def rows(self) -> int:
        return self.blocks * self.block_rows

    @property
    def key_tiles(self) -> int:
        """Of the whole context, those beyond its end included."""
        return self.chunks * (self.chunk // self.keys)


def _divisor(size: int, wanted: int, unit: int = LANES) -> int:
    """The largest multiple of `unit` up to `wanted` that divides `size`, itself a multiple of `unit`."""
    return max(d for d in range(unit, min(size, max(wanted, unit)) + 1, unit) if size % d == 0)


def tiling(sizes: BlockSizes, anchors: int, group_rows: int, block_size: int, context_length: int) -> Tiling:
    """Fits block sizes to a shape. `group_rows` = query heads of a kv head x query slots of a block."""
    block_rows, block_keys = round_up(group_rows, SUBLANES), round_up(block_size, SUBLANES)
    step = next(n for n in range(1, LANES + 1) if n * block_rows % LANES == 0)
    fitting = max(step, sizes.rows // block_rows // step * step)
    blocks = min(fitting, round_up(anchors, step))
    keys = min(sizes.keys, round_up(context_length, LANES))
    chunk = min(sizes.context // keys * keys, round_up(context_length, keys))
    rows = blocks * block_rows
    return Tiling(
        block_rows=block_rows,
        block_keys=block_keys,
        blocks=blocks,
        query_tiles=-(-anchors // blocks),
        keys=keys,
        chunk=chunk,
        chunks=-(-context_length // chunk),
        own_keys=round_up(blocks * block_keys, LANES),
        rows_unrolled=_divisor(rows, sizes.rows_unrolled),
        keys_unrolled=_divisor(keys, sizes.keys_unrolled),
        weights_staged=sizes.weights_staged,
        rows_unrolled_backward=_divisor(rows, sizes.rows_unrolled_backward),
        keys_unrolled_backward=_divisor(keys, sizes.keys_unrolled_backward, SUBLANES),
        rows_summed=_divisor(rows, sizes.rows_summed),
        keys_at_once=max(keys, min(sizes.keys_at_once, chunk) // keys * keys),
        staged_bits=sizes.staged_bits,
    )


def per_key_bytes(head_dim: int, itemsize: int, *, backward: bool) -> int:
    """VMEM of one key of the context: k and v twice; backward once, with sums in float32 and gradients."""
    return round_up(head_dim, LANES) * (4 * itemsize + (8 if backward else 0))


def vmem_bytes(t: Tiling, head_dim: int, itemsize: int, *, backward: bool) -> int:
    """VMEM of one kernel: pipelined windows twice, scratch once. Lanes are padded to whole registers."""
    lanes = round_up(head_dim, LANES)
    context = t.chunk * per_key_bytes(head_dim, itemsize, backward=backward)
    if not backward:
        tile = t.rows * (lanes * (4 * itemsize + 4) + 4 * LANES * 4) + 2 * 2 * t.own_keys * lanes * itemsize
        staged = 2 * t.rows * t.keys * itemsize if t.weights_staged else 0
        return context + tile + staged + 4 * t.rows_unrolled * t.keys * 4
    tile = t.rows * lanes * (6 * itemsize + 4) + t.own_keys * lanes * (8 * itemsize)
    staged = max(t.keys_at_once, t.own_keys) * (t.rows * (4 + max(t.staged_bits // 8, itemsize)) + 3 * lanes * itemsize)
    return context + tile + staged + 4 * t.rows_unrolled_backward * t.keys * 4


def heuristic(
    facts: Chip,
    *,
    anchors: int,
    group_rows: int,
    block_size: int,
    context_length: int,
    head_dim: int,
    itemsize: int,
    backward: bool,
) -> BlockSizes:
    """Sizes without a tuned entry: the largest tiles that fit, then as few parts of the context as VMEM allows."""
    # The largest products whose values stay in registers, by the compiled schedules.
    products = {"rows_unrolled": 256, "keys_unrolled": 512, "rows_unrolled_backward": 512}
    if facts.mxu_size == 128:
        products |= {"weights_staged": True, "rows_summed": 128, "keys_at_once": 1024}
    if facts.name == "v4":  # its registers are half as many, and what it loads in bfloat16 it has to pack anew
        products |= {"rows_unrolled": 512, "keys_unrolled": 128, "weights_staged": False}
        products |= {
            "rows_unrolled_backward": 128,
            "keys_unrolled_backward": 128,
            "keys_at_once": 512,
            "staged_bits": 32,
        }
    per_key = per_key_bytes(head_dim, itemsize, backward=backward)
    for size in (512, 256, LANES):
        sizes = BlockSizes(rows=size, keys=size, context=size, **products)
        t = tiling(sizes, anchors, group_rows, block_size, context_length)
        t = dataclasses.replace(t, keys_at_once=max(size, sizes.keys_at_once))  # which a longer part may reach
        spare = int(block_sizes.VMEM_SHARE * facts.vmem_bytes) - vmem_bytes(t, head_dim, itemsize, backward=backward)
        if spare >= 0:
            most = t.chunk + spare // per_key // t.keys * t.keys
            if (
                not backward and t.query_tiles == 1
            ):  # nothing is read twice, and only the parts that a text reaches are read
                most = min(most, _PART_READ_ONCE)
            parts = -(-context_length // most)
            return dataclasses.replace(sizes, context=round_up(-(-context_length // parts), size))
    return sizes


def choose(
    argument: BlockSizes | None,
    device_kind: str,
    *,
    anchors: int,
    group_rows: int,
    block_size: int,
    context_length: int,
    head_dim: int,
    itemsize: int,
    backward: bool,
) -> Tiling:
    """The tiling that runs: argument, else tuned for the chip, else heuristic. ValueError when it exceeds VMEM."""
    shape = {"anchors": anchors, "group_rows": group_rows, "block_size": block_size, "context_length": context_length}
    element = {"head_dim": head_dim, "itemsize": itemsize, "backward": backward}
    sizes = block_sizes.choose(
        OP,
        BlockSizes,
        argument,
        device_kind,
        f"E{head_dim}_{itemsize * 8}bit_{'backward' if backward else 'forward'}",
        lambda facts: heuristic(facts, **shape, **element),
    )
    t = tiling(sizes, **shape)
    check_vmem(f"{OP} with {sizes}", vmem_bytes(t, head_dim, itemsize, backward=backward), device_kind)
    return t
