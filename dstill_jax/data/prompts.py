"""Prompt rows and finished conversations, read from JSONL files and from TFDS data sources.

Called by `generate`. Every complaint names the file and the line (or the source and the row).
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dstill_jax.errors import MissingExtraError, UserError
from dstill_jax.paths import in_home

ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True)
class PromptRow:
    """One prompt, or one finished conversation.

    `messages` are dicts of two strings, `role` and `content`; `where` says where the row was read, for messages to
    people.
    """

    id: str
    messages: tuple[dict[str, str], ...]
    where: str


@dataclass(frozen=True)
class PromptSource:
    """Where rows come from.

    `path` is a JSONL file, a folder that holds a prepared TFDS dataset, or `tfds:NAME` for a dataset in TFDS's own data
    folder. `split` and `text_field` are used by TFDS only. With `conversations` each row must end with an assistant
    message.
    """

    path: str
    conversations: bool = False
    split: str = "train"
    text_field: str = "prompt"  # the text feature used as the prompt, unless the rows have `messages`

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", in_home(self.path))


def read_rows(source: PromptSource) -> list[PromptRow]:
    """All rows of a source, in order.

    Raises:
        UserError: the source is missing, empty or malformed, or two rows share an id.
    """
    if source.path.startswith("tfds:") or Path(source.path).is_dir():
        rows = _tfds_rows(source)
    else:
        rows = _jsonl_rows(Path(source.path), source.conversations)
    seen: dict[str, str] = {}
    result = []
    for row in rows:
        if row.id in seen:
            raise UserError(f"{row.where}: id {row.id!r} was already used at {seen[row.id]}; give each row its own id")
        seen[row.id] = row.where
        result.append(row)
    if not result:
        raise UserError(f"{source.path}: no rows; expected one JSON object a line with 'messages' or 'prompt'")
    return result


def rows_sha256(rows: Iterable[PromptRow]) -> str:
    """Hex SHA-256 over ids and messages: the same for the same content, wherever it was read."""
    digest = hashlib.sha256()
    for row in rows:
        line = json.dumps([row.id, [[m["role"], m["content"]] for m in row.messages]], ensure_ascii=True)
        digest.update(line.encode() + b"\n")
    return digest.hexdigest()


def _jsonl_rows(path: Path, conversations: bool) -> Iterator[PromptRow]:
    try:
        file = open(path, "rb")
    except OSError as error:
        raise UserError(
            f"prompts file {path}: {error.strerror}; give a JSONL file, a TFDS folder or tfds:NAME"
        ) from error
    with file:
        for number, line in enumerate(file, start=1):
            where = f"{path}:{number}"
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise UserError(
                    f"{where}: not UTF-8 ({error.reason} at byte {error.start}); save the file as UTF-8"
                ) from error
            if not text.strip():
                continue
            try:
                value = json.loads(text)
            except (ValueError, RecursionError) as error:
                raise UserError(f"{where}: malformed JSON ({error}); expected one JSON object a line") from error
            yield _row(value, f"{path.name}:{number}", where, "prompt", conversations)


def _tfds_rows(source: PromptSource) -> Iterator[PromptRow]:
    try:
        import tensorflow_datasets as tfds
    except ImportError as error:
        raise MissingExtraError("tensorflow-datasets", "data") from error
    where = f"{source.path}[{source.split}]"
    try:
        if source.path.startswith("tfds:"):
            builder = tfds.builder(source.path.removeprefix("tfds:"))
        else:
            builder = tfds.builder_from_directory(source.path)
        name = builder.info.name
        records = builder.as_data_source(split=source.split)
        count = len(records)
    except Exception as error:  # TFDS raises many kinds; all mean that this source cannot be read here
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise UserError(
            f"{where}: cannot be read as a TFDS data source ({reason}); it must be prepared already, have that split,"
            ' and be stored in a format with random access (file_format="array_record")'
        ) from error
    for index in range(count):
        yield _row(
            _plain(records[index]), f"{name}/{source.split}/{index}", f"{where} row {index}", source.text_field,
            source.conversations,
        )  # fmt: skip


def _plain(value: Any) -> Any:
    """TFDS's bytes, arrays and NumPy scalars as the values JSON would give."""
    if isinstance(value, bytes):
        return value.decode("utf-8", errors="surrogateescape")  # refused by `_check_text` when it was not UTF-8
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def _row(value: Any, default_id: str, where: str, text_field: str, conversations: bool) -> PromptRow:
    if not isinstance(value, dict):
        raise UserError(f"{where}: expected a JSON object with 'messages' or {text_field!r}, got {_kind(value)}")
    row_id = value.get("id", default_id)
    if isinstance(row_id, bool) or not isinstance(row_id, str | int):
        raise UserError(f"{where}: 'id' must be a string or an integer, got {_kind(row_id)}")
    row_id = _check_text(str(row_id), "'id'", where)
    if value.get("messages") is not None:
        messages = _messages(value["messages"], where)
    elif value.get(text_field) is not None:
        if conversations:
            raise UserError(f"{where}: a finished conversation needs 'messages' that end with an assistant turn")
        text = value[text_field]
        if not isinstance(text, str):
            raise UserError(f"{where}: {text_field!r} must be a string, got {_kind(text)}")
        messages = ({"role": "user", "content": _check_text(text, repr(text_field), where)},)
    else:
        fields = ", ".join(sorted(map(str, value))) or "none"
        raise UserError(f"{where}: neither 'messages' nor {text_field!r} is present (fields: {fields})")
    _check_ending(messages, where, conversations)
    return PromptRow(row_id, messages, where)


def _messages(value: Any, where: str) -> tuple[dict[str, str], ...]:
    if isinstance(value, dict) and all(isinstance(column, list) for column in value.values()):
        keys, columns = list(value), list(value.values())
        if len({len(column) for column in columns}) > 1:
            raise UserError(f"{where}: 'messages' is a dict of lists of different lengths")
        # TFDS gives a sequence of dicts as a dict of lists.
        value = [dict(zip(keys, items, strict=True)) for items in zip(*columns, strict=True)]
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise UserError(f"{where}: 'messages' must be a list, got {_kind(value)}")
    if not value:
        raise UserError(f"{where}: 'messages' is empty")
    result = []
    for index, message in enumerate(value):
        at = f"messages[{index}]"
        if not isinstance(message, dict):
            raise UserError(f"{where}: {at} must be an object with 'role' and 'content', got {_kind(message)}")
        for field in ("role", "content"):
            if field not in message:
                raise UserError(f"{where}: {at} has no {field!r}")
            if not isinstance(message[field], str):
                raise UserError(f"{where}: {at}.{field} must be a string, got {_kind(message[field])}")
        if message["role"] not in ROLES:
            raise UserError(f"{where}: {at}.role is {message['role']!r}; expected one of {', '.join(ROLES)}")
        result.append({"role": message["role"], "content": _check_text(message["content"], f"{at}.content", where)})
    return tuple(result)


def _check_ending(messages: Sequence[dict[str, str]], where: str, conversations: bool) -> None:
    ends_with_answer = messages[-1]["role"] == "assistant"
    if conversations and not ends_with_answer:
        raise UserError(
            f"{where}: a finished conversation must end with an assistant turn, got {messages[-1]['role']!r}"
        )
    if not conversations and ends_with_answer:
        raise UserError(
            f"{where}: a prompt must not end with an assistant turn; to train on finished answers, say that the"
            " rows are conversations"
        )
    if not conversations and not messages[-1]["content"].strip():
        raise UserError(f"{where}: the prompt is empty")
    for index, message in enumerate(messages):
        if conversations and message["role"] == "assistant" and not message["content"].strip():
            raise UserError(f"{where}: messages[{index}] is an empty answer; remove the row")


def _check_text(text: str, name: str, where: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError(
            f"{where}: {name} holds characters that are not valid Unicode text (position {error.start})"
        ) from error
    return text


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number" if isinstance(value, int | float) else type(value).__name__)
