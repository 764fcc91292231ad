"""What a plan says: bytes by kind, work, traffic, bounds on time and what they allow. As a dict, and as text."""

from typing import Any

from dstill_jax.config import DrafterConfig, TargetConfig
from dstill_jax.planning.chips import Slice
from dstill_jax.planning.compile import AbstractRun, Compiled
from dstill_jax.planning.model_flops import step_flops
from dstill_jax.runs import RunConfig

PAPER_SAMPLES = 800_000  # conversations of the published recipe (arXiv 2602.06036)


def plan_values(
    config: RunConfig,
    place: Slice,
    target: TargetConfig,
    drafter: DrafterConfig,
    run: AbstractRun,
    compiled: Compiled,
    changed: dict[str, Any],
) -> dict[str, Any]:
    """The plan as JSON values. Times are lower bounds, rates upper bounds; nothing here was run."""
    batches = config.batches
    flops = step_flops(
        target,
        drafter,
        config.objective,
        batches.batch_size,
        batches.seq_len,
        config.anchors_per_row,
    )
    values: dict[str, Any] = {
        "note": "compiled for this slice, not run on it: times are lower bounds, rates are upper bounds",
        "slice": {
            "name": place.name,
            "topology": place.topology,
            "slices": place.num_slices,
            "devices": place.num_devices,
            "hbm_bytes": place.chip.hbm_bytes,
        },
        "run": {
            "stage": config.stage,
            "target": config.target,
            "mesh": config.mesh.describe(),
            "changed_for_slice": changed,
            "rows": batches.batch_size,
            "rows_per_micro_batch_and_device": batches.batch_size
            / (config.mesh.row_shares * config.train.accumulate_steps),
            "seq_len": batches.seq_len,
            "anchors_per_row": config.anchors_per_row,
            "block_size": drafter.block_size,
            "remat_layers": config.memory.remat_layers,
            "anchor_chunk": config.memory.anchor_chunk,
        },
        "fits": compiled.fits,
        "reason": compiled.reason,
        "compile_seconds": round(compiled.seconds, 1),
        "argument_bytes_by_kind": run.argument_bytes(),
        "model_flops_per_step": vars(flops) | {"total": flops.total},
    }
    if compiled.fits:
        values["bytes_per_device"] = {
            "arguments": compiled.argument,
            "outputs": compiled.output,
            "aliased": compiled.aliased,
            "temporaries": compiled.temporary,
            "program": compiled.program,
            "peak": compiled.peak,
        }
        values |= _work(config, place, compiled, flops.total)
    return values


def _work(config: RunConfig, place: Slice, compiled: Compiled, model_flops: float) -> dict[str, Any]:
    counts, chip, batches = compiled.counts, place.chip, config.batches
    ici, dcn = counts.network_bytes(False), counts.network_bytes(True)
    seconds = {
        "compute": counts.flops / chip.flops,
        "hbm": counts.hbm_bytes / chip.hbm_bytes_per_s,
        "ici": ici / place.ici_bytes_per_s,
        "dcn": dcn / chip.dcn_bytes_per_s,
    }
    bound = max(seconds, key=lambda name: seconds[name])
    step = seconds[bound]
    tokens = batches.batch_size * batches.seq_len
    anchors = batches.batch_size * config.anchors_per_row
    collectives = [
        {
            "kind": c.kind,
            "devices": c.group,
            "network": "dcn" if c.crosses_slices else "ici",
            "times": c.times,
            "bytes": c.bytes,
        }
        for c in counts.by_kind()
    ]
    return {
        "per_device_and_step": {
            "flops": counts.flops,
            "hbm_bytes": counts.hbm_bytes,
            "ici_bytes": ici,
            "dcn_bytes": dcn,
            "ici_bytes_per_token": ici * place.num_devices / tokens,
        },
        "collectives": collectives,
        "seconds_at_least": seconds,
        "bound_by": bound,
        "mfu_at_most": model_flops / (place.num_devices * chip.flops * step),
        "mfu_of_compute_bound": model_flops / (place.num_devices * counts.flops),
        "tokens_per_second_at_most": tokens / step,
        "anchors_per_second_at_most": anchors / step,
        "days_for_800k_samples_at_least": PAPER_SAMPLES / batches.batch_size * step / 86400,
        "uncounted": sorted(counts.notes),
    }


def plan_text(values: dict[str, Any]) -> str:
    """The plan as lines of at most about 100 characters."""
    place, run = values["slice"], values["run"]
    lines = [
        f"plan for {place['name']} ({place['slices']} x {place['topology']}, {place['devices']} devices), mesh:"
        f" {run['mesh']}",
        f"  {run['stage']} of {run['target']}: {run['rows']} rows of {run['seq_len']}, {run['anchors_per_row']} anchors"
        f" of {run['block_size']}; remat {'on' if run['remat_layers'] else 'off'}, anchor chunk {run['anchor_chunk']}",
    ]
    if run["changed_for_slice"]:
        lines.append("  set for this slice: " + ", ".join(f"{k}={v}" for k, v in run["changed_for_slice"].items()))
    kinds = ", ".join(f"{name} {_size(n)}" for name, n in values["argument_bytes_by_kind"].items() if n)
    if not values["fits"]:
        lines += [f"  DOES NOT FIT: {values['reason']}", f"  arguments per device: {kinds}"]
        return "\n".join(lines)
    sizes, work, seconds = values["bytes_per_device"], values["per_device_and_step"], values["seconds_at_least"]
    lines += [
        f"  fits: {_size(sizes['peak'])} of {_size(place['hbm_bytes'])} per device (compiled in"
        f" {values['compile_seconds']:.0f} s)",
        f"  bytes per device: arguments {_size(sizes['arguments'])}, outputs {_size(sizes['outputs'])} (of them"
        f" {_size(sizes['aliased'])} in place), temporaries {_size(sizes['temporaries'])}, program"
        f" {_size(sizes['program'])}",
        f"    arguments: {kinds}",
        f"  per device and step: {work['flops'] / 1e12:.1f} TFLOP, HBM {_size(work['hbm_bytes'])}, ICI"
        f" {_size(work['ici_bytes'])}, DCN {_size(work['dcn_bytes'])}"
        f" ({work['ici_bytes_per_token']:.0f} ICI bytes a token)",
    ]
    for c in values["collectives"][:6]:
        lines.append(
            f"    {c['kind']:<18} {c['times']:>6.0f} x over {c['devices']:>4} devices ({c['network']}):"
            f" {_size(c['bytes'])}"
        )
    lines += [
        "  step takes at least: "
        + ", ".join(f"{name} {1e3 * s:.0f} ms" for name, s in seconds.items() if s)
        + f" -> bound by {values['bound_by']}",
        f"  at most: MFU {values['mfu_at_most']:.0%} (compute alone {values['mfu_of_compute_bound']:.0%}),"
        f" {values['tokens_per_second_at_most']:,.0f} tokens/s, {values['anchors_per_second_at_most']:,.0f} anchors/s;"
        f" 800k samples take at least {values['days_for_800k_samples_at_least']:.2f} days",
        *(f"  not counted: {note}" for note in values["uncounted"]),
        "  These are bounds from the compiled program and published peaks. Nothing was run.",
    ]
    return "\n".join(lines)


def _size(size: float) -> str:
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= factor:
            return f"{size / factor:.2f} {unit}"
    return f"{size:.0f} B"
