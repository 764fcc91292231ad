"""Checkpoints come back bit for bit, or not at all."""

import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy_training import OPTIMIZER, ToyData, toy_frozen, toy_loss, toy_params

from dstill_jax.errors import UserError
from dstill_jax.training import (
    CheckpointStore,
    TrainConfig,
    best_step,
    build_optimizer,
    checkpoints,
    init_state,
    latest_step,
    load_metadata,
    load_params,
    make_train_step,
)

IDENTITY = {
    "stage": "stage1",
    "target_fingerprint": "f00d",
    "config": {"block_size": 8, "mask_token_id": 3, "taps": [1, 2]},
}


@pytest.fixture(scope="module")
def trained():
    """The state after three steps, as host arrays."""
    optimizer = build_optimizer(OPTIMIZER, 10)
    state, data = init_state(toy_params(), optimizer, 0), ToyData()
    train_step = make_train_step(toy_loss, optimizer, TrainConfig(total_steps=10))
    for step in range(3):
        state, _ = train_step(state, toy_frozen(), data.batch(step))
    return state


@pytest.fixture
def saved(tmp_path, trained):
    with CheckpointStore(tmp_path / "checkpoints") as store:
        store.save(trained, IDENTITY)
    return tmp_path


def template(params=None):
    return init_state(params or toy_params(seed=9), build_optimizer(OPTIMIZER, 10), 5)


def at_step(state, step):
    return {**state, "step": jnp.int32(step)}


def assert_same_bytes(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape and np.asarray(x).tobytes() == np.asarray(y).tobytes()


def test_every_array_and_container_comes_back(saved, trained):
    with CheckpointStore(saved / "checkpoints") as store:
        assert store.latest_step() == 3
        assert_same_bytes(store.restore(template(), IDENTITY), trained)


def test_weights_alone_are_read_from_run_folder_checkpoint_folder_or_step_folder(saved, trained):
    for folder in (saved, saved / "checkpoints", saved / "checkpoints" / "3"):
        assert_same_bytes(load_params(folder), trained["ema"])
        assert_same_bytes(load_params(folder, "params"), trained["params"])
    with pytest.raises(UserError, match="which='opt_state'"):
        load_params(saved, "opt_state")


def test_metadata_holds_identity_and_versions(saved):
    metadata = load_metadata(saved)
    assert metadata["identity"] == IDENTITY
    assert metadata["step"] == 3 and set(metadata["notes"]) >= {"dstill-jax", "jax", "orbax-checkpoint"}


def cast(tree, dtype):
    return jax.tree.map(lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree)


def with_layer(params):
    return {**params, "layers_1": {"norm": {"scale": np.ones(8, np.float32)}}}


def renamed(params):
    return {**params, "layers_0": {"norm": {"weight": params["layers_0"]["norm"]["scale"]}}}


def wider(params):
    return {**params, "head": {"kernel": np.ones((8, 12), np.float32)}}


@pytest.mark.parametrize(
    ("make_template", "messages"),
    [
        (lambda: template(with_layer(toy_params())), ["params/layers_1/norm/scale is not in the checkpoint"]),
        (lambda: template({"head": toy_params()["head"]}), ["params/layers_0/norm/scale is only in the checkpoint"]),
        (
            lambda: template(renamed(toy_params())),
            ["params/layers_0/norm/weight is not in", "params/layers_0/norm/scale is only in"],
        ),
        (
            lambda: template(wider(toy_params())),
            [r"head/kernel has shape \[8, 11\] there, \[8, 12\] now", "opt_state/1/mu"],
        ),
        (lambda: cast(template(), jnp.bfloat16), ["params/head/kernel is float32 there, bfloat16 now"]),
        (lambda: at_step(template(), 0) | {"step": jnp.float32(0)}, ["step is int32 there, float32 now"]),
    ],
)
def test_another_structure_shape_or_dtype_is_refused_with_its_paths(saved, make_template, messages):
    with CheckpointStore(saved / "checkpoints") as store:
        for message in messages:
            with pytest.raises(UserError, match=message):
                store.restore(make_template(), IDENTITY)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target_fingerprint": "beef"}, "target_fingerprint is 'f00d' there, 'beef' now"),
        ({"stage": "stage2"}, "stage is 'stage1' there, 'stage2' now"),
        ({"config": {**IDENTITY["config"], "block_size": 16}}, r"config\.block_size is 8 there, 16 now"),
        ({"config": {**IDENTITY["config"], "mask_token_id": 4}}, r"config\.mask_token_id is 3 there, 4 now"),
        ({"config": {**IDENTITY["config"], "taps": (1, 3)}}, r"config\.taps is \[1, 2\] there, \[1, 3\] now"),
        ({"config": {**IDENTITY["config"], "new": 1}}, r"config\.new is not in the checkpoint \(1 now\)"),
        ({"config": {"block_size": 8, "taps": [1, 2]}}, r"config\.mask_token_id is only in the checkpoint"),
    ],
)
def test_another_run_is_refused_with_the_differing_fields(saved, change, message):
    with CheckpointStore(saved / "checkpoints") as store, pytest.raises(UserError, match=message):
        store.restore(template(), {**IDENTITY, **change})


def test_only_the_newest_are_kept_and_a_step_is_saved_once(tmp_path, trained):
    with CheckpointStore(tmp_path, keep_last=2) as store:
        for step in (1, 2, 3, 3):
            store.save(at_step(trained, step), IDENTITY)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["2", "3"]


def steps_in(folder):
    return sorted(int(p.name) for p in folder.iterdir() if p.name.isdecimal())


def test_the_best_is_kept_beside_the_newest(tmp_path, trained):
    by_loss = ("train/loss", "min")
    with CheckpointStore(tmp_path, keep_last=1, keep_best=by_loss) as store:
        for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0)):
            store.save(at_step(trained, step), IDENTITY, {"train/loss": loss, "train/tau": 1.0})
        store.save(at_step(trained, 4), IDENTITY, {"train/tau": 1.0})  # no loss was measured
    assert steps_in(tmp_path) == [2, 4] and best_step(tmp_path, *by_loss) == 2
    with CheckpointStore(tmp_path, keep_last=1, keep_best=by_loss) as store:
        store.save(at_step(trained, 5), IDENTITY, {"train/loss": 1.5})
        assert steps_in(tmp_path) == [2, 5]
        store.save(at_step(trained, 6), IDENTITY, {"train/loss": 0.5})
    assert steps_in(tmp_path) == [6]
    with CheckpointStore(tmp_path, keep_last=1, keep_best=("train/tau", "max")) as store:  # another judge from here on
        for step, tau in ((7, 2.0), (8, 1.0)):
            store.save(at_step(trained, step), IDENTITY, {"train/tau": tau})
    assert steps_in(tmp_path) == [7, 8]
    with pytest.raises(UserError, match=r"no checkpoint in .* was saved with the metric 'eval/tau'"):
        best_step(tmp_path, "eval/tau", "max")


def test_a_save_in_the_background_holds_the_state_of_its_step(tmp_path):
    """The next steps reuse (donate) the memory of the state while it is being written."""
    optimizer, data = build_optimizer(OPTIMIZER, 10), ToyData()
    train_step = make_train_step(toy_loss, optimizer, TrainConfig(total_steps=10))
    state = init_state(toy_params(), optimizer, 0)
    with CheckpointStore(tmp_path, keep_last=9) as store:
        copies = []
        for step in range(4):
            copies.append(jax.tree.map(lambda x: np.array(x, copy=True), state))
            store.save(state, IDENTITY, wait=False)
            state, _ = train_step(state, toy_frozen(), data.batch(step))
        store.wait()
        for step, copy in enumerate(copies):
            assert_same_bytes(store.restore(template(), IDENTITY, step), copy)


def test_a_bucket_stays_a_bucket(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert str(checkpoints._folder("gs://bucket/run")) == "gs://bucket/run"
    assert str(checkpoints._folder("run")) == str(tmp_path / "run")


def test_a_half_written_step_is_never_restored(saved, trained):
    folder = saved / "checkpoints"
    unfinished = folder / "4.orbax-checkpoint-tmp"
    shutil.copytree(folder / "3", unfinished)
    (unfinished / "commit_success.txt").unlink()
    (folder / "5").mkdir()  # a copy that broke off
    (folder / "5" / "state").mkdir()
    (folder / "1" / "state").mkdir(parents=True)  # a deletion that was killed
    assert latest_step(saved) == 3
    with CheckpointStore(folder, keep_last=2) as store:
        assert int(store.restore(template(), IDENTITY)["step"]) == 3
        for step in (4, 5):
            store.save(at_step(trained, step), IDENTITY)
    assert sorted(p.name for p in folder.iterdir() if p.name.isdecimal()) == ["4", "5"]
    assert (folder / "5.incomplete").is_dir()


def test_folders_that_are_somebody_else_s_are_refused_and_left(tmp_path, trained):
    """Job numbers and years look like steps."""
    photo = tmp_path / "2024" / "photo.txt"
    photo.parent.mkdir()
    photo.touch()
    for _ in range(2):
        with pytest.raises(UserError, match=r"2024 holds photo.txt and is no checkpoint.*folder of their own"):
            CheckpointStore(tmp_path)
    assert photo.exists()


def test_a_store_looks_into_its_own_folder_alone(tmp_path, trained):
    with CheckpointStore(tmp_path / "checkpoints") as store:
        store.save(at_step(trained, 3), IDENTITY)
    with CheckpointStore(tmp_path) as store:
        assert store.latest_step() is None


def test_a_damaged_checkpoint_is_named(saved):
    for file in (saved / "checkpoints" / "3" / "state" / "d").iterdir():
        file.write_bytes(b"")
    with (
        CheckpointStore(saved / "checkpoints") as store,
        pytest.raises(UserError, match=r"cannot read checkpoint .*/3: "),
    ):
        store.restore(template(), IDENTITY)


def test_missing_checkpoints_are_named(tmp_path, saved):
    with pytest.raises(UserError, match="holds no complete checkpoint"):
        load_params(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"no checkpoint of step 7; it has 3"):
        load_params(saved, step=7)


def test_a_folder_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "checkpoints").write_text("")
    with pytest.raises(UserError, match="cannot open checkpoint folder"):
        CheckpointStore(tmp_path / "checkpoints")


def test_moments_stay_float32_after_a_restore(saved):
    with CheckpointStore(saved / "checkpoints") as store:
        state = store.restore(template(), IDENTITY)
    dtypes = {str(x.dtype) for x in jax.tree.leaves(state) if jnp.issubdtype(x.dtype, jnp.floating)}
    assert dtypes == {"float32"}
