"""Target configs: every spelling is understood, what cannot be represented is refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest

from dstill_jax.config import Llama3RopeScaling, RopeConfig, TargetConfig
from dstill_jax.errors import UserError
from dstill_jax.weights.hf_config import generation_eos_token_ids, parse_target_config, target_config_dict

REFERENCE = Path(__file__).parent.parent / "reference"
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
SCALING = Llama3RopeScaling(8.0, 1.0, 4.0, 8192)


def read(case: str) -> dict[str, Any]:
    return json.loads((REFERENCE / case / "target" / "config.json").read_text())


def llama(**changes: Any) -> dict[str, Any]:
    """The Llama case with keys replaced, or removed where the value is `...`."""
    config = {**read("llama_tied"), **changes}
    return {key: value for key, value in config.items() if value is not ...}


def test_qwen3_fields_are_read() -> None:
    config = parse_target_config(read("qwen3_tiny"))
    assert config == TargetConfig(
        family="qwen3",
        vocab_size=211,
        hidden_size=64,
        intermediate_size=96,
        num_layers=8,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        rms_norm_eps=1e-6,
        rope=RopeConfig(1e6),
        qk_norm=True,
        attention_bias=False,
        tie_embeddings=False,
        max_position_embeddings=512,
        bos_token_id=1,
        eos_token_ids=(2,),
        pad_token_id=0,
    )


def test_llama_fields_are_read() -> None:
    config = parse_target_config(llama(attention_bias=True))
    assert (config.family, config.qk_norm, config.tie_embeddings, config.attention_bias) == ("llama", False, True, True)
    assert config.rope == RopeConfig(5e5)


def test_llama_derives_missing_head_sizes_as_its_family_does() -> None:
    config = parse_target_config(llama(head_dim=..., num_key_value_heads=...))
    assert (config.head_dim, config.num_kv_heads) == (48 // 6, 6)


@pytest.mark.parametrize("case", ["qwen3_tiny", "llama_tied"])
@pytest.mark.parametrize("eos", [7, [7, 9]])
def test_end_of_text_ids_are_merged_with_the_generation_config(case: str, eos: Any) -> None:
    config = parse_target_config(read(case) | {"eos_token_id": eos}, generation_eos_token_ids({"eos_token_id": [9, 2]}))
    assert config.eos_token_ids == (7, 9, 2)


# --- rotary settings ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"rope_theta": 1e6}, RopeConfig(1e6)),
        ({"rope_theta": 5000000, "rope_scaling": None}, RopeConfig(5e6)),
        ({"rope_theta": 5e5, "rope_scaling": LLAMA3}, RopeConfig(5e5, SCALING)),
        ({"rope_theta": 5e5, "rope_scaling": {**LLAMA3, "type": "llama3"}}, RopeConfig(5e5, SCALING)),
        ({"rope_theta": 1e4, "rope_scaling": {"type": "default"}}, RopeConfig(1e4)),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e6}}, RopeConfig(5e6)),
        ({"rope_parameters": {**LLAMA3, "rope_theta": 5e5}}, RopeConfig(5e5, SCALING)),
        ({"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e6}}}, RopeConfig(1e6)),
        ({"rope_theta": 1e6, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, RopeConfig(1e6)),
        (
            {"rope_theta": 5e5, "rope_scaling": LLAMA3, "rope_parameters": {**LLAMA3, "rope_theta": 5e5}},
            RopeConfig(5e5, SCALING),
        ),
        ({"rope_theta": 1e6, "partial_rotary_factor": 1.0, "rope_interleaved": False}, RopeConfig(1e6)),
    ],
)
def test_every_rotary_spelling_gives_the_same_settings(fields: dict, expected: RopeConfig) -> None:
    blank = {"rope_theta": ..., "rope_scaling": ..., "rope_parameters": ...}
    assert parse_target_config(llama(**{**blank, **fields})).rope == expected


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"rope_theta": ...}, "rope_theta is missing"),
        ({"rope_theta": ..., "rope_parameters": {"rope_type": "default"}}, "rope_theta is missing"),
        ({"rope_theta": None, "rope_scaling": LLAMA3}, "rope_theta is missing"),
        ({"rope_theta": "1e6"}, "rope_theta='1e6'"),
        ({"rope_theta": 0}, "rope_theta=0"),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
            "contradicts rope_parameters.rope_theta=1000000",
        ),
        ({"rope_scaling": None, "rope_parameters": {**LLAMA3, "rope_theta": 5e5}}, "contradicts rope_parameters"),
        ({"rope_scaling": {**LLAMA3, "factor": 4.0}, "rope_parameters": LLAMA3}, "contradicts rope_parameters"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "'yarn'"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "'linear'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic'"),
        ({"rope_scaling": {"rope_type": "mrope", "mrope_section": [16, 24, 24]}}, "'mrope'"),
        ({"rope_scaling": {"type": "llama3", **LLAMA3, "rope_type": "default"}}, "both rope_type"),
        ({"rope_scaling": {"rope_type": "default", "mrope_section": [16, 24, 24]}}, "mrope_section"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}}, "partial_rotary_factor"),
        ({"partial_rotary_factor": 0.25}, "partial_rotary_factor"),
        ({"rope_interleaved": True}, "rope_interleaved"),
        ({"rope_scaling": {key: LLAMA3[key] for key in LLAMA3 if key != "factor"}}, "rope_scaling.factor is missing"),
        ({"rope_scaling": {**LLAMA3, "high_freq_factor": 0.5}}, "high_freq_factor"),
        ({"rope_scaling": {**LLAMA3, "attention_factor": 1.2}}, "attention_factor"),
        ({"rope_scaling": LLAMA3, "original_max_position_embeddings": 4096}, "original_max_position_embeddings=4096"),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 5e5}, "sliding_attention": {"rope_theta": 1e4}}},
            "sliding_attention",
        ),
    ],
)
def test_rotary_settings_that_are_missing_contradictory_or_unknown_stop(fields: dict, named: str) -> None:
    blank = {"rope_scaling": ...}
    with pytest.raises(UserError, match=named.replace(".", r"\.")):
        parse_target_config(llama(**{**blank, **fields}))


# --- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"model_type": "gemma3"}, "model_type='gemma3'"),
        ({"model_type": "qwen3_moe"}, "model_type='qwen3_moe'"),
        ({"model_type": ...}, "model_type=None"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"use_sliding_window": True}, "use_sliding_window=True"),
        ({"sliding_window": 4096}, "sliding_window=4096"),
        ({"layer_types": ["full_attention"] * 5 + ["sliding_attention"]}, r"layer_types\[5\]='sliding_attention'"),
        ({"layer_types": ["full_attention"] * 5}, "layer_types has 5 entries but num_hidden_layers=6"),
        ({"num_experts": 8}, "num_experts=8"),
        ({"num_local_experts": 8}, "num_local_experts=8"),
        ({"moe_intermediate_size": 32}, "moe_intermediate_size=32"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"mlp_bias": True}, "mlp_bias=True"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0"),
        ({"embedding_multiplier": 12.0}, "embedding_multiplier=12.0"),
        ({"scale_emb": 12}, "scale_emb=12"),
        ({"logits_scaling": 8.0}, "logits_scaling=8.0"),
        ({"use_qk_norm": True}, "use_qk_norm=True"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"attention_bias": "yes"}, "attention_bias='yes'"),
        ({"hidden_size": ...}, "hidden_size is missing"),
        ({"hidden_size": 48.5}, "hidden_size=48.5"),
        ({"num_hidden_layers": True}, "num_hidden_layers=True"),
        ({"rms_norm_eps": ...}, "rms_norm_eps is missing"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps=inf must be a finite number"),
        ({"bos_token_id": 10**6}, "bos_token_id has 1000000, outside the vocabulary"),
        ({"eos_token_id": [2, 10**6]}, "eos_token_ids has 1000000, outside the vocabulary"),
        ({"eos_token_id": "</s>"}, "eos_token_id='</s>'"),
        ({"head_dim": ..., "hidden_size": 50}, "head_dim is missing"),
        ({"num_key_value_heads": 4}, "num_kv_heads=4"),
    ],
)
def test_what_cannot_be_represented_is_refused_by_name(fields: dict, named: str) -> None:
    with pytest.raises(UserError, match=named):
        parse_target_config(llama(**fields))


def test_a_window_that_is_switched_off_is_harmless() -> None:
    parse_target_config(read("qwen3_tiny") | {"use_sliding_window": False, "sliding_window": 4096})


@pytest.mark.parametrize("key", ["head_dim", "num_key_value_heads"])
def test_qwen3_head_sizes_are_never_guessed(key: str) -> None:
    config = read("qwen3_tiny")
    del config[key]
    with pytest.raises(UserError, match=f"{key} is missing"):
        parse_target_config(config)


# --- writing --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["qwen3_tiny", "llama_tied"])
@pytest.mark.parametrize("rope", [{}, {"rope_scaling": LLAMA3}])
@pytest.mark.parametrize("eos", [None, 2, [2, 5]])
def test_a_written_config_reads_back_equal(case: str, rope: dict, eos: Any) -> None:
    config = parse_target_config(read(case) | rope | {"eos_token_id": eos, "attention_bias": True})
    assert parse_target_config(json.loads(json.dumps(target_config_dict(config)))) == config


@pytest.mark.parametrize("case", ["qwen3_tiny", "llama_tied"])
@pytest.mark.parametrize("rope", [{}, {"rope_scaling": LLAMA3}])
def test_transformers_reads_the_written_config_the_same(case: str, rope: dict, tmp_path: Path) -> None:
    import transformers

    ours = parse_target_config(read(case) | rope)
    (tmp_path / "config.json").write_text(json.dumps(target_config_dict(ours)))
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    assert theirs.model_type == ours.family
    assert theirs.head_dim == ours.head_dim and theirs.num_key_value_heads == ours.num_kv_heads
    assert theirs.tie_word_embeddings == ours.tie_embeddings and theirs.rms_norm_eps == ours.rms_norm_eps
    assert theirs.rope_parameters["rope_theta"] == ours.rope.theta
    assert theirs.rope_parameters["rope_type"] == ("llama3" if rope else "default")
    # and what transformers writes in its own, newest spelling is read back as the same target
    theirs.save_pretrained(tmp_path / "again")
    again = json.loads((tmp_path / "again" / "config.json").read_text())
    assert parse_target_config(again) == ours
