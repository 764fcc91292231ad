"""Chat templates: which tokens are supervised, with templates that carry no generation markers."""

import numpy as np
import pytest
from fake_backend import STOP, FakeTokenizer

from dstill_jax.data.prompts import PromptRow
from dstill_jax.data.templates import ChatTemplate, TemplateConfig, tokenizer_sha256
from dstill_jax.errors import UserError

CHATML = (
    "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nBe kind<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Shows thinking of the last turn only, and closes it for the model when thinking is off.
THINKER = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' and loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{{ m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)
# Llama 3: the date is in the prompt, and no newline follows the end of a turn.
DATED = (
    "{{ '<|im_start|>' + date_string }}"
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n\n' + m['content'] | trim + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n\n' }}{% endif %}"
)
TEMPLATES = {"chatml": CHATML, "thinker": THINKER, "dated": DATED}


def chat(*contents, where="rows.jsonl:1"):
    roles = ("user", "assistant")
    return PromptRow(where, tuple({"role": roles[i % 2], "content": c} for i, c in enumerate(contents)), where)


@pytest.fixture(scope="module")
def tokenizer():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*alphabet, "ĊĊ"])}  # two newlines merge into one token
    inner = Tokenizer(models.BPE(vocab=vocab, merges=[("Ċ", "Ċ")]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    special = {"bos_token": "<|bos|>", "eos_token": "<|im_end|>", "additional_special_tokens": ["<|im_start|>"]}
    return PreTrainedTokenizerFast(tokenizer_object=inner, chat_template=CHATML, **special)


def supervised_text(template, rendered):
    return template.tokenizer.decode(rendered.tokens[rendered.loss_mask])


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_answer_and_its_end_are_supervised_and_nothing_else(tokenizer, name):
    config = TemplateConfig(chat_template=TEMPLATES[name])
    template = ChatTemplate(tokenizer, config, [tokenizer.eos_token_id])
    row = chat("Why?", "Because.")
    rendered = template.conversation(row)
    assert supervised_text(template, rendered) == "Because.<|im_end|>"
    assert rendered.tokens[-1] == tokenizer.eos_token_id and rendered.loss_mask[-1], "nothing follows the answer's end"
    prompt = template.prompt_ids(PromptRow("p", row.messages[:1], "p"))
    assert rendered.tokens[: len(prompt)].tolist() == prompt, "training sees the prompt that generation sees"
    assert not rendered.loss_mask[: len(prompt)].any()


@pytest.mark.parametrize("name", ["chatml", "dated"])
def test_both_answers_of_two_turns_are_supervised_or_only_the_last(tokenizer, name):
    row = chat("Why?", "Because.", "Really?", "Yes.")
    for supervise, expected in (("all", "Because.<|im_end|>Yes.<|im_end|>"), ("last", "Yes.<|im_end|>")):
        config = TemplateConfig(chat_template=TEMPLATES[name], supervise=supervise)
        template = ChatTemplate(tokenizer, config, [tokenizer.eos_token_id])
        assert supervised_text(template, template.conversation(row)) == expected


def test_history_that_is_rendered_otherwise_is_refused_and_its_last_turn_usable(tokenizer):
    row = chat("Why?", "Because.", "Really?", "Yes.", where="talks.jsonl:9")
    with pytest.raises(UserError, match=r"talks.jsonl:9: messages\[1\] cannot be masked.*supervise='last'"):
        ChatTemplate(tokenizer, TemplateConfig(chat_template=THINKER), [tokenizer.eos_token_id]).conversation(row)
    last = ChatTemplate(tokenizer, TemplateConfig(chat_template=THINKER, supervise="last"), [tokenizer.eos_token_id])
    assert supervised_text(last, last.conversation(row)) == "Yes.<|im_end|>"


def test_a_prompt_that_is_no_prefix_of_its_answer_is_refused(tokenizer):
    crooked = CHATML.replace("'<|im_start|>assistant\n' }}{% endif %}", "'<|im_start|>assistant\nSure: ' }}{% endif %}")
    template = ChatTemplate(tokenizer, TemplateConfig(chat_template=crooked), [tokenizer.eos_token_id])
    with pytest.raises(UserError, match=r"rows.jsonl:1: messages\[1\] cannot be masked: the rendered answer does not"):
        template.conversation(chat("Why?", "Because."))


def test_the_thinking_switch_changes_the_prompt_and_what_is_supervised(tokenizer):
    row = chat("Why?", "Because.")
    on, off = (
        ChatTemplate(tokenizer, TemplateConfig(chat_template=THINKER, thinking=thinking), [tokenizer.eos_token_id])
        for thinking in (True, False)
    )
    question = PromptRow("p", row.messages[:1], "p")
    assert len(off.prompt_ids(question)) > len(on.prompt_ids(question))
    assert supervised_text(on, on.conversation(row)) == "<think>\n\n</think>\n\nBecause.<|im_end|>"
    assert supervised_text(off, off.conversation(row)) == "Because.<|im_end|>"


def test_an_answer_that_starts_with_a_newline_does_not_merge_into_the_prompt(tokenizer):
    template = ChatTemplate(tokenizer, TemplateConfig(), [tokenizer.eos_token_id])
    row = chat("Why?", "\nBecause.")
    rendered = template.conversation(row)
    prompt = template.prompt_ids(PromptRow("p", row.messages[:1], "p"))
    assert rendered.tokens[: len(prompt)].tolist() == prompt
    assert supervised_text(template, rendered) == "\nBecause.<|im_end|>"
    merged = tokenizer.encode("assistant\n\nBecause.", add_special_tokens=False)
    assert tokenizer.convert_tokens_to_ids("ĊĊ") in merged, "the whole text would have been tokenised otherwise"


def test_the_mask_equals_the_one_of_a_template_with_generation_markers(tokenizer):
    marked = CHATML.replace(
        "m['content'] + '<|im_end|>' + '\n' }}",
        "'' }}{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}"
        "{% else %}{{ m['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}",
    )
    row = chat("Why?", "Because.", "Really?", "Yes.")
    reference = tokenizer.apply_chat_template(
        list(row.messages), chat_template=marked, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    rendered = ChatTemplate(tokenizer, TemplateConfig(), [tokenizer.eos_token_id]).conversation(row)
    n = len(rendered.tokens)
    np.testing.assert_array_equal(rendered.tokens, reference["input_ids"][:n])
    np.testing.assert_array_equal(rendered.loss_mask, reference["assistant_masks"][:n])


def test_the_date_is_fixed_by_the_configuration(tokenizer):
    row = PromptRow("p", chat("Why?").messages, "p")
    one = ChatTemplate(tokenizer, TemplateConfig(chat_template=DATED), [])
    other = ChatTemplate(tokenizer, TemplateConfig(chat_template=DATED, date_string="01 Jan 2030"), [])
    assert "26 Jul 2024" in tokenizer.decode(one.prompt_ids(row))
    assert "01 Jan 2030" in tokenizer.decode(other.prompt_ids(row))


def test_hashes_follow_template_and_tokenizer(tokenizer):
    hashes = {name: ChatTemplate(tokenizer, TemplateConfig(chat_template=t)).sha256 for name, t in TEMPLATES.items()}
    assert len(set(hashes.values())) == 3
    assert ChatTemplate(tokenizer, TemplateConfig()).sha256 == hashes["chatml"]
    assert tokenizer_sha256(tokenizer) == tokenizer_sha256(tokenizer) != tokenizer_sha256(FakeTokenizer())


def test_raw_style_is_the_prompt_itself():
    template = ChatTemplate(FakeTokenizer(), TemplateConfig(style="raw"), [STOP])
    row = PromptRow("p", ({"role": "user", "content": "def f():"},), "p")
    assert template.tokenizer.decode(template.prompt_ids(row)) == "def f():"
    with pytest.raises(UserError, match="style 'raw' takes a single 'prompt'"):
        template.prompt_ids(chat("a", "b", "c"))
    with pytest.raises(UserError, match="need a chat template"):
        template.conversation(chat("a", "b"))


@pytest.mark.parametrize("fields", [{"thinking": True}, {"chat_template": "{{ messages }}"}])
def test_raw_style_reads_no_field_of_a_template(fields):
    with pytest.raises(UserError, match=f"{next(iter(fields))} is read by a chat template"):
        TemplateConfig(style="raw", **fields)


def test_a_thinking_mode_is_that_of_a_template_with_the_switch():
    def mode(thinking, text="{{ enable_thinking }}"):
        return ChatTemplate(FakeTokenizer(), TemplateConfig(thinking=thinking, chat_template=text)).thinking

    assert [mode(False), mode(True)] == ["off", "on"]
    assert mode(True, "{{ messages }}") == "not applicable"
    assert ChatTemplate(FakeTokenizer(), TemplateConfig(style="raw")).thinking == "not applicable"


def test_answers_without_an_end_of_turn_are_counted():
    rendered = ChatTemplate(FakeTokenizer(), TemplateConfig(), [99999]).conversation(chat("a", "b"))
    assert rendered.unended_answers == 1


def test_supervised_text_is_shown_between_marks():
    template = ChatTemplate(FakeTokenizer(), TemplateConfig(), [STOP])
    rendered = template.conversation(chat("a", "b"))
    shown = template.mark_supervised(rendered.tokens, rendered.loss_mask)
    assert shown == "<|start|>user\na<|end|>\n<|start|>assistant\n⟦b<|end|>⟧"


def test_a_missing_template_and_unknown_settings_are_refused():
    class Bare(FakeTokenizer):
        chat_template = None

    with pytest.raises(UserError, match="has no chat template"):
        ChatTemplate(Bare(), TemplateConfig())
    with pytest.raises(UserError, match="style='text'"):
        TemplateConfig(style="text")
    with pytest.raises(UserError, match="supervise='none'"):
        TemplateConfig(supervise="none")


def test_a_template_that_refuses_the_roles_is_reported_with_the_row(tokenizer):
    strict = "{{ raise_exception('roles must alternate') }}"
    template = ChatTemplate(tokenizer, TemplateConfig(chat_template=strict), [])
    with pytest.raises(UserError, match="rows.jsonl:1: the chat template refuses these messages .roles must alternate"):
        template.prompt_ids(chat("a"))
