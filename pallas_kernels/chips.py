"""The TPU generations a kernel is written and compiled for: what block-size choices and time bounds need to know.

Everything is per TensorCore. Rates and capacities are the maker's published ones of a chip over its cores: where jax's own
`tpu_info` has others (2460 GB/s for a v5p chip of 2765), a time from them would not be a lower bound. Looked up by the
device kind that jax reports, which callers pass in: nothing here asks the machine.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Chip:
    """One TensorCore of a TPU generation."""

    name: str
    device_kinds: tuple[str, ...]  # what `jax.Device.device_kind` says
    topology: str  # smallest slice that the compiler offers
    mxu_size: int  # the matrix unit multiplies by [size, size]
    mxus: int
    vmem_bytes: int
    hbm_bytes: int
    hbm_bytes_per_second: float
    bf16_flops_per_second: float
    bf16_vectors: bool  # vector unit computes on bfloat16 without unpacking
    cores_per_chip: int
    cores_per_device: int  # of a `jax.Device`: one, or a chip's two cores fused

    @property
    def ridge_rows(self) -> float:
        """Rows of activations that one pass over bf16 weights carries before arithmetic, not HBM, sets the time."""
        return self.bf16_flops_per_second / self.hbm_bytes_per_second


_MIB, _GIB = 2**20, 2**30

CHIPS: dict[str, Chip] = {
    chip.name: chip
    for chip in (
        Chip("v4", ("TPU v4",), "v4:2x2x1", 128, 4, 16 * _MIB, 16 * _GIB, 614e9, 137.5e12, False, 2, 2),
        Chip("v5e", ("TPU v5 lite", "TPU v5e"), "v5e:2x2", 128, 4, 128 * _MIB, 16 * _GIB, 819e9, 197e12, False, 1, 1),
        Chip("v5p", ("TPU v5", "TPU v5p"), "v5p:2x2x1", 128, 4, 64 * _MIB, 95 * 2**29, 1382.5e9, 229.5e12, False, 2, 2),
        Chip("v6e", ("TPU v6 lite", "TPU v6e"), "v6e:2x2", 256, 2, 128 * _MIB, 32 * _GIB, 1640e9, 918e12, True, 1, 1),
        Chip("tpu7x", ("TPU7x",), "tpu7x:2x2x1", 256, 2, 64 * _MIB, 96 * _GIB, 3690e9, 1153.5e12, True, 2, 1),
    )
}


def chip(device_kind: str) -> Chip:
    """The facts of a chip by name ("v5e") or by jax's device kind ("TPU v5 lite"). ValueError when unknown."""
    for known in CHIPS.values():
        if device_kind == known.name or device_kind in known.device_kinds:
            return known
    kinds = sorted(kind for known in CHIPS.values() for kind in (known.name, *known.device_kinds))
    raise ValueError(f"device_kind={device_kind!r} is not a TPU known here; known: {', '.join(kinds)}")


def is_tpu(device_kind: str) -> bool:
    """Whether a device kind, or a chip name of `CHIPS`, names a TPU, known here or not."""
    return device_kind.startswith("TPU") or device_kind in CHIPS
