"""From messages to token ids and loss masks, under the target's own chat template.

Called by `generate`. The mask is found by rendering prefixes, so a template needs no generation markers: the prompt
is what the template renders before an answer (generation prompt included), the answer is what it adds. Both are
tokenised apart, as at generation time, where the answer's first token can never merge with the prompt's last.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dstill_jax.data.prompts import PromptRow
from dstill_jax.errors import UserError


@dataclass(frozen=True)
class TemplateConfig:
    """How messages become text. Every field is part of a dataset's key."""

    style: str = "chat"  # "chat": the tokenizer's chat template; "raw": the prompt's text itself, for base models
    thinking: bool = False  # the template's `enable_thinking`; templates without the switch ignore it
    date_string: str = "26 Jul 2024"  # for templates that print today's date: fixed, so that a dataset is reproducible
    supervise: str = "all"  # in finished conversations: "all" assistant turns or the "last" one
    chat_template: str | None = None  # replaces the tokenizer's own

    def __post_init__(self) -> None:
        if self.style not in ("chat", "raw"):
            raise UserError(f"style={self.style!r} must be 'chat' or 'raw'")
        if self.supervise not in ("all", "last"):
            raise UserError(f"supervise={self.supervise!r} must be 'all' or 'last'")
        if self.style == "raw" and (self.thinking or self.chat_template is not None):
            given = "thinking" if self.thinking else "chat_template"
            raise UserError(f"{given} is read by a chat template, and style='raw' (--raw) renders none; leave one out")


@dataclass(frozen=True)
class Rendered:
    """A finished conversation as tokens [n] int32 and loss_mask [n] bool (True = counted)."""

    tokens: np.ndarray
    loss_mask: np.ndarray
    unended_answers: int  # supervised answers without an end-of-turn token


class ChatTemplate:
    """A tokenizer and a TemplateConfig, ready to render rows."""

    def __init__(self, tokenizer: Any, config: TemplateConfig, stop_token_ids: Sequence[int] = ()) -> None:
        """`stop_token_ids` end an answer; finished conversations are supervised up to the last one of each answer.

        Raises:
            UserError: chat style is asked for, but there is no chat template.
        """
        self.tokenizer = tokenizer
        self.config = config
        self.stop_token_ids = frozenset(stop_token_ids)
        self._text = _template_text(tokenizer, config)

    @property
    def thinking(self) -> str:
        """The mode that prompts are rendered with: "on", "off" or, where there is no such switch, "not applicable"."""
        if self._text is None or "enable_thinking" not in self._text:
            return "not applicable"
        return "on" if self.config.thinking else "off"

    @property
    def sha256(self) -> str:
        """Identifies the template's text; "raw" when there is none."""
        return hashlib.sha256(self._text.encode()).hexdigest() if self._text is not None else "raw"

    def prompt_ids(self, row: PromptRow) -> list[int]:
        """The tokens the target sees before it answers."""
        if self.config.style == "raw":
            if len(row.messages) != 1:
                raise UserError(f"{row.where}: style 'raw' takes a single 'prompt', got {len(row.messages)} messages")
            return list(self.tokenizer.encode(row.messages[0]["content"], add_special_tokens=True))
        return self._encode(self._render(row, len(row.messages), generation=True))

    def conversation(self, row: PromptRow) -> Rendered:
        """Tokens and loss mask of a finished conversation; nothing is kept after the end of the last answer.

        Raises:
            UserError: the template does not render the conversation as prompt + answer, so no mask would be right.
        """
        if self.config.style == "raw":
            raise UserError("finished conversations need a chat template; style 'raw' has no roles")
        whole = self._render(row, len(row.messages), generation=False)
        answers = [i for i, message in enumerate(row.messages) if message["role"] == "assistant"]
        if self.config.supervise == "last":
            answers = answers[-1:]
        tokens: list[int] = []
        mask: list[bool] = []
        unended = cursor = 0
        for i in answers:
            begin, end = self._answer_span(row, i, whole, cursor)
            before, answer = self._encode(whole[cursor:begin]), self._encode(whole[begin:end])
            stops = [n for n, token in enumerate(answer) if token in self.stop_token_ids]
            length = stops[-1] + 1 if stops else len(answer)
            unended += not stops
            if i == answers[-1]:
                answer = answer[:length]
            tokens += before + answer
            mask += [False] * len(before) + [True] * length + [False] * (len(answer) - length)
            cursor = end
        return Rendered(np.asarray(tokens, np.int32), np.asarray(mask, bool), unended)

    def mark_supervised(self, tokens: np.ndarray, loss_mask: np.ndarray) -> str:
        """Decoded text of a row with each supervised stretch between ⟦ and ⟧."""
        edges = np.flatnonzero(np.diff(loss_mask.astype(np.int8))) + 1
        pieces = []
        for part, mask in zip(np.split(tokens, edges), np.split(loss_mask, edges), strict=True):
            text = self.tokenizer.decode(part.tolist())
            pieces.append(f"⟦{text}⟧" if mask.size and mask[0] else text)
        return "".join(pieces)

    def _answer_span(self, row: PromptRow, i: int, whole: str, cursor: int) -> tuple[int, int]:
        prompt = self._render(row, i, generation=True)
        until = self._render(row, i + 1, generation=False)
        if not until.startswith(prompt):
            problem = "the rendered answer does not begin with the rendered prompt"
            advice = f"try thinking={not self.config.thinking}, or another chat_template"
        elif not whole.startswith(until) or len(prompt) < cursor:
            problem = "the template renders this turn differently once others follow it"
            advice = "count the last answer only: supervise='last' (--supervise last)"
        else:
            return len(prompt), len(until)
        raise UserError(f"{row.where}: messages[{i}] cannot be masked: {problem}; {advice}")

    def _render(self, row: PromptRow, count: int, generation: bool) -> str:
        try:
            return self.tokenizer.apply_chat_template(
                list(row.messages[:count]), tokenize=False, add_generation_prompt=generation, chat_template=self._text,
                enable_thinking=self.config.thinking, date_string=self.config.date_string,
            )  # fmt: skip
        except Exception as error:  # templates raise their own errors, e.g. "roles must alternate"
            raise UserError(f"{row.where}: the chat template refuses these messages ({error})") from error

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False)) if text else []


def tokenizer_sha256(tokenizer: Any) -> str:
    """Identifies what a fast tokenizer does to text: a hash of its complete serialised state."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    state = backend.to_str() if backend is not None else repr(tokenizer)
    return hashlib.sha256(state.encode()).hexdigest()


def _template_text(tokenizer: Any, config: TemplateConfig) -> str | None:
    if config.style == "raw":
        return None
    text = config.chat_template or getattr(tokenizer, "chat_template", None)
    if isinstance(text, dict):
        text = text.get("default")
    if not text:
        raise UserError(
            "the target's tokenizer has no chat template; give one (--chat-template FILE), or continue prompts as plain"
            " text (style='raw'; --raw, of prepare --style raw)"
        )
    return text
