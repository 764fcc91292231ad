"""Slice names, and what `dstill plan` says to bad input and of a small run on a real slice."""

import dataclasses
import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest
import sharded_case
import simulated
from tiny_models import drafter_config, random_target, target_config

from dstill_jax.cli import main
from dstill_jax.errors import UserError
from dstill_jax.losses.config import BlockTerms
from dstill_jax.planning.chips import CHIPS, parse_slice, slice_devices
from dstill_jax.planning.compile import compile_step, device_bytes, require_target
from dstill_jax.planning.decode import abstract_round
from dstill_jax.planning.model_flops import step_flops
from dstill_jax.planning.plan import candidates, fit_to_slice
from dstill_jax.planning.targets import KNOWN
from dstill_jax.sharding import MeshConfig
from dstill_jax.weights.load import save_target


@pytest.mark.parametrize(
    ("name", "topology", "devices"),
    [
        ("v5e-16", "v5e:4x4", 16),
        ("v6e-256", "v6e:16x16", 256),
        ("v5p-8", "v5p:2x2x1", 4),
        ("v5p-128", "v5p:4x4x4", 64),
        ("v5p-512", "v5p:4x8x8", 256),
        ("tpu7x-16", "tpu7x:2x2x2", 16),
        ("v5p:4x4x8", "v5p:4x4x8", 128),
        ("2xv6e-256", "v6e:16x16", 512),
    ],
)
def test_slice_names(name: str, topology: str, devices: int) -> None:
    place = parse_slice(name)
    assert (place.topology, place.num_devices) == (topology, devices)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("v5e-17", "slice 'v5e-17' does not exist; v5e comes as v5e-1, v5e-4"),
        ("v5p-9", "slice 'v5p-9' does not exist; v5p comes as v5p-8, v5p-16"),
        ("v9-8", "slice 'v9-8' is unknown; write e.g. v5e-16"),
        ("v5p:4x4", "v5p topologies have 3 sizes"),
        ("v5e-4x4", "a topology stands after ':'"),
        ("0xv5e-4", "has no slices"),
    ],
)
def test_a_slice_that_does_not_exist(name: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_slice(name)


def test_links_of_a_torus() -> None:
    """Two links on each axis, one where it has two chips; never more than the maker states for a chip."""
    assert parse_slice("v5p:4x4x4").ici_bytes_per_s == 6 * CHIPS["v5p"].ici_link_bytes_per_s
    assert parse_slice("v5p:2x2x1").ici_bytes_per_s == 2 * CHIPS["v5p"].ici_link_bytes_per_s
    assert parse_slice("v5e:4x4").ici_bytes_per_s == 4 * CHIPS["v5e"].ici_link_bytes_per_s


def test_a_run_is_resized_to_a_slice_at_the_same_rows_per_device() -> None:
    config = sharded_case.run_config("stage1", MeshConfig(data=2, fsdp=2, tensor=2), sharded_case.Memory(), 4, 1)
    made, changed = fit_to_slice(config, parse_slice("2xv5e-16"))
    assert made.mesh == MeshConfig(dcn_data=2, data=4, fsdp=2, tensor=2)
    assert made.batches.batch_size / made.mesh.row_shares == config.batches.batch_size / config.mesh.row_shares
    assert changed == {"mesh.dcn_data": 2, "mesh.data": 4, "batches.batch_size": 32}
    assert fit_to_slice(config, parse_slice("v5e-8")) == (config, {})
    with pytest.raises(UserError, match="do not divide into mesh.fsdp=3"):
        three = dataclasses.replace(config.batches, batch_size=3)
        fit_to_slice(dataclasses.replace(config, mesh=MeshConfig(fsdp=3), batches=three), parse_slice("v5e-16"))


def test_the_search_tries_only_what_can_be() -> None:
    config = sharded_case.run_config("stage1", MeshConfig(), sharded_case.Memory(), 4, 1)
    place = parse_slice("v5e-16")
    made = [c for c, _ in candidates(config, place)]
    assert {c.mesh.tensor for c in made} == {1, 2, 4} and all(
        c.mesh.size == 16 and c.batches.batch_size % c.mesh.row_shares == 0 for c in made
    )


def test_model_flops_of_a_step_by_hand() -> None:
    """One row, counted product by product for the target, the drafter and the head of the 8B recipe."""
    target = KNOWN["Qwen/Qwen3-8B"]
    config = runpy.run_path(str(Path(__file__).parents[2] / "configs" / "qwen3_8b_stage1.py"))["CONFIG"]
    drafter = config.new.build(target)
    D, F, HE, GE, S, N = 4096, 12288, 4096, 1024, 3072, 512 * 16
    layer = 2 * (D * HE + 2 * D * GE + HE * D + 3 * D * F)
    found = step_flops(target, drafter, config.objective, 1, S, 512, 151936)
    assert found.target == 36 * S * (layer + 2 * 2 * HE * S / 2)
    assert found.head == 512 * 15 * 2 * 2 * D * 151936
    blocks = 3 * 5 * N * (layer + 2 * 2 * HE * (S / 2 + 16))
    assert found.drafter == blocks + 3 * 5 * S * 2 * D * 2 * GE + 2 * 2 * S * 5 * D * D
    assert found.teacher == 0
    assert 100e12 < found.total < 130e12


def test_model_flops_of_the_further_terms_of_stage_two() -> None:
    """Each of the two is a forward pass of the drafter and one more distribution of each slot."""
    target = KNOWN["Qwen/Qwen3-8B"]
    configs = Path(__file__).parents[2] / "configs"
    drafter = runpy.run_path(str(configs / "qwen3_8b_stage1.py"))["CONFIG"].new.build(target)
    plain = runpy.run_path(str(configs / "qwen3_8b_stage2.py"))["CONFIG"].objective
    rest = dataclasses.replace(plain.loss.rest, consistency_kl=0.5)
    consistent = dataclasses.replace(plain, loss=dataclasses.replace(plain.loss, rest=rest))
    contrasted = dataclasses.replace(plain, loss=dataclasses.replace(plain.loss, whole=BlockTerms(ddo_fake=0.5)))
    without, *others = (step_flops(target, drafter, o, 1, 3072, 512, 151936) for o in (plain, consistent, contrasted))
    matrices = 4096 * (2 * 4096 + 2 * 1024 + 3 * 12288)
    one_pass = 512 * 16 * 5 * (2 * matrices + 2 * 2 * 4096 * (3072 / 2 + 16))
    for found in others:
        assert found.head - without.head == 512 * 15 * 2 * 4096 * 151936
        assert found.teacher - without.teacher == one_pass
        assert (found.target, found.drafter) == (without.target, without.drafter)


def test_shapes_known_without_a_network_are_accepted_by_name() -> None:
    assert require_target("Qwen/Qwen3-0.6B").tie_embeddings
    with pytest.raises(UserError, match="planning knows without a network: Qwen/Qwen3-0.6B"):
        require_target("no/such_folder")


CONFIG = """
import sys
sys.path.insert(0, {folder!r})
import sharded_case
import dataclasses
mesh = sharded_case.MeshConfig(data=2, fsdp=2)  # libtpu 0.0.50 aborts on a number's sum over `tensor`
CONFIG = sharded_case.run_config("stage1", mesh, sharded_case.Memory(True, True, 2), 4, 1)
CONFIG = dataclasses.replace(
    CONFIG, target={target!r}, start_from=None, compute_dtype="bfloat16",
    new=sharded_case.DrafterShape(mask_token_id=63, num_layers=1, block_size=4, target_layer_ids=(0, 1)),
)
"""


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    """A config file beside the target it names, of which only the configuration is there."""
    target = random_target(**sharded_case.SHAPE)
    save_target(tmp_path / "target", target.config, target.params)
    (tmp_path / "target" / "model.safetensors").unlink()
    path = tmp_path / "run.py"
    path.write_text(CONFIG.format(folder=str(Path(__file__).parent), target=str(tmp_path / "target")))
    return path


def command(config_file: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "dstill_jax.cli", "plan", str(config_file), *arguments],
        env=simulated.environment(1) | variables,
        capture_output=True,
        text=True,
    )


def test_a_small_run_planned_for_a_real_slice(config_file: Path, tmp_path: Path) -> None:
    done = command(config_file, "--slice", "v5e-4", "--json", str(tmp_path / "plan.json"))
    assert done.returncode == 0, done.stderr
    assert "Nothing was run" in done.stdout and "fits:" in done.stdout
    values = json.loads((tmp_path / "plan.json").read_text())
    assert values["fits"] and values["slice"]["devices"] == 4
    sizes = values["bytes_per_device"]
    known = sum(values["argument_bytes_by_kind"].values())
    # The compiler pads small arrays and drops arguments that the step does not read (the target's own head).
    assert 0.3 * known < sizes["arguments"]
    assert 0 < sizes["aliased"] <= sizes["outputs"]
    work = values["per_device_and_step"]
    assert work["flops"] * 4 > 0.9 * values["model_flops_per_step"]["total"]
    assert not values["uncounted"]
    kinds = {c["kind"] for c in values["collectives"]}
    assert "all-gather" in kinds and all(c["network"] == "ici" for c in values["collectives"])


def test_only_sums_of_gradients_cross_between_slices(config_file: Path, tmp_path: Path) -> None:
    done = command(config_file, "--slice", "2xv5e-4", "--json", str(tmp_path / "plan.json"))
    assert done.returncode == 0, done.stderr
    values = json.loads((tmp_path / "plan.json").read_text())
    assert values["slice"]["devices"] == 8 and values["run"]["changed_for_slice"]["mesh.dcn_data"] == 2
    work, crossing = values["per_device_and_step"], [c for c in values["collectives"] if c["network"] == "dcn"]
    assert {c["kind"] for c in crossing} <= {"all-reduce", "reduce-scatter", "all-gather"}
    assert 0 < work["dcn_bytes"] == sum(c["bytes"] for c in crossing) and values["seconds_at_least"]["dcn"] > 0
    # Each device's share of the float32 gradients, met by the other slice's: sent and received once. Vectors, whole
    # everywhere, and a few numbers are on top; weights and activations would be several times as much.
    share = values["argument_bytes_by_kind"]["drafter params"]
    assert share <= work["dcn_bytes"] <= 2 * share
    assert "DCN" in done.stdout and "(dcn)" in done.stdout


def test_a_round_of_decoding_planned_for_a_real_slice(config_file: Path, tmp_path: Path) -> None:
    done = command(config_file, "--slice", "v5e-4", "--decode", "8x64", "--json", str(tmp_path / "plan.json"))
    assert done.returncode == 0, done.stderr
    assert "one round of decoding" in done.stdout and "Nothing was run" in done.stdout
    values = json.loads((tmp_path / "plan.json").read_text())
    assert values["fits"] and values["run"]["mesh"] == "data=2, tensor=2" and not values["uncounted"]
    L, G, E = sharded_case.SHAPE["num_layers"], 2, 8
    kinds = values["argument_bytes_by_kind"]
    assert (
        kinds["target cache"] == 2 * L * (8 * G // 4) * 64 * E * 2
    )  # keys and values, bfloat16; a quarter of the rows' heads
    assert kinds["drafter context"] == 2 * 1 * (8 * G // 4) * 64 * E * 2
    # One round, not none and not two: the products of the target's and the drafter's matrices over a block of 4, and those
    # of the target's attention, a kernel as on the slice: 4 requests, one key head, 2 x 16 rows, 64 + 16 keys.
    V, D, F = (sharded_case.SHAPE[name] for name in ("vocab_size", "hidden_size", "intermediate_size"))
    products = 8 * 4 * 2 * ((L + 1) * (D * E * (2 * 4 + 2 * G) + 3 * D * F) + 2 * D * V) / 4
    known = products + L * 4 * 4 * (2 * 16) * (64 + 16) * E
    assert known < values["per_device_and_step"]["flops"] <= 1.2 * known  # the drafter's own kernel is the rest
    few, many = values["tokens_per_second_at_most"].values()
    assert many == 4 * few == 4 * values["rounds_per_second_at_most"]


def test_a_round_on_a_tpu_copies_no_cache() -> None:
    """Kernels and writes agree on how caches lie: a round reads them, and the weights, about once."""
    shape = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 128, "intermediate_size": 1024}
    target = target_config(vocab_size=1024, hidden_size=512, num_layers=3, max_position_embeddings=4096, **shape)
    drafter = drafter_config(target, block_size=8, **shape)
    devices = slice_devices(parse_slice("v5e-1"))
    run = abstract_round(target, drafter, MeshConfig(), 8, 2048, devices, jnp.dtype("bfloat16"))
    compiled = compile_step(run)
    caches, weights = (device_bytes(tree) for tree in ((run.state.cache, run.state.context), run.frozen))
    assert caches < compiled.counts.hbm_bytes < 1.5 * (caches + 2 * weights)  # 158 MB; 595 where they were copied
    assert compiled.temporary < caches / 8


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--decode", "8by64"], "must be requests x cache tokens"),
        (["--decode", "8x64", "--search"], "without --search"),
        (["--decode", "7x64"], "7 rows of decoding do not divide over 2 shares"),
    ],
)
def test_a_round_that_cannot_be(
    config_file: Path, capsys: pytest.CaptureFixture, arguments: list, message: str
) -> None:
    assert main(["plan", str(config_file), "--slice", "v5e-4", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_what_a_device_is_comes_from_the_table_of_cores() -> None:
    for chip in CHIPS.values():
        cores = chip.core.cores_per_device
        assert chip.flops == cores * chip.core.bf16_flops_per_second and chip.hbm_bytes == cores * chip.core.hbm_bytes
    assert CHIPS["v5p"].flops == 459e12 and CHIPS["v5p"].hbm_bytes_per_s == 2765e9
    assert CHIPS["tpu7x"].devices_per_chip == 2 and CHIPS["v5p"].devices_per_chip == 1


@pytest.mark.slow
def test_a_search_returns_the_settings_that_fit_best_first(config_file: Path, tmp_path: Path) -> None:
    done = command(config_file, "--slice", "v5e-4", "--search", "--limit", "2", "--json", str(tmp_path / "found.json"))
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    rates = [values["tokens_per_second_at_most"] for values in found]
    assert len(found) == 2 and all(values["fits"] for values in found) and rates == sorted(rates, reverse=True)
    assert done.stderr.count("tokens/s at most") == 2 and "plan for v5e-4" in done.stdout


def test_the_compiler_knows_the_slices_by_these_names() -> None:
    names = [
        "v5e-1",
        "v5e-8",
        "v5e-256",
        "v5p-8",
        "v5p-1024",
        "v6e-1",
        "v6e-64",
        "tpu7x-8",
        "2xv5e-16",
        "2xv5p-32",
    ]
    found = sharded_case.call("found_devices", 1, names=names)
    assert found == {name: parse_slice(name).num_devices for name in names}


def test_a_program_larger_than_a_device_does_not_fit_and_says_by_how_much() -> None:
    made = sharded_case.call("too_big", 1, slice_name="v5e-1")
    assert not made["fits"]
    assert re.search(r"\([\d.]+G\) exceeds available HBM \(15\.\d+G\)", made["reason"]), made


def test_user_errors_are_one_line(config_file: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["plan", str(config_file), "--slice", "v5e-17"]) == 2
    assert "v5e comes as" in capsys.readouterr().err
    assert main(["plan", str(config_file), "mesh.fsdp=3", "--slice", "v5e-4"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_without_libtpu_the_message_names_the_extra(config_file: Path, tmp_path: Path) -> None:
    (tmp_path / "libtpu.py").write_text("raise ImportError('not here')\n")
    done = command(config_file, "--slice", "v5e-4", PYTHONPATH=f"{tmp_path}:{simulated.environment(1)['PYTHONPATH']}")
    assert done.returncode == 2
    assert done.stderr.strip() == "dstill: 'libtpu' is not installed; run: pip install 'dstill-jax[tpu]'"
