"""A head whose columns devices share: what they tell each other. On one device every function hands back its argument."""

from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import Array

Tree = TypeVar("Tree")
_NO_COLUMN = jnp.iinfo(jnp.int32).max


@dataclass(frozen=True)
class HeadShares:
    """How the mesh axes of a surrounding `jax.shard_map(..., check_vma=False)` share the work.

    Every device holds as many columns of the head. Rows come as each device has them: where they are dealt over one of the
    axes of the columns, too, a group of rows is gathered over it, meets all columns, and results go back to the owners.
    The head is never gathered, logits never leave their device.

    Attributes:
      columns: axes over which the columns are dealt, in order, the first changing slowest.
      rows: the one of them over which rows are dealt; None: all these devices have the same rows.

    Raises:
      ValueError: `columns` is not a tuple of different names, or `rows` not one of them.
    """

    columns: tuple[str, ...] = ()
    rows: str | None = None

    def __post_init__(self) -> None:
        names = self.columns
        if not isinstance(names, tuple) or not all(isinstance(n, str) for n in names) or len(set(names)) < len(names):
            raise ValueError(f"columns={names!r} must be a tuple of different mesh axes, such as ('fsdp', 'tensor')")
        if self.rows is not None and self.rows not in names:
            raise ValueError(f"rows={self.rows!r} must be one of columns={names}")

    def check_bound(self) -> None:
        """ValueError unless this is called where a `shard_map` without `check_vma` binds the axes."""
        for name in self.columns:
            try:
                index = jax.lax.axis_index(name)
            except NameError as error:
                raise ValueError(f"{self}: {error}; call it inside a jax.shard_map over these axes") from error
            aval = jax.typeof(index)
            if getattr(getattr(aval, "manual_axis_type", None), "varying", getattr(aval, "vma", None)):
                raise ValueError(f"{self} needs jax.shard_map(..., check_vma=False): it writes its collectives itself")

    @property
    def groups(self) -> int:
        """Devices whose rows are gathered."""
        return 1 if self.rows is None else jax.lax.axis_size(self.rows)

    @property
    def holders(self) -> int:
        """Devices that hold the columns of a head."""
        return jax.lax.axis_size(self.columns) if self.columns else 1

    def first_column(self, width: int) -> Array | int:
        """Of this device, which has `width` of them."""
        return jax.lax.axis_index(self.columns) * width if self.columns else 0

    def gather(self, tree: Tree) -> Tree:
        """Rows of all owners, along the leading axis."""
        if self.rows is None:
            return tree
        return jax.tree.map(lambda x: jax.lax.all_gather(x, self.rows, axis=0, tiled=True), tree)

    def own(self, tree: Tree) -> Tree:
        """Of gathered rows, this device's."""
        if self.rows is None:
            return tree

        def one(x: Array) -> Array:
            count = x.shape[0] // self.groups
            return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(self.rows) * count, count)

        return jax.tree.map(one, tree)

    def own_sum(self, rows: Array) -> Array:
        """This device's rows of a sum over the owners, in their dtype. Over the other axes shard_map's transpose adds the
        parts, in the dtype of the rows' gradient."""
        return rows if self.rows is None else jax.lax.psum_scatter(rows, self.rows, scatter_dimension=0, tiled=True)

    def whole_cotangents(self, tree: Any) -> Any:
        """Cotangents of results that devices of the other axes hold alike, each its part of them."""
        others = tuple(axis for axis in self.columns if axis != self.rows)
        return jax.lax.psum(tree, others) if others else tree

    def sum(self, tree: Tree) -> Tree:
        return jax.lax.psum(tree, self.columns) if self.columns else tree

    def max(self, tree: Tree) -> Tree:
        return jax.lax.pmax(tree, self.columns) if self.columns else tree

    def best(self, top: Array, column: Array, whole_top: Array, width: int) -> Array:
        """The first of the largest columns of the whole head, from each device's largest value and its column."""
        if not self.columns:
            return column
        candidate = jnp.where(top == whole_top, column + self.first_column(width), _NO_COLUMN)
        column = jax.lax.pmin(candidate, self.columns)
        return jnp.where(column == _NO_COLUMN, 0, column)  # a row of NaN, as a whole head has it
