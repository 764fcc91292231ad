"""The head on shares of a mesh against one device."""

import jax
import jax.numpy as jnp
import numpy as np

from dstill_jax.losses.head import SlotInputs, slot_choices, slot_losses
from dstill_jax.sharding import MeshConfig, build_mesh, use_mesh
from pallas_kernels.fused_head_loss import HeadTiles


def head_on_shares(mesh: dict) -> dict[str, float]:
    """Largest differences of every head loss, its gradient and the choices on a mesh from those on one device.

    Tiles divide neither a device's rows nor its columns: several groups of rows, an early last tile.
    """
    random = np.random.default_rng(1)
    shape, D, V = (8, 8, 3), 16, 80
    hidden, teacher, target = random.normal(size=(3, *shape, D)).astype(np.float32)
    head = random.normal(size=(D, V)).astype(np.float32)
    labels, hard = random.integers(-1, V, (2, *shape)).astype(np.int32)
    cotangents = random.normal(size=(5, *shape)).astype(np.float32)
    banned = np.arange(V) % 7 == 0

    def everything(hidden, head, direction, tiles):
        def total(hidden):
            inputs = SlotInputs(labels, hard, teacher, target)
            losses = slot_losses(
                hidden, inputs, head, kl_direction=direction, target_kl=True, target_l1=True, tiles=tiles
            )
            return sum((c * x).sum() for c, x in zip(cotangents, losses, strict=False)), losses

        gradient, losses = jax.grad(total, has_aux=True)(hidden)
        best, sure = slot_choices(hidden, head, jnp.asarray(banned), tiles)
        found = {**losses._asdict(), "gradient": gradient, "best": best, "sure": sure}
        return jax.tree.map(lambda x: x.astype(jnp.float32), found)

    def on(devices, direction, tiles):
        with use_mesh(devices):
            return jax.jit(lambda hidden, head: everything(hidden, head, direction, tiles))(hidden, head)

    most: dict[str, float] = {}
    for direction in ("forward", "reverse"):
        one = on(None, direction, None)
        shared = on(build_mesh(MeshConfig(**mesh)), direction, HeadTiles(20, 7))
        for name, value in one.items():
            gap = float(jnp.abs(value - shared[name]).max() / (1 + jnp.abs(value).max()))
            most[name] = max(most.get(name, 0.0), gap)
    return most
