"""Plans: one run on one slice, and the search for the settings with the best bound. Called by `dstill plan`."""

import contextlib
import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

from dstill_jax.config import DrafterConfig, TargetConfig
from dstill_jax.distill.initialise import DrafterShape
from dstill_jax.errors import UserError
from dstill_jax.models.drafter import Memory
from dstill_jax.planning.chips import Slice, parse_slice, slice_devices
from dstill_jax.planning.compile import abstract_run, compile_step, require_target, settle
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
    config, drafter = settle(config, target, shape)
    config, changed = fit_to_slice(config, place)
    return _plan(config, place, devices, target, drafter, changed, quick)


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
    """What `search` tries: mesh shapes x rows per device x remat.

    All meshes with the settings that take the most memory come first, all with the cheapest in memory last, so that
    the first few are of every mesh. The optimiser step keeps its number of rows where they divide: fewer rows per
    device are micro-batches. Where they do not, it is a single micro-batch of another number of rows.
    """
    inner = place.num_devices // place.num_slices
    meshes = [
        MeshConfig(inner // (fsdp * tensor), fsdp, tensor, place.num_slices)
        for tensor in (1, 2, 4)
        for fsdp in sorted({min(16, inner // tensor), 32, 64})
        if fsdp and inner % (fsdp * tensor) == 0
    ]
    found = []
    for per_device, remat, mesh in itertools.product((4, 2, 1), (False, True), meshes):
        micro = per_device * mesh.size
        count, rest = divmod(config.batches.batch_size, micro)
        steps = 1 if rest else count
        batches = dataclasses.replace(config.batches, batch_size=micro * steps)
        train = dataclasses.replace(config.train, accumulate_steps=steps)
        memory = Memory(scan_layers=True, remat_layers=remat)
        parts = {"mesh": mesh, "memory": memory, "batches": batches, "train": train}
        changed = {
            f"{name}.{field}": value
            for name, part in parts.items()
            for field, value in vars(part).items()
            if value != getattr(getattr(config, name), field)
        }
        with contextlib.suppress(UserError):  # what the run itself refuses
            made = dataclasses.replace(config, **parts)
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
    """Plans up to `limit` of the `candidates`, best first: highest bound on tokens a second among those that fit."""
    place = parse_slice(slice_name)
    devices, target = slice_devices(place), require_target(config.target)
    config, drafter = settle(config, target, shape)
    results: list[dict[str, Any]] = []
    for made, changed in candidates(config, place):
        if len(results) >= limit:
            break
        try:
            values = _plan(made, place, devices, target, drafter, changed, quick)
        except UserError:  # heads, vocabulary or width do not divide over this mesh
            continue
        results.append(values)
        if report is not None:
            verdict = (
                f"{values['tokens_per_second_at_most']:,.0f} tokens/s at most" if values["fits"] else values["reason"]
            )
            rows, steps = made.batches.batch_size, made.train.accumulate_steps
            setting = f"batch_size={rows}, accumulate_steps={steps}, remat_layers={made.memory.remat_layers}"
            report(f"{made.mesh.describe()}, {setting}: {verdict}")
    return sorted(results, key=lambda v: -v.get("tokens_per_second_at_most", 0.0))
