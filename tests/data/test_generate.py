"""Preparing a dataset with a fake target: content, keys, refusals. Killing and resuming: test_resume."""

import dataclasses
import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest
from fake_backend import HIDDEN, STOP, FakeBackend, FakeTokenizer, fake_answer, fake_features

from dstill_jax.data import generate
from dstill_jax.data.dataset import ConversationDataset
from dstill_jax.data.generate import prepare
from dstill_jax.data.pool import split_cores
from dstill_jax.data.prepare_config import PrepareConfig, config_from_dict, config_to_dict
from dstill_jax.data.prompts import PromptSource
from dstill_jax.data.templates import TemplateConfig
from dstill_jax.errors import UserError

WORKER = (sys.executable, str(Path(__file__).with_name("fake_backend.py")))


def make_config(tmp_path, rows=23, out="out", **settings):
    path = tmp_path / "prompts.jsonl"
    if not path.exists():
        lines = [{"id": f"q/{i}", "prompt": "?" * (i % 7) + str(i)} for i in range(rows)]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    defaults = {"max_prompt_tokens": 64, "max_new_tokens": 12, "source": PromptSource(str(path))}
    return PrepareConfig(target="fake", out=str(tmp_path / out), **{**defaults, **settings})


def run(config, **options):
    return prepare(config, backend=FakeBackend(config), worker_command=WORKER, show_progress=False, **options)


def files(folder):
    return {p.name: p.read_bytes() for p in Path(folder, "dataset").iterdir()}


def test_rows_are_prompts_and_the_target_s_own_answers_in_the_order_of_the_file(tmp_path):
    summary = run(config := make_config(tmp_path, seed=5))
    dataset = ConversationDataset(config.out)
    tokenizer = FakeTokenizer()
    assert len(dataset) == summary.rows == 23
    for i, row in enumerate(dataset[i] for i in range(23)):
        text = f"<|start|>user\n{'?' * (i % 7)}{i}<|end|>\n<|start|>assistant\n"
        prompt = tokenizer.encode(text)
        answer = fake_answer(prompt, 5, 12)
        assert row.source_id == f"q/{i}"
        assert row.tokens.tolist() == prompt + answer
        np.testing.assert_array_equal(row.loss_mask, np.arange(len(row.tokens)) >= len(prompt))
    assert summary.tokens == dataset.lengths.sum() and summary.supervised_tokens == summary.new_tokens
    assert summary.ended_by_stop + summary.ended_by_length == 23 and summary.ended_by_length > 0
    assert summary.samples[0].startswith("<|start|>user\n0<|end|>\n<|start|>assistant\n⟦") and len(summary.samples) == 3
    assert json.loads(Path(config.out, "summary.json").read_text())["rows"] == 23
    assert not Path(config.out, "work").exists()
    inputs = dataset.provenance["inputs"]
    assert inputs["target_fingerprint"] == "fake-target" and inputs["thinking"] is False and inputs["seed"] == 5


@pytest.mark.parametrize("features", [False, True])
def test_the_bytes_do_not_depend_on_workers_or_batch_size(tmp_path, features):
    settings = {"record_features": True, "tap_ids": (1, 4)} if features else {}
    one = make_config(tmp_path, out="one", **settings)
    two = make_config(tmp_path, out="two", workers=2, batch_size=3, **settings)
    assert run(one).new_tokens == run(two).new_tokens > 0
    assert files(one.out) == files(two.out)


def test_stored_features_are_those_of_each_row_s_own_tokens(tmp_path):
    run(config := make_config(tmp_path, record_features=True, tap_ids=(0, 2, 5)))
    dataset = ConversationDataset(config.out)
    assert dataset.feature_width == 4 * HIDDEN
    for i in range(len(dataset)):
        values = dataset.features(i)
        assert len(values) == len(dataset[i].tokens)
        np.testing.assert_array_equal(values[:-1], fake_features(dataset[i].tokens.tolist(), 3))
        assert not values[-1].any(), "the target never read the last token"


def test_features_of_the_wrong_length_or_beyond_float16_are_refused(tmp_path):
    class Short(FakeBackend):
        def answer(self, requests, **options):
            for completion in super().answer(requests, **options):
                yield dataclasses.replace(completion, features=completion.features[:-1])

    class Huge(FakeBackend):
        def answer(self, requests, **options):
            for completion in super().answer(requests, **options):
                yield dataclasses.replace(completion, features=completion.features.astype(np.float32) * 1e6)

    config = make_config(tmp_path, record_features=True, tap_ids=(1,))
    with pytest.raises(ValueError, match="features of row"):
        prepare(config, backend=Short(config), show_progress=False)
    with np.errstate(over="ignore"), pytest.raises(UserError, match="overflow float16"):
        prepare(config, backend=Huge(config), show_progress=False)


def test_a_finished_dataset_is_used_as_it_is(tmp_path):
    first = run(config := make_config(tmp_path))
    backend = FakeBackend(config)
    again = prepare(config, backend=backend, show_progress=False)
    assert backend.answered == [] and again.new_tokens == 0
    assert (again.rows, again.tokens, again.resumed_rows) == (first.rows, first.tokens, first.rows)


CHANGES = {
    "max_prompt_tokens": {"max_prompt_tokens": 63},
    "max_new_tokens": {"max_new_tokens": 11},
    "temperature": {"temperature": 0.7},
    "top_k": {"temperature": 0.7, "top_k": 5},
    "top_p": {"temperature": 0.7, "top_p": 0.9},
    "seed": {"seed": 1},
    "target_dtype": {"dtype": "bfloat16"},
    "thinking": {"template": TemplateConfig(thinking=True)},
    "date_string": {"template": TemplateConfig(date_string="today")},
    "template_sha256": {"template": TemplateConfig(chat_template="other")},
    "template_style": {"template": TemplateConfig(style="raw")},
    "stop_token_ids": {"stop_token_ids": (STOP, 4)},
    "rows_sha256": {"limit": 22},
    "tap_ids": {"record_features": True, "tap_ids": (1,)},
}


def test_a_change_of_any_input_is_refused_and_named(tmp_path):
    run(make_config(tmp_path))
    for field, change in CHANGES.items():
        with pytest.raises(UserError, match=rf"was prepared from other inputs \(.*{field}: there "):
            run(make_config(tmp_path, **change))


def test_other_targets_tokenizers_prompts_and_code_are_refused_and_named(tmp_path, monkeypatch):
    run(config := make_config(tmp_path))
    other = FakeBackend(config)
    other.fingerprint = "another"
    with pytest.raises(UserError, match="target_fingerprint: there .*fake-target.*, now .*another"):
        prepare(config, backend=other, show_progress=False)
    other = FakeBackend(config)
    other.tokenizer = type("Revised", (FakeTokenizer,), {"__repr__": lambda self: "revised"})()
    with pytest.raises(UserError, match="tokenizer_sha256: "):
        prepare(config, backend=other, show_progress=False)
    with monkeypatch.context() as patch:
        patch.setattr(generate, "STAGE_VERSION", 99)
        with pytest.raises(UserError, match="stage_version: there 1, now 99"):
            run(config)
    path = Path(config.source.path)
    path.write_text(path.read_text().replace("???", "!!!"))
    with pytest.raises(UserError, match="rows_sha256: "):
        run(config)


def test_a_manifest_without_a_field_and_a_foreign_folder_are_refused(tmp_path):
    run(config := make_config(tmp_path))
    path = Path(config.out, "manifest.json")
    manifest = json.loads(path.read_text())
    del manifest["inputs"]["thinking"]
    path.write_text(json.dumps(manifest))
    with pytest.raises(UserError, match="thinking: there absent, now false"):
        run(config)
    path.write_text("[]")
    with pytest.raises(UserError, match="not a manifest"):
        run(config)
    path.unlink()
    with pytest.raises(UserError, match=r"is not empty and has no manifest.json"):
        run(config)
    with pytest.raises(UserError, match="is a file"):
        run(make_config(tmp_path, out="prompts.jsonl"))


def test_long_prompts_are_skipped_and_counted(tmp_path):
    limit = len(FakeTokenizer().encode("<|start|>user\n??22<|end|>\n<|start|>assistant\n"))
    summary = run(config := make_config(tmp_path, max_prompt_tokens=limit))
    dataset = ConversationDataset(config.out)
    assert summary.skipped_too_long == 23 - summary.rows > 0
    assert dataset.provenance["skipped_ids"][0] == "q/4" and dataset.lengths.max() <= limit + 12
    with pytest.raises(UserError, match="all 23 prompts are longer than max_prompt_tokens=3"):
        run(make_config(tmp_path, out="none", max_prompt_tokens=3))


def test_a_slice_of_the_prompts_can_be_taken(tmp_path):
    run(config := make_config(tmp_path, start=4, limit=5))
    dataset = ConversationDataset(config.out)
    assert [dataset[i].source_id for i in range(len(dataset))] == ["q/4", "q/5", "q/6", "q/7", "q/8"]
    with pytest.raises(UserError, match="start=23 leaves none of its 23 rows"):
        run(make_config(tmp_path, out="none", start=23))


def test_finished_conversations_become_a_dataset_without_a_target_s_answers(tmp_path):
    path = tmp_path / "talks.jsonl"
    talk = [("user", "a"), ("assistant", "bc"), ("user", "d"), ("assistant", "e")]
    path.write_text(json.dumps({"id": "t", "messages": [{"role": r, "content": c} for r, c in talk]}) + "\n")
    config = PrepareConfig("fake", PromptSource(str(path), conversations=True), str(tmp_path / "out"))
    summary = run(config)
    row = ConversationDataset(config.out)[0]
    assert FakeTokenizer().decode(row.tokens[row.loss_mask]) == "bc<|end|>e<|end|>"
    assert (summary.rows, summary.supervised_tokens, summary.resumed_rows) == (1, 5, 0)
    assert run(config).resumed_rows == 1
    with pytest.raises(UserError, match="supervise: there .all., now .last."):
        run(dataclasses.replace(config, template=TemplateConfig(supervise="last")))


BAD = {
    "max_prompt_tokens": {"max_prompt_tokens": 0},
    "max_new_tokens": {"max_new_tokens": 0},
    "answers_per_prompt": {"answers_per_prompt": 2, "temperature": 0.0},
    "batch_size": {"batch_size": 0},
    "workers": {"workers": 0},
    "start": {"start": -1},
    "limit": {"limit": 0},
    "temperature": {"temperature": 1e-5},  # below what the target draws at
    "top_k": {"top_k": 2.5},
    "top_p": {"top_p": 0.9},  # of a greedy run
    "seed": {"seed": -1},
    "record_features": {"record_features": True},
    "tap_ids": {"tap_ids": (1,)},
}


@pytest.mark.parametrize("field", BAD)
def test_bad_settings_name_the_field(tmp_path, field):
    with pytest.raises(UserError, match=field):
        make_config(tmp_path, **BAD[field])


def test_settings_the_target_cannot_meet_are_refused(tmp_path):
    with pytest.raises(UserError, match="= 2049 is more than the target's context of 2048"):
        run(make_config(tmp_path, max_prompt_tokens=2037))
    with pytest.raises(UserError, match="tap_ids has 6, but the target has layers 0..5"):
        run(make_config(tmp_path, record_features=True, tap_ids=(6,)))
    with pytest.raises(UserError, match="stop_token_ids has 300, but"):
        run(make_config(tmp_path, stop_token_ids=(300,)))


def test_features_that_cannot_fit_on_the_disk_are_refused_before_work(tmp_path, monkeypatch):
    monkeypatch.setattr("dstill_jax.data.features.shutil.disk_usage", lambda _: os.stat_result((0,) * 10) and Free)
    config = make_config(tmp_path, record_features=True, tap_ids=(1,))
    backend = FakeBackend(config)
    with pytest.raises(UserError, match="storing features of 23 rows may take .* but .* has 10 bytes free"):
        prepare(config, backend=backend, show_progress=False)
    assert backend.answered == []


class Free:
    free = 10


def test_a_full_disk_is_reported_and_what_was_done_is_kept(tmp_path, monkeypatch):
    config = make_config(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(generate, "write_dataset", _no_space)
        with pytest.raises(UserError, match="No space left on device.*run the same command"):
            run(config)
    backend = FakeBackend(config)
    assert prepare(config, backend=backend, show_progress=False).resumed_rows == 23
    assert backend.answered == []


def _no_space(*_):
    raise OSError(28, "No space left on device", "somewhere")


def test_a_worker_s_refusal_and_crash_reach_the_caller(tmp_path, monkeypatch):
    config = make_config(tmp_path, workers=2)
    with monkeypatch.context() as patch:
        patch.setenv("FAKE_REFUSE", "1")
        with pytest.raises(UserError, match="^the fake target refuses$"):
            run(config)
    with monkeypatch.context() as patch:
        patch.setenv("FAKE_CRASH", "1")
        with pytest.raises(UserError, match="failed: RuntimeError: the fake target broke; see .*worker-.*run the same"):
            run(config)
    assert run(config).rows == 23


def test_cores_are_split_without_overlap(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {2, 3, 5, 7, 8}, raising=False)
    assert split_cores(1) == [(2, 3, 5, 7, 8)]
    assert split_cores(2) == [(2, 3), (5, 7, 8)]
    assert split_cores(7) == [(2,), (3,), (5,), (7,), (8,), (2,), (3,)]


def test_the_configuration_survives_json_and_unknown_fields_are_named(tmp_path):
    config = make_config(tmp_path, record_features=True, tap_ids=(1, 2), stop_token_ids=(3,))
    assert config_from_dict(json.loads(json.dumps(config_to_dict(config)))) == config
    with pytest.raises(UserError, match="PrepareConfig has no field 'temprature'"):
        config_from_dict({**config_to_dict(config), "temprature": 1})
    with pytest.raises(UserError, match="TemplateConfig has no field 'think'"):
        config_from_dict({**config_to_dict(config), "template": {"think": True}})
