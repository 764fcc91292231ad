"""Chip facts, choice of implementation and of block sizes, and the reader of compiled schedules."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import block_sizes, chips, dispatch, testing


@dataclasses.dataclass(frozen=True)
class Sizes:
    rows: int = 8

    def __post_init__(self) -> None:
        block_sizes.check_multiple("rows", self.rows, 8)


def doubled(rows: int) -> tuple:
    """A builder for `schedules_of`: module-level, JSON arguments."""
    return (lambda x: jnp.sin(x @ x.T)), (jax.ShapeDtypeStruct((rows, 128), jnp.bfloat16),)


@pytest.mark.parametrize("name", chips.CHIPS)
def test_chip_is_found_by_name_and_by_every_device_kind(name: str) -> None:
    facts = chips.chip(name)
    assert all(chips.chip(kind) is facts and chips.is_tpu(kind) for kind in (name, *facts.device_kinds))


@pytest.mark.parametrize(("name", "rows"), [("v4", 224), ("v5e", 241), ("v5p", 166), ("v6e", 560), ("tpu7x", 313)])
def test_ridge_rows_are_the_published_ones(name: str, rows: int) -> None:
    assert round(chips.chip(name).ridge_rows) == rows


def test_unknown_chip_is_an_error_that_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match="TPU v99.*v5e"):
        chips.chip("TPU v99")


def test_auto_is_pallas_on_a_tpu_and_xla_elsewhere() -> None:
    assert dispatch.resolve("auto", "TPU v5 lite")[0] == "pallas"
    assert dispatch.resolve("auto", "NVIDIA H200")[0] == "xla"
    assert dispatch.resolve("auto", None) == ("xla", jax.devices()[0].device_kind)


def test_a_forced_implementation_never_falls_back() -> None:
    with pytest.raises(ValueError, match="needs a TPU, got device_kind='cpu'"):
        dispatch.resolve("pallas", "cpu")
    assert dispatch.resolve("pallas", "cpu", interpret=True)[0] == "pallas"
    assert dispatch.resolve("xla", "TPU v4")[0] == "xla"
    with pytest.raises(ValueError, match="cuda"):
        dispatch.resolve("cuda", "cpu")


def test_block_sizes_argument_beats_tuned_beats_heuristic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "toy.json").write_text(json.dumps({"v5e": {"S8": {"rows": 16}}}))
    monkeypatch.setattr(block_sizes, "TUNING", tmp_path)
    block_sizes._tuned.cache_clear()

    def chosen(argument: Sizes | None, kind: str, key: str) -> Sizes:
        return block_sizes.choose("toy", Sizes, argument, kind, key, lambda facts: Sizes(24))

    assert chosen(Sizes(32), "TPU v5 lite", "S8").rows == 32
    assert chosen(None, "TPU v5 lite", "S8").rows == 16
    assert chosen(None, "TPU v5 lite", "S9").rows == 24
    assert chosen(None, "cpu", "S8").rows == 16  # simulated as HEURISTIC_CHIP
    block_sizes._tuned.cache_clear()


def test_bad_block_sizes_say_field_and_value() -> None:
    with pytest.raises(ValueError, match="rows=12 must be a positive multiple of 8"):
        Sizes(12)
    with pytest.raises(ValueError, match="toy needs 14.0 MiB of VMEM, v4 offers 12.0 MiB"):
        block_sizes.check_vmem("toy", 14 * 2**20, "TPU v4")


def test_schedule_table_is_read_and_cut_at_branch_targets(tmp_path: Path) -> None:
    head = "== CAPACTIY:\nMXU, XLU\n 4 3 4 2 1 3 3 1 1 2\n== UTILIZATION:\n"
    path = tmp_path / "17-hot.1-70-final_hlo-static-per-bundle-utilization.txt"
    path.write_text(head + "0 0 1 0 0 0 0 0 0 0\n" + "4 0 1 0 0 0 2 0 1 0\n" * 2 + "4 0 1 0 0 0 0 0 0 0\n" * 3)
    lines = ["0 : > { nop }", "0x1 LB: >> { x }", "0x2 : >> { x }", "0x3 PF: > { y }", "0x4 : { y }", "0x5 : { y }"]
    (tmp_path / "17-hot.1-72-final_bundles.txt").write_text("".join(f"   {line}\n" for line in lines))
    (whole,) = testing.read_schedules(tmp_path, "hot")
    assert (whole.kernel, whole.bundles, whole.spills, whole.fills) == ("hot.1", 6, 2, 4)
    assert whole.utilisation("MXU") == 5 / 6
    assert [(part.bundles, part.spills) for part in whole.segments] == [(1, 0), (2, 2), (3, 0)]
    assert whole.hot.kernel == "hot.1@3-6"
    path.write_text("== UTILIZATION:\n1 2 3\n")
    with pytest.raises(ValueError, match="did libtpu change it"):
        testing.read_schedules(tmp_path, "hot")


def test_schedules_come_from_the_real_compiler() -> None:
    report = testing.schedules_of("v5e", f"{__file__}:doubled", {"rows": 256})
    assert report.output_bytes == 256 * 256 * 2
    assert max(schedule.used["MXU"] for schedule in report.schedules) > 0


def test_a_missing_compiler_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from jax.experimental import topologies

    def missing(**_: object) -> None:
        raise ValueError("no libtpu")

    monkeypatch.setattr(topologies, "get_topology_desc", missing)
    with pytest.raises(RuntimeError, match="install dstill-jax\\[dev\\]"):
        testing.devices("v5e")
