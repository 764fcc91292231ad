"""Compiles block attention, splash attention with the same mask and a dense XLA version for every chip, and tabulates them.

    JAX_PLATFORMS=cpu python experiments/001_kernel_schedules/run.py [chip ...]

Hardware: none of the chips; any Linux x86-64 machine with `jax[tpu]` installed. About 15 minutes on two CPU cores.
Writes results.json beside this file and prints a table. Every figure is of code *compiled for* a chip; nothing ran on one.
"""

import argparse
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import testing
from pallas_kernels.block_attention import block_attention, visible_intervals
from pallas_kernels.block_attention.blocks import choose
from pallas_kernels.block_attention.plan import make_plan, visited_and_needed
from pallas_kernels.chips import chip

HERE = Path(__file__).resolve().parent


@dataclasses.dataclass(frozen=True)
class Shape:
    """Qwen3-8B, one row of training."""

    B: int = 1
    S: int = 3072
    A: int = 512
    K: int = 16
    H: int = 32
    G: int = 8
    E: int = 128


SHAPE = Shape()
SPLASH_TILES = (
    (512, 512, 512),
    (1024, 512, 512),
    (1024, 1024, 512),
    (1024, 1024, 1024),
)  # rows, keys fetched, keys at once


def ours(gradient: bool, implementation: str = "auto") -> tuple[Any, Any]:
    """Block attention as a model would call it: q comes heads-major, as its rotary embedding may as well leave it."""
    s, struct = SHAPE, jax.ShapeDtypeStruct

    def attend(q, context_k, context_v, block_k, block_v, anchors):
        block_k, block_v = (x.swapaxes(2, 3) for x in (block_k, block_v))
        operands = (q.swapaxes(2, 3), context_k, context_v, block_k, block_v)
        return block_attention(*operands, anchors, implementation=implementation).swapaxes(2, 3)

    heads = struct((s.B, s.A, s.H, s.K, s.E), jnp.bfloat16)
    own = struct((s.B, s.A, s.G, s.K, s.E), jnp.bfloat16)
    context = struct((s.B, s.G, s.S, s.E), jnp.bfloat16)
    structs = (heads, context, context, own, own, struct((s.B, s.A), jnp.int32))
    return _maybe_gradient(attend, structs, heads, gradient)


def splash(gradient: bool, tile: list[int], fused: bool = False) -> tuple[Any, Any]:
    """jax's splash attention over context and all blocks' own keys, its mask given as an array."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel

    s, struct = SHAPE, jax.ShapeDtypeStruct
    rows, fetched, at_once = tile
    sizes: dict[str, Any] = {"block_q": rows, "block_kv": fetched, "block_kv_compute": at_once}
    if gradient:
        sizes |= {"block_q_dkv": rows, "block_kv_dkv": fetched, "block_kv_dkv_compute": at_once}
        sizes |= {"use_fused_bwd_kernel": True} if fused else {"block_q_dq": rows, "block_kv_dq": fetched}

    def attend(q, k, v, anchors):
        row_anchor = jnp.repeat(anchors, s.K)[:, None]
        block = jnp.arange(s.A * s.K) // s.K
        context = jnp.arange(s.S) < row_anchor
        mask = jnp.concatenate([context, block[:, None] == block], axis=1)
        mask = jnp.broadcast_to(mask, (s.H // s.G, *mask.shape))
        one_group = kernel.make_splash_mqa_single_device(mask, block_sizes=kernel.BlockSizes(**sizes))
        return jax.vmap(one_group)(q, k, v)

    q = struct((s.G, s.H // s.G, s.A * s.K, s.E), jnp.bfloat16)
    keys = struct((s.G, s.S + s.A * s.K, s.E), jnp.bfloat16)
    return _maybe_gradient(attend, (q, keys, keys, struct((s.A,), jnp.int32)), q, gradient)


def _maybe_gradient(attend: Any, structs: tuple, out: jax.ShapeDtypeStruct, gradient: bool) -> tuple[Any, Any]:
    if not gradient:
        return attend, structs

    def both(cotangent, *x):
        return jax.vjp(lambda *y: attend(*y, x[-1]), *x[:-1])[1](cotangent)

    return both, (out, *structs)


def tile_counts() -> dict[str, float]:
    """Key tiles visited over key tiles needed, at random anchors."""
    s = SHAPE
    anchors = jnp.asarray(np.random.default_rng(0).integers(1, s.S, (s.B, s.A)))
    none = dict.fromkeys(("valid", "context_documents", "block_documents", "slots"))
    sees = visible_intervals(anchors, s.K, s.K, s.S, causal=False, window=None, **none)
    t = choose(
        None, "v5e", anchors=s.A, group_rows=s.H // s.G * s.K, block_size=s.K, context_length=s.S, head_dim=s.E,
        itemsize=2, backward=False,
    )  # fmt: skip
    visited, needed = visited_and_needed(make_plan(sees, s.H // s.G, s.S, t), s.B, t)
    return {"visited": int(visited), "needed": int(needed), "of": s.B * t.query_tiles * t.key_tiles}


def _row(chip_name: str, name: str, report: testing.Report, kernels: dict[str, int], products: int) -> dict[str, Any]:
    """One line of the table; `kernels` maps part of a kernel's name to the elements (rows x keys) of its hot tile."""
    facts, s = chip(chip_name), SHAPE
    found = [
        (k, size, schedule) for k, size in kernels.items() for schedule in report.schedules if k in schedule.kernel
    ]
    row: dict[str, Any] = {"chip": chip_name, "what": name, "temporary_bytes": report.temporary_bytes}
    row["hbm_bytes"] = report.accessed_bytes
    if found:
        hot = [(schedule.hot, 512 * 512 / size) for _, size, schedule in found]
        bundles = sum(part.bundles * share for part, share in hot)
        row |= {
            "bundles_per_512x512": round(bundles),
            "spills_and_fills": sum(part.spills + part.fills for part, _ in hot),
            "busy": {
                unit: round(sum(p.utilisation(unit) * p.bundles * c for p, c in hot) / bundles, 3)
                for unit in ("MXU", "XLU", "VALU", "EUP", "VLOAD", "VSTORE")
            },
            "ideal_over_bundles": round(products * facts.mxu_cycles(512, s.E, 512) / bundles, 3),
            "hbm_bound_ms": round(report.accessed_bytes / facts.hbm_bytes_per_second * 1e3, 3),
        }
    return row


def measure(chip_name: str, rows: list[dict[str, Any]], done: Callable[[], None]) -> None:
    """Appends all rows of one chip, calling `done` after each group of them."""
    s = SHAPE
    me = f"{Path(__file__).resolve()}"
    for gradient in (False, True):
        t = choose(
            None, chip_name, anchors=s.A, group_rows=s.H // s.G * s.K, block_size=s.K, context_length=s.S,
            head_dim=s.E, itemsize=2, backward=gradient,
        )  # fmt: skip
        kernel = "block_attention_backward" if gradient else "block_attention_forward"
        report = testing.schedules_of(chip_name, f"{me}:ours", {"gradient": gradient}, "block_attention")
        name = "backward" if gradient else "forward"
        rows.append(_row(chip_name, f"block_attention {name}", report, {kernel: t.rows * t.keys}, 5 if gradient else 2))
        done()
        for tile in SPLASH_TILES:
            for fused in (False, True)[: 1 + gradient]:
                size = tile[0] * tile[2]
                kernels = {"_dkv": size} | ({} if fused else {"_dq": size}) if gradient else {"_fwd": size}
                if gradient and not fused:
                    kernels["_dq"] = tile[0] * tile[1]
                label = f"splash {name}{' fused' if fused else ''} {'x'.join(map(str, tile))}"
                try:
                    arguments = {"gradient": gradient, "tile": tile, "fused": fused}
                    report = testing.schedules_of(chip_name, f"{me}:splash", arguments, "splash")
                except RuntimeError as error:
                    rows.append({"chip": chip_name, "what": label, "error": str(error).splitlines()[-1][:200]})
                    continue
                rows.append(_row(chip_name, label, report, kernels, 2 if not gradient else 5 if fused else 7))
        report = testing.schedules_of(chip_name, f"{me}:ours", {"gradient": gradient, "implementation": "xla"}, "none")
        rows.append(_row(chip_name, f"XLA in chunks {name}", report, {}, 0))
        done()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("chips", nargs="*", help="by default all")
    path = HERE / "results.json"
    results = json.loads(path.read_text()) if path.exists() else {}
    results |= {
        "compiled_for_not_run_on": True, "jax": jax.__version__, "shape": dataclasses.asdict(SHAPE), "tiles": tile_counts()
    }  # fmt: skip
    for name in parser.parse_args().chips or testing.chip_names():
        results.setdefault("rows", {})[name] = []
        measure(name, results["rows"][name], lambda: path.write_text(json.dumps(results, indent=1) + "\n"))
        for row in results["rows"][name]:
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
