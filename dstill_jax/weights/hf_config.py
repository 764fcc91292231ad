"""`config.json` of targets and drafters to and from this library's configs; what it cannot hold is refused by name.

Called by `load`, by converters that write model folders, and by exporters.
"""

from typing import Any

from dstill_jax.config import DrafterConfig, TargetConfig, check_drafter_matches
from dstill_jax.errors import UserError
from dstill_jax.weights._fields import (
    optional_bool,
    optional_token_id,
    parse_rope,
    refuse,
    refuse_unless,
    refuse_windows,
    require_int,
    require_number,
    rope_fields,
    token_ids,
)

_TARGET_ARCHITECTURES = {"qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}
_DRAFTER_ARCHITECTURE = "DFlashDraftModel"
_DRAFTER_ARCHITECTURES = (_DRAFTER_ARCHITECTURE, "DFlashForCausalLM")

# Keys that other members of these families use to change the network, with the values that change nothing.
_NEUTRAL: dict[str, tuple] = {
    "hidden_act": ("silu",),
    "hidden_activation": ("silu",),
    "mlp_bias": (False,),
    "clip_qkv": (),
    "qkv_clip": (),
    "alibi": (False,),
    "attention_chunk_size": (),
    "attention_multiplier": (),
    "query_pre_attn_scalar": (),
    "embedding_multiplier": (1,),
    "embedding_scale": (1,),
    "emb_scale": (1,),
    "scale_emb": (1,),
    "scale_embedding": (False, 1),
    "scale_depth": (),
    "residual_multiplier": (1,),
    "logit_scale": (1,),
    "logits_scaling": (1,),
    "kv_lora_rank": (),
    "no_rope_layers": ([],),
    "num_kv_shared_layers": (0,),
    "num_nextn_predict_layers": (0,),
    "quantization_config": (),
    "text_config": (),
    "vision_config": (),
}
_NEUTRAL_WHY = "this library would compute something else than the model does"

# The drafter's own settings may stand at the top level, inside `dflash_config`, or in both with equal values.
_NESTED = "dflash_config"
_NESTED_KEYS = frozenset(
    {"block_size", "mask_token_id", "mask_token", "target_layer_ids", "num_target_layers", "target_hidden_size"}
    | {"is_causal", "causal", "draft_vocab_size"}
)
_OTHER_LAYOUTS = {
    "speculators_model_type": "this is the speculators layout; convert it to the public DFlash layout",
    "transformer_layer_config": "this is the speculators layout; convert it to the public DFlash layout",
    "aux_hidden_state_layer_ids": "these ids are shifted by one; write target_layer_ids = each id minus 1",
    "eagle_aux_hidden_state_layer_ids": "these ids are shifted by one; write target_layer_ids = each id minus 1",
}


# --- targets --------------------------------------------------------------------------------------------------------


def generation_eos_token_ids(generation_config: dict[str, Any]) -> tuple[int, ...]:
    """End-of-text ids that `generation_config.json` names. Raises UserError for anything but token ids."""
    return token_ids(generation_config, "eos_token_id")


def parse_target_config(config: dict[str, Any], more_eos_token_ids: tuple[int, ...] = ()) -> TargetConfig:
    """The target that a Qwen3 or Llama-3.x `config.json` describes, exactly.

    Args:
      config: the file's object; old and new spellings of the rotary settings are understood.
      more_eos_token_ids: end-of-text ids beside the config's, see `generation_eos_token_ids`.

    Raises:
      UserError: a field is missing, contradicts another, or asks for what this library does not implement.
    """
    family = config.get("model_type")
    if not isinstance(family, str) or family not in _TARGET_ARCHITECTURES:
        refuse("model_type", family, f"known families are {', '.join(sorted(_TARGET_ARCHITECTURES))}")
    _check_architecture(config, (_TARGET_ARCHITECTURES[family],))
    _refuse_variants(config)
    qk_norm = family == "qwen3"
    for key in ("use_qk_norm", "qk_norm"):
        refuse_unless(config, key, (qk_norm,), f"{family} layers {'always' if qk_norm else 'never'} norm their heads")
    num_layers, num_heads = require_int(config, "num_hidden_layers"), require_int(config, "num_attention_heads")
    refuse_windows(config, num_layers)
    hidden_size = require_int(config, "hidden_size")
    eos = token_ids(config, "eos_token_id") + more_eos_token_ids
    return TargetConfig(
        family=family,
        vocab_size=require_int(config, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=require_int(config, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=_num_kv_heads(config, family, num_heads),
        head_dim=_head_dim(config, family, hidden_size, num_heads),
        rms_norm_eps=require_number(config, "rms_norm_eps"),
        rope=parse_rope(config),
        qk_norm=qk_norm,
        attention_bias=optional_bool(config, "attention_bias", False),
        tie_embeddings=optional_bool(config, "tie_word_embeddings", False),  # the families' own default
        max_position_embeddings=require_int(config, "max_position_embeddings"),
        bos_token_id=optional_token_id(config, "bos_token_id"),
        eos_token_ids=tuple(dict.fromkeys(eos)),
        pad_token_id=optional_token_id(config, "pad_token_id"),
    )


def target_config_dict(config: TargetConfig, dtype: str = "float32") -> dict[str, Any]:
    """The `config.json` of a target, readable by transformers 4 and 5."""
    if config.qk_norm != (config.family == "qwen3"):
        raise UserError(f"a {config.family} checkpoint cannot say qk_norm={config.qk_norm}; use family 'qwen3' for it")
    eos = config.eos_token_ids
    fields: dict[str, Any] = {
        "architectures": [_TARGET_ARCHITECTURES[config.family]],
        "model_type": config.family,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": (list(eos) if len(eos) > 1 else eos[0]) if eos else None,
        "pad_token_id": config.pad_token_id,
        "tie_word_embeddings": config.tie_embeddings,
        "attention_bias": config.attention_bias,
        **_shape_fields(config, dtype),
    }
    if config.family == "llama":
        fields["mlp_bias"] = False
    else:
        fields |= _full_attention_fields(config.num_layers)
    return fields


def _num_kv_heads(config: dict, family: str, num_heads: int) -> int:
    # transformers: null means one per query head; a missing key does too for Llama, but means 32 for Qwen3.
    if "num_key_value_heads" not in config and family == "qwen3":
        raise UserError("num_key_value_heads is missing; add it to the config, Qwen3 has no safe default")
    if config.get("num_key_value_heads") is None:
        return num_heads
    return require_int(config, "num_key_value_heads")


def _head_dim(config: dict, family: str, hidden_size: int, num_heads: int) -> int:
    if config.get("head_dim") is not None:
        return require_int(config, "head_dim")
    if family == "qwen3":  # transformers would take 128, whatever the width
        raise UserError("head_dim is missing; add it to the config, Qwen3 has no safe default")
    if num_heads < 1 or hidden_size % num_heads:
        raise UserError(
            f"head_dim is missing and hidden_size={hidden_size} is no multiple of {num_heads} heads; add it"
        )
    return hidden_size // num_heads


# --- drafters -------------------------------------------------------------------------------------------------------


def parse_drafter_config(config: dict[str, Any]) -> DrafterConfig:
    """The drafter that a public DFlash `config.json` describes.

    Block size, mask token and tapped layers are training choices: they are required, never guessed.

    Raises:
      UserError: a field is missing, has two values, or asks for what this library does not implement.
    """
    nested = config.get(_NESTED) or {}
    if not isinstance(nested, dict):
        raise UserError(f"{_NESTED}={nested!r} must be an object")
    for key, why in _OTHER_LAYOUTS.items():
        if config.get(key) is not None or nested.get(key) is not None:
            refuse(key, config.get(key, nested.get(key)), why)
    for key in nested.keys() - _NESTED_KEYS:
        refuse(f"{_NESTED}.{key}", nested[key], "unknown setting of a drafter; it could change the network")
    _check_architecture(config, _DRAFTER_ARCHITECTURES, required=True)
    if config.get("model_type") != "qwen3":
        refuse("model_type", config.get("model_type"), "a DFlash drafter is always 'qwen3', whatever its target is")
    _refuse_variants(config)
    refuse_unless(config, "attention_bias", (False,), "drafter projections have no bias")
    num_layers, hidden_size = require_int(config, "num_hidden_layers"), require_int(config, "hidden_size")
    refuse_windows(config, num_layers)
    vocab_size = require_int(config, "vocab_size")
    pruned = _own_setting(config, "draft_vocab_size", required=False)
    if pruned not in (None, vocab_size):
        refuse("draft_vocab_size", pruned, f"a drafter must use its target's whole vocabulary ({vocab_size})")
    width = _own_setting(config, "target_hidden_size", required=False)
    if width not in (None, hidden_size):
        refuse("target_hidden_size", width, f"the drafter's hidden_size={hidden_size} must equal the target's")
    return DrafterConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=require_int(config, "intermediate_size"),
        num_layers=num_layers,
        num_heads=require_int(config, "num_attention_heads"),
        num_kv_heads=require_int(config, "num_key_value_heads"),
        head_dim=require_int(config, "head_dim"),
        rms_norm_eps=require_number(config, "rms_norm_eps"),
        rope=parse_rope(config),
        block_size=_own_int(config, "block_size"),
        mask_token_id=_own_int(config, "mask_token_id"),
        target_layer_ids=_target_layer_ids(config),
        num_target_layers=_own_int(config, "num_target_layers"),
        max_position_embeddings=require_int(config, "max_position_embeddings"),
        causal=_causal(config),
    )


def drafter_config_dict(config: DrafterConfig, target_config: TargetConfig, dtype: str = "bfloat16") -> dict[str, Any]:
    """The `config.json` of a drafter: every key that a known loader reads, in each place where one looks for it.

    Raises:
      UserError: the drafter does not belong to a target of this shape.
    """
    check_drafter_matches(config, target_config)
    own: dict[str, Any] = {
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": list(config.target_layer_ids),
    }
    target = target_config_dict(target_config)
    return {
        "architectures": [_DRAFTER_ARCHITECTURE],
        "model_type": "qwen3",
        **{key: target[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")},
        "tie_word_embeddings": False,
        "attention_bias": False,
        **_shape_fields(config, dtype),
        **_full_attention_fields(config.num_layers),
        **own,
        "num_target_layers": config.num_target_layers,
        "target_hidden_size": config.hidden_size,
        "is_causal": config.causal,
        _NESTED: {**own, "causal": config.causal},
    }


def _own_setting(config: dict, key: str, required: bool = True) -> Any:
    """A drafter setting from the top level, from `dflash_config`, or from both when they agree."""
    outer, inner = config.get(key), (config.get(_NESTED) or {}).get(key)
    if (
        outer is not None
        and inner is not None
        and (outer != inner or isinstance(outer, bool) != isinstance(inner, bool))
    ):
        raise UserError(f"{key}={outer!r} contradicts {_NESTED}.{key}={inner!r}; make them equal or remove one")
    value = inner if outer is None else outer
    if value is None and required:
        raise UserError(
            f"{key} is missing, at the top level and in {_NESTED}; a choice made in training has no default"
        )
    return value


def _own_int(config: dict, key: str) -> int:
    return require_int({key: _own_setting(config, key)}, key)


def _target_layer_ids(config: dict) -> tuple[int, ...]:
    ids = _own_setting(config, "target_layer_ids")
    if not isinstance(ids, list) or any(isinstance(i, bool) or not isinstance(i, int) for i in ids):
        raise UserError(f"target_layer_ids={ids!r} must be a list of layer numbers")
    if len(set(ids)) != len(ids):
        raise UserError(f"target_layer_ids={ids!r} names a layer twice")
    return tuple(ids)


def _causal(config: dict) -> bool:
    values = {key: _own_setting(config, key, required=False) for key in ("is_causal", "causal")}
    given = {key: optional_bool(values, key, False) for key, value in values.items() if value is not None}
    if len(set(given.values())) > 1:
        raise UserError(f"is_causal={given['is_causal']} contradicts causal={given['causal']}; make them equal")
    return next(
        iter(given.values()), False
    )  # full-attention drafts are bidirectional in every loader unless they say so


# --- both -----------------------------------------------------------------------------------------------------------


def _check_architecture(config: dict, known: tuple[str, ...], required: bool = False) -> None:
    names = config.get("architectures")
    if names is None and not required:
        return
    if not isinstance(names, list) or len(names) != 1 or names[0] not in known:
        refuse("architectures", names, f"expected {' or '.join(known)}")


def _refuse_variants(config: dict) -> None:
    """Refuses mixtures of experts, capped logits, scaled embeddings and other changes of the network."""
    for key, neutral in _NEUTRAL.items():
        refuse_unless(config, key, neutral, _NEUTRAL_WHY)
    for key, value in config.items():
        if ("expert" in key or "moe" in key) and value:
            refuse(key, value, "mixture-of-experts layers are not implemented")
        if "softcap" in key and value:
            refuse(key, value, "capped logits are not implemented")


def _shape_fields(config: TargetConfig | DrafterConfig, dtype: str) -> dict[str, Any]:
    return {
        "dtype": dtype,
        "torch_dtype": dtype,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        "attention_dropout": 0.0,
        **rope_fields(config.rope),
    }


def _full_attention_fields(num_layers: int) -> dict[str, Any]:
    return {
        "layer_types": ["full_attention"] * num_layers,
        "sliding_window": None,
        "use_sliding_window": False,
        "max_window_layers": num_layers,
    }
