"""Block sizes of tree attention: how much of the cache a step fetches, and how many query rows stay in VMEM."""

from dataclasses import dataclass

from pallas_kernels.block_sizes import LANES, VMEM_SHARE, check_multiple, check_vmem, choose, round_up
from pallas_kernels.chips import Chip
from pallas_kernels.tree_attention.trees import check_rows

SUBLANES = 16  # of packed bfloat16
_STEP_SECONDS = 1.5e-6  # of HBM time a grid step should fetch: several times what a step itself costs
_SLOTS, _ROWS = 512, 128  # of one product: its running maxima and sums then fit the registers
_TEMPORARY_BYTES = 1 << 20


@dataclass(frozen=True)
class TreeShape:
    """What the choice depends on. `rows` counts the stacked query rows of one kv head: (H/G) N, N padded."""

    num_rows: int
    heads_per_kv: int
    num_kv_heads: int
    head_dim: int
    capacity: int
    itemsize: int

    @property
    def padded_rows(self) -> int:
        """Rows of one head as the kernel holds them: whole sublanes, whole lanes from 128 on (they are columns too)."""
        return round_up(self.num_rows, SUBLANES if self.num_rows < LANES else LANES)

    @property
    def rows(self) -> int:
        return self.heads_per_kv * self.padded_rows

    @property
    def key(self) -> str:
        """Of the tuning file."""
        return f"R{self.rows}_G{self.num_kv_heads}_E{self.head_dim}_C{self.capacity}_b{self.itemsize}"


@dataclass(frozen=True)
class TreeBlocks:
    """Sizes of one kernel.

    Attributes:
      context: cache slots a step fetches, a multiple of 128.
      resident: query rows of a kv head held in VMEM while the context streams by. The whole stack, unless VMEM is too
        small: the context is read once for each part. Whole heads, or a divisor of the padded rows of one.
      rows: query rows a product multiplies at a time; divides `resident`.
      slots: cache slots a product multiplies at a time; a multiple of 128 that divides `context`.
    """

    context: int
    resident: int
    rows: int
    slots: int

    def __post_init__(self) -> None:
        check_multiple("slots", self.slots, LANES)
        check_multiple("context", self.context, self.slots)
        check_multiple("rows", self.rows, SUBLANES)
        check_multiple("resident", self.resident, self.rows)

    def vmem_bytes(self, shape: TreeShape) -> int:
        """Upper estimate of what the kernel holds: double-buffered blocks, scratch, one tile of scores."""
        lanes = round_up(shape.head_dim, LANES)
        per_row = 4 * lanes * shape.itemsize + 2 * LANES * 4 + (lanes + 2 * LANES) * 4  # q, out; lse; scratch
        slots = 4 * (self.context + shape.padded_rows) * lanes * shape.itemsize
        words = 2 * shape.padded_rows * LANES * 4
        scores = self.rows * max(self.slots, shape.padded_rows) * (4 + shape.itemsize)
        return self.resident * per_row + slots + words + scores + _TEMPORARY_BYTES

    def check(self, shape: TreeShape, device_kind: str) -> None:
        """ValueError unless these sizes fit the shape and the chip."""
        if shape.rows % self.resident:
            raise ValueError(f"resident={self.resident} must divide the {shape.rows} stacked rows (H/G x padded N)")
        for name, size in (("resident", self.resident), ("rows", self.rows)):
            if size % shape.padded_rows and shape.padded_rows % size:
                raise ValueError(f"{name}={size} must be whole heads of {shape.padded_rows} rows, or divide one")
        check_vmem(f"tree attention with {self}", self.vmem_bytes(shape), device_kind)


def _stacks(shape: TreeShape) -> list[int]:
    """What a part of the stacked rows may be, largest first: some heads, or a divisor of one."""
    one = shape.padded_rows
    heads = [one * d for d in range(shape.heads_per_kv, 0, -1) if shape.heads_per_kv % d == 0]
    return heads + [one // d for d in range(2, one // SUBLANES + 1) if one % (d * SUBLANES) == 0]


def _heuristic(shape: TreeShape, facts: Chip) -> TreeBlocks:
    """As many rows as fit, so that the context is read once; then fetches long enough to hide what a step costs."""
    stacks = _stacks(shape)
    slots = min(_SLOTS, round_up(shape.capacity, LANES))
    wanted = facts.hbm_bytes_per_second * _STEP_SECONDS / (2 * shape.head_dim * shape.itemsize)
    all_tiles = -(-shape.capacity // slots)
    most = min(max(round(wanted / slots), 1), all_tiles)
    tiles = min(range(most, most // 2, -1), key=lambda count: -all_tiles % count)  # the last step reaches past the end
    for resident in stacks:
        rows = next(r for r in stacks if resident % r == 0 and (r <= _ROWS or r == stacks[-1]))
        for count in range(tiles, 0, -1):
            sizes = TreeBlocks(count * slots, resident, rows, slots)
            if sizes.vmem_bytes(shape) <= VMEM_SHARE * facts.vmem_bytes:
                return sizes
    raise ValueError(f"{shape} does not fit the {facts.vmem_bytes / 2**20:.0f} MiB of VMEM of {facts.name}")


def choose_blocks(shape: TreeShape, argument: TreeBlocks | None, device_kind: str) -> TreeBlocks:
    """The sizes that run, checked. ValueError names the size that does not fit."""
    check_rows(shape.num_rows)
    sizes = choose(
        "tree_attention", TreeBlocks, argument, device_kind, shape.key, lambda facts: _heuristic(shape, facts)
    )
    sizes.check(shape, device_kind)
    return sizes
