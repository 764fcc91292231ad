"""TPU slices by name, and what one device of each generation can do at most.

A *device* is what jax shows: a chip, or one of the two cores of a tpu7x chip. What a core does is in `pallas_kernels.chips`;
here are the networks. Peaks are the maker's published ones.
"""

import math
import re
from dataclasses import dataclass
from typing import Any

from dstill_jax.errors import MissingExtraError, UserError
from pallas_kernels import chips, offline

_GB = 1e9


@dataclass(frozen=True)
class Chip:
    """Peak rates of one device: bounds, never expectations."""

    core: chips.Chip
    ici_link_bytes_per_s: float  # one direction of one link
    dcn_bytes_per_s: float  # one device's part of its host's network
    host_bytes: float  # one device's part of its host's memory

    @property
    def name(self) -> str:
        return self.core.name

    @property
    def flops(self) -> float:
        """bfloat16, per second."""
        return self.core.bf16_flops_per_second * self.core.cores_per_device

    @property
    def hbm_bytes_per_s(self) -> float:
        return self.core.hbm_bytes_per_second * self.core.cores_per_device

    @property
    def hbm_bytes(self) -> float:
        return float(self.core.hbm_bytes * self.core.cores_per_device)

    @property
    def devices_per_chip(self) -> int:
        return self.core.cores_per_chip // self.core.cores_per_device


CHIPS = {
    chip.name: chip
    for chip in (
        Chip(chips.chip("v5e"), 50 * _GB, 3.125 * _GB, 48 * _GB),
        Chip(chips.chip("v5p"), 100 * _GB, 6.25 * _GB, 112 * _GB),
        Chip(chips.chip("v6e"), 100 * _GB, 12.5 * _GB, 180 * _GB),
        Chip(chips.chip("tpu7x"), 100 * _GB, 6.25 * _GB, 120 * _GB),
    )
}

_FLAT = {1: "1x1", 4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"}
_SOLID = {
    4: "2x2x1",
    8: "2x2x2",
    16: "2x2x4",
    32: "2x4x4",
    64: "4x4x4",
    128: "4x4x8",
    256: "4x8x8",
    512: "8x8x8",
    1024: "8x8x16",
    2048: "8x16x16",
    4096: "16x16x16",
}


@dataclass(frozen=True)
class Slice:
    """One or more slices of a generation."""

    name: str  # as asked for
    chip: Chip
    topology: str  # of one slice, e.g. "v5p:4x4x4"
    num_slices: int = 1

    @property
    def dims(self) -> tuple[int, ...]:
        return tuple(int(d) for d in self.topology.partition(":")[2].split("x"))

    @property
    def num_devices(self) -> int:
        return math.prod(self.dims) * self.chip.devices_per_chip * self.num_slices

    @property
    def ici_bytes_per_s(self) -> float:
        """What all links of a device carry towards it: two on each torus axis, one where an axis has two chips."""
        links = sum(2 if d > 2 else 1 for d in self.dims if d > 1)
        return links * self.chip.ici_link_bytes_per_s / self.chip.devices_per_chip or self.chip.ici_link_bytes_per_s


def parse_slice(name: str) -> Slice:
    """`v5e-16`, `v5p-128`, `tpu7x-64`, a topology string such as `v5p:4x4x8`, any of them after `2x` for two slices.

    v5e and v6e count chips; v5p and tpu7x count TensorCores, two a chip, as their makers do.

    Raises UserError for a name or size that does not exist, listing those that do.
    """
    several = re.fullmatch(r"(?:(\d+)x)?((?:v|tpu)\w+)([:-])([\dx]+)", name)
    if several is None or several.group(2) not in CHIPS:
        raise UserError(
            f"slice {name!r} is unknown; write e.g. v5e-16, v5p-128, 2xv6e-256 or v5p:4x4x8"
            f" (generations: {', '.join(CHIPS)})"
        )
    count, chip = int(several.group(1) or 1), CHIPS[several.group(2)]
    if count < 1:
        raise UserError(f"slice {name!r} has no slices; write 2x... for two")
    flat = chip.name in ("v5e", "v6e")
    shapes = _FLAT if flat else _SOLID
    if several.group(3) == ":":
        dims = several.group(4)
        if not re.fullmatch(r"[1-9]\d*x[1-9]\d*" if flat else r"[1-9]\d*x[1-9]\d*x[1-9]\d*", dims):
            raise UserError(f"slice {name!r}: {chip.name} topologies have {2 if flat else 3} sizes, e.g. {shapes[16]}")
        return Slice(name, chip, f"{chip.name}:{dims}", count)
    if not several.group(4).isdigit():
        raise UserError(f"slice {name!r}: after '-' stands a number; a topology stands after ':'")
    cores = chip.core.cores_per_chip
    count_chips, odd = divmod(int(several.group(4)), cores)
    if odd or count_chips not in shapes:
        sizes = ", ".join(f"{chip.name}-{n * cores}" for n in shapes)
        raise UserError(f"slice {name!r} does not exist; {chip.name} comes as {sizes}, or write a topology")
    return Slice(name, chip, f"{chip.name}:{shapes[count_chips]}", count)


def slice_devices(place: Slice) -> list[Any]:
    """jax devices of a slice that is not attached: they compile and cannot run.

    Raises UserError when libtpu is not installed, or does not know the topology.
    """
    try:
        import libtpu  # noqa: F401
    except ImportError:
        raise MissingExtraError("libtpu", "tpu") from None
    offline.prepare_environment()
    from jax.experimental import topologies

    options: dict[str, Any] = {"num_slices": place.num_slices} if place.num_slices > 1 else {}
    if math.prod(place.dims) == 1:  # hosts have four chips elsewhere
        options["chips_per_host_bounds"] = (1, 1, 1)
    try:
        return list(topologies.get_topology_desc(platform="tpu", topology_name=place.topology, **options).devices)
    except Exception as error:  # jax and libtpu raise several kinds for a topology they do not know
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"slice {place.name!r}: the compiler has no topology {place.topology} ({reason})") from None
