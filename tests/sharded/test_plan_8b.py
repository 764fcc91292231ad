"""The published recipe for Qwen3-8B (S 3072, A 512, K 16, five layers), compiled for real slices. Minutes each."""

import functools
import math
from pathlib import Path
from typing import Any

import pytest

from dstill_jax.commands import load_config
from dstill_jax.planning import plan

CONFIG = Path(__file__).parents[2] / "configs" / "qwen3_8b_stage1.py"
pytestmark = pytest.mark.slow


@functools.cache
def planned(name: str, *overrides: str) -> dict[str, Any]:
    return plan(load_config(str(CONFIG), "CONFIG", overrides), name)


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("v5e-16", ()),
        ("v6e-16", ()),
        ("v5p-8", ("mesh.fsdp=4", "batches.batch_size=4")),
        ("v5p-512", ()),
    ],
)
def test_it_fits_and_compiles_in_minutes(name: str, overrides: tuple[str, ...]) -> None:
    values = planned(name, *overrides)
    assert values["fits"], values["reason"]
    assert values["bytes_per_device"]["peak"] < values["slice"]["hbm_bytes"]
    assert not values["uncounted"]


def test_on_v5p_arithmetic_bounds_the_step() -> None:
    values = planned("v5p-512")
    seconds = values["seconds_at_least"]
    assert values["bound_by"] == "compute" and values["mfu_at_most"] >= 0.55
    assert max(seconds["hbm"], seconds["ici"]) < seconds["compute"]


@pytest.mark.parametrize("generation", ["v5p"])
def test_bytes_per_device_and_per_token_do_not_grow_with_the_slice(generation: str) -> None:
    """From 16 to 256 chips at the same rows per chip. On 16 chips, without wrap-around links, the compiler sums gradients
    whole, twice the bytes of scattered sums; with those counted alike, ICI bytes are equal, too."""
    small, large = planned(f"{generation}-32"), planned(f"{generation}-512")
    assert small["slice"]["devices"] * 16 == large["slice"]["devices"] == 256
    for read in (
        lambda v: v["bytes_per_device"]["peak"],
        lambda v: v["per_device_and_step"]["flops"],
    ):
        assert math.isclose(read(small), read(large), rel_tol=0.1)
    moved = [{(c["kind"], c["devices"]): c["bytes"] for c in v["collectives"]} for v in (small, large)]
    gathers, sums, scattered = ("all-gather", 16), ("all-reduce", 16), ("reduce-scatter", 16)
    assert moved[0][gathers] == moved[1][gathers] and scattered not in moved[0]
    totals = [sum(m.values()) for m in moved]
    assert totals[1] <= 1.1 * totals[0]
    assert math.isclose(totals[0], totals[1] + moved[1][scattered], rel_tol=0.05)
    assert math.isclose(moved[0][sums], moved[1][sums] + 2 * moved[1][scattered], rel_tol=0.1)
