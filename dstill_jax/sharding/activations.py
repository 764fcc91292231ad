"""The mesh a computation is traced under, and constraints on its activations.

`use_mesh` is entered inside the traced function, so one function can be compiled for several meshes in one process.
"""

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array

from dstill_jax.sharding.rules import Logical, to_spec
from pallas_kernels.chips import is_tpu
from pallas_kernels.dispatch import default_device_kind


class ActiveMesh(NamedTuple):
    mesh: Mesh
    split_rows: bool = False


_active: contextvars.ContextVar[ActiveMesh | None] = contextvars.ContextVar("active_mesh", default=None)


@contextlib.contextmanager
def use_mesh(mesh: Mesh | None, *, split_rows: bool = False) -> Iterator[None]:
    """Within it, constraints and sharded products apply; None switches them off."""
    token = _active.set(None if mesh is None else ActiveMesh(mesh, split_rows))
    try:
        yield
    finally:
        _active.reset(token)


def active_mesh() -> ActiveMesh | None:
    """The mesh in use, or None on one device."""
    return _active.get()


def on_tpu() -> bool:
    """Whether what is traced is for TPUs: the devices of the mesh in use, attached or not, or the default one."""
    active = _active.get()
    return is_tpu(default_device_kind() if active is None else active.mesh.devices.flat[0].device_kind)


def constrain(x: Array, *logical: str | None) -> Array:
    """`x`, spread as its logical axes say; axes not named are whole on every device. Without a mesh: `x`."""
    active = _active.get()
    if active is None:
        return x
    spec = to_spec((*logical, *(None,) * (x.ndim - len(logical))), split_rows=active.split_rows)
    return jax.lax.with_sharding_constraint(x, NamedSharding(active.mesh, spec))


def local_shards(function: Callable[..., Any], in_axes: Any, out_axes: Any) -> Callable[..., Any]:
    """`function` run on each device's share; `in_axes` and `out_axes` are pytrees of logical axes (tuples).

    Only with an active mesh. A None leaf of an argument must have None there, too.
    """
    active = _active.get()
    assert active is not None, "local_shards is for sharded computations"

    def specs(axes: Any) -> Any:
        return jax.tree.map(lambda a: to_spec(a, split_rows=active.split_rows), axes, is_leaf=_is_logical)

    # Replication over unused axes is by construction (every collective is written out), not inferred.
    return jax.shard_map(
        function, mesh=active.mesh, in_specs=specs(in_axes), out_specs=specs(out_axes), check_vma=False
    )


def _is_logical(x: Any) -> bool:
    return type(x) is tuple and all(a is None or isinstance(a, str) for a in x)


def logical_rows(rank: int, *last: str | None) -> Logical:
    """Axes of an activation [batch, tokens or anchors, ...]; `last` names its final axes."""
    first: Logical = ("batch", "seq") if rank - len(last) > 1 else ("batch",)
    return (*first, *(None,) * (rank - len(first) - len(last)), *last)
