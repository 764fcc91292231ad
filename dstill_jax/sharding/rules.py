"""The rule table: parameter path -> logical axes -> mesh axes. One table for weights, optimiser state, batches, caches.

Used when arrays are created or loaded (`tree_shardings`), and by `weights.py` for what a product needs.
"""

import re
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dstill_jax.errors import UserError

Logical = tuple[str | None, ...]

_PATHS: tuple[tuple[str, Logical], ...] = (
    # Projections, [in, out]. In optimiser state and averages the same paths come after a prefix.
    (r"(q_proj|k_proj|v_proj)/kernel", ("embed", "heads")),
    (r"(q_proj|k_proj|v_proj)/bias", ("heads",)),
    (r"o_proj/kernel", ("heads", "embed")),
    (r"o_proj/bias", (None,)),
    (r"(gate_proj|up_proj)/kernel", ("embed", "mlp")),
    (r"down_proj/kernel", ("mlp", "embed")),
    (r"fc/kernel", ("embed", "mlp")),
    # Norm scales are a few kilobytes each: everywhere whole.
    (r"(input_layernorm|post_attention_layernorm|norm|hidden_norm|q_norm|k_norm)/scale", (None,)),
    # The table is shared out by columns, so that a device looks up its columns of every token; the head by vocabulary.
    (r"embed/embedding|embedding", (None, "table_columns")),
    (r"head/kernel|head", (None, "vocab")),
    (r"vocabulary|tap_scale", (None,)),
    # Train state.
    (r"step|updates|count", ()),
    (r"rng|ns_coeffs", (None,)),
    # Batches.
    (r"tokens|loss_mask|document_ids|positions", ("batch", "seq")),
    (r"features", ("batch", "seq", None)),
    # Key/value caches, [L, B, G, E, C] and [L, B, G, C, E]; context keys and values, without the L.
    (r"keys/\d+|values/\d+", (None, "batch", "kv_heads", None, None)),
    (r"context/\d+/[01]", ("batch", "kv_heads", None, None)),
)
_COMPILED = tuple((re.compile(rf"(?:.*/)?(?:{pattern})"), axes) for pattern, axes in _PATHS)

_LAYERS = re.compile(r"(?:.*/)?layers/")
"""Parameters of scanned layers carry one more axis, the layer, in front."""

_MESH_AXES: dict[str, tuple[str, ...]] = {
    "batch": ("dcn_data", "data", "fsdp"),
    "seq": (),
    "anchors": (),
    "embed": ("fsdp",),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "mlp": ("tensor",),
    "vocab": ("fsdp", "tensor"),
    "table_columns": ("fsdp", "tensor"),
}
_SPLIT_ROWS = {"batch": ("dcn_data", "data"), "seq": ("fsdp",), "anchors": ("fsdp",)}
"""Instead of the above where a row is longer than a device's share."""


def logical_axes(path: str, rank: int) -> Logical:
    """The logical axis of each dimension of the array at `path` ("a/b/c").

    Raises UserError when no rule matches, or the rule is of another rank; both are named.
    """
    for pattern, axes in _COMPILED:
        if pattern.fullmatch(path):
            stacked = _LAYERS.match(path) is not None
            found = (None, *axes) if stacked else axes
            if len(found) != rank:
                raise UserError(f"{path} has {rank} axes, its sharding rule {pattern.pattern} describes {found}")
            return found
    raise UserError(f"no sharding rule matches {path}; add its name to the table in dstill_jax/sharding/rules.py")


def mesh_axes(name: str | None, *, split_rows: bool = False) -> tuple[str, ...]:
    """The mesh axes a logical axis is spread over."""
    if name is None:
        return ()
    if split_rows and name in _SPLIT_ROWS:
        return _SPLIT_ROWS[name]
    if name not in _MESH_AXES:
        raise UserError(f"no logical axis is called {name!r}; known: {', '.join(_MESH_AXES)}")
    return _MESH_AXES[name]


def to_spec(logical: Logical, *, split_rows: bool = False) -> PartitionSpec:
    """Logical axes as a PartitionSpec."""
    axes = [mesh_axes(name, split_rows=split_rows) for name in logical]
    return PartitionSpec(*(None if not a else a[0] if len(a) == 1 else a for a in axes))


def spec_of(path: str, shape: tuple[int, ...], mesh: Mesh, *, split_rows: bool = False) -> PartitionSpec:
    """The PartitionSpec of one array.

    Raises UserError naming the path, or the path, the dimension and the mesh axes that do not divide it.
    """
    logical = logical_axes(path, len(shape))
    for dimension, (name, size) in enumerate(zip(logical, shape, strict=True)):
        axes = mesh_axes(name, split_rows=split_rows)
        shares = 1
        for axis in axes:
            shares *= mesh.shape[axis]
        if size % shares:
            sizes = " x ".join(f"{axis}={mesh.shape[axis]}" for axis in axes)
            raise UserError(
                f"{path}: axis {dimension} ({name}) of {size} does not divide over {sizes} = {shares} shares;"
                " choose mesh sizes whose product divides it"
            )
    return to_spec(logical, split_rows=split_rows)


def tree_shardings(tree: Any, mesh: Mesh, prefix: str = "", *, split_rows: bool = False) -> Any:
    """A pytree of NamedShardings like `tree` (arrays or shapes). Errors as `spec_of`."""

    def place(path: jax.tree_util.KeyPath, leaf: Any) -> NamedSharding:
        name = prefix + jax.tree_util.keystr(path, simple=True, separator="/")
        return NamedSharding(mesh, spec_of(name, tuple(leaf.shape), mesh, split_rows=split_rows))

    return jax.tree_util.tree_map_with_path(place, tree)


def batch_sharding(mesh: Mesh, *, split_rows: bool = False) -> NamedSharding:
    """Rows of a batch: the leading axis of every array (and the token axis with `split_rows`)."""
    return NamedSharding(mesh, to_spec(("batch", "seq") if split_rows else ("batch",), split_rows=split_rows))
