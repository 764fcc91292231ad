"""Tree attention and the head loss, compiled for a chip: schedules, bytes, temporaries. `run.py` asks for the rows.

Expected: 16 rows over 32768 slots move keys and values once (ratio below 1.05); head loss temporaries below 256 MB.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.chips import CHIPS
from pallas_kernels.fused_head_loss import Term, fused_head_loss
from pallas_kernels.fused_head_loss.blocks import choose_tiles
from pallas_kernels.testing import compile_for, facts_of, schedules_here
from pallas_kernels.tree_attention import tree_attention
from pallas_kernels.tree_attention.blocks import TreeShape, choose_blocks

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128  # Qwen3-8B
ROWS, WIDTH, VOCABULARY = 8192, 4096, 151_936
DECODE_SHAPES = ((8, 16, 32768), (1, 64, 32768), (8, 256, 4096), (1, 1024, 4096))  # batch, rows, slots
FOR_ALL_CHIPS = ("decode 8x16x32768 BGEC", "decode 8x256x4096 BGEC", "head ce")
ONE_CHIP = "v5e"

Row = tuple[str, str | None, str, Callable[[str, Path], dict[str, Any]]]  # see `planned`


def decode(batch: int, rows: int, slots: int, key_layout: str = "BGEC", dense: bool = False) -> tuple[Any, Any]:
    """A function to compile and its arguments: the kernel, or dense attention in XLA as the peer."""
    struct, dtype = jax.ShapeDtypeStruct, jnp.bfloat16
    keys = (batch, KV_HEADS, HEAD_DIM, slots) if key_layout == "BGEC" else (batch, KV_HEADS, slots, HEAD_DIM)
    own = struct((batch, rows, KV_HEADS, HEAD_DIM), dtype)
    arguments = (
        struct((batch, rows, HEADS, HEAD_DIM), dtype),
        struct(keys, dtype),
        struct((batch, KV_HEADS, slots, HEAD_DIM), dtype),
        struct((batch,), jnp.int32),
        own,
        own,
        struct((batch, rows, 128), jnp.int32),
    )
    options: dict[str, Any] = {"implementation": "xla", "chunk": slots} if dense else {"implementation": "pallas"}
    return lambda *a: tree_attention(*a, key_layout=key_layout, **options), arguments


def decode_figures(chip: str, dump: Path, batch: int, rows: int, slots: int, key_layout: str) -> dict[str, Any]:
    """One shape of tree attention on one chip."""
    shape = {"batch": batch, "rows": rows, "slots": slots, "key_layout": key_layout}
    report = schedules_here(chip, *decode(**shape), "tree_attention", dump)
    peer = facts_of(compile_for(chip, *_spread(decode(**shape, dense=True))))
    kernel, hot = report.schedule("tree_attention"), report.schedule("tree_attention").hot
    blocks = choose_blocks(TreeShape(rows, HEADS // KV_HEADS, KV_HEADS, HEAD_DIM, slots, 2), None, chip)
    cache = 2 * batch * KV_HEADS * slots * HEAD_DIM * 2
    return {
        **shape,
        "blocks": {name: getattr(blocks, name) for name in ("context", "resident", "rows", "slots")},
        "hot": hot.kernel,
        "hot_bundles": hot.bundles,
        "hot_mxu": round(hot.utilisation("MXU"), 3),
        "hot_valu": round(hot.utilisation("VALU"), 3),
        "hot_xlu": round(hot.utilisation("XLU"), 3),
        "hot_eup": round(hot.utilisation("EUP"), 3),
        "hot_spills_and_fills": hot.spills + hot.fills,
        "kernel_bundles": kernel.bundles,
        "kernel_spills_and_fills": kernel.spills + kernel.fills,
        "bytes_over_cache": round(report.accessed_bytes / cache, 4),
        "temporaries_over_cache": round(report.temporary_bytes / cache, 4),
        "dense_xla_bytes_over_cache": round(peer["accessed_bytes"] / cache, 4),
        "dense_xla_temporaries_over_cache": round(peer["temporary_bytes"] / cache, 4),
        "hbm_bound_us": round(report.accessed_bytes / CHIPS[chip].hbm_bytes_per_second * 1e6, 1),
        "mxu_bound_us": round(report.flops / CHIPS[chip].bf16_flops_per_second * 1e6, 1),
    }


PLAIN_LAYOUTS = {"xla_tpu_control_large_2nd_minor_layout_for_x16": False}
"""On tpu7x the compiler wants 16-bit arrays of a loop in tiles of 16 x 128, and copies the head to have it so."""


def head(kind: str, dense: bool = False) -> tuple[Any, Any]:
    """Loss and gradient by hidden, frozen head: a cross-entropy, and the named term beside it unless that is "ce"."""
    struct = jax.ShapeDtypeStruct
    terms = (Term("ce"),) if kind == "ce" else (Term("ce"), Term(kind))

    def loss(hidden, matrix, label, other):
        def total(hidden):
            losses = fused_head_loss(
                hidden,
                matrix,
                terms=terms,
                labels=(label,),
                others=() if kind == "ce" else (other,),
                implementation="reference" if dense else "xla",
            )
            return sum(value.sum() for value in losses.values)

        return jax.value_and_grad(total)(hidden)

    hidden, matrix = struct((ROWS, WIDTH), jnp.bfloat16), struct((WIDTH, VOCABULARY), jnp.bfloat16)
    return loss, (hidden, matrix, struct((ROWS,), jnp.int32), hidden)


def head_figures(chip: str, kind: str) -> dict[str, Any]:
    """One loss on one chip. The compiler counts a loop's body once; trips multiply it."""
    options = {"compiler_options": PLAIN_LAYOUTS} if chip == "tpu7x" else {}
    ours, dense = (facts_of(compile_for(chip, *_spread(head(kind, dense)), **options)) for dense in (False, True))
    tiles = choose_tiles(ROWS, VOCABULARY, None, chip)
    trips = ROWS // tiles.rows * -(-VOCABULARY // tiles.columns)
    product = 2 * ROWS * WIDTH * VOCABULARY
    facts = CHIPS[chip]
    return {
        "terms": "ce" if kind == "ce" else f"ce + {kind}",
        "tiles": {"rows": tiles.rows, "columns": tiles.columns},
        "temporary_mb": round(ours["temporary_bytes"] / 1e6, 1),
        "products": round(ours["flops"] * trips / product, 3),
        "hbm_bound_ms": round(ours["accessed_bytes"] * trips / facts.hbm_bytes_per_second * 1e3, 1),
        "mxu_bound_ms": round(ours["flops"] * trips / facts.bf16_flops_per_second * 1e3, 1),
        "dense_temporary_mb": round(dense["temporary_bytes"] / 1e6, 1),
        "dense_products": round(dense["flops"] / product, 3),
    }


def _spread(built: tuple[Any, Any]) -> tuple[Any, ...]:
    function, arguments = built
    return function, *arguments


def planned(digest: Callable[[Any, str], str]) -> list[Row]:
    """The rows for `run.py`: name, one chip or None for all, digest, and what makes the row for a chip."""
    rows: list[Row] = []
    for i, shape in enumerate(DECODE_SHAPES):
        for layout in ("BGEC", "BGCE")[: 2 - (i > 0)]:
            name = f"decode {'x'.join(map(str, shape))} {layout}"

            def make(
                chip: str, dump: Path, shape: tuple[int, int, int] = shape, layout: str = layout
            ) -> dict[str, Any]:
                return decode_figures(chip, dump, *shape, layout)

            rows.append((name, None if name in FOR_ALL_CHIPS else ONE_CHIP, digest(name, "tree_attention"), make))
    for kind in ("ce", "kl_forward", "l1"):
        name = f"head {kind}"
        only = None if name in FOR_ALL_CHIPS else ONE_CHIP
        rows.append((name, only, digest(name, "fused_head_loss"), lambda chip, _, kind=kind: head_figures(chip, kind)))
    return rows


def tables(rows: dict[str, dict[str, Any]]) -> tuple[str, str]:
    """Of tree attention and of the head loss: chip -> name -> row as `run.py` keeps them."""
    decoding = [
        "| chip | batch x rows x slots, keys | hot bundles | MXU | VALU | XLU | EUP | spills + fills | MXU bound, us "
        "| HBM bound, us | bytes / (K and V once) | temporaries / cache | dense XLA: bytes | dense XLA: temporaries |",
        "|---|" + "---|" * 13,
    ]
    heads = [
        "| chip | loss | temporaries | products | HBM bound | MXU bound | dense: temporaries | dense: products |",
        "|---|" + "---|" * 7,
    ]
    for chip, name, row in ((chip, name, row) for chip, found in rows.items() for name, row in found.items()):
        if name.startswith("decode "):
            busy = " | ".join(f"{row[f'hot_{unit}']:.0%}" for unit in ("mxu", "valu", "xlu", "eup"))
            cells = [name.removeprefix("decode "), row["hot_bundles"], busy, row["hot_spills_and_fills"]]
            cells += [row["mxu_bound_us"], row["hbm_bound_us"], f"{row['bytes_over_cache']:.3f}"]
            cells += [f"{row['temporaries_over_cache']:.2%}", f"{row['dense_xla_bytes_over_cache']:.2f}"]
            cells.append(f"{row['dense_xla_temporaries_over_cache']:.0%}")
            decoding.append(f"| {chip} | {' | '.join(map(str, cells))} |")
        if name.startswith("head "):
            cells = [row["terms"], f"{row['temporary_mb']} MB", f"{row['products']:.3f}", f"{row['hbm_bound_ms']} ms"]
            cells += [
                f"{row['mxu_bound_ms']} ms",
                f"{row['dense_temporary_mb']:.0f} MB",
                f"{row['dense_products']:.3f}",
            ]
            heads.append(f"| {chip} | {' | '.join(map(str, cells))} |")
    return "\n".join(decoding), "\n".join(heads)
