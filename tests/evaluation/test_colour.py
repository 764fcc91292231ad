"""Coloured text: exact text, right slots, characters that span tokens, safe output."""

import html
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dstill_jax.errors import UserError
from dstill_jax.evaluation import IncrementalDecoder, Segment, colour_segments
from dstill_jax.evaluation.colour import legend_html, slot_colours, to_ansi, to_html, token_slots


def decode_bytes(ids):
    """A byte-level tokenizer in which every byte is a token."""
    return bytes(ids).decode("utf-8", errors="replace")


def decode_words(ids):
    """A tokenizer that, like SentencePiece, drops the space before the first word, and hides token 0."""
    words = {0: "", 1: " one", 2: " two", 3: "é", 4: "\n"}
    return "".join(words[i] for i in ids).removeprefix(" ")


def test_slots_count_drafts_from_one_and_leave_the_bonus_uncoloured():
    assert token_slots(6, [3, 1, 2]) == [1, 2, None, None, 1, None]
    assert token_slots(4, [3]) == [None, 1, 2, None]  # the first token came from the prefill
    assert token_slots(1, []) == [None]
    with pytest.raises(UserError, match="must sum to the 9 tokens"):
        token_slots(9, [3])


def test_a_character_of_three_tokens_belongs_to_the_last_of_them():
    segments = colour_segments(list("a日b".encode()), [4, 1], decode_bytes)
    assert segments == [Segment("a", 1), Segment("日", None), Segment("b", None)]


@given(st.text(max_size=30))
def test_pieces_join_to_the_text_and_no_piece_is_half_a_character(text):
    ids = list(text.encode("utf-8", errors="ignore"))
    decoder = IncrementalDecoder(decode_bytes)
    pieces = [decoder.push(token) for token in ids]
    assert "".join(pieces) + decoder.flush() == decode_bytes(ids)
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


@given(st.lists(st.integers(0, 255), max_size=40))
def test_invalid_bytes_lose_and_double_nothing(ids):
    decoder = IncrementalDecoder(decode_bytes)
    assert "".join(decoder.push(token) for token in ids) + decoder.flush() == decode_bytes(ids)


@given(st.lists(st.integers(0, 4), max_size=20))
def test_leading_space_rules_and_hidden_tokens_do_not_matter(ids):
    decoder = IncrementalDecoder(decode_words)
    assert "".join(decoder.push(token) for token in ids) + decoder.flush() == decode_words(ids)


def test_streaming_decodes_a_window_and_not_the_whole_text():
    seen = []

    def decode(ids):
        seen.append(len(ids))
        return decode_bytes(ids)

    decoder = IncrementalDecoder(decode)
    for token in b"x" * 200:
        decoder.push(token)
    assert max(seen) <= 4


def test_agrees_with_a_real_byte_level_tokenizer():
    import tokenizers

    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(["the thin thing there, then the other"] * 20, trainer)
    text = "the naïve 日本語 thing 🎉\n  then"
    ids = tokenizer.encode(text).ids
    segments = colour_segments(ids, [1] * len(ids), tokenizer.decode)
    assert "".join(segment.text for segment in segments) == text


def test_html_is_escaped_and_keeps_the_text():
    segments = [Segment("<script>alert('x')</script> & \"q\"\n", 2), Segment("\x1b[31m\x00é", None)]
    text = to_html(segments, 3)
    assert "<script>" not in text and 'title="slot 2"' in text and "\x1b" not in text and "\x00" not in text
    bare = html.unescape(re.sub(r"<[^>]*>", "", text))
    assert bare == "<script>alert('x')</script> & \"q\"\n␛[31m␀é"


def test_terminal_text_has_no_escape_but_our_own():
    text = to_ansi([Segment("a\x1b]0;title\x07\nb", 1), Segment("c", None)], 2)
    bare = re.sub(r"\x1b\[[0-9;]*m", "", text)
    assert bare == "a␛]0;title␇\nbc"
    assert "\x1b[0m\n" in text  # no background across the line end
    assert text.endswith("c")


@pytest.mark.parametrize("slots", [1, 2, 7, 15])
def test_slot_colours_are_distinct_and_darken(slots):
    colours = slot_colours(slots)
    light = [0.2126 * r + 0.7152 * g + 0.0722 * b for r, g, b in colours]
    assert len(set(colours)) == slots and light == sorted(light, reverse=True)
    assert legend_html(slots).count("<span") == slots


def test_a_slot_beyond_the_announced_ones_is_refused():
    with pytest.raises(UserError, match="slot 4, but slots=3"):
        to_html([Segment("x", 4)], 3)
