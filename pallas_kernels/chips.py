"""The TPU generations a kernel is written and compiled for: what block-size choices and time bounds need to know.

Everything is per TensorCore, from the published figures that jax's own `tpu_info` also carries. Looked up by the
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

    @property
    def ridge_rows(self) -> float:
        """Rows of activations that one pass over bf16 weights carries before arithmetic, not HBM, sets the time."""
        return self.bf16_flops_per_second / self.hbm_bytes_per_second

    def mxu_cycles(self, m: int, k: int, n: int) -> float:
        """Fewest cycles of a bf16 product [m, k] x [k, n] with every lane of every MXU busy."""
        return m * k * n / (self.mxus * self.mxu_size**2)


_MIB = 1024 * 1024

CHIPS: dict[str, Chip] = {
    chip.name: chip
    for chip in (
        Chip("v4", ("TPU v4",), "v4:2x2x1", 128, 4, 16 * _MIB, 17_200_000_000, 6.15e11, 1.375e14, False),
        Chip("v5e", ("TPU v5 lite", "TPU v5e"), "v5e:2x2", 128, 4, 128 * _MIB, 17_200_000_000, 8.2e11, 1.97e14, False),
        Chip("v5p", ("TPU v5", "TPU v5p"), "v5p:2x2x1", 128, 4, 64 * _MIB, 51_500_000_000, 1.23e12, 2.295e14, False),
        Chip("v6e", ("TPU v6 lite", "TPU v6e"), "v6e:2x2", 256, 2, 128 * _MIB, 34_400_000_000, 1.64e12, 9.2e14, True),
        Chip("tpu7x", ("TPU7x",), "tpu7x:2x2x1", 256, 2, 64 * _MIB, 103_000_000_000, 3.7e12, 1.155e15, True),
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
