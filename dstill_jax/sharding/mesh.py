"""The device mesh of a run: four named axes, from a validated configuration.

Built by `runs` and `planning`; everything else asks `activations.active_mesh`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from dstill_jax.config import DrafterConfig, TargetConfig
from dstill_jax.errors import UserError

AXES = ("dcn_data", "data", "fsdp", "tensor")


@dataclass(frozen=True)
class MeshConfig:
    """How many devices each axis has. All ones: no mesh, one device.

    Rows of a batch are spread over `dcn_data`, `data` and `fsdp`; weights and optimiser state over `fsdp` and `tensor`.
    """

    data: int = 1  # copies of the weights within a slice
    fsdp: int = 1  # shares of the weights; gathered layer by layer over ICI when they are used
    tensor: int = 1  # shares of heads, MLP columns and vocabulary; activations are summed over ICI in every layer
    dcn_data: int = 1  # slices; only gradient sums cross between them
    split_rows: bool = (
        False  # rows longer than a chip's share: tokens and anchors of a row are spread over `fsdp` instead
    )

    def __post_init__(self) -> None:
        for name in AXES:
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise UserError(f"MeshConfig.{name}={value!r} must be a whole number of devices, at least 1")
        if not isinstance(self.split_rows, bool):
            raise UserError(f"MeshConfig.split_rows={self.split_rows!r} must be True or False")
        if self.split_rows and self.fsdp == 1:
            raise UserError("MeshConfig.split_rows=True spreads rows over fsdp, which has 1 device; raise fsdp")

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Sizes in the order of `AXES`."""
        return self.dcn_data, self.data, self.fsdp, self.tensor

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def row_shares(self) -> int:
        """Into how many parts the rows of a batch are dealt."""
        return self.dcn_data * self.data * (1 if self.split_rows else self.fsdp)

    def describe(self) -> str:
        named = [f"{name}={size}" for name, size in zip(AXES, self.shape, strict=True) if size > 1]
        return ", ".join(named + ["split_rows"] * self.split_rows) or "one device"


def build_mesh(config: MeshConfig, devices: Sequence[Any] | None = None) -> Mesh:
    """The mesh over all devices (or those given), laid out so that the inner axes are neighbours on the torus.

    Raises UserError when the number of devices is not the product of the axes, and when they lie in several TPU slices
    that `dcn_data` does not tell apart.
    """
    devices = list(jax.devices() if devices is None else devices)
    if len(devices) != config.size:
        raise UserError(
            f"the mesh ({config.describe()}) has {config.size} places, but there are {len(devices)} devices;"
            f" make the product of mesh.{', mesh.'.join(AXES)} equal {len(devices)}"
        )
    slices = len({getattr(d, "slice_index", 0) for d in devices})  # simulated devices have no such number
    if slices > 1 and slices != config.dcn_data and devices[0].platform == "tpu":
        # jax would refuse some of these layouts without saying why, and let others mix slices within an axis.
        raise UserError(
            f"mesh.dcn_data={config.dcn_data}, but the devices are in {slices} slices; set mesh.dcn_data={slices}"
        )
    if config.dcn_data > 1 and slices == config.dcn_data:
        inner = (1, *config.shape[1:])
        outer = (config.dcn_data, 1, 1, 1)
        array = mesh_utils.create_hybrid_device_mesh(inner, outer, devices, allow_split_physical_axes=True)
    elif devices[0].platform == "tpu":
        array = mesh_utils.create_device_mesh(config.shape, devices, allow_split_physical_axes=True)
    else:
        array = np.asarray(devices).reshape(config.shape)
    return Mesh(array, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def check_model_divides(config: MeshConfig, model: TargetConfig | DrafterConfig) -> None:
    """Whole heads on each device: the rule table sees heads and their size as one axis, so it cannot tell.

    Raises UserError naming the field, the axis and the sizes that fit.
    """
    for name in ("num_heads", "num_kv_heads"):
        heads = getattr(model, name)
        if heads % config.tensor:
            fitting = [n for n in range(1, heads + 1) if heads % n == 0]
            raise UserError(
                f"{type(model).__name__}.{name}={heads} does not divide over mesh axis tensor={config.tensor};"
                f" use one of {', '.join(map(str, fitting))}"
            )


def check_rows_divide(config: MeshConfig, batch_size: int, seq_len: int, accumulate_steps: int) -> None:
    """Equal shares of every micro-batch on each device.

    Raises UserError naming what does not divide.
    """
    rows = config.row_shares * accumulate_steps
    if batch_size % rows:
        raise UserError(
            f"batches.batch_size={batch_size} does not divide into {config.row_shares} shares of the mesh"
            f" ({config.describe()}) times train.accumulate_steps={accumulate_steps}; use a multiple of {rows}"
        )
    if config.split_rows and seq_len % config.fsdp:
        raise UserError(f"batches.seq_len={seq_len} does not divide over mesh axis fsdp={config.fsdp} (split_rows)")
