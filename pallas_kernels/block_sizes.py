"""How block sizes are chosen, the same way by every operation: argument, else tuned JSON of the chip, else heuristic.

A block-size class is a frozen dataclass of ints that validates itself; `check_multiple` and `check_vmem` word its errors.
`tuning/<op>.json` maps chip name -> shape key -> sizes; its sizes come from compiled schedules, see the experiments.
"""

import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from pallas_kernels.chips import CHIPS, Chip, chip

Sizes = TypeVar("Sizes")

VMEM_SHARE = 0.75  # of the nominal capacity: the compiler keeps some for itself (64.00 MiB asked, 63.94 offered)
LANES = 128
HEURISTIC_CHIP = "v5e"  # block sizes used when the kernel is interpreted on a device that is not a TPU

TUNING = Path(__file__).parent / "tuning"


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


def check_multiple(name: str, value: int, multiple: int) -> None:
    """ValueError unless `value` is a positive multiple."""
    if value <= 0 or value % multiple:
        raise ValueError(f"{name}={value} must be a positive multiple of {multiple}")


def check_vmem(name: str, needed: int, device_kind: str) -> None:
    """ValueError when a kernel's buffers exceed what the compiler offers on this chip."""
    facts = known_chip(device_kind)
    if needed > VMEM_SHARE * facts.vmem_bytes:
        raise ValueError(
            f"{name} needs {needed / 2**20:.1f} MiB of VMEM, {facts.name} offers "
            f"{VMEM_SHARE * facts.vmem_bytes / 2**20:.1f} MiB; pass smaller block sizes"
        )


def known_chip(device_kind: str) -> Chip:
    """Facts of a TPU; of `HEURISTIC_CHIP` for other devices, where kernels are only simulated."""
    known = device_kind.startswith("TPU") or device_kind in CHIPS
    return chip(device_kind) if known else CHIPS[HEURISTIC_CHIP]


@functools.cache
def _tuned(op: str) -> dict[str, dict[str, dict[str, int]]]:
    path = TUNING / f"{op}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def choose(
    op: str,
    sizes_class: Callable[..., Sizes],
    argument: Sizes | None,
    device_kind: str,
    shape_key: str,
    heuristic: Callable[[Chip], Sizes],
) -> Sizes:
    """The block sizes that run: `argument`, else `tuning/<op>.json` at [chip][shape_key], else `heuristic(chip)`."""
    if argument is not None:
        if not dataclasses.is_dataclass(argument):
            raise ValueError(f"block_sizes={argument!r} must be a {sizes_class}")
        return argument
    facts = known_chip(device_kind)
    tuned = _tuned(op).get(facts.name, {}).get(shape_key)
    return heuristic(facts) if tuned is None else sizes_class(**tuned)
