"""Tables: right cells, sensible digits, readable on narrow terminals."""

import dataclasses
import io

import pytest
from rich.console import Console

from dstill_jax.errors import UserError
from dstill_jax.evaluation import EvaluationResult, Interval, change_table, headline_table, print_headline
from dstill_jax.evaluation.tables import decimals_for, html_table


def column(table, name):
    index = table.columns.index(name)
    return [row[index] for row in table.rows]


def test_headline_has_the_columns_and_values_of_every_arm(result):
    table = headline_table(result)
    assert table.columns == (
        "arm",
        "total steps",
        "drafted",
        "tau, mean of responses [95 %]",
        "tau pooled",
        "slot 1",
        "slot 2",
        "slot 3",
        "tokens/s",
        "speed-up [95 %]",
        "notes",
    )
    # Responses of A4 commit 3, 4, 4 and 10/4 a round, all of them together 28 tokens in 9 rounds.
    assert column(table, "tau, mean of responses [95 %]")[2].startswith("3.38 [")
    assert column(table, "tau pooled")[2] == "3.11"
    assert column(table, "total steps") == ["–", "100", "100", "–", "–"]
    assert column(table, "tokens/s")[:2] == ["1.0", "2.0"] and column(table, "tokens/s")[-1] == "–"
    assert column(table, "speed-up [95 %]")[0] == "1 (baseline)"
    assert column(table, "speed-up [95 %]")[-1] == "–"
    assert column(table, "slot 1")[0] == "–"
    assert column(table, "slot 1")[2] == "(0.78)"  # 7 of 9 rounds: few, so in parentheses
    assert column(table, "slot 2")[3] == "–"  # drafted one token only
    assert any("bonus token included" in note for note in table.footnotes)


def test_drafted_and_notes_appear_only_when_they_say_something(result):
    plain = type(result)(result.metadata, result.arms[:2])
    assert not {"drafted", "notes"} & set(headline_table(plain).columns)


def test_the_notes_say_what_was_timed_and_which_outputs_differ(result):
    plain, a1, a4 = result.arms[:3]
    timed = [dataclasses.replace(arm, seconds=arm.seconds[:2]) for arm in (plain, a1)]
    other = dataclasses.replace(a4, output_digests=("another", *a4.output_digests[1:]), seconds=None)
    meta = dataclasses.replace(result.metadata, batch_size=3)

    def notes(*arms):
        return " ".join(headline_table(EvaluationResult(meta, arms)).footnotes)

    assert "token for token: 7 of 8 answers (not all in A4: 3 of 4)." in notes(*timed, other)
    assert "speeds are of the first 2, one at a time; the others 3 at a time" in notes(*timed, other)
    assert "all timed, one at a time" in notes(plain, a1) and "token for token: 4 of 4 answers. " in notes(plain, a1)
    assert "3 at a time, not timed" in notes(other) and "was not recorded" in notes(other)


@pytest.mark.parametrize("half, decimals", [(0.058, 3), (0.12, 2), (0.58, 2), (1.4, 1), (0.0004, 3), (40.0, 1)])
def test_digits_follow_the_width_of_the_interval(half, decimals):
    assert decimals_for([Interval(2, 2 - half, 2 + half, 9)]) == decimals


def test_digits_without_any_width():
    assert decimals_for([]) == decimals_for([Interval(1, 1, 1, 9)]) == 2


def test_html_cells_are_escaped(result):
    text = html_table(headline_table(result))
    assert "A1 &lt;b&gt;" in text and "<b>" not in text


@pytest.mark.parametrize("width", [60, 80, 100, 139, 140, 200])
def test_terminal_shows_every_figure_within_its_width(result, width):
    stream = io.StringIO()
    print_headline(result, Console(file=stream, width=width, force_terminal=False))
    text = stream.getvalue()
    assert max(len(line) for line in text.splitlines()) <= width
    if width >= 80:
        for wanted in ("autoregressive", "A1 <b>", "1 (baseline)", "3.11", "A4: a | note", "(.78)"):
            assert wanted in text or wanted.replace("(.", "(0.") in text
        for head in ("tau, mean of", "responses [95 %]", "pooled"):  # which average stands in which column
            assert head in text


def test_changes_are_paired_and_judged(result):
    table = change_table(result, "A1 <b>")
    assert [row[0] for row in table.rows] == ["A4", "A4, W = 1", "untimed"]
    assert [row[3] for row in table.rows] == ["above", "no difference shown", "below"]
    assert table.rows[1][1] == "+0.0 [+0.0, +0.0]"
    with pytest.raises(UserError, match="no arm 'A2'"):
        change_table(result, "A2")
