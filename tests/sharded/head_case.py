"""The head on shares of a mesh against one device."""

import jax
import jax.numpy as jnp
import numpy as np

from dstill_jax.losses.head import SlotInputs, slot_choices, slot_losses
from dstill_jax.sharding import MeshConfig, build_mesh, use_mesh
from pallas_kernels.fused_head_loss import HeadShares, HeadTiles, Term, fused_head_loss


def head_on_shares(mesh: dict) -> dict[str, float]:
    """Largest differences of every head loss, its gradient and the choices on a mesh from those on one device.

    Tiles do not divide a device's columns, and on most meshes not its rows: several groups, an early last tile.
    """
    random = np.random.default_rng(1)
    shape, D, V = (8, 8, 3), 16, 80
    hidden, teacher, target = random.normal(size=(3, *shape, D)).astype(np.float32)
    head = random.normal(size=(D, V)).astype(np.float32)
    labels, hard = random.integers(-1, V, (2, *shape)).astype(np.int32)
    cotangents = random.normal(size=(5, *shape)).astype(np.float32)
    banned = (np.arange(V) % 7 == 0) | (np.arange(V) < 12)  # all columns of some shares

    def everything(hidden, head, direction, tiles):
        def total(hidden):
            inputs = SlotInputs(labels, hard, teacher, target)
            losses = slot_losses(
                hidden, inputs, head, kl_direction=direction, target_kl=True, target_l1=True, tiles=tiles
            )
            return sum((c * x).sum() for c, x in zip(cotangents, losses, strict=False)), losses

        gradient, losses = jax.grad(total, has_aux=True)(hidden)
        # Small whole numbers: exact, and ties among the shares.
        best, sure = slot_choices(jnp.round(hidden), jnp.round(head), jnp.asarray(banned), tiles)
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
            most[name] = float(np.maximum(most.get(name, 0.0), gap))  # NaN stays
    return most


def op_on_shares() -> dict[str, float]:
    """Largest differences of the operation from the whole head's, weights and the head's gradient with it.

    Columns over both axes and rows over one; all devices with the same rows; columns over one axis only.
    """
    random = np.random.default_rng(2)
    R, D, V = 24, 6, 32
    hidden, other = random.normal(size=(2, R, D)).astype(np.float32)
    head = random.normal(size=(D, V)).astype(np.float32)
    label = random.integers(-1, V, R).astype(np.int32)
    weights = random.integers(0, 3, R).astype(np.float32)
    cotangents = random.normal(size=(4, R)).astype(np.float32)
    terms = (Term("ce"), Term("kl_forward"), Term("kl_reverse"), Term("l1"))
    mesh, P = build_mesh(MeshConfig(fsdp=2, tensor=4)), jax.sharding.PartitionSpec

    def compare(shares, rows, columns):
        def losses(hidden, head, other, label, weights, **options):
            return jnp.stack(
                fused_head_loss(
                    hidden,
                    head,
                    terms=terms,
                    labels=(label,),
                    others=(other,),
                    weights=weights,
                    head_gradient=True,
                    **options,
                ).values
            )

        def local(*arguments):
            return losses(*arguments, shares=shares, block_sizes=HeadTiles(10, 3))

        spread = jax.shard_map(
            local, mesh=mesh, in_specs=(rows, columns, rows, rows, rows), out_specs=P(None, *rows), check_vma=False
        )

        def results(function):
            def total(*arguments):
                values = function(*arguments)
                return (values * cotangents).sum(), values

            return jax.jit(jax.value_and_grad(total, (0, 1, 4), has_aux=True))(hidden, head, other, label, weights)

        gaps = jax.tree.map(
            lambda a, b: float(jnp.abs(a - b).max() / (1 + jnp.abs(a).max())), results(losses), results(spread)
        )
        return float(np.max(jax.tree.leaves(gaps)))

    both = ("fsdp", "tensor")
    return {
        "both axes, rows over one": compare(HeadShares(both, "fsdp"), P("fsdp"), P(None, both)),
        "both axes, the same rows": compare(HeadShares(both), P(), P(None, both)),
        "one axis, rows over the other": compare(HeadShares(("tensor",)), P("fsdp"), P(None, "tensor")),
    }
