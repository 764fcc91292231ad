"""What a plan says: bytes by kind, work, traffic, bounds on time and what they allow. As a dict, and as text."""

import textwrap
from typing import Any

from dstill_jax.config import DrafterConfig, TargetConfig
from dstill_jax.data.features import feature_bytes
from dstill_jax.planning.chips import Slice
from dstill_jax.planning.compile import AbstractRun, Compiled
from dstill_jax.planning.count import Counts
from dstill_jax.planning.model_flops import step_flops
from dstill_jax.runs import RunConfig

NOTE = "compiled for this slice, not run on it: times are lower bounds, rates are upper bounds"
QUICK_NOTE = (
    "compiled at the lowest effort (--quick): the real program moves less in HBM, and its memory may differ by a tenth"
)
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
        run.frozen.head.shape[1],
    )
    values: dict[str, Any] = {
        "note": NOTE,
        "slice": slice_values(place),
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
        "quick": compiled.quick,
        "argument_bytes_by_kind": run.argument_bytes(),
        "model_flops_per_step": vars(flops) | {"total": flops.total},
    }
    values["host_bytes_per_device"] = host = run.host_bytes() | {"available": place.chip.host_bytes}
    values["host_fits"] = max(host["checkpoint copy"], host["largest share"]) < host["available"]
    values["feature_disk_bytes"] = feature_bytes(
        PAPER_SAMPLES * batches.seq_len, drafter.num_taps, target.hidden_size
    )  # were all rows full, and the target not run in each step
    if compiled.fits:
        values |= memory_values(compiled) | bounds(compiled.counts, place)
        values |= _rates(config, place, values, flops.total)
    return values


def slice_values(place: Slice) -> dict[str, Any]:
    return {
        "name": place.name,
        "topology": place.topology,
        "slices": place.num_slices,
        "devices": place.num_devices,
        "hbm_bytes": place.chip.hbm_bytes,
    }


def memory_values(compiled: Compiled) -> dict[str, Any]:
    sizes = {
        "arguments": compiled.argument,
        "outputs": compiled.output,
        "aliased": compiled.aliased,
        "temporaries": compiled.temporary,
        "program": compiled.program,
        "peak": compiled.peak,
    }
    return {"bytes_per_device": sizes}


def bounds(counts: Counts, place: Slice) -> dict[str, Any]:
    """Work, traffic and the times they take at the least, of one run of a program on one device."""
    ici, dcn = counts.network_bytes(False), counts.network_bytes(True)
    seconds = {
        "compute": counts.flops / place.chip.flops,
        "hbm": counts.hbm_bytes / place.chip.hbm_bytes_per_s,
        "ici": ici / place.ici_bytes_per_s,
        "dcn": dcn / place.chip.dcn_bytes_per_s,
    }
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
        },
        "collectives": collectives,
        "seconds_at_least": seconds,
        "bound_by": max(seconds, key=lambda name: seconds[name]),
        "uncounted": sorted(counts.notes),
    }


def _rates(config: RunConfig, place: Slice, values: dict[str, Any], model_flops: float) -> dict[str, Any]:
    """What the bounds of a train step allow."""
    work, step = values["per_device_and_step"], max(values["seconds_at_least"].values())
    rows = config.batches.batch_size
    tokens = rows * config.batches.seq_len
    work["ici_bytes_per_token"] = work["ici_bytes"] * place.num_devices / tokens
    return {
        "mfu_at_most": model_flops / (place.num_devices * place.chip.flops * step),
        "mfu_of_compute_bound": model_flops / (place.num_devices * work["flops"]),
        "tokens_per_second_at_most": tokens / step,
        "anchors_per_second_at_most": rows * config.anchors_per_row / step,
        "days_for_800k_samples_at_least": PAPER_SAMPLES / rows * step / 86400,
    }


def plan_text(values: dict[str, Any]) -> str:
    """The plan as lines of at most 120 characters."""
    run = values["run"]
    lines = [
        f"{run['stage']} of {run['target']}: {run['rows']} rows of {run['seq_len']}, {run['anchors_per_row']} anchors"
        f" of {run['block_size']}; remat {'on' if run['remat_layers'] else 'off'}, anchor chunk {run['anchor_chunk']}",
    ]
    if run["changed_for_slice"]:
        lines.append("set for this slice: " + ", ".join(f"{k}={v}" for k, v in run["changed_for_slice"].items()))
    lines += _memory_lines(values)
    if values["fits"]:
        ici = values["per_device_and_step"]["ici_bytes_per_token"]
        lines += _work_lines(values, "step", f" ({ici:.0f} ICI bytes a token)")
        lines.append(
            f"at most: MFU {values['mfu_at_most']:.0%} (compute alone {values['mfu_of_compute_bound']:.0%}),"
            f" {values['tokens_per_second_at_most']:,.0f} tokens/s, {values['anchors_per_second_at_most']:,.0f}"
            f" anchors/s; 800k samples take at least {values['days_for_800k_samples_at_least']:.2f} days"
        )
    host = values["host_bytes_per_device"]
    lines.append(
        f"host memory per device: {_size(host['checkpoint copy'])} while a checkpoint is written,"
        f" {_size(host['largest share'])} while weights are loaded; hosts have {_size(host['available'])}"
    )
    if not values["host_fits"]:
        lines.append("DOES NOT FIT: host memory; raise mesh.fsdp or mesh.tensor, or take a larger slice")
    lines.append(f"features of 800k full rows, were they stored: {_size(values['feature_disk_bytes'])} of disk")
    return _text(values, lines)


def decode_text(values: dict[str, Any]) -> str:
    """The plan of a decoding round, as `plan_text`."""
    run = values["run"]
    lines = [
        f"one round of decoding with {run['round_of']}: {run['rows']} requests, caches of {run['capacity']} tokens,"
        f" blocks of {run['block_size']} drafted in one pass",
        *_memory_lines(values),
    ]
    if values["fits"]:
        lines += _work_lines(values, "round", "")
        few, many = values["tokens_per_second_at_most"].values()
        lines.append(
            f"at most: {values['rounds_per_second_at_most']:,.0f} requests' rounds/s: {few:,.0f} tokens/s if a round"
            f" yields one, {many:,.0f} if it yields {run['block_size']}"
        )
    return _text(values, lines)


def _text(values: dict[str, Any], lines: list[str]) -> str:
    place = values["slice"]
    first = (
        f"plan for {place['name']} ({place['slices']} x {place['topology']}, {place['devices']} devices), mesh:"
        f" {values['run']['mesh']}"
    )
    lines = [
        *lines,
        *(f"not counted: {note}" for note in values.get("uncounted", ())),
        *([QUICK_NOTE] if values.get("quick") else []),
        "These are bounds from the compiled program and published peaks. Nothing was run.",
    ]
    wrapped = [
        textwrap.fill(line, 116, initial_indent="  ", subsequent_indent="      ", break_on_hyphens=False)
        for line in lines
    ]
    return "\n".join([first, *wrapped])


def _memory_lines(values: dict[str, Any]) -> list[str]:
    kinds = ", ".join(f"{name} {_size(n)}" for name, n in values["argument_bytes_by_kind"].items() if n)
    if not values["fits"]:
        return [f"DOES NOT FIT: {values['reason']}", f"arguments per device: {kinds}"]
    sizes = values["bytes_per_device"]
    return [
        f"fits: {_size(sizes['peak'])} of {_size(values['slice']['hbm_bytes'])} per device",
        f"bytes per device: arguments {_size(sizes['arguments'])}, outputs {_size(sizes['outputs'])} (of them"
        f" {_size(sizes['aliased'])} in place), temporaries {_size(sizes['temporaries'])}, program"
        f" {_size(sizes['program'])}",
        f"arguments: {kinds}",
    ]


def _work_lines(values: dict[str, Any], what: str, more: str) -> list[str]:
    work, seconds = values["per_device_and_step"], values["seconds_at_least"]
    lines = [
        f"per device and {what}: {work['flops'] / 1e12:.3g} TFLOP, HBM {_size(work['hbm_bytes'])}, ICI"
        f" {_size(work['ici_bytes'])}, DCN {_size(work['dcn_bytes'])}{more}",
    ]
    for c in values["collectives"][:6]:
        lines.append(
            f"{c['kind']}: {c['times']:.0f} x over {c['devices']} devices ({c['network']}), {_size(c['bytes'])}"
        )
    lines.append(
        f"{what} takes at least: "
        + ", ".join(f"{name} {1e3 * s:.3g} ms" for name, s in seconds.items() if s)
        + f" -> bound by {values['bound_by']}"
    )
    return lines


def _size(size: float) -> str:
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= factor:
            return f"{size / factor:.2f} {unit}"
    return f"{size:.0f} B"
