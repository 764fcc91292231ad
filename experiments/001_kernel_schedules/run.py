"""Compiles block attention, splash attention with the same mask and dense XLA einsums for every chip, and tabulates them.

    JAX_PLATFORMS=cpu python experiments/001_kernel_schedules/run.py [chip ...]

The rows of `decode_and_head.py` come with it. Hardware: none of the chips; any Linux x86-64 machine with `jax[tpu]` installed.
About 40 minutes of CPU time; a run that was stopped goes on where it was, and rows are compiled anew only when the code they
compile has changed. Writes results.json beside this file and prints the tables of README.md. Every figure is of code
*compiled for* a chip; nothing ran on one.
"""

import argparse
import dataclasses
import hashlib
import itertools
import json
import os
import runpy
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels
from pallas_kernels import testing
from pallas_kernels.block_attention import block_attention, visible_intervals
from pallas_kernels.block_attention.blocks import Tiling, choose
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
SPLASH_TILES = ((512, 512, 512), (1024, 512, 512), (512, 1024, 512))  # rows, keys fetched, at once; for every chip
MORE_SPLASH_TILES = ((1024, 1024, 512), (2048, 512, 512), (512, 512, 256))  # for one chip
ONE_CHIP = "v5e"


# --- what is compiled ---


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


def _mask(anchors: jax.Array) -> jax.Array:
    """[A * K, S + A * K]: a block sees context before its anchor, and itself."""
    s = SHAPE
    block = jnp.arange(s.A * s.K) // s.K
    context = jnp.arange(s.S) < jnp.repeat(anchors, s.K)[:, None]
    return jnp.concatenate([context, block[:, None] == block], axis=1)


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
        # One mask for all heads of a group: the kernel reads the same one for each.
        one_group = kernel.make_splash_mqa_single_device(_mask(anchors)[None], block_sizes=kernel.BlockSizes(**sizes))
        # Inside jit a flag among the mask's facts has become a traced array, of which the kernel then asks the value.
        infos = (one_group.fwd_mask_info, one_group.dq_mask_info, one_group.dkv_mask_info)
        infos = [info if info is None else info._replace(is_dynamic_mask=True) for info in infos]
        one_group = kernel.SplashAttentionKernel(*infos, **one_group.kwargs)
        return jax.vmap(lambda *x: one_group(*x))(q, k, v)

    q = struct((s.G, s.H // s.G, s.A * s.K, s.E), jnp.bfloat16)
    keys = struct((s.G, s.S + s.A * s.K, s.E), jnp.bfloat16)
    return _maybe_gradient(attend, (q, keys, keys, struct((s.A,), jnp.int32)), q, gradient)


def dense(gradient: bool) -> tuple[Any, Any]:
    """Two einsums over context and all blocks' own keys, softmax in float32 between them."""
    s, struct = SHAPE, jax.ShapeDtypeStruct

    def attend(q, k, v, anchors):
        scores = jnp.einsum("ghne,gce->ghnc", q, k, preferred_element_type=jnp.float32) * s.E**-0.5
        weights = jax.nn.softmax(jnp.where(_mask(anchors), scores, -1e30), axis=-1)
        return jnp.einsum("ghnc,gce->ghne", weights.astype(v.dtype), v)

    q = struct((s.G, s.H // s.G, s.A * s.K, s.E), jnp.bfloat16)
    keys = struct((s.G, s.S + s.A * s.K, s.E), jnp.bfloat16)
    return _maybe_gradient(attend, (q, keys, keys, struct((s.A,), jnp.int32)), q, gradient)


def _maybe_gradient(attend: Any, structs: tuple, out: jax.ShapeDtypeStruct, gradient: bool) -> tuple[Any, Any]:
    """With the gradient: the output is returned, too, since it is kept from forward to backward in any case."""
    if not gradient:
        return attend, structs

    def both(cotangent, *x):
        made, pull = jax.vjp(lambda *y: attend(*y, x[-1]), *x[:-1])
        return made, pull(cotangent)

    return both, (out, *structs)


# --- what is counted ---


def _tiling(chip_name: str, gradient: bool) -> Tiling:
    s = SHAPE
    return choose(
        None, chip_name, anchors=s.A, group_rows=s.H // s.G * s.K, block_size=s.K, context_length=s.S, head_dim=s.E,
        itemsize=2, backward=gradient,
    )  # fmt: skip


def _random_anchors() -> np.ndarray:
    return np.random.default_rng(0).integers(1, SHAPE.S, (SHAPE.B, SHAPE.A))


def our_tiles(chip_name: str, gradient: bool) -> dict[str, float]:
    """Context tiles of one layer, and the products that the tiles of own blocks add, in tiles of 512 x 512."""
    s, t = SHAPE, _tiling(chip_name, gradient)
    none = dict.fromkeys(("valid", "context_documents", "block_documents", "slots"))
    sees = visible_intervals(jnp.asarray(_random_anchors()), s.K, s.K, s.S, causal=False, window=None, **none)
    visited, needed = (int(x) for x in visited_and_needed(make_plan(sees, s.H // s.G, s.S, t), s.B, t))
    unit = s.G * t.rows * t.keys / 512**2
    own = s.B * s.G * t.query_tiles * t.rows * t.own_keys / 512**2
    return {"visited_over_needed": visited / needed, "tiles": visited * unit, "own_tiles": own}


def splash_tiles(tile: tuple[int, int, int]) -> dict[str, float]:
    """The same of splash attention with the blocks already sorted by anchor, which is the best a caller can do for it."""
    s, (rows, keys, _) = SHAPE, tile
    mask = np.asarray(_mask(jnp.asarray(np.sort(_random_anchors()[0]))))
    tiles = mask.reshape(mask.shape[0] // rows, rows, mask.shape[1] // keys, keys).any(axis=(1, 3)).sum()
    return {"tiles": int(tiles) * s.H * rows * keys / 512**2, "own_tiles": 0.0}


def _kernel_figures(
    chip_name: str, report: testing.Report, kernels: dict[str, tuple[int, int]], counts: dict[str, float]
) -> dict[str, Any]:
    """Of hot tiles and the MXU's time bound; `kernels`: part of a kernel's name -> (rows x keys of its hot tile, products)."""
    facts, s = chip(chip_name), SHAPE
    first = {k: next(schedule for schedule in report.schedules if k in schedule.kernel) for k in kernels}
    hot = [(first[k].hot, 512**2 / size, products) for k, (size, products) in kernels.items()]
    bundles = sum(part.bundles * share for part, share, _ in hot)
    products = sum(products for *_, products in hot)
    tiles = counts["tiles"] + counts["own_tiles"]
    return {
        "bundles_per_512x512": round(bundles),
        "spills_and_fills": sum(part.spills + part.fills for part, *_ in hot),
        "busy": {
            unit: round(sum(p.utilisation(unit) * p.bundles * c for p, c, _ in hot) / bundles, 3)
            for unit in ("MXU", "XLU", "VALU", "EUP", "VLOAD", "VSTORE")
        },
        **counts,
        "mxu_bound_ms": round(products * 2 * 512**2 * s.E * tiles / facts.bf16_flops_per_second * 1e3, 3),
    }


# --- cases ---


@dataclasses.dataclass(frozen=True)
class Case:
    """One program compiled for every chip."""

    name: str
    builder: str
    arguments: dict[str, Any]
    kernels: str  # operations whose schedule is read

    @property
    def gradient(self) -> bool:
        return self.arguments["gradient"]

    def row(self, chip_name: str, dump: Path) -> dict[str, Any]:
        """Compiles it for one chip."""
        function, structs = globals()[self.builder](**self.arguments)
        report = testing.schedules_here(chip_name, function, structs, self.kernels, dump)
        return self.figures(chip_name, report)

    def figures(self, chip_name: str, report: testing.Report) -> dict[str, Any]:
        row: dict[str, Any] = {"temporary_bytes": report.temporary_bytes, "hbm_bytes": report.accessed_bytes}
        row["hbm_bound_ms"] = round(report.accessed_bytes / chip(chip_name).hbm_bytes_per_second * 1e3, 3)
        if self.builder == "dense":  # nothing loops in it: the compiler counts every product
            row["mxu_bound_ms"] = round(report.flops / chip(chip_name).bf16_flops_per_second * 1e3, 3)
        if self.builder == "splash":
            tile = self.arguments["tile"]
            size = tile[0] * tile[1]  # keys fetched, in pieces, all in one stretch of code
            fused = self.arguments["fused"]
            kernels = {"_fwd": (size, 2)} if not self.gradient else {"_dkv": (size, 5 if fused else 4)}
            if self.gradient and not fused:
                kernels["_dq"] = (size, 3)
            row |= _kernel_figures(chip_name, report, kernels, splash_tiles(tile))
        elif self.kernels == "block_attention":
            t = _tiling(chip_name, self.gradient)
            kernel = "block_attention_backward" if self.gradient else "block_attention_forward"
            keys = t.keys_at_once if self.gradient else min(2 * t.keys, t.chunk)  # forward, tiles are visited in pairs
            size = {kernel: (t.rows * keys, 5 if self.gradient else 2)}
            row |= _kernel_figures(chip_name, report, size, our_tiles(chip_name, self.gradient))
        return row


def cases() -> list[tuple[Case, str | None]]:
    """Everything that is compiled, what matters most first; and the one chip for which it is, if not for all."""
    found: list[tuple[Case, str | None]] = []
    directions = {"forward": False, "backward": True}
    for name, gradient in directions.items():
        found.append((Case(f"ours {name}", "ours", {"gradient": gradient}, "block_attention"), None))
    for tiles, only in ((SPLASH_TILES, None), (MORE_SPLASH_TILES, ONE_CHIP)):
        for tile in tiles:
            for name, gradient in directions.items():
                for fused in (False, True)[: 1 + gradient]:
                    label = f"splash {name}{' fused' if fused else ''} {'x'.join(map(str, tile))}"
                    arguments = {"gradient": gradient, "tile": tile, "fused": fused}
                    found.append((Case(label, "splash", arguments, "splash"), only))
        if only is None:
            found += [(Case(f"dense XLA {n}", "dense", {"gradient": g}, "none"), None) for n, g in directions.items()]
    for name, gradient in directions.items():
        arguments = {"gradient": gradient, "implementation": "xla"}
        found.append((Case(f"XLA in chunks {name}", "ours", arguments, "none"), ONE_CHIP))
    return found


def _digest(case: Case) -> str:
    """Of what a row depends on: the peers' code comes with jax, ours lies in the package."""
    kind = [case.builder, case.arguments, dataclasses.asdict(SHAPE), "output returned"]
    return digest(kind, "block_attention" if case.builder == "ours" else None)


def digest(kind: Any, operation: str | None) -> str:
    """Of a row's kind, of jax's version and, unless None, of an operation's code."""
    content = json.dumps([kind, jax.__version__])
    if operation is not None:
        package = Path(pallas_kernels.__file__).parent
        paths = [
            *package.glob(f"{operation}/*.py"),
            *package.glob(f"tuning/{operation}.json"),
            package / "block_sizes.py",
        ]
        content += "".join(path.read_text() for path in sorted(paths))
    return hashlib.sha256(content.encode()).hexdigest()[:12]


def planned() -> list[tuple[str, str | None, str, Callable[[str, Path], dict[str, Any]]]]:
    """All rows: name, the one chip or None for all, digest, and what makes it for a chip, with a folder for schedules."""

    rows = [(case.name, only, _digest(case), case.row) for case, only in cases()]
    return [*rows, *runpy.run_path(str(HERE / "decode_and_head.py"))["planned"](digest)]


def compile_missing(results: dict[str, Any], chips: list[str], path: Path, dump: Path) -> None:
    """Adds the rows that are not there yet, writing the file after each."""
    for row_name, only, wanted, make in planned():
        for name in chips:
            rows = results["rows"].setdefault(name, {})
            if only not in (None, name) or rows.get(row_name, {}).get("digest") == wanted:
                continue
            try:
                row = make(name, dump)
            except RuntimeError as error:  # what the compiler refuses is a result, too
                row = {"error": str(error).strip().splitlines()[-1][:200]}
            rows[row_name] = {"digest": wanted, **row}
            path.write_text(json.dumps(results, indent=1) + "\n")
            print(name, row_name, json.dumps(row), flush=True)


# --- the tables ---


def splash_rows(rows: dict[str, Any], direction: str) -> dict[str, Any]:
    """Of one chip: every tile size that compiles, the one with the fewest bundles first."""
    found = {k: v for k, v in rows.items() if k.startswith(f"splash {direction}") and "error" not in v}
    return dict(sorted(found.items(), key=lambda item: item[1]["bundles_per_512x512"]))


def table(results: dict[str, Any]) -> str:
    """Ours, splash at its best tile size, and XLA, of every chip and direction."""
    lines = [
        "| chip | what | bundles per 512 x 512 | MXU | VALU | XLU | EUP | spills + fills | tiles | tiles / needed "
        "| MXU bound, ms | HBM bound, ms | HBM bytes | temporaries |",
        "|---|" + "---|" * 13,
    ]
    for name, rows in results["rows"].items():
        for direction in ("forward", "backward"):
            listed = {f"ours {direction}": rows[f"ours {direction}"]}
            listed |= dict(list(splash_rows(rows, direction).items())[:1])
            listed |= {k: rows[k] for k in (f"dense XLA {direction}", f"XLA in chunks {direction}") if k in rows}
            lines += [f"| {name} | {what} | {_cells(row)} |" for what, row in listed.items()]
    return "\n".join(lines)


def _cells(row: dict[str, Any]) -> str:
    if "error" in row:
        return " | ".join([row["error"].replace("|", "/"), *[""] * 11])
    cells = [""] * 8
    if "busy" in row:
        needed = row.get("visited_over_needed")
        cells = [str(row["bundles_per_512x512"]), *(f"{row['busy'][u]:.0%}" for u in ("MXU", "VALU", "XLU", "EUP"))]
        cells += [str(row["spills_and_fills"]), f"{row['tiles']:.0f}", "" if needed is None else f"{needed:.2f}"]
    bounds = (row.get(f"{kind}_bound_ms") for kind in ("mxu", "hbm"))
    cells += ["" if bound is None else f"{bound:.2f}" for bound in bounds]
    cells += [f"{row['hbm_bytes'] / 1e6:.0f} MB", f"{row['temporary_bytes'] / 1e6:.1f} MB"]
    return " | ".join(cells)


def splash_table(results: dict[str, Any]) -> str:
    """Bundles and spills + fills of every tile size of splash attention."""
    names = {case.name: None for case, _ in cases() if case.builder == "splash"}
    chips = list(results["rows"])
    lines = [f"| splash | {' | '.join(chips)} |", "|---|" + "---|" * len(chips)]
    for what in names:
        rows = [results["rows"][name].get(what, {}) for name in chips]
        cells = [
            "refused" if "error" in r else f"{r['bundles_per_512x512']}, {r['spills_and_fills']}" if r else ""
            for r in rows
        ]
        lines.append(f"| {what.removeprefix('splash ')} | {' | '.join(cells)} |")
    return "\n".join(lines)


def summary(results: dict[str, Any]) -> str:
    """Ours and, behind it, splash at its best tile size; a column for each chip. For `pallas_kernels/README.md`."""
    figures: dict[str, Callable[[dict[str, Any]], str]] = {
        "bundles": lambda row: str(row["bundles_per_512x512"]),
        "MXU busy": lambda row: f"{row['busy']['MXU']:.0%}",
        "spills + fills": lambda row: str(row["spills_and_fills"]),
        "HBM bytes": lambda row: f"{row['hbm_bytes'] / 1e6:.0f} MB",
        "temporaries": lambda row: f"{row['temporary_bytes'] / 1e6:.1f} MB",
    }
    chips = results["rows"]
    lines = [f"| ours, splash | {' | '.join(chips)} |", "|---|" + "---|" * len(chips)]
    for direction, (figure, cell) in itertools.product(("forward", "backward"), figures.items()):
        pairs = [
            (rows[f"ours {direction}"], *list(splash_rows(rows, direction).values())[:1]) for rows in chips.values()
        ]
        lines.append(f"| {direction}: {figure} | {' | '.join(', '.join(map(cell, pair)) for pair in pairs)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("chips", nargs="*", help="by default all")
    path = HERE / "results.json"
    results = json.loads(path.read_text()) if path.exists() else {"rows": {}}
    results |= {"compiled_for_not_run_on": True, "jax": jax.__version__, "shape": dataclasses.asdict(SHAPE)}
    chips = parser.parse_args().chips or list(testing.chip_names())
    with tempfile.TemporaryDirectory() as dump:
        os.environ["LIBTPU_INIT_ARGS"] = testing.dump_flags(Path(dump))
        compile_missing(results, chips, path, Path(dump))
    tables = runpy.run_path(str(HERE / "decode_and_head.py"))["tables"]
    print(summary(results), table(results), splash_table(results), *tables(results["rows"]), sep="\n\n")


if __name__ == "__main__":
    main()
