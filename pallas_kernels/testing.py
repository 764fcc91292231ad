"""Compiles for TPUs that are not attached and reads the compiler's own instruction schedules. Tests and experiments call it.

`jax[tpu]` holds the whole TPU compiler, so any Linux machine compiles a jitted function for a real slice. A figure obtained
here is "compiled for" a chip; nothing here runs on one. `schedules_of` starts a process of its own, since the compiler
reads where to write its schedules only once, when it is loaded.
"""

import argparse
import dataclasses
import importlib
import itertools
import json
import os
import re
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from pallas_kernels import offline
from pallas_kernels.chips import CHIPS, chip

UNITS = ("MXU", "XLU", "VALU", "VPOP", "EUP", "VLOAD", "VLOAD:FILL", "VSTORE", "VSTORE:SPILL", "SALU")

COMPILER_ENVIRONMENT = {"JAX_PLATFORMS": "cpu", **offline.ENVIRONMENT}  # of the compiling process


@dataclasses.dataclass(frozen=True)
class Schedule:
    """A stretch of VLIW code: one bundle issues a cycle, branches count once, however often they run."""

    kernel: str  # or kernel@first-last bundle, of a segment
    capacity: dict[str, int]  # unit -> instructions a bundle can hold
    used: dict[str, int]  # unit -> instructions in all bundles
    bundles: int
    segments: tuple["Schedule", ...] = ()  # of a kernel: the code between one branch target and the next

    @property
    def hot(self) -> "Schedule":
        """The inner loop's segment: as many MXU cycles as any, and the least vector work; masked tiles have more of it."""
        most = max(segment.used["MXU"] for segment in self.segments)
        busy = [segment for segment in self.segments if segment.used["MXU"] >= 0.9 * most]
        return min(busy, key=lambda segment: segment.used["VALU"])

    @property
    def spills(self) -> int:
        return self.used["VSTORE:SPILL"]

    @property
    def fills(self) -> int:
        return self.used["VLOAD:FILL"]

    def utilisation(self, unit: str) -> float:
        """Share of the unit's issue slots that are used, 0..1."""
        return self.used[unit] / (self.capacity[unit] * self.bundles)


def devices(chip_name: str) -> list[jax.Device]:
    """The devices of the chip's smallest slice, none of which is attached. RuntimeError when libtpu is missing."""
    offline.prepare_environment()
    from jax.experimental import topologies

    facts = chip(chip_name)
    try:
        return list(topologies.get_topology_desc(platform="tpu", topology_name=facts.topology).devices)
    except Exception as error:
        raise RuntimeError(
            f"cannot compile for {facts.topology}: the TPU compiler did not load ({error}). It comes with the "
            "libtpu package (Linux x86-64): install dstill-jax[dev] or jax[tpu]"
        ) from error


def compile_for(chip_name: str, function: Callable[..., Any], *arguments: Any, **jit_options: Any) -> Any:
    """Compiles `jax.jit(function)` for one device of a chip that is not attached; returns `jax.stages.Compiled`.

    Args:
      chip_name: a name of `CHIPS`.
      arguments: pytrees of `jax.ShapeDtypeStruct` (or arrays, of which only shape and dtype count).
    """
    device = devices(chip_name)[0]
    sharding = jax.sharding.SingleDeviceSharding(device)
    structs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), arguments)
    # Under a mesh of the device, "auto" and jax's own lowering rules see the chip that is compiled for, not this machine.
    mesh = jax.sharding.Mesh([device], ("device",), axis_types=(jax.sharding.AxisType.Auto,)).abstract_mesh
    with jax.sharding.use_abstract_mesh(mesh):
        return jax.jit(function, **jit_options).lower(*structs).compile()


def _schedule(kernel: str, capacity: list[int], rows: list[list[int]], segments: tuple[Schedule, ...] = ()) -> Schedule:
    used = [sum(column) for column in zip(*rows, strict=True)] or [0] * len(UNITS)
    return Schedule(
        kernel, dict(zip(UNITS, capacity, strict=True)), dict(zip(UNITS, used, strict=True)), len(rows), segments
    )


def _branch_targets(listing: Path) -> list[int]:
    """Bundles of a `*-final_bundles.txt` that begin a loop body, a predicated region or what follows one."""
    lines = listing.read_text(errors="replace").splitlines()
    marked = re.compile(r"\s*(0x[0-9a-f]+|\d+)\s+(?:LH|LB|LE|PB|PF|CT)\s*:")
    return [int(match[1], 0) for line in lines if (match := marked.match(line))]


def read_schedule(path: Path) -> Schedule:
    """Parses a `*-final_hlo-static-per-bundle-utilization.txt`, cut into segments if the bundles lie beside it."""
    match = re.match(r"(\d+-(.*))-\d+-final_hlo-static-per-bundle-utilization", path.name)
    rows = [line.split() for line in path.read_text().splitlines() if re.fullmatch(r"[\s\d]+", line) and line.strip()]
    if match is None or not rows or len(rows[0]) != len(UNITS):
        raise ValueError(f"{path.name} is not a bundle utilisation table of {len(UNITS)} units; did libtpu change it?")
    capacity, *bundles = [[int(cell) for cell in row] for row in rows]
    listings = [
        other
        for other in path.parent.iterdir()
        if other.name.startswith(match[1]) and re.fullmatch(r"-\d+-final_bundles\.txt", other.name[len(match[1]) :])
    ]
    edges = [0, *(_branch_targets(listings[0]) if listings else []), len(bundles)]
    segments = tuple(
        _schedule(f"{match[2]}@{first}-{last}", capacity, bundles[first:last])
        for first, last in itertools.pairwise(edges)
        if last > first
    )
    return _schedule(match[2], capacity, bundles, segments)


def read_schedules(directory: Path, kernel: str) -> list[Schedule]:
    """The schedules of every compiled operation whose name contains `kernel`."""
    tables = sorted(directory.glob("*-final_hlo-static-per-bundle-utilization.txt"))
    return [read_schedule(path) for path in tables if kernel in path.name]


@dataclasses.dataclass(frozen=True)
class Report:
    """What compiling one function for one chip told."""

    chip: str
    schedules: list[Schedule]
    temporary_bytes: int
    argument_bytes: int
    output_bytes: int
    flops: float  # the compiler's count: bodies of loops and kernels count once or as they declare
    accessed_bytes: float

    def schedule(self, kernel: str) -> Schedule:
        """The one schedule whose name contains `kernel`; ValueError otherwise."""
        found = [schedule for schedule in self.schedules if kernel in schedule.kernel]
        if len(found) != 1:
            raise ValueError(f"{kernel=} names {len(found)} of {[s.kernel for s in self.schedules]}")
        return found[0]


def schedules_of(
    chip_name: str, builder: str, arguments: dict[str, Any] | None = None, kernel: str = "", *, keep: Path | None = None
) -> Report:
    """Compiles, in a process of its own, what `builder` returns and reads the schedules of its kernels.

    Args:
      builder: "module:function" or "file.py:function"; called with `arguments`, returns (function to jit, its
        ShapeDtypeStructs).
      arguments: JSON-able keyword arguments of the builder.
      kernel: only operations whose name contains this.
      keep: folder for the compiler's dump; by default a temporary one that is deleted.
    """
    with tempfile.TemporaryDirectory() as temporary:
        dump = Path(temporary) if keep is None else keep
        environment = os.environ | COMPILER_ENVIRONMENT | {"LIBTPU_INIT_ARGS": dump_flags(dump)}
        command = [sys.executable, "-m", "pallas_kernels.testing", chip_name, builder, json.dumps(arguments or {})]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"compiling {builder} for {chip_name} failed:\n{done.stderr[-4000:]}")
        facts = json.loads(done.stdout.splitlines()[-1])
        return Report(chip=chip_name, schedules=read_schedules(dump, kernel), **facts)


def dump_flags(directory: Path) -> str:
    """What LIBTPU_INIT_ARGS must hold, before the compiler is loaded, for schedules to be written to a folder."""
    flags = f"--xla_jf_dump_to={directory} --xla_jf_dump_llo_text=true --xla_jf_emit_annotations=true"
    return flags + " --xla_jf_dump_llo_pass_label_regex=.*final_.*"  # of some 70 stages, the last


def schedules_here(chip_name: str, function: Callable[..., Any], structs: Any, kernel: str, dump: Path) -> Report:
    """As `schedules_of`, in this process: many compilations load the compiler once.

    Args:
      dump: the folder of `dump_flags`, emptied here.
    """
    for path in dump.iterdir():
        path.unlink()
    facts = facts_of(compile_for(chip_name, function, *structs))
    return Report(chip=chip_name, schedules=read_schedules(dump, kernel), **facts)


def facts_of(compiled: Any) -> dict[str, float]:
    """Bytes and FLOPs of a `jax.stages.Compiled`, per device, named as in `Report`."""
    memory, cost = compiled.memory_analysis(), compiled.cost_analysis() or {}
    return {
        "temporary_bytes": memory.temp_size_in_bytes,
        "argument_bytes": memory.argument_size_in_bytes,
        "output_bytes": memory.output_size_in_bytes,
        "flops": cost.get("flops", 0.0),
        "accessed_bytes": cost.get("bytes accessed", 0.0),
    }


def chip_names() -> tuple[str, ...]:
    """Every chip that kernels are compiled for."""
    return tuple(CHIPS)


def _builder(name: str) -> Callable[..., tuple[Callable[..., Any], Any]]:
    place, function = name.rsplit(":", 1)
    if not place.endswith(".py"):
        return getattr(importlib.import_module(place), function)
    return runpy.run_path(place)[function]


def _main() -> None:
    parser = argparse.ArgumentParser(description="compile one function and print its facts as JSON (see schedules_of)")
    parser.add_argument("chip", choices=chip_names())
    parser.add_argument("builder")
    parser.add_argument("arguments")
    options = parser.parse_args()
    function, structs = _builder(options.builder)(**json.loads(options.arguments))
    print(json.dumps(facts_of(compile_for(options.chip, function, *structs))))


if __name__ == "__main__":
    _main()
