"""The tiny target: corpus split, tokenizer, determinism, and a folder that others can read."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from dstill_jax.errors import UserError
from dstill_jax.weights import tiny, tiny_corpus
from dstill_jax.weights.byte_bpe import train_tokenizer
from dstill_jax.weights.tiny import TinyConfig, train_tiny

SMALL = TinyConfig(
    steps=30, rows_per_step=2, context=64, num_layers=1, hidden_size=64, intermediate_size=96, vocab_size=512,
    max_files=40, train_prompts=50, held_out_prompts=20,
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_tiny(tmp_path_factory.mktemp("tiny") / "tiny", SMALL)


@pytest.fixture(scope="module")
def tokenizer(folder: Path):
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def read_rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_corpus_leaves_out_tests_and_splits_by_file():
    train, held_out = tiny_corpus.read_corpus()
    names = [file.name for file in train + held_out]
    assert len(names) == len(set(names)) > 300
    assert not any("/test/" in f"/{name}" or "site-packages" in name or "idlelib" in name for name in names)
    assert 0.03 < len(held_out) / len(names) < 0.1
    assert all(tiny_corpus.is_held_out(file.name) for file in held_out)
    assert not any(tiny_corpus.is_held_out(file.name) for file in train)


def test_empty_standard_library_is_explained(tmp_path: Path):
    with pytest.raises(UserError, match=r"0 training and 0 held-out"):
        tiny_corpus.read_corpus(tmp_path)


def test_joined_files_end_with_the_end_token():
    files = [np.asarray([5, 6], np.int32), np.asarray([7], np.int32)]
    assert tiny_corpus.join_files(files, 0).tolist() == [5, 6, 0, 7, 0]


@pytest.mark.parametrize("text", ["def f(x):\n\treturn  x**2\n", "Ünïcödé 漢字 🙂 \x00\x7f", "   \n\n  "])
def test_tokenizer_round_trips_any_text(tokenizer, text: str):
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_special_tokens_have_their_ids_and_never_occur_in_text(folder: Path, tokenizer):
    assert [tokenizer.token_to_id(token) for token in tiny.SPECIAL_TOKENS] == [0, 1, 2]
    assert tokenizer.encode("<|mask|>").ids == [2]
    assert tokenizer.get_vocab_size() == SMALL.vocab_size
    train, _ = tiny_corpus.read_corpus(max_files=SMALL.max_files)
    assert min(ids.min() for ids in tiny_corpus.encode_files(tokenizer, train)) > 2


def test_vocabulary_smaller_than_the_bytes_is_refused():
    with pytest.raises(UserError, match="at least 259"):
        train_tokenizer(["text"], 258, tiny.SPECIAL_TOKENS)


@pytest.mark.parametrize(("name", "count"), [("train", 50), ("heldout", 20)])
def test_prompts_come_from_their_own_side_and_stay_short(folder: Path, tokenizer, name: str, count: int):
    rows = read_rows(folder / f"prompts_{name}.jsonl")
    assert len(rows) == len({row["id"] for row in rows}) == len({row["prompt"] for row in rows}) == count
    for row in rows:
        file = row["id"].removeprefix(f"tiny/{name}/").rpartition(":")[0]
        assert tiny_corpus.is_held_out(file) == (name == "heldout")
        assert 32 <= len(tokenizer.encode(row["prompt"]).ids) <= tiny_corpus.PROMPT_TOKENS_AT_MOST


def test_training_learns_and_says_the_held_out_loss(folder: Path):
    provenance = json.loads((folder / "provenance.json").read_text())
    assert 1.0 < provenance["heldout_loss"] < np.log(SMALL.vocab_size) - 0.5
    assert provenance["train_tokens_seen"] == 30 * 2 * 64


@pytest.mark.slow
def test_same_settings_give_the_same_bytes(folder: Path, tmp_path: Path):
    again = train_tiny(tmp_path / "again", SMALL)
    for file in ("model.safetensors", "tokenizer.json", "prompts_train.jsonl", "prompts_heldout.jsonl", "config.json"):
        assert (again / file).read_bytes() == (folder / file).read_bytes(), file


def test_second_call_does_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tiny, "_build", lambda *a: pytest.fail("trained again"))
    assert train_tiny(folder, SMALL) == folder


def test_a_folder_made_with_other_settings_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    seeds = []

    def build(work: Path, config: TinyConfig, recipe: dict, report) -> None:
        seeds.append(config.seed)
        (work / "provenance.json").write_text(json.dumps({"recipe": recipe, "files": {}}))

    monkeypatch.setattr(tiny, "_build", build)
    for seed in (0, 0, 1):
        train_tiny(tmp_path / "tiny", dataclasses.replace(SMALL, seed=seed))
    assert seeds == [0, 1]


def test_interrupted_training_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def stop(work: Path, *_) -> None:
        (work / "config.json").write_text("{}")
        raise KeyboardInterrupt

    monkeypatch.setattr(tiny, "_build", stop)
    with pytest.raises(KeyboardInterrupt):
        train_tiny(tmp_path / "tiny", SMALL)
    assert [p.name for p in tmp_path.iterdir()] == ["tiny.lock"]


def test_folder_reads_back_as_a_target(folder: Path):
    from dstill_jax.weights.load import load_target

    target = load_target(folder)
    assert target.config == SMALL.target_config()
    _, held_out = tiny_corpus.read_corpus()
    ids = tiny_corpus.encode_files(_fast(target.tokenizer), held_out)
    rows = tiny._evaluation_rows(tiny_corpus.join_files(ids, 0), SMALL.context)
    loss = json.loads((folder / "provenance.json").read_text())["heldout_loss"]
    assert tiny.held_out_loss(target.config, target.params, rows) == pytest.approx(loss, rel=1e-5)


def _fast(tokenizer):
    return tokenizer.backend_tokenizer


@pytest.mark.slow
def test_folder_works_in_transformers(folder: Path):
    """The same weights give the same logits in an independent implementation of the architecture."""
    import jax.numpy as jnp
    import torch
    import transformers

    from dstill_jax.models.target import forward, head
    from dstill_jax.weights.load import load_target

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    names = (tokenizer.eos_token, tokenizer.pad_token, tokenizer.mask_token)
    assert names == tiny.SPECIAL_TOKENS
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "import "}, {"role": "assistant", "content": "os\n"}], tokenize=False
    )
    assert text == "import os\n"
    ids = tokenizer("def main(argv):\n    return 0\n")["input_ids"]
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        theirs = model(torch.tensor([ids])).logits[0].numpy()
    target = load_target(folder)
    tokens = jnp.asarray([ids])
    hidden = forward(target.config, target.params, tokens, jnp.arange(len(ids))[None]).hidden
    ours = np.asarray(head(target.config, target.params, hidden))[0]
    np.testing.assert_allclose(ours, theirs, atol=1e-4 * np.abs(theirs).max())


def test_no_steps_are_refused():
    with pytest.raises(UserError, match=r"TinyConfig\.steps must be positive, got 0"):
        dataclasses.replace(SMALL, steps=0)
