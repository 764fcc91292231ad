"""Drafter configs: the public DFlash layout, and what each known loader finds in the one we write."""

import json
from pathlib import Path
from typing import Any

import pytest

from dstill_jax.config import DrafterConfig, Llama3RopeScaling, RopeConfig, TargetConfig
from dstill_jax.errors import UserError
from dstill_jax.weights.hf_config import drafter_config_dict, parse_drafter_config, parse_target_config

REFERENCE = Path(__file__).parent.parent / "reference"
CASES = [("qwen3_tiny", "draft"), ("qwen3_tiny", "draft2"), ("llama_tied", "draft")]


def read(case: str = "qwen3_tiny", folder: str = "draft") -> dict[str, Any]:
    return json.loads((REFERENCE / case / folder / "config.json").read_text())


def target(case: str = "qwen3_tiny") -> TargetConfig:
    return parse_target_config(read(case, "target"))


def changed(**changes: Any) -> dict[str, Any]:
    """The Qwen3 case with keys replaced (or removed: `...`); a `nested_x` key changes x inside dflash_config."""
    config = read()
    for key, value in changes.items():
        place, name = (config["dflash_config"], key[7:]) if key.startswith("nested_") else (config, key)
        place.pop(name, None)
        if value is not ...:
            place[name] = value
    return config


def test_the_public_layout_is_read() -> None:
    assert parse_drafter_config(read()) == DrafterConfig(
        vocab_size=211,
        hidden_size=64,
        intermediate_size=96,
        num_layers=3,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        rms_norm_eps=1e-6,
        rope=RopeConfig(1e6),
        block_size=8,
        mask_token_id=208,
        target_layer_ids=(1, 3, 5),
        num_target_layers=8,
        max_position_embeddings=512,
        causal=False,
    )


def test_settings_may_stand_at_the_top_or_nested() -> None:
    expected = parse_drafter_config(read())
    flat = changed(mask_token_id=208, target_layer_ids=[1, 3, 5], nested_mask_token_id=..., nested_target_layer_ids=...)
    both = changed(mask_token_id=208, target_layer_ids=[1, 3, 5], nested_block_size=8, nested_num_target_layers=8)
    nested = changed(block_size=..., nested_block_size=8)
    for config in (flat, both, nested, {**flat, "dflash_config": None}):
        assert parse_drafter_config(config) == expected


def test_causality_is_read_from_each_key() -> None:
    assert parse_drafter_config(changed(is_causal=True)).causal
    assert parse_drafter_config(changed(nested_causal=True)).causal
    assert not parse_drafter_config(changed(is_causal=False, nested_causal=False)).causal
    with pytest.raises(UserError, match="is_causal=False contradicts causal=True"):
        parse_drafter_config(changed(is_causal=False, nested_causal=True))


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"block_size": ...}, "block_size is missing"),
        ({"nested_mask_token_id": ...}, "mask_token_id is missing"),
        ({"nested_mask_token_id": ..., "nested_mask_token": "<mask>"}, "mask_token_id is missing"),
        ({"nested_target_layer_ids": ...}, "target_layer_ids is missing"),
        ({"num_target_layers": ...}, "num_target_layers is missing"),
        ({"head_dim": ...}, "head_dim is missing"),
        ({"rope_theta": ...}, "rope_theta is missing"),
        ({"nested_block_size": 16}, "block_size=8 contradicts dflash_config.block_size=16"),
        ({"mask_token_id": 0}, "mask_token_id=0 contradicts dflash_config.mask_token_id=208"),
        ({"target_layer_ids": [2, 4, 6]}, "target_layer_ids=.2, 4, 6. contradicts"),
        ({"block_size": 1}, "block_size=1"),
        ({"nested_mask_token_id": 211}, "mask_token_id=211"),
        ({"nested_target_layer_ids": [1, 3, 8]}, "target_layer_ids has 8"),
        ({"nested_target_layer_ids": []}, "target_layer_ids is empty"),
        ({"nested_target_layer_ids": [1, 1, 3]}, "names a layer twice"),
        ({"nested_target_layer_ids": "1,3,5"}, "target_layer_ids='1,3,5'"),
        ({"nested_projector_type": "other"}, "dflash_config.projector_type"),
        ({"architectures": ["DFlash2DraftModel"]}, "DFlash2DraftModel"),
        ({"architectures": ...}, "architectures=None"),
        ({"model_type": "llama"}, "model_type='llama'"),
        ({"speculators_model_type": "dflash"}, "speculators layout"),
        ({"aux_hidden_state_layer_ids": [2, 4, 6]}, "aux_hidden_state_layer_ids"),
        ({"draft_vocab_size": 100}, "draft_vocab_size=100"),
        ({"target_hidden_size": 128}, "target_hidden_size=128"),
        ({"layer_types": ["sliding_attention"] * 3}, r"layer_types\[0\]='sliding_attention'"),
        ({"layer_types": ["full_attention"] * 5}, "layer_types has 5 entries but num_hidden_layers=3"),
        ({"use_sliding_window": True, "sliding_window": 8}, "use_sliding_window=True"),
        ({"use_sliding_window": ..., "sliding_window": 8}, "sliding_window=8"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
    ],
)
def test_missing_contradictory_and_unknown_settings_stop(fields: dict, named: str) -> None:
    with pytest.raises(UserError, match=named):
        parse_drafter_config(changed(**fields))


def test_a_draft_vocabulary_of_full_size_is_no_pruning() -> None:
    parse_drafter_config(changed(draft_vocab_size=211))


# --- writing --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("case", "folder"), CASES)
def test_a_written_config_reads_back_equal(case: str, folder: str) -> None:
    config = parse_drafter_config(read(case, folder))
    assert parse_drafter_config(json.loads(json.dumps(drafter_config_dict(config, target(case))))) == config


def test_a_written_config_states_every_key_of_the_published_one() -> None:
    ours = drafter_config_dict(parse_drafter_config(read()), target())
    framework_only = {"transformers_version", "use_cache", "initializer_range"}
    for key in read().keys() - framework_only - {"dtype", "max_window_layers", "dflash_config"}:
        assert ours[key] == read()[key], key
    assert read()["dflash_config"].items() <= ours["dflash_config"].items()


# What five loaders take from the config, re-stated: (block, ids, mask id, theta, head size).


def qwen3_config_class(c: dict) -> tuple:  # transformers with the public draft class
    nested = c["dflash_config"]
    assert c["num_target_layers"] and not c["use_sliding_window"] and set(c["layer_types"]) == {"full_attention"}
    return c["block_size"], nested["target_layer_ids"], nested["mask_token_id"], c["rope_theta"], c["head_dim"]


def gpu_server_a(c: dict) -> tuple:  # nested ids; drafted tokens are asked for at launch; rope_parameters
    nested = c["dflash_config"]
    assert c.get("is_causal", nested.get("causal", False)) is False and c["target_hidden_size"] == c["hidden_size"]
    mask = nested.get("mask_token_id", c.get("mask_token_id"))
    return c["block_size"], nested["target_layer_ids"], mask, c["rope_parameters"]["rope_theta"], c["head_dim"]


def gpu_server_b(c: dict) -> tuple:  # nested wins, then the top
    both = {**c, **c["dflash_config"]}
    theta = (c.get("rope_parameters") or c)["rope_theta"]
    return both["block_size"], both["target_layer_ids"], both["mask_token_id"], theta, c["head_dim"]


def tpu_server_a(c: dict) -> tuple:  # block at the top; a missing nested mask id would become 0
    nested = c["dflash_config"]
    ids = nested["target_layer_ids"]
    return c["block_size"], ids, nested.get("mask_token_id", 0), c["rope_theta"], c["head_dim"]


def tpu_server_b(c: dict) -> tuple:  # top first for ids, nested first for the rest; theta only
    nested = c["dflash_config"]
    block = nested.get("block_size", c["block_size"])
    return block, c.get("target_layer_ids"), nested["mask_token_id"], c["rope_theta"], c["head_dim"]


@pytest.mark.parametrize("loader", [qwen3_config_class, gpu_server_a, gpu_server_b, tpu_server_a, tpu_server_b])
@pytest.mark.parametrize(("case", "folder"), CASES)
def test_every_loader_finds_the_same_values(loader: Any, case: str, folder: str) -> None:
    config = parse_drafter_config(read(case, folder))
    written = json.loads(json.dumps(drafter_config_dict(config, target(case))))
    expected = (
        config.block_size,
        list(config.target_layer_ids),
        config.mask_token_id,
        config.rope.theta,
        config.head_dim,
    )
    assert loader(written) == expected


def test_scaled_rotary_settings_are_written_in_both_spellings() -> None:
    scaled = RopeConfig(5e5, Llama3RopeScaling(8.0, 1.0, 4.0, 8192))
    config = parse_drafter_config(read())
    written = drafter_config_dict(DrafterConfig(**{**vars(config), "rope": scaled}), target())
    assert {"rope_theta": 5e5, **written["rope_scaling"]} == written["rope_parameters"]
    assert parse_drafter_config(written).rope == scaled


def test_a_drafter_of_another_target_is_not_written() -> None:
    with pytest.raises(UserError, match="vocab_size=211 but the target has vocab_size=131"):
        drafter_config_dict(parse_drafter_config(read()), target("llama_tied"))
