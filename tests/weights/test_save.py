"""Saving whole models: the published layout, round trips, and what a failed save leaves behind."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from dstill_jax.errors import UserError
from dstill_jax.weights import load
from dstill_jax.weights.load import load_drafter, load_target, save_drafter, save_target

REFERENCE = Path(__file__).parent.parent / "reference"
CASES = ["qwen3_tiny", "llama_tied"]


def assert_same_tree(a: Any, b: Any) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)


# The published layout, spelled out: one draft layer of width D, MLP F, n query heads, g key heads of size d, K taps.
PUBLISHED = {
    "fc.weight": "D,KD",
    "hidden_norm.weight": "D",
    "norm.weight": "D",
    "layers.0.input_layernorm.weight": "D",
    "layers.0.post_attention_layernorm.weight": "D",
    "layers.0.self_attn.q_proj.weight": "nd,D",
    "layers.0.self_attn.k_proj.weight": "gd,D",
    "layers.0.self_attn.v_proj.weight": "gd,D",
    "layers.0.self_attn.o_proj.weight": "D,nd",
    "layers.0.self_attn.q_norm.weight": "d",
    "layers.0.self_attn.k_norm.weight": "d",
    "layers.0.mlp.gate_proj.weight": "F,D",
    "layers.0.mlp.up_proj.weight": "F,D",
    "layers.0.mlp.down_proj.weight": "D,F",
}


@pytest.mark.parametrize("case", CASES)
def test_a_saved_drafter_holds_the_published_names_shapes_and_dtype_and_no_other(case: str, tmp_path: Path) -> None:
    target = load_target(REFERENCE / case / "target")
    drafter = load_drafter(REFERENCE / case / "draft", target)
    save_drafter(tmp_path / "out", drafter, target.config)
    c = drafter.config
    n, g, d = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim, c.head_dim
    sizes = {"D": c.hidden_size, "F": c.intermediate_size, "nd": n, "gd": g, "d": d, "KD": c.num_taps * c.hidden_size}
    expected = {}
    for name, axes in PUBLISHED.items():
        shape = tuple(sizes[a] for a in axes.split(","))
        layers = range(c.num_layers) if name.startswith("layers.0.") else [0]
        expected |= {name.replace("layers.0.", f"layers.{i}."): shape for i in layers}
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert {name: value.shape for name, value in tensors.items()} == expected
    assert {value.dtype for value in tensors.values()} == {np.dtype(ml_dtypes.bfloat16)}
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize(("case", "kind"), [("qwen3_tiny", "draft"), ("qwen3_tiny", "draft2"), ("llama_tied", "draft")])
def test_a_drafter_survives_the_round_trip_bit_for_bit(case: str, kind: str, tmp_path: Path) -> None:
    target = load_target(REFERENCE / case / "target")
    drafter = load_drafter(REFERENCE / case / kind, target)
    save_drafter(tmp_path / "f32", drafter, target.config, dtype="float32")
    again = load_drafter(tmp_path / "f32", target)
    assert again.config == drafter.config
    assert_same_tree(again.params, drafter.params)
    original, saved = (
        load_file(REFERENCE / case / kind / "model.safetensors"),
        load_file(tmp_path / "f32/model.safetensors"),
    )
    assert all(np.array_equal(original[name], saved[name]) for name in original)
    rounded = load_drafter(REFERENCE / case / kind, dtype="bfloat16")
    save_drafter(tmp_path / "bf16", rounded, target.config)
    assert_same_tree(load_drafter(tmp_path / "bf16", dtype="bfloat16").params, rounded.params)


def test_the_fingerprint_of_the_target_is_kept_beside_the_public_layout(tmp_path: Path) -> None:
    target = load_target(REFERENCE / "llama_tied" / "target")
    drafter = load_drafter(REFERENCE / "llama_tied" / "draft", target)
    assert drafter.target_fingerprint is None
    known = dataclasses.replace(drafter, target_fingerprint=target.fingerprint)
    save_drafter(tmp_path, known, target.config)
    assert load_drafter(tmp_path, target).target_fingerprint == target.fingerprint
    save_drafter(tmp_path, drafter, target.config)  # saving over it must not leave the old claim behind
    assert load_drafter(tmp_path, target).target_fingerprint is None


def test_the_vocabulary_of_a_drafter_is_kept_beside_the_public_layout(tmp_path: Path) -> None:
    target = load_target(REFERENCE / "llama_tied" / "target")
    drafter = load_drafter(REFERENCE / "llama_tied" / "draft", target)
    assert drafter.vocabulary is None
    save_drafter(tmp_path, dataclasses.replace(drafter, vocabulary=(3, 7, 130)), target.config)
    assert load_drafter(tmp_path, target).vocabulary == (3, 7, 130)
    for wrong in ([], [3, 3], [7, 3], [131], [-1], [1.5], "3", [True]):
        (tmp_path / "dstill.json").write_text(json.dumps({"vocabulary": wrong}))
        with pytest.raises(UserError, match=r"dstill.json: vocabulary must list distinct token ids of 0..130"):
            load_drafter(tmp_path, target)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("scan_layers", [False, True])
def test_a_target_survives_the_round_trip_from_either_form(case: str, scan_layers: bool, tmp_path: Path) -> None:
    target = load_target(REFERENCE / case / "target", scan_layers=scan_layers)
    (tmp_path / "tokenizer.json").write_text("{}")
    save_target(tmp_path, target.config, target.params)
    again = load_target(tmp_path, scan_layers=scan_layers)
    assert again.config == target.config
    assert_same_tree(again.params, target.params)
    assert (tmp_path / "tokenizer.json").exists()


def test_parameters_that_do_not_fit_the_config_are_not_saved(tmp_path: Path) -> None:
    target = load_target(REFERENCE / "llama_tied" / "target")
    less = {k: v for k, v in target.params.items() if k != "norm"}
    more = {**target.params, "head": {"kernel": jnp.zeros((48, 131))}}
    wrong = {**target.params, "norm": {"scale": jnp.zeros(47)}}
    for params, message in (
        (less, "lack norm/scale"),
        (more, "no place for parameter head/kernel"),
        (wrong, r"\(47,\)"),
    ):
        with pytest.raises(UserError, match=message):
            save_target(tmp_path / "out", target.config, params)
    assert not (tmp_path / "out").exists()


def test_a_folder_with_other_weights_is_not_saved_into(tmp_path: Path) -> None:
    target = load_target(REFERENCE / "llama_tied" / "target")
    (tmp_path / "stage1.safetensors").touch()
    with pytest.raises(UserError, match=r"other weights \(stage1\.safetensors\)"):
        save_target(tmp_path, target.config, target.params)
    with pytest.raises(UserError, match="is a file"):
        save_target(tmp_path / "stage1.safetensors", target.config, target.params)


def test_a_full_disk_leaves_the_folder_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = load_target(REFERENCE / "llama_tied" / "target")
    save_target(tmp_path, target.config, target.params)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}

    def disk_full(pairs: Any, dtype: Any) -> Any:
        yield np.zeros((131, 48), np.float32)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(load, "_host_values", disk_full)
    with pytest.raises(OSError, match="No space left"):
        save_target(tmp_path, target.config, target.params)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before
