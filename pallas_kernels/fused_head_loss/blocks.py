"""Tile sizes of the head loss: how many rows, and how many columns of the vocabulary, have logits at once."""

from dataclasses import dataclass

from pallas_kernels.block_sizes import LANES, check_multiple, choose, known_chip, round_up
from pallas_kernels.chips import Chip, is_tpu

_TILE_BYTES = 64 * 2**20  # of float32 logits, for each distribution
_GPU_BYTES = 256 * 2**20  # the same on a GPU, which works on whole rows
_ROWS = 4096  # far past the ridge of any chip; the sums of the gradient, float32 [rows, D], are rewritten every tile


@dataclass(frozen=True)
class HeadTiles:
    """Logits exist for `rows` x `columns` at a time. Columns beyond the vocabulary mean all of it at once."""

    rows: int
    columns: int

    def __post_init__(self) -> None:
        check_multiple("rows", self.rows, 1)
        check_multiple("columns", self.columns, 1)

    def dealt(self, devices: int) -> "HeadTiles":
        """What each of several devices adds to such a tile, when their rows are gathered."""
        return HeadTiles(max(self.rows // devices, 1), self.columns)


def _balanced(vocabulary: int, most: int) -> int:
    """The tile of at most `most` columns, in whole lanes, whose last one overlaps the one before least."""
    if vocabulary <= most:
        return vocabulary
    sizes = range(round_up(most // 2, LANES), most + 1, LANES)
    return min(sizes, key=lambda size: (-vocabulary % size, -size))


def _tpu_tiles(rows: int, vocabulary: int) -> HeadTiles:
    rows = min(rows, _ROWS)
    return HeadTiles(rows, _balanced(vocabulary, max(_TILE_BYTES // (4 * rows) // LANES, 8) * LANES))


def choose_tiles(rows: int, vocabulary: int, argument: HeadTiles | None, device_kind: str) -> HeadTiles:
    """`argument`, else on a TPU the tuned or heuristic tile, else whole rows of logits, as many as fit a budget,
    at most 512 on a CPU.

    Whole rows suit caches of CPUs and GPUs, and need no second pass for L1. `rows` counts gathered ones.
    """
    if argument is not None or is_tpu(device_kind):

        def heuristic(facts: Chip) -> HeadTiles:
            del facts  # rows are past the ridge of all of them
            return _tpu_tiles(rows, vocabulary)

        key = f"R{rows}_V{vocabulary}"
        return choose("fused_head_loss", HeadTiles, argument, known_chip(device_kind).name, key, heuristic)
    budget, most = (_TILE_BYTES, 512) if device_kind == "cpu" else (_GPU_BYTES, _ROWS)
    return HeadTiles(max(min(rows, most, budget // (4 * vocabulary)), 1), vocabulary)
