"""Prompt rows: what is read, and what every bad row is told."""

import json

import numpy as np
import pytest

from dstill_jax.data.prompts import PromptSource, read_rows, rows_sha256
from dstill_jax.errors import UserError

USER = {"role": "user", "content": "hi"}
ANSWER = {"role": "assistant", "content": "hello"}


def write(tmp_path, *lines):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\n".join(line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines))
    return str(path)


def test_prompt_and_messages_rows_become_the_same_thing(tmp_path):
    path = write(tmp_path, {"prompt": "hi", "id": "a"}, b"", {"messages": [USER], "id": 7, "extra": 1}, {"prompt": "x"})
    rows = read_rows(PromptSource(path))
    assert [row.id for row in rows] == ["a", "7", "rows.jsonl:4"]
    assert rows[0].messages == rows[1].messages == (USER,)


def test_a_byte_order_mark_is_ignored(tmp_path):
    assert read_rows(PromptSource(write(tmp_path, b'\xef\xbb\xbf{"prompt": "hi"}')))[0].messages == (USER,)


def test_finished_conversations_end_with_an_answer(tmp_path):
    rows = read_rows(PromptSource(write(tmp_path, {"messages": [USER, ANSWER]}), conversations=True))
    assert rows[0].messages[-1] == ANSWER


def test_hash_follows_the_content_and_not_the_file(tmp_path):
    (tmp_path / "other").mkdir()
    same = write(tmp_path, {"prompt": "hi", "id": "a"}), write(tmp_path / "other", b'{"id":"a",   "prompt":"hi"}')
    first, second = (rows_sha256(read_rows(PromptSource(path))) for path in same)
    changed = rows_sha256(read_rows(PromptSource(write(tmp_path, {"prompt": "ho", "id": "a"}))))
    assert first == second != changed


BAD_PROMPTS = {
    "malformed": (b'{"prompt": "hi"', "malformed JSON"),
    "not an object": (["hi"], "expected a JSON object"),
    "neither field": ({"text": "hi"}, "neither 'messages' nor 'prompt'"),
    "prompt is a number": ({"prompt": 3}, "'prompt' must be a string, got a number"),
    "prompt is blank": ({"prompt": " \n"}, "the prompt is empty"),
    "messages is a string": ({"messages": "hi"}, "'messages' must be a list, got a string"),
    "messages is empty": ({"messages": []}, "'messages' is empty"),
    "message is a string": ({"messages": ["hi"]}, "messages[0] must be an object"),
    "no role": ({"messages": [{"content": "hi"}]}, "messages[0] has no 'role'"),
    "no content": ({"messages": [{"role": "user"}]}, "messages[0] has no 'content'"),
    "content is a list": ({"messages": [{"role": "user", "content": ["hi"]}]}, "messages[0].content must be a string"),
    "unknown role": ({"messages": [{"role": "human", "content": "hi"}]}, "messages[0].role is 'human'"),
    "ends with an answer": ({"messages": [USER, ANSWER]}, "must not end with an assistant turn"),
    "id is a list": ({"prompt": "hi", "id": [1]}, "'id' must be a string or an integer, got a list"),
    "not UTF-8": (b'{"prompt": "\xff"}', "not UTF-8"),
    "half a surrogate pair": (b'{"prompt": "\\ud800"}', "not valid Unicode"),
    "id used before": ({"prompt": "hi", "id": "first"}, "already used at"),
}  # fmt: skip


@pytest.mark.parametrize("line, message", BAD_PROMPTS.values(), ids=BAD_PROMPTS)
def test_a_bad_prompt_is_refused_with_file_and_line(tmp_path, line, message):
    path = write(tmp_path, {"prompt": "fine", "id": "first"}, line)
    with pytest.raises(UserError) as error:
        read_rows(PromptSource(path))
    assert str(error.value).startswith(f"{path}:2: ") and message in str(error.value)


BAD_CONVERSATIONS = {
    "a prompt string": ({"prompt": "hi"}, "needs 'messages'"),
    "ends with a question": ({"messages": [USER]}, "must end with an assistant turn, got 'user'"),
    "empty answer": ({"messages": [USER, {"role": "assistant", "content": " "}]}, "messages[1] is an empty answer"),
}


@pytest.mark.parametrize("line, message", BAD_CONVERSATIONS.values(), ids=BAD_CONVERSATIONS)
def test_a_bad_conversation_is_refused_with_file_and_line(tmp_path, line, message):
    path = write(tmp_path, line)
    with pytest.raises(UserError) as error:
        read_rows(PromptSource(path, conversations=True))
    assert str(error.value).startswith(f"{path}:1: ") and message in str(error.value)


def test_missing_and_empty_files_are_refused_by_name(tmp_path):
    with pytest.raises(UserError, match="nothing.jsonl: No such file"):
        read_rows(PromptSource(str(tmp_path / "nothing.jsonl")))
    with pytest.raises(UserError, match="rows.jsonl: no rows"):
        read_rows(PromptSource(write(tmp_path, b"\n")))
    with pytest.raises(UserError, match="cannot be read as a TFDS data source"):
        read_rows(PromptSource(str(tmp_path)))
    with pytest.raises(UserError, match="cannot be read as a TFDS data source"):
        read_rows(PromptSource("tfds:no_such_dataset_anywhere"))


def make_tfds(folder, rows, features):
    import tensorflow_datasets as tfds

    with tfds.core.registered.skip_registration():

        class Prompts(tfds.core.GeneratorBasedBuilder):
            VERSION = tfds.core.Version("1.0.0")

            def _info(self):
                return tfds.core.DatasetInfo(
                    builder=self, features=tfds.features.FeaturesDict(features(tfds)), disable_shuffling=True
                )

            def _split_generators(self, dl_manager):
                return {"train": self._generate_examples()}

            def _generate_examples(self):
                yield from enumerate(rows)

    builder = Prompts(data_dir=folder, file_format="array_record")
    builder.download_and_prepare()
    return str(builder.data_dir)


def test_tfds_text_features_are_prompts(tmp_path):
    rows = [{"question": "wie geht's, schön?"}, {"question": "b"}]
    path = make_tfds(tmp_path, rows, lambda tfds: {"question": tfds.features.Text()})
    read = read_rows(PromptSource(path, text_field="question"))
    assert [row.messages[0]["content"] for row in read] == ["wie geht's, schön?", "b"]
    assert [row.id for row in read] == ["prompts/train/0", "prompts/train/1"]
    with pytest.raises(UserError, match=r"row 0: neither 'messages' nor 'prompt' is present \(fields: question\)"):
        read_rows(PromptSource(path))
    with pytest.raises(UserError, match="cannot be read"):
        read_rows(PromptSource(path, split="validation"))


def test_tfds_sequences_of_messages_are_conversations(tmp_path):
    rows = [{"id": np.int64(4), "messages": [USER, ANSWER]}]

    def features(tfds):
        message = {"role": tfds.features.Text(), "content": tfds.features.Text()}
        return {"id": tfds.features.Scalar(np.int64), "messages": tfds.features.Sequence(message)}

    read = read_rows(PromptSource(make_tfds(tmp_path, rows, features), conversations=True))
    assert read[0].messages == (USER, ANSWER) and read[0].id == "4"
