"""Typed reads from a Hugging Face `config.json`, and the parts of it that targets and drafters share.

Called by `hf_config` only. Every error names the field, the value found and what to do.
"""

import math
from typing import Any, NoReturn

from dstill_jax.config import Llama3RopeScaling, RopeConfig
from dstill_jax.errors import UserError, whole

_ROPE_COMMON_KEYS = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor"})
_LLAMA3_KEYS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
_FULL_ATTENTION = "full_attention"


def refuse(field: str, value: object, why: str) -> NoReturn:
    """Stop because this library cannot represent `field=value` exactly."""
    raise UserError(f"{field}={value!r} is not supported: {why}")


def require_int(config: dict, key: str) -> int:
    """A whole number that must be there (JSON booleans and floats are refused)."""
    value = config.get(key)
    if value is None:
        raise UserError(f"{key} is missing; add it to the config, it has no default")
    return whole(key, value)


def require_number(config: dict, key: str, where: str = "") -> float:
    """A number that must be there; `where` prefixes the key in messages."""
    value = config.get(key)
    if value is None:
        raise UserError(f"{where}{key} is missing; add it to the config, it has no default")
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise UserError(f"{where}{key}={value!r} must be a finite number")
    return float(value)


def optional_bool(config: dict, key: str, default: bool) -> bool:
    value = config.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise UserError(f"{key}={value!r} must be true or false")
    return value


def optional_token_id(config: dict, key: str) -> int | None:
    """A token id, or None when absent, null or the old spelling -1."""
    if config.get(key) is None:
        return None
    value = require_int(config, key)
    return None if value < 0 else value


def token_ids(config: dict, key: str) -> tuple[int, ...]:
    """One token id or a list of them as a tuple; absent or null gives an empty one."""
    value = config.get(key)
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    for i in ids:
        if isinstance(i, bool) or not isinstance(i, int) or i < 0:
            raise UserError(f"{key}={value!r} must be a token id or a list of token ids")
    return tuple(ids)


def refuse_unless(config: dict, key: str, neutral: tuple, why: str) -> None:
    """Stop when `key` is set to anything but one of the values that change nothing."""
    value = config.get(key)
    if value is not None and value not in neutral:
        refuse(key, value, why)


def refuse_windows(config: dict, num_layers: int) -> None:
    """Stop on any layer that does not attend to the whole context, or when the fields leave that open."""
    use = optional_bool(config, "use_sliding_window", False)
    if use:
        refuse("use_sliding_window", True, "only full attention is implemented")
    window = config.get("sliding_window")
    if window is not None and config.get("use_sliding_window") is None:
        refuse("sliding_window", window, "use_sliding_window is not given; set it to false if every layer is full")
    layer_types = config.get("layer_types")
    if layer_types is None:
        return
    if not isinstance(layer_types, list) or len(layer_types) != num_layers:
        count = len(layer_types) if isinstance(layer_types, list) else repr(layer_types)
        raise UserError(f"layer_types has {count} entries but num_hidden_layers={num_layers}; they must agree")
    for i, kind in enumerate(layer_types):
        if kind != _FULL_ATTENTION:
            refuse(f"layer_types[{i}]", kind, "only full_attention layers are implemented")


# --- rotary embedding ---------------------------------------------------------------------------------------------


def parse_rope(config: dict) -> RopeConfig:
    """Rotary settings from either spelling: `rope_theta` + `rope_scaling`, or `rope_parameters` (transformers 5).

    Where both are given they must say the same, and the base is never defaulted.
    """
    refuse_unless(config, "partial_rotary_factor", (1,), "rotation of part of a head is not implemented")
    refuse_unless(config, "rotary_pct", (1,), "rotation of part of a head is not implemented")
    refuse_unless(config, "rope_interleaved", (False,), "only the half-split rotary layout is implemented")
    thetas: dict[str, float] = {}
    scalings: dict[str, Llama3RopeScaling | None] = {}
    if config.get("rope_theta") is not None:
        thetas["rope_theta"] = require_number(config, "rope_theta")
    if "rope_scaling" in config and config["rope_scaling"] is None:
        scalings["rope_scaling"] = None
    for key in ("rope_scaling", "rope_parameters"):
        for where, values in _rope_dicts(key, config.get(key)).items():
            scalings[where] = _parse_rope_dict(where, values)
            if values.get("rope_theta") is not None:
                thetas[f"{where}.rope_theta"] = require_number(values, "rope_theta", f"{where}.")
    if not thetas:
        raise UserError(
            "rope_theta is missing, at the top level and in rope_parameters; state the base of the trained weights"
        )
    theta = _agreed(thetas)
    if not theta > 0:
        raise UserError(f"rope_theta={theta} must be positive")
    scaling = _agreed(scalings) if scalings else None
    outer = config.get("original_max_position_embeddings")
    if scaling is not None and outer is not None and outer != scaling.original_max_position_embeddings:
        raise UserError(
            f"original_max_position_embeddings={outer} at the top level contradicts"
            f" {scaling.original_max_position_embeddings} in the rotary settings; keep one"
        )
    return RopeConfig(theta=theta, scaling=scaling)


def rope_fields(rope: RopeConfig) -> dict[str, Any]:
    """The rotary settings in both spellings, with equal values."""
    scaling = None
    if rope.scaling is not None:
        scaling = {"rope_type": "llama3", **{key: getattr(rope.scaling, key) for key in _LLAMA3_KEYS}}
    return {
        "rope_theta": rope.theta,
        "rope_scaling": scaling,
        "rope_parameters": {"rope_theta": rope.theta, **(scaling or {"rope_type": "default"})},
    }


def _rope_dicts(key: str, value: object) -> dict[str, dict]:
    """The flat dictionaries in `config[key]`: itself, or one for each layer type when nested by layer type."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise UserError(f"{key}={value!r} must be an object or null")
    if not any(isinstance(inner, dict) for inner in value.values()):
        return {key: value}
    for layer_type, inner in value.items():
        if layer_type != _FULL_ATTENTION or not isinstance(inner, dict):
            refuse(f"{key}.{layer_type}", inner, "rotary settings may be nested under full_attention only")
    return {f"{key}.{layer_type}": inner for layer_type, inner in value.items()}


def _parse_rope_dict(where: str, values: dict) -> Llama3RopeScaling | None:
    types = {k: values[k] for k in ("rope_type", "type") if values.get(k) is not None}
    if len(set(map(str, types.values()))) > 1:
        raise UserError(f"{where} has both rope_type={types['rope_type']!r} and type={types['type']!r}; keep one")
    rope_type = next(iter(types.values()), "default")
    if rope_type not in ("default", "llama3"):
        refuse(f"{where}.rope_type", rope_type, "only 'default' and 'llama3' rotary embeddings are implemented")
    refuse_unless(values, "partial_rotary_factor", (1,), f"{where} rotates part of a head, which is not implemented")
    known = _ROPE_COMMON_KEYS | (set(_LLAMA3_KEYS) if rope_type == "llama3" else set())
    for key, value in values.items():
        if key not in known and value is not None:
            refuse(f"{where}.{key}", value, f"it has no meaning for rope_type {rope_type!r} here")
    if rope_type == "default":
        return None
    factor, low, high = (require_number(values, k, f"{where}.") for k in _LLAMA3_KEYS[:3])
    original = require_number(values, _LLAMA3_KEYS[3], f"{where}.")
    if not (factor > 0 and 0 < low < high and original > 0 and original == int(original)):
        raise UserError(
            f"{where}: llama3 scaling needs factor > 0, 0 < low_freq_factor < high_freq_factor and a positive"
            f" original_max_position_embeddings, got {factor}, {low}, {high}, {original}"
        )
    return Llama3RopeScaling(factor, low, high, int(original))


def _agreed(values: dict[str, Any]) -> Any:
    """The one value all sources give, or an error that names two sources that differ."""
    (first_name, first), *rest = values.items()
    for name, value in rest:
        if value != first:
            raise UserError(f"{first_name}={first} contradicts {name}={value}; make them equal or remove one")
    return first
