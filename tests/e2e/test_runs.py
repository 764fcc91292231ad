"""Both stages through `run_stage` on a tiny target: what comes out, and that an interruption changes nothing."""

import dataclasses
import gc
import pickle
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from tiny_models import stored_target

from dstill_jax.blocks import ViewMix
from dstill_jax.data.dataset import Conversation, write_dataset
from dstill_jax.data.pipeline import PipelineConfig
from dstill_jax.distill.config import StageOneConfig, StageTwoConfig
from dstill_jax.distill.initialise import DrafterShape
from dstill_jax.errors import UserError
from dstill_jax.overrides import override
from dstill_jax.runs import RunConfig, refreshed_runs, run_stage
from dstill_jax.training import OptimizerConfig, TrainConfig, latest_step, load_params, read_jsonl
from dstill_jax.weights.load import load_drafter, load_target, save_drafter

TARGET = stored_target()
pytestmark = pytest.mark.usefixtures("quick_compilation")


class Boom(Exception):
    """Stands for the machine going away."""


def make_data(folder: Path, kept: slice = slice(None)) -> str:
    """Rows of a short repeating pattern, so that there is something to learn; the first five tokens are a prompt."""
    random = np.random.default_rng(0)
    rows = []
    for i in range(24):
        tokens = np.resize(random.integers(3, 200, 4), 28).astype(np.int32)
        rows.append(Conversation(f"row {i}", tokens, np.arange(28) >= 5))
    provenance = {"inputs": {"target_fingerprint": load_target(TARGET).fingerprint, "tap_ids": []}}
    write_dataset(folder / "dataset", rows[kept], provenance)
    return str(folder)


def stage_one(data: str, out: Path, steps: int = 12) -> RunConfig:
    return RunConfig(
        target=TARGET,
        data=data,
        out=str(out),
        objective=StageOneConfig(views=ViewMix(0.4, 0.3, 0.2, 0.1), late_views=ViewMix(0.8, 0.1, 0.1)),
        optimizer=OptimizerConfig(learning_rate=5e-3, ema_decay=0.5),
        train=TrainConfig(total_steps=steps, save_every=4, progress=False, keep_best=("train/loss", "max")),
        batches=PipelineConfig(seq_len=64, batch_size=2, mode="pack"),
        new=DrafterShape(mask_token_id=208, num_layers=2, block_size=4, num_taps=2, init_from_layers=(0, 2)),
        anchors_per_row=6,
        compute_dtype="float32",
    )


def stage_two(first: RunConfig, out: Path, steps: int = 8) -> RunConfig:
    return dataclasses.replace(
        first,
        objective=StageTwoConfig(),
        out=str(out),
        new=None,
        start_from=f"{first.out}/drafter",
        train=dataclasses.replace(first.train, total_steps=steps),
        vocabulary=64,
    )


def drafter_bytes(config: RunConfig) -> bytes:
    return (Path(config.out) / "drafter" / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunConfig]:
    """Both stages without interruption."""
    folder = tmp_path_factory.mktemp("whole")
    data = make_data(folder / "data")
    first = stage_one(data, folder / "stage1")
    run_stage(first)
    second = stage_two(first, folder / "stage2")
    run_stage(second)
    return {"stage1": first, "stage2": second}


@pytest.mark.parametrize("stage", ["stage1", "stage2"])
def test_a_run_stopped_twice_ends_with_the_same_bytes(stage: str, whole: dict[str, RunConfig], tmp_path: Path) -> None:
    config = dataclasses.replace(whole[stage], out=str(tmp_path / stage))
    for stop_at in (5, 7):

        def stop(step: int, _: object, stop_at: int = stop_at) -> None:
            if step == stop_at:
                raise Boom

        with pytest.raises(Boom):
            run_stage(config, on_step=stop)
    run_stage(config)
    assert drafter_bytes(config) == drafter_bytes(whole[stage])
    steps = [record["step"] for record in read_jsonl(Path(config.out) / "metrics.jsonl")]
    assert steps == list(range(1, config.train.total_steps + 1))


@pytest.mark.parametrize("stage", ["stage1", "stage2"])
def test_while_it_trains_the_device_holds_no_other_copy_of_the_drafter(
    stage: str, whole: dict[str, RunConfig], tmp_path: Path
) -> None:
    """Than those of the state and, in stage 2, the teacher; counted before a checkpoint is copied for writing."""
    others = jax.live_arrays()  # of whatever ran before in this process; held, so that their ids stay theirs
    known = set(map(id, others))

    def look(step: int, state: dict) -> None:
        gc.collect()
        shape = state["params"]["fc"]["kernel"].shape
        found = [x for x in jax.live_arrays() if x.shape == shape and id(x) not in known]
        assert len(found) == sum(x.shape == shape for x in jax.tree.leaves(state)) + (stage == "stage2")
        raise Boom

    with pytest.raises(Boom):
        run_stage(dataclasses.replace(whole[stage], out=str(tmp_path / stage)), on_step=look)


def test_the_loss_falls_and_the_drafter_loads(whole: dict[str, RunConfig]) -> None:
    losses = [record["train/loss"] for record in read_jsonl(Path(whole["stage1"].out) / "metrics.jsonl")]
    assert np.mean(losses[-3:]) < np.mean(losses[:3])
    target = load_target(TARGET)
    drafter = load_drafter(f"{whole['stage2'].out}/drafter", target)
    assert drafter.target_fingerprint == target.fingerprint
    assert drafter.config.block_size == 4


def test_the_best_checkpoint_is_exported_beside_the_last(whole: dict[str, RunConfig]) -> None:
    """By the *highest* loss here, so that it is not the last one; `dstill export RUN/drafter_best` is then all it takes."""
    out, lines = Path(whole["stage1"].out), []
    run_stage(whole["stage1"], report=lines.append)
    loss = {r["step"]: r["train/loss"] for r in read_jsonl(out / "metrics.jsonl") if r["step"] % 4 == 0}
    best = max(loss, key=lambda step: loss[step])
    assert best < 12 and latest_step(out) == 12
    assert lines[-1].endswith(f"{out}/drafter_best the best by train/loss max, of step {best}")
    target = load_target(TARGET)
    exported = {
        step: load_drafter(out / name, target).params for step, name in ((12, "drafter"), (best, "drafter_best"))
    }
    averages = {step: load_params(out, step=step) for step in exported}
    for step in exported:
        for name in ("layers_0", "layers_1", "norm"):
            jax.tree.map(np.testing.assert_array_equal, exported[step][name], averages[step][name])
    # The scale of the taps is folded into both alike.
    scales = [
        np.asarray(exported[step]["fc"]["kernel"]) / np.asarray(averages[step]["fc"]["kernel"]) for step in exported
    ]
    np.testing.assert_allclose(scales[0], scales[1], rtol=1e-5)


def test_a_finished_run_is_found_complete(whole: dict[str, RunConfig]) -> None:
    before = drafter_bytes(whole["stage1"])

    def never(step: int, state: object) -> None:
        raise AssertionError("a finished run must not step")

    run_stage(whole["stage1"], on_step=never)
    assert drafter_bytes(whole["stage1"]) == before


def test_two_datasets_train_as_one_that_holds_all_their_rows(whole: dict[str, RunConfig], tmp_path: Path) -> None:
    halves = tuple(make_data(tmp_path / name, kept) for name, kept in (("a", slice(0, 9)), ("b", slice(9, None))))
    config = override(whole["stage1"], [f"data={halves}", f"out={tmp_path / 'run'}"])
    run_stage(config)
    assert drafter_bytes(config) == drafter_bytes(whole["stage1"])


def test_a_folder_of_another_run_is_refused(whole: dict[str, RunConfig]) -> None:
    with pytest.raises(UserError, match="anchors_per_row"):
        run_stage(dataclasses.replace(whole["stage1"], anchors_per_row=5))


def test_a_run_goes_on_though_its_folders_have_moved(whole: dict[str, RunConfig], tmp_path: Path) -> None:
    """Target, data and drafters are known by what is in them, not by where they lie."""
    moved = {"target": TARGET, "data": str(whole["stage2"].data), "start_from": str(whole["stage2"].start_from)}
    for name, path in moved.items():
        shutil.copytree(path, tmp_path / name)
    shutil.copytree(whole["stage2"].out, tmp_path / "run")
    before = drafter_bytes(whole["stage2"])
    paths = {name: str(tmp_path / name) for name in moved}
    config = dataclasses.replace(whole["stage2"], **paths, out=str(tmp_path / "run"))
    run_stage(config)
    assert drafter_bytes(config) == before


def test_the_vocabulary_is_that_of_the_answers(whole: dict[str, RunConfig], tmp_path: Path) -> None:
    """Prompts hold other tokens, far more often, and what lies behind the end of a row is never drafted."""
    tokens = np.concatenate([np.full(20, 150), np.resize([7, 8, 9], 30), np.full(50, 151)]).astype(np.int32)
    write_dataset(tmp_path / "data" / "dataset", [Conversation("a", tokens, np.arange(100) >= 20)] * 2, {"inputs": {}})
    batches = dataclasses.replace(whole["stage1"].batches, seq_len=50, mode="pad")
    config = dataclasses.replace(stage_one(str(tmp_path / "data"), tmp_path / "run", 1), vocabulary=3, batches=batches)
    run_stage(config)
    assert load_drafter(f"{config.out}/drafter", load_target(TARGET)).vocabulary == (7, 8, 9)


def test_a_mask_token_that_texts_contain_is_refused(whole: dict[str, RunConfig], tmp_path: Path) -> None:
    tokens = np.resize([7, 208, 9], 30).astype(np.int32)
    write_dataset(tmp_path / "data" / "dataset", [Conversation("a", tokens, np.arange(30) >= 5)] * 2, {"inputs": {}})
    with pytest.raises(UserError, match="mask_token_id=208 stands 10 times in row 0 of the data"):
        run_stage(stage_one(str(tmp_path / "data"), tmp_path / "run", 1))


def test_a_run_without_a_folder_is_refused(whole: dict[str, RunConfig]) -> None:
    with pytest.raises(UserError, match="RunConfig.out is empty"):
        dataclasses.replace(whole["stage1"], out="")


def test_a_teacher_of_another_shape_is_refused(whole: dict[str, RunConfig], tmp_path: Path) -> None:
    other = dataclasses.replace(stage_one(whole["stage1"].data, tmp_path / "other", 1), new=DrafterShape(208, 1, 4, 2))
    run_stage(other)
    config = dataclasses.replace(whole["stage2"], out=str(tmp_path / "run"), teacher=f"{other.out}/drafter")
    with pytest.raises(UserError, match="shape"):
        run_stage(config)


def test_a_run_does_not_go_on_from_other_weights_in_the_same_folder(
    whole: dict[str, RunConfig], tmp_path: Path
) -> None:
    """Stage 1 trained anew under a stopped stage 2 would be another start and another teacher."""
    first = dataclasses.replace(whole["stage1"], out=str(tmp_path / "first"))
    shutil.copytree(Path(whole["stage1"].out) / "drafter", Path(first.out) / "drafter")
    second = stage_two(first, tmp_path / "second")
    run_stage(second)
    shutil.rmtree(Path(first.out) / "drafter")
    shutil.copytree(Path(whole["stage2"].out) / "drafter", Path(first.out) / "drafter")
    with pytest.raises(UserError, match="belongs to another run.*drafters"):
        run_stage(second)


def test_stage_two_drafts_what_its_teacher_drafts(whole: dict[str, RunConfig], tmp_path: Path) -> None:
    """The teacher was never asked for other tokens than its own; the data here would choose others."""
    target = load_target(TARGET)
    first = dataclasses.replace(stage_one(whole["stage1"].data, tmp_path / "first", 1), vocabulary=40)
    run_stage(first)
    known = load_drafter(f"{first.out}/drafter", target).vocabulary
    other = make_data(tmp_path / "data", slice(0, 3))
    second = dataclasses.replace(stage_two(first, tmp_path / "second", 1), data=other, vocabulary=None)
    run_stage(second)
    assert load_drafter(f"{second.out}/drafter", target).vocabulary == known
    with pytest.raises(UserError, match=f"vocabulary=30, but .* drafts {len(known)} tokens"):
        run_stage(dataclasses.replace(second, out=str(tmp_path / "third"), vocabulary=30))
    with pytest.raises(UserError, match="draft other tokens"):
        teacher = f"{whole['stage2'].out}/drafter"
        run_stage(dataclasses.replace(second, out=str(tmp_path / "fourth"), teacher=teacher))


def test_a_teacher_of_another_target_is_refused(whole: dict[str, RunConfig], tmp_path: Path) -> None:
    target, folder = load_target(TARGET), tmp_path / "foreign"
    foreign = dataclasses.replace(load_drafter(f"{whole['stage1'].out}/drafter", target), target_fingerprint="f" * 64)
    save_drafter(folder, foreign, target.config, dtype="float32")
    with pytest.raises(UserError, match="was trained on target ffff"):
        run_stage(dataclasses.replace(whole["stage2"], out=str(tmp_path / "run"), start_from=str(folder)))


def test_more_steps_than_the_epochs_hold_are_refused_before_any_is_done(
    whole: dict[str, RunConfig], tmp_path: Path
) -> None:
    batches = dataclasses.replace(whole["stage1"].batches, num_epochs=1)
    config = dataclasses.replace(whole["stage1"], out=str(tmp_path), batches=batches)
    with pytest.raises(UserError, match="num_epochs=1 of .* are 6 steps, and train.total_steps=12"):
        run_stage(config)
    assert not list(tmp_path.iterdir())
    enough = dataclasses.replace(config.train, total_steps=6)
    assert run_stage(dataclasses.replace(config, train=enough)).exists()


def test_more_passes_than_slots_are_refused(whole: dict[str, RunConfig], tmp_path: Path) -> None:
    config = dataclasses.replace(whole["stage2"], out=str(tmp_path), objective=StageTwoConfig(passes=4))
    with pytest.raises(UserError, match="passes=4, but a block has 3 slots"):
        run_stage(config)


def test_the_scale_of_taps_is_that_of_what_batches_show(whole: dict[str, RunConfig], tmp_path: Path) -> None:
    """A document much longer than a row costs no memory that the batches would not."""
    rows = [Conversation("long", np.resize(np.arange(3, 60), 4000).astype(np.int32), np.arange(4000) >= 5)]
    cut = [Conversation("cut", rows[0].tokens[:64], rows[0].loss_mask[:64])]
    found = []
    for name, kept in (("long", rows), ("cut", cut)):
        write_dataset(tmp_path / name / "dataset", kept, {"inputs": {}})
        config = stage_one(str(tmp_path / name), tmp_path / f"run_{name}", 1)
        run_stage(config)
        found.append(drafter_bytes(config))
    assert found[0] == found[1]


def test_rounds_hand_their_student_on_and_go_on_after_a_stop(whole: dict[str, RunConfig], tmp_path: Path) -> None:
    """3 passes -> 2 -> 1, stopped in the second round: the first is not trained again."""
    base = stage_two(whole["stage1"], tmp_path, 4)
    first, second = refreshed_runs(base, (2, 1))

    def stop(step: int, _: object) -> None:
        if step == 2:
            raise Boom

    run_stage(first)
    with pytest.raises(Boom):
        run_stage(second, on_step=stop)
    before = drafter_bytes(first)
    again: list[str] = []
    for config in (first, second):
        run_stage(config, on_step=lambda step, _, out=config.out: again.append(out))
    assert set(again) == {second.out}
    assert drafter_bytes(first) == before != drafter_bytes(second)
    steps = [record["step"] for record in read_jsonl(Path(second.out) / "metrics.jsonl")]
    assert steps == [1, 2, 3, 4]


def test_a_second_round_takes_the_full_trajectories_of_the_first_student(whole: dict[str, RunConfig]) -> None:
    first, second = refreshed_runs(dataclasses.replace(whole["stage2"], teacher="other/drafter"), (1, 1))
    assert first.teacher == "other/drafter" and first.start_from == whole["stage2"].start_from
    assert second.teacher is None and second.start_from == f"{first.out}/drafter"
    assert first.objective == second.objective == whole["stage2"].objective


def test_rounds_that_leave_nothing_to_learn_are_refused(whole: dict[str, RunConfig]) -> None:
    with pytest.raises(UserError, match="refreshed_runs needs a stage-2 run.*stage1"):
        refreshed_runs(whole["stage1"], (2, 1))
    with pytest.raises(UserError, match="student_passes=2 must be below the teacher's passes=2"):
        refreshed_runs(whole["stage2"], (2, 2))


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["stage1", "stage2"])
def test_kill_9_at_any_moment_changes_nothing(stage: str, whole: dict[str, RunConfig], tmp_path: Path) -> None:
    """The process is killed at three moments spread over its life, then left to finish."""
    program = (
        "import sys, pickle; sys.path[:0] = sys.argv[2:]\n"
        "from dstill_jax.runs import run_stage\n"
        "run_stage(pickle.load(open(sys.argv[1], 'rb')))"
    )

    def command(name: str) -> list[str]:
        config = dataclasses.replace(whole[stage], out=str(tmp_path / name))
        (tmp_path / f"{name}.config").write_bytes(pickle.dumps(config))
        return [sys.executable, "-c", program, str(tmp_path / f"{name}.config"), str(Path(__file__).parents[2])]

    subprocess.run(command("whole"), check=True)
    for seconds in (3.0, 12.0, 18.0):
        process = subprocess.Popen(command("killed"))
        time.sleep(seconds)
        process.send_signal(signal.SIGKILL)
        process.wait()
    subprocess.run(command("killed"), check=True)
    weights = [tmp_path / name / "drafter" / "model.safetensors" for name in ("whole", "killed")]
    assert weights[0].read_bytes() == weights[1].read_bytes()
