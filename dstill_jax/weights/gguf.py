"""GGUF files turned into ordinary Hugging Face folders, in float32.

Called by `embedded`. Covers the Llama architecture with a byte-level BPE tokenizer; anything else in the file that
would change the model's output (rope scaling, experts, biases, an unknown split rule, a leftover tensor) is refused by
name.
Needs the packages `gguf` and `tokenizers` (extra `embedded`), only here.
"""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from dstill_jax.errors import MissingExtraError, UserError
from dstill_jax.paths import in_home
from dstill_jax.weights.byte_bpe import SPLIT_RULES, build_tokenizer, write_tokenizer_files
from dstill_jax.weights.cache_folder import new_folder, sha256_of

_LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5  # token types of the format

# Keys under the architecture's name that say something about the model and are read below.
_READ_KEYS = {
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.layer_norm_rms_epsilon",
    "rope.freq_base",
    "rope.dimension_count",
    "vocab_size",
}
_TOKEN_NAMES = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}


def convert_gguf(
    gguf_file: str | os.PathLike,
    folder: str | os.PathLike,
    *,
    source: dict | None = None,
    report: Callable[[str], None] | None = None,
) -> Path:
    """Writes `folder` as a Hugging Face model folder holding the GGUF file's weights in float32.

    The folder appears only when complete: config.json, generation_config.json, model.safetensors, tokenizer.json,
    tokenizer_config.json, provenance.json. Memory: one tensor at a time. Callers that may meet another process in the
    same place hold `cache_folder.locked(folder)`.

    Args:
        gguf_file: the file to read.
        folder: where to write; a folder made by an earlier call is replaced.
        source: what to say in provenance.json about where the file comes from.
        report: told in a line what is being done.

    Raises:
        UserError: the file is no GGUF, or holds something this library cannot represent exactly; the folder holds
            something else.
        MissingExtraError: the `gguf` or `tokenizers` package is absent.
    """
    gguf_file, folder = (Path(in_home(path)) for path in (gguf_file, folder))
    if folder.resolve() in gguf_file.resolve().parents:
        raise UserError(f"{gguf_file} lies in the folder to write, {folder}; choose another folder")
    reader = _open(gguf_file)
    values = _Metadata(reader, gguf_file)
    config = _model_config(values, reader)
    tensors = _tensor_plan(reader, config, gguf_file)
    if report:
        report(f"converting {gguf_file.name}")
    with new_folder(folder) as work:
        _write_weights(work / "model.safetensors", tensors)
        _write_tokenizer(work, values, config)
        _write_json(work / "config.json", config)
        ids = ("bos_token_id", "eos_token_id", "pad_token_id")
        _write_json(work / "generation_config.json", {name: config[name] for name in ids})
        provenance = {"source": source or {"file": gguf_file.name, "file_sha256": sha256_of(gguf_file)}}
        provenance["tensor_types"] = sorted({tensor.tensor_type.name for tensor in reader.tensors})
        provenance["files"] = {file.name: file.stat().st_size for file in sorted(work.iterdir())}
        _write_json(work / "provenance.json", provenance)
    return folder


class _Metadata:
    """The key/value part of a GGUF file, with errors that name file and key."""

    def __init__(self, reader: Any, path: Path) -> None:
        self._fields, self._path = reader.fields, path
        self.architecture = self.get("general.architecture")
        if self.architecture != "llama":
            raise UserError(f"{path} has general.architecture={self.architecture!r}; only 'llama' can be converted")

    def get(self, key: str, default: Any = None) -> Any:
        field = self._fields.get(key)
        return default if field is None else field.contents()

    def need(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise UserError(f"{self._path} has no {key}; the model cannot be built without it")
        return value

    def model(self, name: str, default: Any = None) -> Any:
        return self.get(f"{self.architecture}.{name}", default)

    def need_model(self, name: str) -> Any:
        return self.need(f"{self.architecture}.{name}")

    def refuse(self, key: str, why: str) -> None:
        raise UserError(f"{self._path} has {key}={self.get(key)!r}: {why}")

    def refuse_unread_model_keys(self) -> None:
        prefix = f"{self.architecture}."
        for key in self._fields:
            if key.startswith(prefix) and key.removeprefix(prefix) not in _READ_KEYS:
                # A key that states the plain case is harmless.
                if self.get(key) in (0, False, "none", None):
                    continue
                self.refuse(key, "this library cannot represent it")


def _open(path: Path) -> Any:
    try:
        import gguf
    except ImportError as error:
        raise MissingExtraError("gguf", "embedded") from error
    if not path.is_file():
        raise UserError(f"GGUF file {path} does not exist")
    try:
        return gguf.GGUFReader(path)
    except (ValueError, IndexError, KeyError, OSError) as error:
        raise UserError(f"{path} is not a readable GGUF file ({error}); fetch it again") from error


def _model_config(values: _Metadata, reader: Any) -> dict[str, Any]:
    """config.json of the model. Every number comes from the file; none has a default."""
    values.refuse_unread_model_keys()
    width, heads = values.need_model("embedding_length"), values.need_model("attention.head_count")
    head_dim = values.model("attention.key_length", width // heads)
    for name in ("attention.value_length", "rope.dimension_count"):
        if values.model(name, head_dim) != head_dim:
            values.refuse(f"{values.architecture}.{name}", f"must equal the head size {head_dim}")
    theta = float(values.need_model("rope.freq_base"))
    shapes = {tensor.name: tuple(int(n) for n in tensor.shape) for tensor in reader.tensors}
    vocabulary = shapes.get("token_embd.weight", (0, 0))[1]
    tokens = len(values.need("tokenizer.ggml.tokens"))
    if not vocabulary == tokens == values.model("vocab_size", tokens):
        raise UserError(f"token_embd.weight has {vocabulary} rows, but the file lists {tokens} tokens")
    # Stored as float32: the shortest decimal that reads back as the same float32 is what the model's author wrote.
    epsilon = float(str(np.float32(values.need_model("attention.layer_norm_rms_epsilon"))))
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocabulary,
        "hidden_size": width,
        "intermediate_size": values.need_model("feed_forward_length"),
        "num_hidden_layers": values.need_model("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": values.model("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": values.need_model("context_length"),
        "rms_norm_eps": epsilon,
        "rope_theta": theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": "output.weight" not in shapes,
        "bos_token_id": values.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": _eos_ids(values),
        "pad_token_id": values.get("tokenizer.ggml.padding_token_id"),
        "dtype": "float32",
    }


def _eos_ids(values: _Metadata) -> int | list[int]:
    """The ids that end a text: end of sequence and, where the file names one, end of turn."""
    ids = [values.need("tokenizer.ggml.eos_token_id")]
    turn = values.get("tokenizer.ggml.eot_token_id")
    if turn is not None and turn not in ids:
        ids.append(turn)
    return ids if len(ids) > 1 else ids[0]


class _Tensor:
    """One output tensor: its name and shape at once, its values when asked."""

    def __init__(self, name: str, stored: Any, rotary_heads: int | None) -> None:
        self.name, self.tensor_type = name, stored.tensor_type
        self.shape = tuple(int(n) for n in reversed(stored.shape))
        self._stored, self._rotary_heads = stored, rotary_heads

    def values(self) -> np.ndarray:
        """float32 [out, in] (or [n] for norms), in the half-split rotary layout."""
        from gguf import quants

        array = quants.dequantize(self._stored.data, self.tensor_type)
        array = np.asarray(array, np.float32).reshape(self.shape)
        return array if self._rotary_heads is None else half_split_rows(array, self._rotary_heads)


def half_split_rows(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of a query or key projection [heads * E, D]: interleaved rotary layout -> half-split.

    The format stores the two members of rotary pair i of a head in rows 2i and 2i + 1; here they belong in rows i and
    i + E/2.
    """
    rows, width = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, width)
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(rows, width))


def _tensor_plan(reader: Any, config: dict[str, Any], path: Path) -> list[_Tensor]:
    """Every tensor of the Hugging Face file, in order; missing, leftover and misshapen ones are errors."""
    stored = {tensor.name: tensor for tensor in reader.tensors}
    plan: list[_Tensor] = []

    def take(theirs: str, ours: str, rotary_heads: int | None = None) -> None:
        if theirs not in stored:
            raise UserError(f"{path} has no tensor {theirs}")
        plan.append(_Tensor(ours, stored.pop(theirs), rotary_heads))

    take("token_embd.weight", "model.embed_tokens.weight")
    rotary = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for layer in range(config["num_hidden_layers"]):
        for theirs, ours in _LAYER_TENSORS.items():
            take(f"blk.{layer}.{theirs}.weight", f"model.layers.{layer}.{ours}.weight", rotary.get(theirs))
    take("output_norm.weight", "model.norm.weight")
    if not config["tie_word_embeddings"]:
        take("output.weight", "lm_head.weight")
    if stored:
        raise UserError(f"{path} has tensors this library cannot place: {', '.join(sorted(stored)[:5])}")
    for tensor in plan:
        expected = _expected_shape(tensor.name, config)
        if tensor.shape != expected:
            raise UserError(f"{path}: {tensor.name} has shape {tensor.shape}, expected {expected}")
    return plan


def _expected_shape(name: str, config: dict[str, Any]) -> tuple[int, ...]:
    width, mlp = config["hidden_size"], config["intermediate_size"]
    queries, keys = (config[n] * config["head_dim"] for n in ("num_attention_heads", "num_key_value_heads"))
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens": (config["vocab_size"], width),
        "lm_head": (config["vocab_size"], width),
        "q_proj": (queries, width),
        "k_proj": (keys, width),
        "v_proj": (keys, width),
        "o_proj": (width, queries),
        "gate_proj": (mlp, width),
        "up_proj": (mlp, width),
        "down_proj": (width, mlp),
    }
    return shapes.get(name.split(".")[-2], (width,))


def _write_weights(path: Path, tensors: list[_Tensor]) -> None:
    from dstill_jax.weights.safetensors_io import write_safetensors

    def values() -> Iterator[np.ndarray]:
        for tensor in tensors:
            yield tensor.values()

    write_safetensors(path, [(t.name, t.shape, "F32") for t in tensors], values())


def _write_tokenizer(folder: Path, values: _Metadata, config: dict[str, Any]) -> None:
    model, rule = values.need("tokenizer.ggml.model"), values.need("tokenizer.ggml.pre")
    if model != "gpt2":
        values.refuse("tokenizer.ggml.model", "only byte-level BPE ('gpt2') can be rebuilt")
    if rule not in SPLIT_RULES:
        values.refuse("tokenizer.ggml.pre", f"unknown pre-tokenizer rule; known: {', '.join(SPLIT_RULES)}")
    for key in ("tokenizer.ggml.add_bos_token", "tokenizer.ggml.add_eos_token", "tokenizer.ggml.add_space_prefix"):
        if values.get(key, False):
            values.refuse(key, "a tokenizer that adds tokens or spaces by itself is not supported")
    tokens = values.need("tokenizer.ggml.tokens")
    types = values.get("tokenizer.ggml.token_type", [_NORMAL] * len(tokens))
    strange = set(types) - {_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED}
    if strange:
        raise UserError(f"tokenizer.ggml.token_type has types {sorted(strange)}, which byte-level BPE does not use")
    tokenizer = build_tokenizer(
        tokens,
        values.need("tokenizer.ggml.merges"),
        rule,
        special=[i for i, kind in enumerate(types) if kind == _CONTROL],
        added=[i for i, kind in enumerate(types) if kind == _USER_DEFINED],
    )
    ids = {name: values.get(f"tokenizer.ggml.{theirs}_token_id") for name, theirs in _TOKEN_NAMES.items()}
    write_tokenizer_files(
        folder,
        tokenizer,
        chat_template=values.get("tokenizer.chat_template"),
        model_max_length=config["max_position_embeddings"],
        **{name: None if i is None else tokens[i] for name, i in ids.items()},
    )


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
