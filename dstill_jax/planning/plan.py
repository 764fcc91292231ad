"""Plans: one run on one slice, and the search for the settings with the best bound. Called by `dstill plan`."""

import dataclasses
from collections.abc import Callable
from typing import Any

from dstill_jax.config import DrafterConfig, TargetConfig
from dstill_jax.distill.initialise import DrafterShape
from dstill_jax.errors import UserError
from dstill_jax.models.drafter import Memory
from dstill_jax.planning.chips import Slice, parse_slice, slice_devices
from dstill_jax.planning.compile import abstract_run, compile_step, drafter_config, require_target
from dstill_jax.planning.report import plan_values
from dstill_jax.runs import RunConfig
from dstill_jax.sharding.mesh import MeshConfig


def plan(
    config: RunConfig, slice_name: str, *, shape: DrafterShape | None = None, quick: bool = False
) -> dict[str, Any]:
    """Compiles the run's train step for the slice; see `report.plan_values` for what comes back.

    A mesh of another size than the slice is fitted to it first (`fit_to_slice`). `shape` is the drafter's where the
    folder that the run goes on from is not there yet; `quick` as in `compile_step`. Features are computed in the step,
    as `dstill train` does unless the dataset stores them.

    Raises UserError: unknown slice, no libtpu, a target of unknown shape, a mesh that does not divide.
    """
    place = parse_slice(slice_name)
    devices = slice_devices(place)
    target = require_target(config.target)
    config, changed = fit_to_slice(config, place)
    return _plan(config, place, devices, target, drafter_config(config, target, shape), changed, quick)


def _plan(
    config: RunConfig,
    place: Slice,
    devices: list[Any],
    target: TargetConfig,
    drafter: DrafterConfig,
    changed: dict[str, Any],
    quick: bool,
) -> dict[str, Any]:
    run = abstract_run(config, target, drafter, devices)
    compiled = compile_step(run, place.num_slices, quick=quick)
    return plan_values(config, place, target, drafter, run, compiled, changed)


def fit_to_slice(config: RunConfig, place: Slice) -> tuple[RunConfig, dict[str, Any]]:
    """The run with its mesh resized to the slice at the same rows per device, and which fields that changed.

    `tensor` is kept, `fsdp` kept or cut to what there is (a run without a mesh takes 16, or all there are), the rest
    is `data`; several slices are `dcn_data`.

    Raises UserError when the sizes do not divide.
    """
    old, inner = config.mesh, place.num_devices // place.num_slices
    if old.size == place.num_devices and old.dcn_data == place.num_slices:
        return config, {}
    fsdp = min(16 if old.size == 1 else old.fsdp, max(1, inner // old.tensor))
    if inner % (fsdp * old.tensor):
        raise UserError(
            f"the {inner} devices of {place.name} do not divide into mesh.fsdp={fsdp} x mesh.tensor={old.tensor}"
        )
    mesh = dataclasses.replace(
        old, dcn_data=place.num_slices, data=inner // (fsdp * old.tensor), fsdp=fsdp, split_rows=old.split_rows
    )
    rows = max(1, round(config.batches.batch_size / old.row_shares)) * mesh.row_shares
    changed = {
        f"mesh.{name}": getattr(mesh, name)
        for name in ("dcn_data", "data", "fsdp")
        if getattr(mesh, name) != getattr(old, name)
    }
    if rows != config.batches.batch_size:
        changed["batches.batch_size"] = rows
    batches = dataclasses.replace(config.batches, batch_size=rows)
    return dataclasses.replace(config, mesh=mesh, batches=batches), changed


def candidates(config: RunConfig, place: Slice) -> list[tuple[RunConfig, dict[str, Any]]]:
    """What `search` tries: mesh shapes x rows per device x remat, the cheapest in memory last.

    The optimiser step keeps its number of rows where the shares divide it: fewer rows per device are micro-batches.
    """
    inner = place.num_devices // place.num_slices
    found = []
    for tensor in (1, 2, 4):
        for fsdp in sorted({min(16, inner // tensor), 32, 64}):
            if not fsdp or inner % (fsdp * tensor):
                continue
            mesh = MeshConfig(inner // (fsdp * tensor), fsdp, tensor, place.num_slices)
            for per_share in (4, 2, 1):
                for memory in (Memory(scan_layers=True), Memory(scan_layers=True, remat_layers=True)):
                    batches = dataclasses.replace(config.batches, batch_size=per_share * tensor * mesh.row_shares)
                    changed = {
                        "mesh": mesh.describe(),
                        "batches.batch_size": batches.batch_size,
                        "memory": f"remat_layers={memory.remat_layers}",
                    }
                    train = dataclasses.replace(config.train, accumulate_steps=1)
                    try:
                        made = dataclasses.replace(config, mesh=mesh, batches=batches, memory=memory, train=train)
                    except UserError:
                        continue
                    found.append((made, changed))
    return found


def search(
    config: RunConfig,
    slice_name: str,
    *,
    limit: int = 12,
    report: Callable[[str], None] | None = None,
    shape: DrafterShape | None = None,
    quick: bool = False,
) -> list[dict[str, Any]]:
    """Plans up to `limit` settings, best first: highest bound on tokens a second among those that fit.

    Once a setting does not fit, those that need more memory in every respect are passed over.
    """
    place = parse_slice(slice_name)
    devices, target = slice_devices(place), require_target(config.target)
    drafter = drafter_config(config, target, shape)
    results: list[dict[str, Any]] = []
    too_big: list[RunConfig] = []
    for made, changed in candidates(config, place):
        if len(results) >= limit:
            break
        if any(_needs_more(made, other) for other in too_big):
            continue
        try:
            values = _plan(made, place, devices, target, drafter, changed, quick)
        except UserError:  # heads, vocabulary or width do not divide over this mesh
            continue
        results.append(values)
        if not values["fits"]:
            too_big.append(made)
        if report is not None:
            verdict = (
                f"{values['tokens_per_second_at_most']:,.0f} tokens/s at most" if values["fits"] else values["reason"]
            )
            report(f"{changed['mesh']}, {changed['batches.batch_size']} rows, {changed['memory']}: {verdict}")
    return sorted(results, key=lambda v: -v.get("tokens_per_second_at_most", 0.0))


def _needs_more(a: RunConfig, b: RunConfig) -> bool:
    """Whether `a` surely needs at least the memory of `b`: more rows on a device, and nothing done to save any."""
    return (
        a.mesh == b.mesh
        and a.batches.batch_size >= b.batches.batch_size
        and a.memory.remat_layers <= b.memory.remat_layers
    )
