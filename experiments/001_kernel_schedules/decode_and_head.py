"""Tree attention and the head loss, compiled for every chip: schedules, bytes, temporaries. Beside `run.py`, runs alone.

Command: python experiments/001_kernel_schedules/decode_and_head.py [chip ...]
Hardware: any Linux x86-64 CPU with libtpu installed; about 15 min for all chips on 2 idle cores. Nothing here runs on a TPU.
Expected: 16 rows over 32768 slots move keys and values once (ratio below 1.05), 0 spills; head loss temporaries below 256 MB.
"""

import json
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.chips import CHIPS
from pallas_kernels.fused_head_loss import Term, fused_head_loss
from pallas_kernels.fused_head_loss.blocks import choose_tiles
from pallas_kernels.testing import chip_names, compile_for, facts_of, schedules_of
from pallas_kernels.tree_attention import tree_attention
from pallas_kernels.tree_attention.blocks import TreeShape, choose_blocks

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128  # Qwen3-8B
ROWS, WIDTH, VOCABULARY = 8192, 4096, 151_936
DECODE_SHAPES = ((8, 16, 32768), (1, 64, 32768), (8, 256, 4096), (1, 1024, 4096))  # batch, rows, slots


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


def decode_figures(chip: str, batch: int, rows: int, slots: int, key_layout: str = "BGEC") -> dict[str, Any]:
    """One shape of tree attention on one chip."""
    shape = {"batch": batch, "rows": rows, "slots": slots, "key_layout": key_layout}
    report = schedules_of(chip, f"{__file__}:decode", shape, "tree_attention")
    peer = facts_of(compile_for(chip, *_spread(decode(**shape, dense=True))))
    kernel, hot = report.schedule("tree_attention"), report.schedule("tree_attention").hot
    blocks = choose_blocks(TreeShape(rows, HEADS // KV_HEADS, KV_HEADS, HEAD_DIM, slots, 2), None, chip)
    cache = 2 * batch * KV_HEADS * slots * HEAD_DIM * 2
    return {
        "op": "tree_attention",
        "chip": chip,
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
    ours, dense = (facts_of(compile_for(chip, *_spread(head(kind, dense)))) for dense in (False, True))
    tiles = choose_tiles(ROWS, VOCABULARY, None, chip)
    trips = ROWS // tiles.rows * -(-VOCABULARY // tiles.columns)
    product = 2 * ROWS * WIDTH * VOCABULARY
    facts = CHIPS[chip]
    return {
        "op": "fused_head_loss",
        "chip": chip,
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


def figures(chip: str) -> list[dict[str, Any]]:
    """Every row of one chip."""
    rows = [decode_figures(chip, *shape) for shape in DECODE_SHAPES]
    rows.append(decode_figures(chip, *DECODE_SHAPES[0], key_layout="BGCE"))
    return rows + [head_figures(chip, kind) for kind in ("ce", "kl_forward", "l1")]


def main() -> None:
    """Prints each chip's rows and writes them beside this file."""
    results = []
    for chip in sys.argv[1:] or chip_names():
        for row in figures(chip):
            print(json.dumps(row), flush=True)
            results.append(row)
    path = Path(__file__).with_name("decode_and_head.json")
    path.write_text(json.dumps({"jax": jax.__version__, "rows": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
