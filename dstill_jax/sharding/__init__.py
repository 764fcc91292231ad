"""Where arrays live: the mesh, one rule table from parameter path to mesh axes, and constraints on activations.

Everything here works on pytrees of paths and shapes. Without a mesh (one device) every function of this package that
model code calls returns its argument, or the plain product, untouched.
"""

from dstill_jax.sharding.activations import active_mesh, constrain, local_shards, use_mesh
from dstill_jax.sharding.mesh import AXES, MeshConfig, build_mesh, check_model_divides
from dstill_jax.sharding.rules import batch_sharding, spec_of, tree_shardings
from dstill_jax.sharding.weights import matmul, rows_of_table

__all__ = [
    "AXES",
    "MeshConfig",
    "active_mesh",
    "batch_sharding",
    "build_mesh",
    "check_model_divides",
    "constrain",
    "local_shards",
    "matmul",
    "rows_of_table",
    "spec_of",
    "tree_shardings",
    "use_mesh",
]
