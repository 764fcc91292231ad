"""Products with sharded weights, every collective written out: gathered for use, gradients summed and scattered.

`models/layers.py` calls `matmul` for each projection; embeddings are looked up with `rows_of_table`. Without a mesh
both are the plain expression.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dstill_jax.sharding.activations import ActiveMesh, active_mesh, local_shards, logical_rows, use_mesh
from dstill_jax.sharding.rules import Logical, logical_axes, mesh_axes

_BATCH_SUM = ("dcn_data", "data")
"""Axes that hold other rows and the same share of the weights."""


def matmul(x: Float[Array, "*batch M"], kernel: Float[Array, "M N"], path: str) -> Float[Array, "*batch N"]:
    """`x @ kernel` in x's dtype; `path` finds the kernel's rule.

    On a mesh the kernel is cast, gathered over `fsdp`, used, and dropped. Its gradient is formed and summed over devices
    in float32, whatever the compute dtype, and each device keeps its own share of it.
    """
    active = active_mesh()
    if active is None:
        # As rows: the gradient of the kernel contracts over all leading axes, and over several at once XLA's CPU
        # product takes twice as long.
        return (x.reshape(-1, x.shape[-1]) @ kernel.astype(x.dtype)).reshape(*x.shape[:-1], kernel.shape[-1])
    return _sharded_matmul(x, kernel, logical_axes(path, 2), active)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _sharded_matmul(x: Array, kernel: Array, axes: Logical, active: ActiveMesh) -> Array:
    del active  # the mesh in use; remembered for the backward pass, which is traced later
    return _forward(x, kernel, axes)


def _forward(x: Array, kernel: Array, axes: Logical) -> Array:
    given, made = _activation_axes(x.ndim, axes)

    def local(x: Array, kernel: Array) -> Array:
        y = x @ _gathered(kernel.astype(x.dtype), axes)
        return jax.lax.psum(y, "tensor") if _contracts_over_tensor(axes) else y

    return local_shards(local, (given, axes), made)(x, kernel)


def _vjp_forward(x: Array, kernel: Array, axes: Logical, active: ActiveMesh) -> tuple[Array, tuple[Array, Array]]:
    return _sharded_matmul(x, kernel, axes, active), (x, kernel)


def _vjp_backward(axes: Logical, active: ActiveMesh, saved: tuple[Array, Array], dy: Array) -> tuple[Array, Array]:
    x, kernel = saved
    given, made = _activation_axes(x.ndim, axes)

    def local(x: Array, kernel: Array, dy: Array) -> tuple[Array, Array]:
        dx = dy @ _gathered(kernel.astype(dy.dtype), axes).T
        if not _contracts_over_tensor(axes):
            dx = jax.lax.psum(dx, "tensor")
        rows, drows = x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])
        dkernel = jnp.einsum("rm,rn->mn", rows, drows, preferred_element_type=jnp.float32)
        dkernel = jax.lax.psum_scatter(dkernel, "fsdp", scatter_dimension=axes.index("embed"), tiled=True)
        return dx.astype(x.dtype), jax.lax.psum(dkernel, _BATCH_SUM).astype(kernel.dtype)

    with use_mesh(active.mesh, split_rows=active.split_rows):
        return local_shards(local, (given, axes, made), (given, axes))(x, kernel, dy)


_sharded_matmul.defvjp(_vjp_forward, _vjp_backward)


def _activation_axes(rank: int, axes: Logical) -> tuple[Logical, Logical]:
    """Of the input and of the output: their last axis is split where the kernel's is split over `tensor`."""
    last = [name if mesh_axes(name) == ("tensor",) else None for name in axes]
    return logical_rows(rank, last[0]), logical_rows(rank, last[1])


def _contracts_over_tensor(axes: Logical) -> bool:
    return mesh_axes(axes[0]) == ("tensor",)


def _gathered(kernel: Array, axes: Logical) -> Array:
    return jax.lax.all_gather(kernel, "fsdp", axis=axes.index("embed"), tiled=True)


def rows_of_table(table: Float[Array, "V D"], tokens: Int[Array, "B *rest"]) -> Float[Array, "B *rest D"]:
    """`table[tokens]`; the table takes no gradient.

    On a mesh each device looks up its columns of all tokens of its `fsdp` group, and the pieces change places: what
    travels is the rows asked for, never the table.
    """
    active = active_mesh()
    if active is None:
        return table[tokens]
    rows = logical_rows(tokens.ndim)

    def local(table: Array, tokens: Array) -> Array:
        wanted = jax.lax.all_gather(tokens, "fsdp")  # [fsdp, B, ...]
        found = table[wanted]  # [fsdp, B, ..., D / (fsdp x tensor)]
        found = jax.lax.all_gather(found, "tensor", axis=found.ndim - 1, tiled=True)
        found = jax.lax.all_to_all(found, "fsdp", split_axis=0, concat_axis=found.ndim - 1, tiled=True)
        return found[0]

    table = jax.lax.stop_gradient(table)
    return local_shards(local, ((None, "table_columns"), rows), (*rows, None))(table, tokens)
