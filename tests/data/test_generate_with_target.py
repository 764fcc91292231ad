"""Preparing a dataset with a real (tiny) JAX target, in this process and in two worker processes."""

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_generate import files

from dstill_jax.data.dataset import ConversationDataset
from dstill_jax.data.generate import prepare
from dstill_jax.data.prepare_config import PrepareConfig
from dstill_jax.data.prompts import PromptSource

REFERENCE = Path(__file__).resolve().parents[1] / "reference" / "llama_tied" / "target"
TEMPLATE = (
    "{% for m in messages %}{{ '<s>' + m['role'] + ':' + m['content'] + '</s>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s>assistant:' }}{% endif %}"
)


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory):
    """The reference target with a tokenizer of single characters."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("target") / "model"
    shutil.copytree(REFERENCE, folder)
    vocab = {"<pad>": 0, "<s>": 1, "</s>": 2, **{chr(c): c for c in range(32, 127)}}
    inner = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    inner.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>", pad_token="<pad>", chat_template=TEMPLATE
    )
    tokenizer.save_pretrained(folder)
    return folder


def make_config(tmp_path, target_folder, out, **settings):
    path = tmp_path / "prompts.jsonl"
    # Lengths 5, 17 and 64, one prompt twice, and two with a common beginning of 16: what captured features got wrong.
    texts = ["a" * 5, "b" * 17, "c" * 64, "b" * 17, "b" * 16 + "x", "the quick brown fox"]
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    return PrepareConfig(
        target=str(target_folder), source=PromptSource(str(path)), out=str(tmp_path / out), max_prompt_tokens=100,
        max_new_tokens=10, record_features=True, tap_ids=(1, 3), **settings,
    )  # fmt: skip


def check_against_plain_forward(config, greedy):
    """Every stored row against one forward pass over that row alone."""
    from dstill_jax.models.target import forward, head
    from dstill_jax.weights.load import load_target

    target = load_target(config.target)
    dataset = ConversationDataset(config.out)
    width = int(dataset.lengths.max())  # padding on the right: a causal target's rows do not see it

    @jax.jit
    def plain(params, tokens):
        out = forward(target.config, params, tokens, jnp.arange(width)[None], tap_ids=config.tap_ids)
        return jnp.concatenate([out.taps[0], out.hidden[0]], axis=-1), head(target.config, params, out.hidden[0])

    for i in range(len(dataset)):
        row, n = dataset[i], len(dataset[i].tokens)
        expected, logits = plain(target.params, np.pad(row.tokens, (0, width - n))[None])
        np.testing.assert_allclose(dataset.features(i)[:-1], expected[: n - 1], rtol=2e-3, atol=2e-3)  # float16
        if greedy:
            best, at = np.asarray(logits).argmax(-1), np.flatnonzero(row.loss_mask)
            np.testing.assert_array_equal(row.tokens[at], best[at - 1])


@pytest.mark.parametrize("temperature", [0.0, pytest.param(1.0, marks=pytest.mark.slow)])
def test_every_answer_and_feature_is_that_of_its_row_alone(tmp_path, target_folder, temperature):
    config = make_config(tmp_path, target_folder, "out", batch_size=3, temperature=temperature)
    summary = prepare(config, show_progress=False)
    assert summary.rows == 6 and summary.tokens_per_second > 0
    check_against_plain_forward(config, greedy=temperature == 0)


def test_further_answers_of_a_prompt_are_other_draws_and_leave_the_first_as_it_was(tmp_path, target_folder):
    datasets = []
    for n in (1, 3):
        config = make_config(tmp_path, target_folder, f"of{n}", answers_per_prompt=n, temperature=1.0)
        prepare(dataclasses.replace(config, record_features=False, tap_ids=()), show_progress=False)
        datasets.append(ConversationDataset(config.out))
    one, three = ([(d[i].source_id, d[i].tokens.tolist()) for i in range(len(d))] for d in datasets)
    prompts = len(one)
    assert [tokens for _, tokens in three[:prompts]] == [tokens for _, tokens in one]
    assert [name for name, _ in three] == [f"{name}#{n}" for n in range(3) for name, _ in one]
    for i in range(prompts):
        answers = {tuple(three[i + n * prompts][1]) for n in range(3)}
        assert len(answers) == 3, "ten tokens at temperature 1 do not come out alike"


@pytest.mark.slow
def test_two_worker_processes_give_the_same_bytes(tmp_path, target_folder):
    one = make_config(tmp_path, target_folder, "one", batch_size=3, temperature=0.7)
    two = make_config(tmp_path, target_folder, "two", batch_size=2, temperature=0.7, workers=2)
    prepare(one, show_progress=False)
    prepare(two, show_progress=False)
    check_against_plain_forward(two, greedy=False)
    assert files(one.out) == files(two.out), "neither on the number of workers nor on the batch size"
