"""The declared map between parameter paths and checkpoint tensor names, used for loading and for saving.

One row per tensor kind: path in the parameter tree, name in the file, shape in the file. `load` calls it both ways.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from dstill_jax.config import DrafterConfig, TargetConfig
from dstill_jax.dims import Params
from dstill_jax.errors import UserError


@dataclass(frozen=True)
class TensorEntry:
    """One tensor: where it lives in the parameters and what a checkpoint calls it."""

    path: tuple[str, ...]  # in the parameter tree, without the layer component for a tensor of a layer
    name: str  # in the file
    shape: tuple[int, ...]  # in the file; a matrix is [out, in]
    layer: int | None = None

    def output_first(self) -> "TensorEntry":
        """The same tensor for a tree that holds its matrices as the file does, [out, in]."""
        return dataclasses.replace(self, path=(*self.path[:-1], "weight")) if self.transpose else self

    @property
    def transpose(self) -> bool:
        """Whether the tree holds the matrix as [in, out]."""
        return self.path[-1] == "kernel"

    @property
    def tree_shape(self) -> tuple[int, ...]:
        return self.shape[::-1] if self.transpose else self.shape

    def tree_path(self, stacked: bool) -> tuple[str, ...]:
        """The path from the root; with `stacked` the leaf there has a leading layer axis."""
        if self.layer is None:
            return self.path
        return ("layers" if stacked else f"layers_{self.layer}", *self.path)


@dataclass(frozen=True)
class _Row:
    path: str
    name: str
    axes: str  # letters of dims.py; HE and GE are all heads flattened
    when: str = ""  # the config feature that must be on


_LAYER_ROWS = (
    _Row("input_layernorm.scale", "input_layernorm.weight", "D"),
    _Row("post_attention_layernorm.scale", "post_attention_layernorm.weight", "D"),
    _Row("attention.q_proj.kernel", "self_attn.q_proj.weight", "HE D"),
    _Row("attention.k_proj.kernel", "self_attn.k_proj.weight", "GE D"),
    _Row("attention.v_proj.kernel", "self_attn.v_proj.weight", "GE D"),
    _Row("attention.o_proj.kernel", "self_attn.o_proj.weight", "D HE"),
    _Row("attention.q_proj.bias", "self_attn.q_proj.bias", "HE", "attention_bias"),
    _Row("attention.k_proj.bias", "self_attn.k_proj.bias", "GE", "attention_bias"),
    _Row("attention.v_proj.bias", "self_attn.v_proj.bias", "GE", "attention_bias"),
    _Row("attention.o_proj.bias", "self_attn.o_proj.bias", "D", "attention_bias"),
    _Row("attention.q_norm.scale", "self_attn.q_norm.weight", "E", "qk_norm"),
    _Row("attention.k_norm.scale", "self_attn.k_norm.weight", "E", "qk_norm"),
    _Row("mlp.gate_proj.kernel", "mlp.gate_proj.weight", "F D"),
    _Row("mlp.up_proj.kernel", "mlp.up_proj.weight", "F D"),
    _Row("mlp.down_proj.kernel", "mlp.down_proj.weight", "D F"),
)
_TARGET_ROWS = (
    _Row("embed.embedding", "model.embed_tokens.weight", "V D"),
    _Row("norm.scale", "model.norm.weight", "D"),
    _Row("head.kernel", "lm_head.weight", "V D", "untied_head"),
)
_DRAFTER_ROWS = (
    _Row("fc.kernel", "fc.weight", "D TD"),
    _Row("hidden_norm.scale", "hidden_norm.weight", "D"),
    _Row("norm.scale", "norm.weight", "D"),
)
HEAD_NAME = "lm_head.weight"
_ROTARY_BUFFER = "rotary_emb.inv_freq"  # written by old exporters; recomputed from the config


def target_entries(config: TargetConfig) -> list[TensorEntry]:
    """Every tensor a target of this config has, and no other."""
    features = {"attention_bias": config.attention_bias, "qk_norm": config.qk_norm}
    features["untied_head"] = not config.tie_embeddings
    return _entries(config, _TARGET_ROWS, "model.layers.{}.", features, num_taps=0)


def drafter_entries(config: DrafterConfig) -> list[TensorEntry]:
    """Every tensor a drafter of this config has, and no other."""
    features = {"attention_bias": False, "qk_norm": True}
    return _entries(config, _DRAFTER_ROWS, "layers.{}.", features, num_taps=config.num_taps)


def is_ignorable(name: str, config: TargetConfig | DrafterConfig) -> bool:
    """Whether a tensor in the file may be skipped: rotary buffers, and the stale head copy of a tied target."""
    if name.endswith(_ROTARY_BUFFER):
        return True
    return isinstance(config, TargetConfig) and config.tie_embeddings and name == HEAD_NAME


def _entries(
    config: TargetConfig | DrafterConfig, rows: tuple[_Row, ...], prefix: str, features: dict[str, bool], num_taps: int
) -> list[TensorEntry]:
    width = config.hidden_size
    sizes = {"D": width, "F": config.intermediate_size, "V": config.vocab_size, "E": config.head_dim}
    sizes |= {"HE": config.num_heads * config.head_dim, "GE": config.num_kv_heads * config.head_dim}
    sizes["TD"] = num_taps * width

    def entry(row: _Row) -> TensorEntry:
        return TensorEntry(tuple(row.path.split(".")), row.name, tuple(sizes[a] for a in row.axes.split()))

    result = [entry(row) for row in rows if not row.when or features[row.when]]
    for layer in range(config.num_layers):
        for row in _LAYER_ROWS:
            if not row.when or features[row.when]:
                base = entry(row)
                result.append(dataclasses.replace(base, name=prefix.format(layer) + base.name, layer=layer))
    return result


# --- the tree side --------------------------------------------------------------------------------------------------


def set_leaf(params: Params, path: tuple[str, ...], leaf: Any) -> None:
    """Put a leaf into a nested dict, creating the branches."""
    for key in path[:-1]:
        params = params.setdefault(key, {})
    params[path[-1]] = leaf


def leaves(params: Params, prefix: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every (path, leaf) of a nested dict."""
    for key, value in params.items():
        if isinstance(value, dict):
            yield from leaves(value, (*prefix, key))
        else:
            yield (*prefix, key), value


def match_tree(entries: list[TensorEntry], params: Params) -> list[tuple[TensorEntry, Any, bool]]:
    """Pair every entry with its leaf: (entry, leaf, whether the leaf is stacked over layers).

    Raises:
        UserError: the tree lacks a parameter, has one more, or one of another shape; the path is named.
    """
    stacked = "layers" in params
    num_layers = 1 + max((e.layer for e in entries if e.layer is not None), default=-1)
    found = dict(leaves(params))
    unused = set(found)
    pairs = []
    for entry in entries:
        if entry.output_first().tree_path(stacked) in found:
            entry = entry.output_first()
        path = entry.tree_path(stacked)
        if path not in found:
            raise UserError(f"the parameters lack {'/'.join(path)}, which the config asks for")
        over_layers = stacked and entry.layer is not None
        expected = (num_layers, *entry.tree_shape) if over_layers else entry.tree_shape
        if tuple(found[path].shape) != expected:
            raise UserError(
                f"parameter {'/'.join(path)} has shape {tuple(found[path].shape)}, the config says {expected}"
            )
        unused.discard(path)
        pairs.append((entry, found[path], over_layers))
    if unused:
        raise UserError(f"the config has no place for parameter {'/'.join(min(unused))} ({len(unused)} such)")
    return pairs
