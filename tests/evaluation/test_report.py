"""Figures and the HTML report: complete, self-contained, escaped; training curves from JSONL."""

import base64
import dataclasses
import html.parser
import io
import re
import sys

import numpy as np
import pytest

from dstill_jax.errors import MissingExtraError, UserError
from dstill_jax.evaluation import EvaluationResult, Sample, Segment, plots, write_report

CURVES = {"train/loss": (np.arange(200), np.linspace(3, 1, 200)), "eval/tau": (np.arange(3), np.array([1, 1.2, 1.4]))}


class Page(html.parser.HTMLParser):
    """Collects tags, attribute values and text, and checks that tags are balanced."""

    void = ("meta", "img")

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.attributes, self.text = [], [], [], ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in self.void:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


@pytest.fixture
def matplotlib():
    import matplotlib

    return matplotlib


def test_report_holds_everything_and_links_to_nothing(result, tmp_path, matplotlib):
    path = write_report(
        tmp_path / "out" / "report.html",
        result,
        caveats=["A short run <on a laptop>."],
        samples=[Sample("A <sample>", "2 < 3?", [Segment("yes & ", 1), Segment("no", None)], 3)],
        training={"A1": CURVES},
        reference="A1 <b>",
    )
    page = Page(path.read_text())
    assert not page.open
    assert not {"script", "link", "iframe", "b", "target"} & set(page.tags)
    sources = [value for name, value in page.attributes if name in ("src", "href")]
    assert len(sources) == 6 and all(source.startswith("data:image/png;base64,") for source in sources)
    assert all(base64.b64decode(s.split(",")[1]).startswith(b"\x89PNG") for s in sources)
    assert not re.search(r"https?://|@import|url\(", path.read_text())
    for wanted in (
        "A short run <on a laptop>.",
        "A <sample>",
        "yes & no",
        "bonus token included",
        "Lossless:",
        "Outputs equal to autoregressive decoding, token for token: 12 of 12 answers.",
        "dstill eval --prompts 'a & b'",
        "f" * 64,
        "sampling 3",
        "Change of tau against A1 <b>",
    ):
        assert wanted in page.text, wanted


def test_report_names_arms_whose_outputs_differ(result, tmp_path, matplotlib):
    wrong = dataclasses.replace(result.arm("A4"), name="wrong", output_digests=("x",) * 4)
    path = write_report(tmp_path / "r.html", EvaluationResult(result.metadata, (*result.arms, wrong)))
    assert "12 of 16 answers (not all in wrong: 0 of 4)." in path.read_text()


def test_an_autoregressive_evaluation_gets_a_report_without_figures(result, tmp_path):
    path = write_report(tmp_path / "r.html", EvaluationResult(result.metadata, result.arms[:1]))
    assert "<img" not in path.read_text()


def test_every_figure_is_a_png_of_its_size_and_repeats(result, matplotlib):
    import PIL.Image as image

    figures = plots.result_figures(result)
    assert list(figures) == ["tau", "speedup", "slots", "drafted_length", "histogram"]
    for figure in figures.values():
        data = plots.png_bytes(figure, dpi=50)
        assert data == plots.png_bytes(figure, dpi=50)
        opened = image.open(io.BytesIO(data))
        assert opened.size[0] == round(figure.get_size_inches()[0] * 50)


def test_drawing_leaves_matplotlib_as_it_was(result, matplotlib):
    before = dict(matplotlib.rcParams)
    plots.png_bytes(plots.tau_figure(result), dpi=40)
    assert dict(matplotlib.rcParams) == before


def test_histogram_bars_are_shares_of_rounds(result, matplotlib):
    figure = plots.histogram_figure(EvaluationResult(result.metadata, result.arms[:3]))
    heights = [bar.get_height() for bar in figure.axes[1].patches]
    np.testing.assert_allclose(heights, [2 / 9, 1 / 9, 0, 6 / 9])


def test_speedups_are_grouped_by_weights(result):
    series = plots.speedup_series(result)
    assert {label: sorted(w for w, _ in points) for label, points in series.items()} == {"A4": [1, 3]}


def test_a_tree_is_no_point_on_the_line_of_chains(result):
    tree = dataclasses.replace(result.arm("A4"), name="tree", method="ddtree", drafted_length=3)
    series = plots.speedup_series(EvaluationResult(result.metadata, (*result.arms, tree)))
    assert {label: sorted(w for w, _ in points) for label, points in series.items()} == {"A4, dflash": [1, 3]}


def test_training_figure_draws_runs_over_each_other(matplotlib):
    figure = plots.training_figure({"A1": CURVES, "A4": CURVES})
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["eval/tau", "train/loss"]
    plots.png_bytes(figure, dpi=40)
    with pytest.raises(UserError, match="no metric to draw.*train/loss"):
        plots.training_figure({"A1": CURVES}, metrics=["no/such"])


def test_metrics_of_a_resumed_run_keep_the_later_rows(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        '{"step": 1, "loss": 3.0}\n{"step": 2, "loss": 9.0, "note": "x"}\n\n'
        '{"step": 2, "loss": 2.0}\n{"step": 3, "loss": 1.5, "tau": 2}\n{"step": 4, "lo'
    )
    curves = plots.read_metrics(path)
    assert set(curves) == {"loss", "tau"}
    np.testing.assert_array_equal(curves["loss"][0], [1, 2, 3])
    np.testing.assert_array_equal(curves["loss"][1], [3.0, 2.0, 1.5])


@pytest.mark.parametrize(
    "text, words",
    [
        ('{"step": 1}\n{"loss": 3}\n{"step": 2}\n', r"metrics\.jsonl:2 must be a JSON object with 'step'"),
        ('{"step": 1, \n{"step": 2}\n', r"metrics\.jsonl:1"),
        ('{"step": "one"}\n', "integer 'step', got 'one'"),
        ("[1]\n\n", r"metrics\.jsonl:1"),
    ],
)
def test_malformed_metrics_are_refused_with_their_line(tmp_path, text, words):
    path = tmp_path / "metrics.jsonl"
    path.write_text(text)
    with pytest.raises(UserError, match=words):
        plots.read_metrics(path)


def test_missing_metrics_are_refused_by_name(tmp_path):
    with pytest.raises(UserError, match=r"nowhere\.jsonl"):
        plots.read_metrics(tmp_path / "nowhere.jsonl")


def test_without_matplotlib_the_extra_is_named(result, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtraError, match=r"dstill-jax\[report\]"):
        write_report(tmp_path / "r.html", result)


def test_nothing_to_draw_is_said(result):
    with pytest.raises(UserError, match="every arm is autoregressive"):
        plots.tau_figure(EvaluationResult(result.metadata, result.arms[:1]))
