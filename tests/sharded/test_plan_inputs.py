"""What a plan has to know and where it is found, which settings a search tries, what a plan says of hosts."""

import dataclasses
import json
import sys
import types
from pathlib import Path

import jax
import pytest
import sharded_case
from tiny_models import random_drafter, random_target

from dstill_jax.distill.config import StageOneConfig
from dstill_jax.distill.initialise import DrafterShape
from dstill_jax.errors import UserError
from dstill_jax.losses.config import LossConfig
from dstill_jax.models.drafter import Memory
from dstill_jax.overrides import override
from dstill_jax.planning.chips import Slice, parse_slice
from dstill_jax.planning.compile import Compiled, abstract_run, require_target, settle
from dstill_jax.planning.plan import candidates
from dstill_jax.planning.report import plan_text, plan_values
from dstill_jax.runs import RunConfig
from dstill_jax.sharding import MeshConfig
from dstill_jax.weights.load import describe_drafter, load_drafter, save_drafter, save_target

TARGET = random_target(**sharded_case.SHAPE)
NEW = DrafterShape(mask_token_id=79, num_layers=1, block_size=4, target_layer_ids=(0, 1))


@pytest.fixture(autouse=True)
def no_hub(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """A hub that has the folders of its test alone, and tells what was asked of it."""
    asked: dict[str, list[str]] = {}

    def snapshot_download(name: str, allow_patterns: list[str], **_) -> str:
        asked[name] = allow_patterns
        folder = Path(name.rpartition("/")[2])
        if not folder.exists():
            raise ConnectionError("no such model")
        return str(folder.absolute())

    monkeypatch.setitem(sys.modules, "huggingface_hub", types.SimpleNamespace(snapshot_download=snapshot_download))
    return asked


@pytest.fixture
def drafter_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A drafter of 20 of the 80 tokens, in the folder of a run at home; its weights are gone."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    drafter = dataclasses.replace(random_drafter(TARGET, **sharded_case.DRAFTER), vocabulary=tuple(range(5, 45, 2)))
    folder = tmp_path / "run" / "drafter"
    save_drafter(folder, drafter, TARGET.config)
    (folder / "model.safetensors").unlink()
    return folder


def run_of(**changes) -> RunConfig:
    config = sharded_case.run_config("stage1", MeshConfig(), Memory(), 4, 1)
    return dataclasses.replace(config, objective=StageOneConfig(LossConfig()), **changes)


def test_a_target_is_known_by_its_config_alone(tmp_path: Path, no_hub: dict) -> None:
    folder = tmp_path / "target"
    save_target(folder, TARGET.config, TARGET.params)
    (folder / "model.safetensors").unlink()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        assert require_target(str(folder)) == require_target("someone/target") == TARGET.config
    assert no_hub == {"someone/target": ["*.json"]}


def test_a_drafter_is_known_by_its_config_alone(drafter_folder: Path, no_hub: dict) -> None:
    """By its folder, its run's folder, both from home, and a hub id."""
    found = [describe_drafter(p) for p in (drafter_folder, drafter_folder.parent, "~/run", "~/run/drafter")]
    assert all(d == found[0] and d.params == {} and len(d.vocabulary or ()) == 20 for d in found)
    drafter_folder.rename("published")
    assert settle(run_of(start_from="someone/published"), TARGET.config)[1] == found[0].config
    assert no_hub == {"someone/published": ["*.json"]}
    with pytest.raises(UserError, match="safetensors"):
        load_drafter("published")


def test_a_drafter_of_another_target_is_refused(drafter_folder: Path) -> None:
    with pytest.raises(UserError, match="the drafter has vocab_size=80 but the target has vocab_size=96"):
        settle(run_of(start_from=str(drafter_folder)), dataclasses.replace(TARGET.config, vocab_size=96))


def test_a_drafter_that_is_not_there_yet_has_the_shape_that_the_config_file_exports(no_hub: dict) -> None:
    missing = run_of(start_from="runs/stage1")
    assert settle(missing, TARGET.config, NEW) == (missing, NEW.build(TARGET.config))
    assert not no_hub, "what is made here is not looked for elsewhere"
    with pytest.raises(UserError, match="'runs/stage1' is not a local folder.*let the config file export SHAPE"):
        settle(missing, TARGET.config)


@pytest.mark.parametrize("role", ["start_from", "teacher"])
def test_the_head_is_that_of_the_drafters_vocabulary(drafter_folder: Path, role: str) -> None:
    """As training takes it, where the run itself names none."""
    config = run_of(start_from=str(drafter_folder))
    if role == "teacher":
        stage2 = sharded_case.OBJECTIVES["stage2"]
        config = run_of(start_from=None, new=NEW)
        config = dataclasses.replace(config, objective=stage2, teacher=str(drafter_folder))
    settled, drafter = settle(config, TARGET.config, NEW)
    run = abstract_run(settled, TARGET.config, drafter, jax.devices()[:1])
    assert run.frozen.head.shape == (32, 20) and run.frozen.vocabulary.shape == (20,)


def planned(config: RunConfig, place: Slice) -> dict:
    """The values of a plan whose program did not fit: those that need no compiler."""
    config, drafter = settle(config, TARGET.config)
    run = abstract_run(config, TARGET.config, drafter, jax.devices()[:1])
    return plan_values(config, place, TARGET.config, drafter, run, Compiled(False, "too large"), {})


@pytest.mark.parametrize(("vocabulary", "columns"), [(None, 80), (24, 24)])
def test_the_arithmetic_of_the_head_counts_the_columns_that_are_compiled(vocabulary: int | None, columns: int) -> None:
    """Eight rows of eight blocks of three scored slots, width 32: logits, and the slots' gradient; two FLOPs each."""
    values = planned(run_of(start_from=None, new=NEW, vocabulary=vocabulary), parse_slice("v5e-1"))
    assert values["model_flops_per_step"]["head"] == 8 * 8 * 3 * 2 * (2 * 32 * columns)


def test_a_plan_says_when_the_host_is_too_small() -> None:
    config, place = run_of(start_from=None, new=NEW), parse_slice("v5e-1")
    assert "host memory; raise" not in plan_text(planned(config, place))
    values = planned(config, dataclasses.replace(place, chip=dataclasses.replace(place.chip, host_bytes=1000.0)))
    text = " ".join(plan_text(values).split())
    assert "hosts have 1.00 kB DOES NOT FIT: host memory; raise mesh.fsdp" in text
    assert json.loads(json.dumps(values))["host_fits"] is False


def searched(rows: int, slice_name: str) -> list[RunConfig]:
    config = run_of()
    batches = dataclasses.replace(config.batches, batch_size=rows)
    return [made for made, _ in candidates(dataclasses.replace(config, batches=batches), parse_slice(slice_name))]


def test_what_a_search_says_makes_its_settings() -> None:
    """As overrides, also of what the configuration had otherwise."""
    config = run_of()
    mesh = dataclasses.replace(config.mesh, fsdp=16, split_rows=True)
    config = dataclasses.replace(
        config, mesh=mesh, memory=Memory(scan_layers=False, anchor_chunk=64), anchors_per_row=64
    )
    for made, changed in candidates(config, parse_slice("v5e-16")):
        assert override(config, [f"{name}={value}" for name, value in changed.items()]) == made


def test_a_search_begins_with_every_mesh() -> None:
    made = searched(256, "v5p-128")
    meshes = [MeshConfig(64 // (f * t), f, t) for t, f in ((1, 16), (1, 32), (1, 64), (2, 16), (2, 32), (4, 16))]
    assert [c.mesh for c in made] == 6 * meshes
    settings = [(c.batches.batch_size // c.train.accumulate_steps // 64, c.memory.remat_layers) for c in made]
    most_first = [(4, False), (4, True), (2, False), (2, True), (1, False), (1, True)]
    assert settings == [setting for setting in most_first for _ in meshes]


def test_a_search_keeps_the_rows_of_an_optimiser_step_where_they_divide() -> None:
    def rows(made: list[RunConfig]) -> set[tuple[int, int]]:
        return {(c.batches.batch_size, c.train.accumulate_steps) for c in made}

    assert rows(searched(256, "v5p-128")) == {(256, 1), (256, 2), (256, 4)}
    assert rows(searched(48, "v5e-16")) == {(64, 1), (32, 1), (48, 3)}
    assert rows(searched(8, "v5e-16")) == {(64, 1), (32, 1), (16, 1)}
