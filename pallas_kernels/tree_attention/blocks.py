"""Block sizes of tree attention: how much of the cache a step fetches, and how many query rows stay in VMEM."""

from dataclasses import dataclass

from pallas_kernels.block_sizes import LANES, VMEM_SHARE, check_multiple, check_vmem, choose, round_up
from pallas_kernels.chips import Chip
from pallas_kernels.tree_attention.trees import check_rows

SUBLANES = 16  # of packed bfloat16
_STEP_SECONDS = 1.5e-6  # of HBM time a grid step should fetch: several times what a step itself costs
_SCORE_TILE = 256 * 1024  # elements of float32 scores that live at once


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
      kv_heads: kv heads a step fetches; divides G.
      resident: query rows of a kv head held in VMEM while the context streams by. The whole stack, unless VMEM is too
        small: the context is read once for each part. Whole heads, or a divisor of the padded rows of one.
      rows: query rows a product multiplies at a time; divides `resident`.
    """

    context: int
    kv_heads: int
    resident: int
    rows: int

    def __post_init__(self) -> None:
        check_multiple("context", self.context, LANES)
        check_multiple("kv_heads", self.kv_heads, 1)
        check_multiple("rows", self.rows, SUBLANES)
        check_multiple("resident", self.resident, self.rows)

    def vmem_bytes(self, shape: TreeShape) -> int:
        """Upper estimate of what the kernel holds: double-buffered blocks, scratch, one tile of scores."""
        lanes = round_up(shape.head_dim, LANES)
        per_row = 4 * lanes * shape.itemsize + 2 * LANES * 4 + (lanes + 2 * LANES) * 4  # q, out; lse; scratch
        slots = 4 * (self.context + shape.padded_rows) * lanes * shape.itemsize
        words = 2 * shape.padded_rows * LANES * 4
        return self.kv_heads * (self.resident * per_row + slots) + words + 12 * self.rows * self.context

    def check(self, shape: TreeShape, device_kind: str) -> None:
        """ValueError unless these sizes fit the shape and the chip."""
        check_multiple("num_kv_heads", shape.num_kv_heads, self.kv_heads)
        if shape.rows % self.resident:
            raise ValueError(f"resident={self.resident} must divide the {shape.rows} stacked rows (H/G x padded N)")
        for name, size in (("resident", self.resident), ("rows", self.rows)):
            if size % shape.padded_rows and shape.padded_rows % size:
                raise ValueError(f"{name}={size} must be whole heads of {shape.padded_rows} rows, or divide one")
        check_vmem(f"tree attention with {self}", self.vmem_bytes(shape), device_kind)


def _divisors(value: int) -> list[int]:
    return [d for d in range(value, 0, -1) if value % d == 0]


def _heuristic(shape: TreeShape, facts: Chip) -> TreeBlocks:
    """The largest stack of rows that fits, then a fetch long enough to hide what a step costs."""
    fits = shape.padded_rows
    stacks = [fits * d for d in _divisors(shape.heads_per_kv)]
    stacks += [fits // d for d in range(2, fits // SUBLANES + 1) if fits % d == 0 and (fits // d) % SUBLANES == 0]
    slot_bytes = 2 * shape.head_dim * shape.itemsize
    wanted = facts.hbm_bytes_per_second * _STEP_SECONDS / slot_bytes  # slots x kv heads
    longest = round_up(shape.capacity, LANES)
    heads = [d for d in _divisors(shape.num_kv_heads) if d == 1 or shape.num_kv_heads // d >= 2]  # two cores share them
    for resident in stacks:
        rows = next(r for r in stacks if r <= min(resident, 256) or r == stacks[-1])
        rows = rows if resident % rows == 0 else resident
        for kv_heads in heads if rows * 4 <= 256 else [1]:
            context = min(longest, max(512, round_up(int(wanted) // kv_heads, 512)), max(_SCORE_TILE // rows, LANES))
            context = context if context == longest else max(context // LANES * LANES, LANES)
            sizes = TreeBlocks(context, kv_heads, resident, rows)
            enough = context * kv_heads >= wanted or context == longest or kv_heads == 1
            if enough and sizes.vmem_bytes(shape) <= VMEM_SHARE * facts.vmem_bytes:
                return sizes
    raise ValueError(f"{shape} does not fit the {facts.vmem_bytes / 2**20:.0f} MiB of VMEM of {facts.name}")


def choose_blocks(shape: TreeShape, argument: TreeBlocks | None, device_kind: str) -> TreeBlocks:
    """The sizes that run, checked. ValueError names the size that does not fit."""
    check_rows(shape.num_rows)
    sizes = choose("tree_attention", TreeBlocks, argument, device_kind, shape.key, lambda facts: _heuristic(shape, facts))
    sizes.check(shape, device_kind)
    return sizes
