"""Coloured text: which tokens of a passage the drafter got right, and in which slot.

Called by the demo, `generate` and the report. Accepted draft tokens carry a colour that deepens with their slot; tokens
that the target chose itself (bonus tokens, and the first one) carry none.
"""

import html
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from dstill_jax.errors import UserError

Decode = Callable[[list[int]], str]
"""Token ids to text, e.g. `lambda ids: tokenizer.decode(ids, clean_up_tokenization_spaces=False)`."""

_REPLACEMENT = "\ufffd"
# Pale yellow to dark blue, monotone in lightness: slots stay in order without colour vision and in grey.
_RAMP = ((255, 237, 160), (186, 225, 150), (112, 198, 178), (62, 163, 200), (44, 115, 190), (40, 66, 150))


@dataclass(frozen=True)
class Segment:
    """A piece of text and the draft slot (1-based) that proposed it; slot None = the target's own token."""

    text: str
    slot: int | None


class IncrementalDecoder:
    """Text of a growing token list, given out only once it can no longer change.

    A byte-level tokenizer may split one character over several tokens: its text appears with the token that completes
    it. Each call decodes a short window, not the whole passage.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._tokens: list[int] = []
        self._start = 0  # the window begins here, at a character boundary
        self._boundary = 0  # everything before this token has been given out
        self._sent = 0  # characters of the window given out

    def push(self, token: int) -> str:
        """Add a token; return the new complete text, possibly empty."""
        self._tokens.append(int(token))
        text = self._decode(self._tokens[self._start :])
        complete = text.rstrip(_REPLACEMENT)
        new = complete[self._sent :]
        self._sent = max(self._sent, len(complete))
        if len(complete) == len(text):
            self._advance()
        return new

    def flush(self) -> str:
        """The rest, with U+FFFD where bytes never became a character; call once, at the end."""
        rest = self._decode(self._tokens[self._start :])[self._sent :]
        self._sent += len(rest)
        return rest

    def _advance(self) -> None:
        # Keep the last complete piece in the window: a tokenizer may treat the first token of a text differently.
        if self._decode(self._tokens[self._boundary :]):
            self._start = self._boundary
            self._boundary = len(self._tokens)
            self._sent = len(self._decode(self._tokens[self._start :]))


def token_slots(token_count: int, acceptance_lengths: Sequence[int]) -> list[int | None]:
    """Slot of each new token of one response, None for the target's own.

    acceptance_lengths: tokens committed in each round, bonus included; one token more may precede them (the prefill's).
    The last token of each round counts as the target's own. Where a stop token or the length cap cut the last round
    behind an accepted draft token it was drafted too, but the counts do not tell these cases apart.
    """
    extra = token_count - sum(acceptance_lengths)
    if extra not in (0, 1):
        raise UserError(
            f"acceptance_lengths must sum to the {token_count} tokens of the response or to one less (the token of the "
            f"prefill), got {sum(acceptance_lengths)}"
        )
    slots: list[int | None] = [None] * extra
    for committed in acceptance_lengths:
        slots += [*range(1, committed), None]
    return slots


def colour_segments(tokens: Sequence[int], acceptance_lengths: Sequence[int], decode: Decode) -> list[Segment]:
    """The text of one response cut into segments of one slot each; joined they give the whole text.

    A character made of several tokens belongs to the one that completes it.
    """
    decoder = IncrementalDecoder(decode)
    slots = token_slots(len(tokens), acceptance_lengths)
    pieces = [Segment(decoder.push(token), slot) for token, slot in zip(tokens, slots, strict=True)]
    return [piece for piece in [*pieces, Segment(decoder.flush(), None)] if piece.text]


def slot_colours(slots: int) -> list[tuple[int, int, int]]:
    """RGB of slots 1..`slots`: light to dark."""
    colours = []
    for index in range(slots):
        place = index / max(1, slots - 1) * (len(_RAMP) - 1) if slots > 1 else 0.0
        low = min(int(place), len(_RAMP) - 2)
        part = place - low
        red, green, blue = (round(a + (b - a) * part) for a, b in zip(_RAMP[low], _RAMP[low + 1], strict=True))
        colours.append((red, green, blue))
    return colours


def to_html(segments: Iterable[Segment], slots: int) -> str:
    """A `<pre>` element with inline styles only; every character of the text is escaped."""
    colours = slot_colours(slots)
    parts = []
    for segment in segments:
        text = html.escape(_printable(segment.text))
        if segment.slot is None:
            parts.append(text)
        else:
            parts.append(f'<span title="slot {segment.slot}" style="{_css(colours, segment.slot)}">{text}</span>')
    return '<pre class="sample">' + "".join(parts) + "</pre>"


def legend_html(slots: int) -> str:
    """One line that explains the colours."""
    colours = slot_colours(slots)
    marks = [f'<span style="{_css(colours, slot)}">&nbsp;{slot}&nbsp;</span>' for slot in range(1, slots + 1)]
    return (
        f'<p class="legend">Draft token accepted in slot {" ".join(marks)}; without colour: chosen by the target.</p>'
    )


def to_ansi(segments: Iterable[Segment], slots: int) -> str:
    """Text with 256-colour escape codes; escape characters inside the text are made visible, never sent."""
    colours = slot_colours(slots)
    parts = []
    for segment in segments:
        text = _printable(segment.text)
        if segment.slot is None:
            parts.append(text)
            continue
        rgb = _colour(colours, segment.slot)
        code = f"\x1b[48;5;{_cube(rgb)};38;5;{16 if _dark_text(rgb) else 231}m"
        # A background left on at a line end would fill the rest of the terminal line.
        parts.append("\n".join(f"{code}{line}\x1b[0m" if line else "" for line in text.split("\n")))
    return "".join(parts)


def legend_ansi(slots: int) -> str:
    """One line that explains the colours of `to_ansi`."""
    marks = " ".join(to_ansi([Segment(f" {slot} ", slot)], slots) for slot in range(1, slots + 1))
    return f"Draft token accepted in slot {marks}; without colour: chosen by the target."


def _colour(colours: Sequence[tuple[int, int, int]], slot: int) -> tuple[int, int, int]:
    if not 1 <= slot <= len(colours):
        raise UserError(f"a segment has slot {slot}, but slots={len(colours)} were announced")
    return colours[slot - 1]


def _css(colours: Sequence[tuple[int, int, int]], slot: int) -> str:
    rgb = _colour(colours, slot)
    text = "#111" if _dark_text(rgb) else "#fff"
    return f"background:#{rgb[0]:02x}{rgb[1]:02x}{rgb[2]:02x};color:{text}"


def _dark_text(rgb: tuple[int, int, int]) -> bool:
    """Whether black text contrasts more than white on this background (WCAG relative luminance)."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (x / 255 for x in rgb)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2] > 0.179


def _cube(rgb: tuple[int, int, int]) -> int:
    """Nearest colour of the 6 x 6 x 6 cube of 256-colour terminals."""
    steps = (0, 95, 135, 175, 215, 255)
    red, green, blue = (min(range(6), key=lambda i: abs(steps[i] - value)) for value in rgb)
    return 16 + 36 * red + 6 * green + blue


def _printable(text: str) -> str:
    """Control characters except newline and tab as their visible pictures; other unsafe ones as U+FFFD."""
    kept = []
    for character in text:
        code = ord(character)
        if character in "\n\t":
            kept.append(character)
        elif code < 0x20:
            kept.append(chr(0x2400 + code))
        elif 0x7F <= code < 0xA0 or 0xD800 <= code < 0xE000:
            kept.append("\u2421" if code == 0x7F else _REPLACEMENT)
        else:
            kept.append(character)
    return "".join(kept)
