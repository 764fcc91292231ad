"""Weights straight from their files to the devices of a mesh: a process reads the byte ranges of its own devices, once.

Called by `load`. Where the devices' parts of a row are shorter than what a disk delivers, whole rows are read and cut. The
host holds 4 MB of a file and, of one parameter at a time, one device's share: of parameters that are cut from whole
rows, the shares of all its devices.
"""

from typing import NamedTuple

import jax
import numpy as np

from dstill_jax.dims import Params
from dstill_jax.errors import UserError
from dstill_jax.sharding.rules import spec_of
from dstill_jax.weights.names import TensorEntry, set_leaf
from dstill_jax.weights.safetensors_io import WeightFiles, aligned_empty


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
    """A tensor as the tree holds it: matrices [in, out], cast.

    Raises UserError when a number does not fit into float16.
    """
    if value.dtype == dtype and not entry.transpose:
        return value
    result = aligned_empty(entry.tree_shape, dtype)
    _cast_into(result, value.T if entry.transpose else value, entry.name)
    return result


def _cast_into(out: np.ndarray, value: np.ndarray, name: str) -> None:
    with np.errstate(over="ignore"):
        np.copyto(out, value, casting="unsafe")
    if out.dtype == np.float16 and value.dtype != out.dtype and not np.isfinite(out).all():
        raise UserError(f"{name} does not fit into float16; load it as bfloat16 or float32")


class _Share(NamedTuple):
    """The part of one parameter that a device holds, as (first, end) in its stored tensors."""

    layers: tuple[int, int]  # which of the parameter's tensors
    rows: tuple[int, int]
    columns: tuple[int, int]  # of a vector (0, 1)


def _place(
    files: WeightFiles,
    group: list[TensorEntry],
    dtype: np.dtype,
    shape: tuple[int, ...],
    sharding: jax.sharding.NamedSharding,
    over_layers: bool,
) -> jax.Array:
    # Devices that hold the same share are served from one read.
    places = sharding.addressable_devices_indices_map(shape)
    holders: dict[_Share, list[jax.Device]] = {}
    for device, index in places.items():
        ranges = [s.indices(size)[:2] for s, size in zip(index, shape, strict=True)]
        layers = ranges.pop(0) if over_layers else (0, 1)
        rows, columns = [*ranges, (0, 1)] if len(ranges) == 1 else ranges[::-1] if group[0].transpose else ranges
        holders.setdefault(_Share(layers, rows, columns), []).append(device)
    # Shares that are short pieces of the same rows are cut from one read of these rows, and wait for each other.
    passes: dict[tuple, list[_Share]] = {}
    for share in holders:
        columns = None if files.reads_whole_rows(group[0].name, share.columns) else share.columns
        passes.setdefault((share.layers, share.rows, columns), []).append(share)
    pieces = {}
    for shares in passes.values():
        arrays = [aligned_empty(sharding.shard_shape(shape), dtype) for _ in shares]
        _fill(files, group, shares, arrays)
        for share, array in zip(shares, arrays, strict=True):
            for device in holders[share]:
                pieces[device] = jax.device_put(array, device)
    return jax.make_array_from_single_device_arrays(shape, sharding, [pieces[device] for device in places])


def _fill(files: WeightFiles, group: list[TensorEntry], shares: list[_Share], arrays: list[np.ndarray]) -> None:
    """Each of the arrays with its share of a parameter; the shares differ in their columns only."""
    layers, rows = shares[0].layers, shares[0].rows
    left, right = min(share.columns[0] for share in shares), max(share.columns[1] for share in shares)
    parts = []  # of a block, and where they go: views [layers, rows, columns]
    for share, array in zip(shares, arrays, strict=True):
        first, end = share.columns
        if group[0].transpose:
            view = array.reshape(-1, end - first, rows[1] - rows[0]).swapaxes(1, 2)
        else:
            view = array.reshape(-1, rows[1] - rows[0], end - first)
        parts.append((slice(first - left, end - left), view))
    for i, entry in enumerate(group[slice(*layers)]):
        for at, block in files.read_blocks(entry.name, rows, (left, right)):
            for columns, view in parts:
                _cast_into(view[i, at], block[:, columns], entry.name)
