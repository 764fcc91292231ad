"""Tables of an evaluation: one plain `Table` of strings, rendered for the terminal (rich) or HTML.

Called by the command line, the demo and the report, so that all three print the same digits.
"""

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dstill_jax.errors import MissingExtraError
from dstill_jax.evaluation import results
from dstill_jax.evaluation.acceptance import SLOT_DEFINITION, TAU_DEFINITION
from dstill_jax.evaluation.results import AUTOREGRESSIVE, EvaluationResult, MethodResult
from dstill_jax.evaluation.stats import INTERVAL_DEFINITION, Bootstrap, Interval

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table as RichTable

EMPTY = "–"
FEW = 50  # a share of fewer cases than this is put in parentheses
_NARROW = 140  # terminal columns under which slots move to a table of their own
_MEAN = "tau, mean of responses [95 %]"
FEW_NOTE = f"A share in parentheses rests on fewer than {FEW} rounds."


@dataclass(frozen=True)
class Table:
    """Strings in rows under `columns`; `numeric` columns are aligned to the right; `footnotes` explain the cells."""

    title: str
    columns: tuple[str, ...]
    numeric: tuple[bool, ...]
    rows: tuple[tuple[str, ...], ...]
    footnotes: tuple[str, ...] = ()

    def select(self, keep: Sequence[str], title: str | None = None, rename: Mapping[str, str] | None = None) -> "Table":
        """The same rows with some columns only, in their old order, some under another name; no footnotes."""
        chosen = [i for i, name in enumerate(self.columns) if name in keep]
        return Table(
            self.title if title is None else title,
            tuple((rename or {}).get(self.columns[i], self.columns[i]) for i in chosen),
            tuple(self.numeric[i] for i in chosen),
            tuple(tuple(row[i] for i in chosen) for row in self.rows),
        )


def headline_table(result: EvaluationResult, bootstrap: Bootstrap = Bootstrap()) -> Table:
    """Arm, total steps, mean tau with interval, pooled tau, slots 1..W, tokens/s, speed-up with interval, notes.

    A column `drafted` appears when arms draft different lengths; `notes` when an arm has one.
    """
    taus = [arm.tau_interval(bootstrap) for arm in result]
    speedups = [result.speedup(arm, bootstrap) for arm in result]
    tau_decimals, speed_decimals = decimals_for(taus), decimals_for([s for s in speedups if s is not None])
    drafting = [arm for arm in result if arm.method != AUTOREGRESSIVE]
    slots = max(arm.drafted_length for arm in result)
    columns: dict[str, tuple[bool, list[str]]] = {
        "arm": (False, [arm.name for arm in result]),
        "total steps": (True, [_steps(arm) for arm in result]),
    }
    if len({arm.drafted_length for arm in drafting}) > 1:
        columns["drafted"] = (True, [str(arm.drafted_length) for arm in result])
    columns[_MEAN] = (True, [_tau(arm, tau, tau_decimals) for arm, tau in zip(result, taus, strict=True)])
    columns["tau pooled"] = (True, [f"{arm.tau_pooled:.{tau_decimals}f}" for arm in result])
    shares = [_shares(arm, slots) for arm in result]
    for slot in range(slots):
        columns[f"slot {slot + 1}"] = (True, [cells[slot] for cells in shares])
    columns["tokens/s"] = (True, [_speed(arm) for arm in result])
    columns["speed-up [95 %]"] = (
        True,
        [_speedup(result, arm, s, speed_decimals) for arm, s in zip(result, speedups, strict=True)],
    )
    if any(arm.notes for arm in result):
        columns["notes"] = (False, [arm.notes for arm in result])
    return Table(
        f"{result.metadata.target}: {result.metadata.prompt_count} prompts",
        tuple(columns),
        tuple(numeric for numeric, _ in columns.values()),
        tuple(zip(*(cells for _, cells in columns.values()), strict=True)),
        footnotes(result, few=any("(" in cell for cells in shares for cell in cells)),
    )


def change_table(result: EvaluationResult, reference: str, bootstrap: Bootstrap = Bootstrap()) -> Table:
    """Change of tau of every drafting arm against one of them in per cent, paired by prompt."""
    base = result.arm(reference)
    arms = [a for a in result if a.method != AUTOREGRESSIVE and a is not base and a.draw == base.draw]
    rows = []
    for arm in arms:
        mean, pooled = results.tau_change(arm, base, bootstrap), results.tau_pooled_change(arm, base, bootstrap)
        verdict = "above" if mean.low > 0 else "below" if mean.high < 0 else "no difference shown"
        rows.append((arm.name, mean.format(1, sign=True), pooled.format(1, sign=True), verdict))
    return Table(
        f"Change of tau against {base.name}, in per cent",
        ("arm", "tau, % [95 %]", "tau pooled, % [95 %]", "tau on these prompts"),
        (False, True, True, False),
        tuple(rows),
        (INTERVAL_DEFINITION,),
    )


def footnotes(result: EvaluationResult, few: bool = False) -> tuple[str, ...]:
    """What belongs under the headline table: whether the outputs are equal, definitions, conditions."""
    notes = [lossless(result), TAU_DEFINITION, SLOT_DEFINITION, INTERVAL_DEFINITION, conditions(result)]
    return tuple(notes + [FEW_NOTE]) if few else tuple(notes)


def conditions(result: EvaluationResult) -> str:
    """What was decoded, how, and on which machine."""
    meta = result.metadata
    return (
        f"{meta.prompt_count} prompts{f' ({meta.prompts})' if meta.prompts else ''}, hash {meta.prompts_hash[:12]}; "
        f"thinking mode {meta.thinking}; at most {meta.max_new_tokens} new tokens; "
        f"{_at_a_time(result)}; {meta.dtype} on {meta.device}."
    )


def _at_a_time(result: EvaluationResult) -> str:
    meta, timed = result.metadata, max(len(arm.seconds or ()) for arm in result)
    together = "one at a time" if meta.batch_size == 1 else f"{meta.batch_size} at a time"
    if not timed:
        return f"{together}, not timed"
    if timed == meta.prompt_count:
        return "all timed, one at a time"
    return f"speeds are of the first {timed}, one at a time; the others {together}"


def lossless(result: EvaluationResult) -> str:
    """How many answers equal those of autoregressive decoding, and in which arms not all do."""
    found = [(arm, result.identical_outputs(arm)) for arm in result]
    checked = [(arm, same) for arm, same in found if same is not None]
    if not checked:
        return "Whether the outputs equal those of autoregressive decoding was not recorded in this evaluation."
    differing = [f"{arm.name}: {same} of {arm.prompts}" for arm, same in checked if same != arm.prompts]
    total = sum(arm.prompts for arm, _ in checked)
    equal = sum(same for _, same in checked)
    text = f"Outputs equal to autoregressive decoding, token for token: {equal} of {total} answers"
    return f"{text} (not all in {'; '.join(differing)})." if differing else f"{text}."


def decimals_for(intervals: Sequence[Interval]) -> int:
    """Decimals (1 to 3) that show two digits of the typical half-width; 2 where there is nothing to go by."""
    widths = sorted(interval.half_width for interval in intervals if interval.half_width > 0)
    if not widths:
        return 2
    return min(3, max(1, 1 - math.floor(math.log10(widths[len(widths) // 2]))))


def html_table(table: Table) -> str:
    """A `<table>` element with escaped cells (footnotes are left to the page)."""

    def line(tag: str, cells: Sequence[str]) -> str:
        marked = (
            f'<{tag} class="number">{html.escape(cell).replace(" %]", "&nbsp;%]")}</{tag}>'
            if numeric
            else f"<{tag}>{html.escape(cell)}</{tag}>"
            for cell, numeric in zip(cells, table.numeric, strict=True)
        )
        return "<tr>" + "".join(marked) + "</tr>"

    body = "\n".join(line("td", row) for row in table.rows)
    return f"<table>\n<thead>{line('th', table.columns)}</thead>\n<tbody>\n{body}\n</tbody>\n</table>"


def rich_table(table: Table) -> "RichTable":
    """A rich table (footnotes apart)."""
    rich = _rich()
    drawn = rich["Table"](
        title=rich["Text"](table.title, style="bold"), title_justify="left", box=rich["SIMPLE_HEAD"], pad_edge=False
    )
    for name, numeric in zip(table.columns, table.numeric, strict=True):
        drawn.add_column(rich["Text"](name), justify="right" if numeric else "left", no_wrap=numeric, overflow="fold")
    for row in table.rows:
        drawn.add_row(*(rich["Text"](cell) for cell in row))
    return drawn


def print_headline(
    result: EvaluationResult, console: "Console | None" = None, bootstrap: Bootstrap = Bootstrap()
) -> None:
    """Print the headline table; a narrow terminal gets the slots as a second table and notes as lines."""
    rich = _rich()
    console = rich["Console"]() if console is None else console
    table = headline_table(result, bootstrap)
    slots = {name: name.removeprefix("slot ") for name in table.columns if name.startswith("slot ")}
    short = slots | {"total steps": "steps", "tau pooled": "pooled", _MEAN: _MEAN.replace("of ", "of\n")}
    if console.width >= _NARROW:
        console.print(rich_table(table.select([name for name in table.columns if name != "notes"], rename=short)))
    else:
        first = [name for name in table.columns if name not in slots and name not in ("notes", "drafted", "tau pooled")]
        console.print(rich_table(table.select(first, rename=short)))
        if slots:
            console.print(rich_table(_slots_in_one_column(table)))
    for arm in result:
        if arm.notes:
            console.print(rich["Text"](f"{arm.name}: {arm.notes}"))
    for note in table.footnotes:
        console.print(rich["Text"](note, style="dim"))


def _slots_in_one_column(table: Table) -> Table:
    """For narrow terminals: arm, drafted length, pooled tau, and all slots as one cell without leading zeros."""
    kept = table.select(["arm", "drafted", "tau pooled"], rename={"drafted": "W", "tau pooled": "pooled"})
    slots = table.select([name for name in table.columns if name.startswith("slot ")])
    width = max(len(cell) - ("0." in cell) for row in slots.rows for cell in row)
    joined = (" ".join(cell.replace("0.", ".").rjust(width) for cell in row) for row in slots.rows)
    return Table(
        "Pooled tau and acceptance of each slot",
        (*kept.columns, f"slots 1 to {len(slots.columns)}"),
        (*kept.numeric, len(slots.columns) <= 7),  # a numeric column is never wrapped
        tuple((*row, cell) for row, cell in zip(kept.rows, joined, strict=True)),
    )


def _steps(arm: MethodResult) -> str:
    return EMPTY if arm.training_steps is None else str(arm.training_steps)


def _tau(arm: MethodResult, tau: Interval, decimals: int) -> str:
    return f"{tau.value:.{decimals}f}" if arm.drafted_length == 0 else tau.format(decimals)


def _shares(arm: MethodResult, slots: int) -> list[str]:
    counts = arm.counts
    cells = []
    for share, reached in zip(counts.conditional(), counts.reached, strict=True):
        text = EMPTY if math.isnan(share) else f"{share:.{3 if counts.rounds >= 1000 else 2}f}"
        cells.append(f"({text})" if 0 < reached < FEW else text)
    return cells + [EMPTY] * (slots - len(cells))


def _speed(arm: MethodResult) -> str:
    speed = arm.tokens_per_second
    if speed is None:
        return EMPTY
    return f"{speed:.0f}" if speed >= 100 else f"{speed:.1f}"


def _speedup(result: EvaluationResult, arm: MethodResult, interval: Interval | None, decimals: int) -> str:
    if arm is result.baseline(arm) and arm.tokens_per_second is not None:
        return "1 (baseline)"
    return EMPTY if interval is None else interval.format(min(2, decimals))


def _rich() -> dict[str, Any]:
    try:
        from rich.box import SIMPLE_HEAD
        from rich.console import Console
        from rich.table import Table as RichTable
        from rich.text import Text
    except ImportError as error:
        raise MissingExtraError("rich", "report") from error
    return {"Console": Console, "Table": RichTable, "Text": Text, "SIMPLE_HEAD": SIMPLE_HEAD}
