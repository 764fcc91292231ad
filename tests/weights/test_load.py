"""Loading whole models: golden cases, dtypes, memory, and every way a folder can fail its config."""

import dataclasses
import json
import shutil
import sys
import tracemalloc
import types
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tiny_models import stack_layers

from dstill_jax.config import RopeConfig, TargetConfig
from dstill_jax.errors import UserError
from dstill_jax.models import target as target_model
from dstill_jax.models.layers import store_input_first
from dstill_jax.models.target import Target, init_params
from dstill_jax.weights.folders import readable_name
from dstill_jax.weights.load import describe_target, load_drafter, load_target, save_drafter, save_target

REFERENCE = Path(__file__).parent.parent / "reference"
CASES = ["qwen3_tiny", "llama_tied"]


def copy(case: str, kind: str, folder: Path) -> Path:
    shutil.copytree(REFERENCE / case / kind, folder / kind)
    return folder / kind


@pytest.mark.parametrize(
    "folder, name",
    [("hub/models--Owner--Model-0.6B/snapshots/c1899de", "Owner/Model-0.6B"), ("my-model/", "my-model")],
)
def test_a_model_is_called_by_its_hub_id_or_its_folder(tmp_path: Path, folder: str, name: str) -> None:
    assert readable_name(f"{tmp_path}/{folder}") == name


def edit_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def edit_tensors(folder: Path, drop: tuple[str, ...] = (), **added: np.ndarray) -> None:
    tensors = load_file(folder / "model.safetensors")
    names = {key.replace("__", "."): value for key, value in added.items()}
    save_file({k: v for k, v in (tensors | names).items() if k not in drop}, folder / "model.safetensors")


def assert_same_tree(a: Any, b: Any) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)


def logits_and_taps(target: Target, tokens: np.ndarray, tap_ids: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    ids = jnp.asarray(tokens, jnp.int32)
    positions = jnp.arange(ids.shape[1], dtype=jnp.int32)[None]
    out = target_model.forward(target.config, target.params, ids, positions, tap_ids=tap_ids)
    return np.asarray(target_model.head(target.config, target.params, out.hidden)), np.asarray(out.taps)


def test_embedded_targets_go_by_their_names(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = REFERENCE / "llama_tied" / "target"
    fetched: list[str] = []
    monkeypatch.setattr("dstill_jax.weights.embedded.fetch", lambda name, report: fetched.append(name) or folder)
    monkeypatch.chdir(tmp_path)
    assert load_target("tiny").fingerprint == describe_target("smollm2").fingerprint == load_target(folder).fingerprint
    assert fetched == ["tiny", "smollm2"]
    copy("qwen3_tiny", "target", tmp_path).rename(tmp_path / "tiny")  # a folder of that name goes first
    assert load_target("tiny").fingerprint != load_target(folder).fingerprint
    assert fetched == ["tiny", "smollm2"]


def test_a_tilde_is_the_home_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In every place, whether the shell has put it in or not."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    copy("qwen3_tiny", "target", tmp_path)
    copy("qwen3_tiny", "draft", tmp_path).rename(tmp_path / "drafter")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").touch()
    target = load_target("~/target")
    with pytest.raises(UserError, match="~/run: this run has not ended"):
        load_drafter("~/run")
    (tmp_path / "drafter").rename(tmp_path / "run" / "drafter")
    drafter = load_drafter("~/run", target)
    assert drafter.source == str(tmp_path / "run" / "drafter")
    save_target("~/saved", target.config, target.params)
    save_drafter("~/saved_drafter", drafter, target.config)
    assert describe_target("~/saved").source == str(tmp_path / "saved")
    assert load_drafter("~/saved_drafter").config == drafter.config
    assert not any(Path().iterdir())
    for load in (load_target, load_drafter):
        with pytest.raises(UserError, match="no folder at '~nobody-of-this-name/model'"):
            load("~nobody-of-this-name/model")


# --- golden cases ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("scan_layers", [False, True])
def test_a_loaded_target_gives_the_reference_logits_and_taps(case: str, scan_layers: bool) -> None:
    expected = np.load(REFERENCE / case / "expected.npz")
    target = load_target(REFERENCE / case / "target", scan_layers=scan_layers)
    tap_ids = load_drafter(REFERENCE / case / "draft", target).config.target_layer_ids
    logits, taps = logits_and_taps(target, expected["prompt"], tap_ids)
    np.testing.assert_allclose(logits, expected["target_logits"], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(taps, expected["context_features"], rtol=1e-4, atol=1e-4)
    shifted = tuple(i + 1 for i in tap_ids)  # the neighbouring layers must not pass
    assert np.abs(logits_and_taps(target, expected["prompt"], shifted)[1] - expected["context_features"]).max() > 1e-2


@pytest.mark.parametrize("case", CASES)
def test_stacked_loading_equals_stacking_the_unrolled_form(case: str) -> None:
    unrolled = load_target(REFERENCE / case / "target", scan_layers=False)
    stacked = load_target(REFERENCE / case / "target", scan_layers=True)
    assert_same_tree(stacked.params, stack_layers(store_input_first(unrolled.params)))
    assert stacked.fingerprint == unrolled.fingerprint


def test_layers_are_unrolled_on_a_cpu_and_stacked_elsewhere_by_default() -> None:
    params = load_target(REFERENCE / "llama_tied" / "target").params
    assert ("layers_0" in params, "layers" in params) == (
        (True, False) if jax.default_backend() == "cpu" else (False, True)
    )


@pytest.mark.parametrize("case", CASES)
def test_the_map_covers_exactly_what_the_modules_create(case: str) -> None:
    target = load_target(REFERENCE / case / "target")
    fresh = init_params(target.config, jax.random.key(0))
    assert jax.tree.map(jnp.shape, fresh) == jax.tree.map(jnp.shape, store_input_first(target.params))


# --- dtypes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stored", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("wanted", ["float32", "float16", "bfloat16"])
def test_weights_are_cast_once_to_the_wanted_dtype(tmp_path: Path, stored: str, wanted: str) -> None:
    source = load_target(REFERENCE / "llama_tied" / "target")
    save_target(tmp_path, source.config, source.params, dtype=stored)
    loaded = load_target(tmp_path, dtype=wanted)
    expected = jax.tree.map(lambda x: np.asarray(x).astype(np.dtype(stored)).astype(np.dtype(wanted)), source.params)
    assert_same_tree(loaded.params, expected)


def test_a_weight_beyond_float16_is_refused_in_float16(tmp_path: Path) -> None:
    folder = copy("llama_tied", "target", tmp_path)
    edit_tensors(folder, model__norm__weight=np.full(48, 1e6, np.float32))
    with pytest.raises(UserError, match=r"model\.norm\.weight does not fit into float16"):
        load_target(folder, dtype="float16")
    assert load_target(folder, dtype="bfloat16").dtype == ml_dtypes.bfloat16


# --- what a folder may lack or have too much of -----------------------------------------------------------------------


def test_a_tied_target_uses_its_embedding_whatever_head_the_file_holds(tmp_path: Path) -> None:
    expected = np.load(REFERENCE / "llama_tied" / "expected.npz")
    folder = copy("llama_tied", "target", tmp_path)
    edit_tensors(folder, lm_head__weight=np.full((131, 48), 7.0, np.float32))
    target = load_target(folder)
    assert "head" not in target.params
    logits, _ = logits_and_taps(target, expected["prompt"], (1,))
    np.testing.assert_allclose(logits, expected["target_logits"], rtol=1e-4, atol=1e-4)


def test_an_untied_target_without_a_head_is_refused(tmp_path: Path) -> None:
    folder = copy("qwen3_tiny", "target", tmp_path)
    edit_tensors(folder, drop=("lm_head.weight",))
    with pytest.raises(UserError, match=r"lack lm_head\.weight"):
        load_target(folder)


def test_rotary_buffers_are_ignored(tmp_path: Path) -> None:
    folder = copy("llama_tied", "target", tmp_path)
    edit_tensors(folder, model__layers__0__self_attn__rotary_emb__inv_freq=np.ones(4, np.float32))
    load_target(folder)


@pytest.mark.parametrize(
    ("kind", "drop", "added", "message"),
    [
        ("target", ("model.layers.3.mlp.up_proj.weight",), {}, r"lack model\.layers\.3\.mlp\.up_proj\.weight"),
        ("target", (), {"model__layers__8__mlp__up_proj__weight": (96, 64)}, r"no place for model\.layers\.8\.mlp"),
        ("target", (), {"model__layers__0__self_attn__q_proj__bias": (64,)}, r"no place for .*q_proj\.bias"),
        ("target", (), {"model__norm__weight": (63,)}, r"model\.norm\.weight has shape \[63\].*says \[64\]"),
        ("draft", ("layers.0.self_attn.q_norm.weight",), {}, r"lack layers\.0\.self_attn\.q_norm\.weight"),
        ("draft", (), {"embed_tokens__weight": (211, 64)}, r"no place for embed_tokens\.weight"),
        ("draft", (), {"fc__weight": (64, 128)}, r"fc\.weight has shape \[64, 128\].*says \[64, 192\]"),
    ],
)
def test_missing_leftover_and_misshapen_tensors_are_named(
    tmp_path: Path, kind: str, drop: tuple[str, ...], added: dict[str, tuple], message: str
) -> None:
    folder = copy("qwen3_tiny", kind, tmp_path)
    edit_tensors(folder, drop, **{name: np.zeros(shape, np.float32) for name, shape in added.items()})
    with pytest.raises(UserError, match=message):
        load_target(folder) if kind == "target" else load_drafter(folder)


def test_another_layer_count_in_the_config_is_refused_both_ways(tmp_path: Path) -> None:
    folder = copy("llama_tied", "target", tmp_path)
    edit_config(folder, num_hidden_layers=7)
    with pytest.raises(UserError, match=r"lack model\.layers\.6\..* and 4 more"):
        load_target(folder)
    edit_config(folder, num_hidden_layers=5)
    with pytest.raises(UserError, match=r"no place for model\.layers\.5\."):
        load_target(folder)


def test_errors_name_the_file(tmp_path: Path) -> None:
    folder = copy("llama_tied", "target", tmp_path)
    edit_config(folder, hidden_act="gelu")
    with pytest.raises(UserError, match=r"target/config\.json: hidden_act='gelu'"):
        load_target(folder)
    (folder / "config.json").write_text('{\n "model_type": llama\n}')
    with pytest.raises(UserError, match=r"config\.json line 2 is not valid JSON"):
        load_target(folder)
    (folder / "config.json").unlink()
    with pytest.raises(UserError, match=r"config\.json does not exist"):
        load_target(folder)
    with pytest.raises(UserError, match="is a file"):
        load_target(folder / "model.safetensors")
    with pytest.raises(UserError, match="no folder at"):
        load_target(tmp_path / "absent")
    with pytest.raises(UserError, match="dtype='int8'"):
        load_target(folder, dtype="int8")


def test_a_damaged_generation_config_is_blamed_itself(tmp_path: Path) -> None:
    folder = copy("llama_tied", "target", tmp_path)
    (folder / "generation_config.json").write_text('{"eos_token_id": "end"}')
    with pytest.raises(UserError, match=r"generation_config\.json.*eos_token_id='end'"):
        load_target(folder)


def test_generation_config_adds_end_of_text_ids(tmp_path: Path) -> None:
    folder = copy("llama_tied", "target", tmp_path)
    (folder / "generation_config.json").write_text('{"eos_token_id": [5, 2]}')
    assert load_target(folder).config.eos_token_ids == (2, 5)


# --- hub ids --------------------------------------------------------------------------------------------------------


def test_a_hub_id_is_downloaded_without_other_formats(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {}

    def snapshot_download(name: str, **options: Any) -> str:
        asked[name] = options
        return str(REFERENCE / "llama_tied" / "target")

    monkeypatch.setitem(sys.modules, "huggingface_hub", types.SimpleNamespace(snapshot_download=snapshot_download))
    assert load_target("owner/tiny-llama").config.vocab_size == 131
    assert "*.safetensors" in asked["owner/tiny-llama"]["allow_patterns"]


def test_an_id_the_hub_cannot_deliver_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot_download(name: str, **options: Any) -> str:
        raise ConnectionError("no route to host\nlong story")

    monkeypatch.setitem(sys.modules, "huggingface_hub", types.SimpleNamespace(snapshot_download=snapshot_download))
    with pytest.raises(UserError, match=r"'owner/name' is not a local folder.*no route to host\)"):
        load_target("owner/name")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UserError, match=r"dstill-jax\[data\]"):
        load_target("owner/name")


# --- drafter and target ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 300}, "vocab_size=211 but the target has vocab_size=300"),
        ({"hidden_size": 128}, "hidden_size=64 but the target has hidden_size=128"),
        ({"num_layers": 12}, "num_target_layers=8 but the target has num_layers=12"),
        ({"eos_token_ids": (2, 208)}, "mask_token_id=208 is an end-of-text token"),
    ],
)
def test_a_drafter_of_another_target_is_refused_with_both_values(changes: dict, message: str) -> None:
    target = load_target(REFERENCE / "qwen3_tiny" / "target")
    other = dataclasses.replace(target, config=dataclasses.replace(target.config, **changes))
    with pytest.raises(UserError, match=message):
        load_drafter(REFERENCE / "qwen3_tiny" / "draft", other)
    load_drafter(REFERENCE / "qwen3_tiny" / "draft", target)


@pytest.mark.parametrize(
    "target_dtype, asked, expected",
    [("bfloat16", None, "bfloat16"), ("bfloat16", "float32", "float32"), ("float32", None, "float32")],
)
def test_a_drafter_has_its_targets_dtype_unless_it_is_asked_for_another(target_dtype, asked, expected):
    target = load_target(REFERENCE / "qwen3_tiny" / "target", dtype=target_dtype)
    drafter = load_drafter(REFERENCE / "qwen3_tiny" / "draft", target, asked)
    assert {str(x.dtype) for x in jax.tree.leaves(drafter.params)} == {expected}


def test_a_drafter_is_float32_without_a_loaded_target():
    described = describe_target(REFERENCE / "qwen3_tiny" / "target")
    for target in (None, described):
        drafter = load_drafter(REFERENCE / "qwen3_tiny" / "draft", target)
        assert {str(x.dtype) for x in jax.tree.leaves(drafter.params)} == {"float32"}


# --- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scan_layers", [False, True])
def test_loading_holds_no_second_copy_of_the_model(scan_layers: bool, tmp_path: Path) -> None:
    """Host bytes alive while a tree is filled: the tree so far and the few tensors in hand, whichever form it takes."""
    config = TargetConfig(
        "llama", 512, 256, 768, 12, 4, 2, 64, 1e-5, RopeConfig(1e4), False, False, False, max_position_embeddings=64
    )
    save_target(tmp_path, config, init_params(config, jax.random.key(0)))
    size = (tmp_path / "model.safetensors").stat().st_size
    load_target(tmp_path, scan_layers=scan_layers)  # whatever is cached once
    tracemalloc.start()
    load_target(tmp_path, scan_layers=scan_layers)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1.3 * size
