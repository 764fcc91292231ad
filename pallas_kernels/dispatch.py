"""Which implementation of an operation runs. Every `api` calls `resolve` once and nothing else decides."""

from typing import Literal

import jax

from pallas_kernels.chips import is_tpu

Implementation = Literal["auto", "pallas", "xla", "reference"]
IMPLEMENTATIONS: tuple[Implementation, ...] = ("auto", "pallas", "xla", "reference")


def default_device_kind() -> str:
    """Kind of the device that the computation is traced for; the only place that asks jax."""
    if (abstract := jax.sharding.get_abstract_mesh().abstract_device) is not None:
        return abstract.device_kind
    if (device := jax.config.jax_default_device) is not None and not isinstance(device, str):
        return device.device_kind
    return jax.devices(device)[0].device_kind


def resolve(implementation: str, device_kind: str | None, *, interpret: bool = False) -> tuple[str, str]:
    """(implementation that runs, device kind it is tuned for).

    "auto" is Pallas on a TPU and XLA elsewhere. A named implementation is that one or an error: it never falls back.

    Args:
      device_kind: e.g. "TPU v5 lite"; None asks jax for the default device.
      interpret: the Pallas kernel is simulated, so any device will do; "auto" still means XLA off a TPU.

    Raises:
      ValueError: unknown name, or "pallas" on a device that is not a TPU without `interpret`.
    """
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation={implementation!r} must be one of {', '.join(IMPLEMENTATIONS)}")
    kind = default_device_kind() if device_kind is None else device_kind
    if implementation == "auto":
        return ("pallas" if is_tpu(kind) else "xla"), kind
    if implementation == "pallas" and not is_tpu(kind) and not interpret:
        raise ValueError(
            f"implementation='pallas' needs a TPU, got device_kind={kind!r}; "
            "pass interpret=pltpu.InterpretParams() to simulate it, or implementation='auto'"
        )
    return implementation, kind
