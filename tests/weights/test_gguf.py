"""GGUF conversion: a synthetic file made with the format's own writer; the real SmolLM2 file in the slow tests."""

import json
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import tokenizers

from dstill_jax.errors import UserError
from dstill_jax.weights.gguf import convert_gguf, half_split_rows

WIDTH, HEADS, KV_HEADS, HEAD_DIM, MLP, LAYERS = 64, 4, 2, 16, 96, 2
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"


def byte_alphabet() -> list[str]:
    return sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())


TEXTS = [
    "Janet’s ducks lay 16 eggs; she sells 3,000.50 of them at $2 each.\n\nHow much?",
    "def f(x):\n    if x > 0:\n\t\treturn {'a': [1, 2], \"b\": x ** 2}  # naïve\n\n\n    return None\n",
    "   leading, trailing   \n\n \t mixed \r\n whitespace  ",
    "Ünïcödé 漢字 かな 한국어 🙂👩‍👩‍👧 עברית ½ ² ٣ Ⅷ",
    "I'll don't we've it's they'd I'm you're CAN'T",
]

TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *byte_alphabet(), "Ġt", "he", "Ġthe", "12", "<tool>"]
MERGES = ["Ġ t", "h e", "Ġt he", "1 2"]


def write_gguf(path: Path, tied: bool = True, **changes) -> dict[str, np.ndarray]:
    """A two-layer Llama with random weights; returns what it wrote. `changes` replace or add metadata and tensors."""
    writer = gguf.GGUFWriter(path, "llama")
    metadata = {
        "llama.context_length": 128,
        "llama.embedding_length": WIDTH,
        "llama.block_count": LAYERS,
        "llama.feed_forward_length": MLP,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS,
        "llama.rope.dimension_count": HEAD_DIM,
    } | changes.get("integers", {})
    for key, value in metadata.items():
        writer.add_uint32(key, value)
    writer.add_float32("llama.rope.freq_base", 54321.0)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    for key, value in changes.get("strings", {}).items():
        writer.add_string(key, value)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(changes.get("pre", "smollm"))
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * 3 + [1] * (len(TOKENS) - 4) + [4])
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template(TEMPLATE)
    rng = np.random.default_rng(0)
    shapes = {"token_embd": (len(TOKENS), WIDTH), "output_norm": (WIDTH,)} | (
        {} if tied else {"output": (len(TOKENS), WIDTH)}
    )
    for i in range(LAYERS):
        shapes |= {f"blk.{i}.attn_norm": (WIDTH,), f"blk.{i}.ffn_norm": (WIDTH,)}
        shapes |= {f"blk.{i}.attn_q": (HEADS * HEAD_DIM, WIDTH), f"blk.{i}.attn_output": (WIDTH, HEADS * HEAD_DIM)}
        shapes |= {f"blk.{i}.attn_{n}": (KV_HEADS * HEAD_DIM, WIDTH) for n in "kv"}
        shapes |= {f"blk.{i}.ffn_{n}": (MLP, WIDTH) for n in ("gate", "up")} | {f"blk.{i}.ffn_down": (WIDTH, MLP)}
    shapes |= changes.get("tensors", {})
    written = {}
    for name, shape in shapes.items():
        if name in changes.get("without", ()):
            continue
        value = rng.normal(size=shape).astype(np.float32)
        kind = quantisation(name, shape)
        if kind == "F32":
            writer.add_tensor(f"{name}.weight", value)
        else:
            kind = gguf.GGMLQuantizationType[kind]
            packed = gguf.quants.quantize(value, kind)
            writer.add_tensor(f"{name}.weight", packed, raw_dtype=kind)
            value = unpack(packed.tobytes(), kind.name).reshape(shape)
        written[name] = value
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return written


def quantisation(name: str, shape: tuple[int, ...]) -> str:
    return "F32" if len(shape) == 1 else "Q8_0" if name in ("token_embd", "output") else "Q4_1"


def unpack(raw: bytes, kind: str) -> np.ndarray:
    """Dequantises by the format's definition, block by block: blocks of 32 values, scale (and minimum) first."""
    values: list[float] = []
    if kind == "Q8_0":
        for at in range(0, len(raw), 34):
            (scale,) = struct.unpack_from("<e", raw, at)
            values += [scale * q for q in struct.unpack_from("<32b", raw, at + 2)]
    else:
        for at in range(0, len(raw), 20):
            scale, low = struct.unpack_from("<2e", raw, at)
            packed = raw[at + 4 : at + 20]
            values += [scale * (b & 15) + low for b in packed] + [scale * (b >> 4) + low for b in packed]
    return np.asarray(values, np.float32)


def rotate_interleaved(x: np.ndarray, position: int, theta: float) -> np.ndarray:
    angles = position * theta ** (-np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    even, odd = x[..., 0::2], x[..., 1::2]
    out = np.empty_like(x)
    out[..., 0::2] = even * np.cos(angles) - odd * np.sin(angles)
    out[..., 1::2] = even * np.sin(angles) + odd * np.cos(angles)
    return out


def rotate_half_split(x: np.ndarray, position: int, theta: float) -> np.ndarray:
    angles = position * theta ** (-np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    first, second = x[..., : HEAD_DIM // 2], x[..., HEAD_DIM // 2 :]
    return np.concatenate(
        [first * np.cos(angles) - second * np.sin(angles), first * np.sin(angles) + second * np.cos(angles)], -1
    )


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, np.ndarray]]:
    folder = tmp_path_factory.mktemp("gguf")
    written = write_gguf(folder / "small.gguf")
    return convert_gguf(folder / "small.gguf", folder / "small"), written


def read_weights(folder: Path) -> dict[str, np.ndarray]:
    from safetensors.numpy import load_file

    return load_file(folder / "model.safetensors")


def test_weights_are_dequantised_exactly(converted):
    folder, written = converted
    weights = read_weights(folder)
    assert len(weights) == len(written)
    assert all(value.dtype == np.float32 for value in weights.values())
    pairs = {
        "token_embd": "model.embed_tokens.weight",
        "output_norm": "model.norm.weight",
        "blk.1.attn_norm": "model.layers.1.input_layernorm.weight",
        "blk.1.ffn_norm": "model.layers.1.post_attention_layernorm.weight",
        "blk.1.attn_v": "model.layers.1.self_attn.v_proj.weight",
        "blk.0.attn_output": "model.layers.0.self_attn.o_proj.weight",
        "blk.0.ffn_gate": "model.layers.0.mlp.gate_proj.weight",
        "blk.0.ffn_up": "model.layers.0.mlp.up_proj.weight",
        "blk.1.ffn_down": "model.layers.1.mlp.down_proj.weight",
    }
    for theirs, ours in pairs.items():
        np.testing.assert_allclose(weights[ours], written[theirs], rtol=1e-6, atol=1e-7, err_msg=ours)


def test_attention_scores_survive_the_change_of_rotary_layout(converted):
    folder, written = converted
    weights = read_weights(folder)
    x = np.random.default_rng(1).normal(size=(2, WIDTH)).astype(np.float32)
    scores = []
    for rotate, q, k in (
        (rotate_interleaved, written["blk.0.attn_q"], written["blk.0.attn_k"]),
        (rotate_half_split, *(weights[f"model.layers.0.self_attn.{n}_proj.weight"] for n in "qk")),
    ):
        queries = rotate((x[0] @ q.T).reshape(HEADS, HEAD_DIM), 7, 54321.0)
        keys = rotate((x[1] @ k.T).reshape(KV_HEADS, HEAD_DIM), 3, 54321.0)
        scores.append(np.einsum("he,he->h", queries, keys.repeat(HEADS // KV_HEADS, 0)))
    np.testing.assert_allclose(scores[0], scores[1], rtol=1e-4)


def test_half_split_rows_on_numbers():
    rows = np.arange(8, dtype=np.float32)[:, None]  # two heads of 4: pairs (0, 1), (2, 3) | (4, 5), (6, 7)
    assert half_split_rows(rows, 2)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_config_takes_every_number_from_the_file(converted):
    config = json.loads((converted[0] / "config.json").read_text())
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 54321.0
    assert config["rms_norm_eps"] == 1e-5
    assert config["tie_word_embeddings"] is True
    assert (config["eos_token_id"], config["bos_token_id"], config["pad_token_id"]) == (2, 1, 2)
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]) == (
        HEADS,
        KV_HEADS,
        HEAD_DIM,
    )
    assert (config["max_position_embeddings"], config["vocab_size"]) == (128, len(TOKENS))
    assert json.loads((converted[0] / "generation_config.json").read_text())["eos_token_id"] == 2


def test_untied_head_is_written(tmp_path: Path):
    written = write_gguf(tmp_path / "m.gguf", tied=False)
    folder = convert_gguf(tmp_path / "m.gguf", tmp_path / "m")
    np.testing.assert_allclose(read_weights(folder)["lm_head.weight"], written["output"], rtol=1e-6)
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is False


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"strings": {"llama.rope.scaling.type": "yarn"}}, "rope.scaling.type"),
        ({"integers": {"llama.expert_count": 4}}, "expert_count"),
        ({"integers": {"llama.attention.sliding_window": 64}}, "sliding_window"),
        ({"integers": {"llama.rope.dimension_count": 8}}, "rope.dimension_count"),
        ({"tensors": {"rope_freqs": (8,)}}, "cannot place: rope_freqs"),
        ({"without": ("blk.1.ffn_up",)}, "no tensor blk.1.ffn_up"),
        ({"tensors": {"blk.0.attn_k": (64, 64)}}, "k_proj.weight has shape"),
        ({"pre": "qwen2"}, "'qwen2'"),
    ],
)
def test_what_cannot_be_represented_is_refused_by_name(tmp_path: Path, changes: dict, message: str):
    write_gguf(tmp_path / "m.gguf", **changes)
    with pytest.raises(UserError, match=message):
        convert_gguf(tmp_path / "m.gguf", tmp_path / "m")
    assert not (tmp_path / "m").exists()


def test_a_folder_with_the_file_in_it_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    models = tmp_path / "models"
    models.mkdir()
    file = models / "m.gguf"
    write_gguf(file)
    size = file.stat().st_size
    monkeypatch.chdir(models)
    for folder in (models, tmp_path, Path(".")):
        with pytest.raises(UserError, match=r"m\.gguf lies in the folder to write"):
            convert_gguf(file, folder)
    assert list(models.iterdir()) == [file] and file.stat().st_size == size
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine").write_text("mine")
    with pytest.raises(UserError, match="notes holds mine"):
        convert_gguf(file, tmp_path / "notes")
    converted = convert_gguf(file, models / "m")
    file.rename(converted / "m.gguf")
    for folder in (converted, converted / ".." / "m"):
        with pytest.raises(UserError, match=r"m\.gguf lies in the folder to write"):
            convert_gguf(converted / "m.gguf", folder)
    assert (converted / "m.gguf").stat().st_size == size


def test_a_tilde_is_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write_gguf(tmp_path / "m.gguf")
    assert convert_gguf("~/m.gguf", "~/m") == tmp_path / "m"
    assert (tmp_path / "m" / "config.json").exists()


@pytest.mark.parametrize("content", [b"", b"no model at all", b"GGUF\x03\x00\x00\x00" + b"\xff" * 40])
def test_not_a_gguf_file(tmp_path: Path, content: bytes):
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(UserError, match="not a readable GGUF file"):
        convert_gguf(tmp_path / "m.gguf", tmp_path / "m")


def test_missing_file(tmp_path: Path):
    with pytest.raises(UserError, match="does not exist"):
        convert_gguf(tmp_path / "m.gguf", tmp_path / "m")


def test_tokenizer_splits_digits_before_merging(converted):
    tokenizer = tokenizers.Tokenizer.from_file(str(converted[0] / "tokenizer.json"))
    assert len(tokenizer.encode("12345").ids) == 5  # although the vocabulary has "12" and a merge that makes it
    assert tokenizer.encode(" the").tokens == ["Ġthe"]
    assert tokenizer.encode("a<|im_end|>b<tool>").tokens == ["a", "<|im_end|>", "b", "<tool>"]
    assert tokenizer.decode(tokenizer.encode("a<|im_end|><tool>").ids) == "a<tool>"


@pytest.mark.parametrize("text", TEXTS)
def test_tokenizer_splits_as_the_rule_says(converted, text: str):
    """Against a regular expression written from the rule: digits one by one, then the GPT-2 alternatives."""
    import regex

    tokenizer = tokenizers.Tokenizer.from_file(str(converted[0] / "tokenizer.json"))
    rule = regex.compile(r"\p{N}|'(?:s|t|re|ve|m|ll|d)| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
    # The digits are cut out first, so what comes before one ends there.
    expected = [piece for part in regex.split(r"(\p{N})", text) for piece in rule.findall(part)]
    found = [text[start:end] for _, (start, end) in tokenizer.pre_tokenizer.pre_tokenize_str(text)]
    assert found == expected
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


@pytest.mark.slow
def test_folder_works_in_transformers(converted):
    import torch
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(converted[0])
    assert (tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id) == (
        2,
        1,
        2,
        0,
    )
    assert tokenizer("the 12")["input_ids"] == [TOKENS.index(t) for t in ("t", "he", "Ġ", "1", "2")]
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert rendered == "<|im_start|>user\nhi<|im_end|>\n"
    model = transformers.AutoModelForCausalLM.from_pretrained(converted[0])
    assert type(model).__name__ == "LlamaForCausalLM"
    assert model.dtype == torch.float32
    assert model.config.rope_parameters["rope_theta"] == 54321.0
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()


@pytest.fixture(scope="module")
def smollm2() -> Path:
    """The real model, from the cache or the network."""
    from dstill_jax.weights.embedded import fetch

    return fetch("smollm2")


@pytest.mark.slow
@pytest.mark.parametrize("text", TEXTS)
def test_smollm2_tokenizer_round_trips(smollm2: Path, text: str):
    tokenizer = tokenizers.Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


@pytest.mark.slow
def test_smollm2_tokenizer_follows_its_rule(smollm2: Path):
    tokenizer = tokenizers.Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 49152
    assert tokenizer.encode("12345").tokens == list("12345")
    assert tokenizer.encode("x2 = 10").tokens == ["x", "2", "Ġ=", "Ġ", "1", "0"]
    for name, expected in {"<|endoftext|>": 0, "<|im_start|>": 1, "<|im_end|>": 2, "<empty_output>": 16}.items():
        assert tokenizer.encode(name).ids == [expected]
    # Letters end a word, runs of spaces leave one space to the next word.
    assert tokenizer.encode("hello   world").tokens == ["hello", "ĠĠ", "Ġworld"]


@pytest.mark.slow
def test_smollm2_chat_template(smollm2: Path):
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2)
    messages = [{"role": "user", "content": "What is 2+2?"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhat is 2+2?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokenizer.eos_token_id == tokenizer.pad_token_id == 2


@pytest.mark.slow
def test_smollm2_agrees_with_transformers(smollm2: Path):
    """Same weights in LlamaForCausalLM: logits within 1e-4 of their largest, 64 greedy tokens the same."""
    import jax
    import jax.numpy as jnp
    import torch
    import transformers

    from dstill_jax.models.target import forward, head
    from dstill_jax.weights.load import load_target

    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": TEXTS[0]}], tokenize=True, add_generation_prompt=True, return_dict=True
    )["input_ids"]
    model = transformers.AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()
    with torch.no_grad():
        theirs = model(torch.tensor([prompt])).logits[0].numpy()
        text = model.generate(torch.tensor([prompt]), max_new_tokens=64, do_sample=False)[0].tolist()

    target = load_target(smollm2)

    @jax.jit
    def logits(params, tokens):
        positions = jnp.arange(tokens.shape[1])[None]
        return head(target.config, params, forward(target.config, params, tokens, positions).hidden)[0]

    ours = np.asarray(logits(target.params, jnp.asarray([prompt])))
    assert np.abs(ours - theirs).max() <= 1e-4 * np.abs(theirs).max()

    # Greedy, teacher-forced: each of their tokens must be our argmax after the ones before it.
    greedy = np.asarray(logits(target.params, jnp.asarray([text]))).argmax(-1)
    assert greedy[len(prompt) - 1 : -1].tolist() == text[len(prompt) :]
    assert len(text) == len(prompt) + 64 or text[-1] == 2
