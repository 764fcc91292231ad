"""Weights straight from their files to the devices of a mesh: a process reads the byte ranges of its own devices.

Called by `load`. Nothing larger than one device's share of one tensor is held on the host (a few megabytes more where
rows are cut into short pieces).
"""

import jax
import numpy as np

from dstill_jax.dims import Params
from dstill_jax.errors import UserError
from dstill_jax.sharding.rules import spec_of
from dstill_jax.weights.names import TensorEntry, set_leaf
from dstill_jax.weights.safetensors_io import WeightFiles, aligned_empty

Index = tuple[slice, ...]


def read_sharded(
    files: WeightFiles, entries: list[TensorEntry], dtype: np.dtype, stacked: bool, mesh: jax.sharding.Mesh
) -> Params:
    """The parameter tree on a mesh; layout as `load.read_params`.

    Raises UserError when a parameter has no sharding rule or does not divide over the mesh.
    """
    groups: dict[tuple[str, ...], list[TensorEntry]] = {}
    for entry in entries:
        groups.setdefault(entry.tree_path(stacked), []).append(entry)
    params: Params = {}
    for path, group in groups.items():
        over_layers = stacked and group[0].layer is not None
        shape = (len(group), *group[0].tree_shape) if over_layers else group[0].tree_shape
        sharding = jax.sharding.NamedSharding(mesh, spec_of("/".join(path), shape, mesh))
        set_leaf(params, path, _place(files, group, dtype, shape, sharding, over_layers))
    return params


def to_tree_layout(value: np.ndarray, entry: TensorEntry, dtype: np.dtype) -> np.ndarray:
    """A tensor, or a part of one, as the tree holds it: matrices [in, out], cast.

    Raises UserError when a number does not fit into float16.
    """
    if value.dtype == dtype and not entry.transpose:
        return value
    result = aligned_empty(value.shape[::-1] if entry.transpose else value.shape, dtype)
    with np.errstate(over="ignore"):
        np.copyto(result, value.T if entry.transpose else value, casting="unsafe")
    if dtype == np.float16 and value.dtype != dtype and not np.isfinite(result).all():
        raise UserError(f"{entry.name} does not fit into float16; load it as bfloat16 or float32")
    return result


def _place(
    files: WeightFiles,
    group: list[TensorEntry],
    dtype: np.dtype,
    shape: tuple[int, ...],
    sharding: jax.sharding.NamedSharding,
    over_layers: bool,
) -> jax.Array:
    # Devices that hold the same share are served from one read; a share goes as soon as the last of them has it.
    waiting: dict[tuple, int] = {}
    places = sharding.addressable_devices_indices_map(shape)
    for index in places.values():
        key = _key(index, shape)
        waiting[key] = waiting.get(key, 0) + 1
    kept: dict[tuple, np.ndarray] = {}
    pieces = []
    for device, index in places.items():
        key = _key(index, shape)
        if key not in kept:
            kept[key] = _read_share(files, group, dtype, index, over_layers)
        pieces.append(jax.device_put(kept[key], device))
        waiting[key] -= 1
        if not waiting[key]:
            del kept[key]
    return jax.make_array_from_single_device_arrays(shape, sharding, pieces)


def _key(index: Index, shape: tuple[int, ...]) -> tuple:
    return tuple(s.indices(size)[:2] for s, size in zip(index, shape, strict=True))


def _read_share(
    files: WeightFiles, group: list[TensorEntry], dtype: np.dtype, index: Index, over_layers: bool
) -> np.ndarray:
    if not over_layers:
        return to_tree_layout(_read_part(files, group[0], index), group[0], dtype)
    layers = group[index[0]]
    first = to_tree_layout(_read_part(files, layers[0], index[1:]), layers[0], dtype)
    share = aligned_empty((len(layers), *first.shape), dtype)
    share[0] = first
    for i, entry in enumerate(layers[1:], start=1):
        share[i] = to_tree_layout(_read_part(files, entry, index[1:]), entry, dtype)
    return share


def _read_part(files: WeightFiles, entry: TensorEntry, index: Index) -> np.ndarray:
    """The part of a stored tensor that `index`, in tree coordinates, asks for."""
    if len(index) == 1:
        return files.read_slice(entry.name, index[0])
    rows, columns = index[::-1] if entry.transpose else index
    return files.read_slice(entry.name, rows, columns)
