"""Figures of an evaluation and of a training run, drawn with matplotlib (extra `report`) without touching its state.

Called by the report and the command line. Each function returns a matplotlib `Figure`; `png_bytes` and `save_png` write
it. Colours are those of Okabe and Ito, told apart by people with colour-vision deficiencies; every line also has a
marker of its own.
"""

import io
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dstill_jax.errors import MissingExtraError, UserError
from dstill_jax.evaluation.results import AUTOREGRESSIVE, EvaluationResult, MethodResult
from dstill_jax.evaluation.stats import Bootstrap, Interval

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#7F7F7F")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
_INK, _GRID = "#333333", "#DDDDDD"
_FEW = 20  # shares of fewer cases are not drawn

Curves = Mapping[str, tuple[np.ndarray, np.ndarray]]
"""Metric name -> (steps, values), both [n]."""


def tau_figure(result: EvaluationResult, bootstrap: Bootstrap = Bootstrap()) -> "Figure":
    """Dot plot: tau of each drafting arm with its interval, first arm on top."""
    arms = _drafting(result)
    intervals = [arm.tau_interval(bootstrap) for arm in arms]
    figure, axes = _figure(7.2, 1.35 + 0.42 * len(arms))
    _dots(axes, [arm.name for arm in arms], intervals, decimals=2)
    axes.set_xlabel(f"τ, tokens committed per verification (95 % interval over {result.metadata.prompt_count} prompts)")
    _title(axes, "Acceptance length")
    return figure


def speedup_figure(result: EvaluationResult, bootstrap: Bootstrap = Bootstrap()) -> "Figure":
    """Dot plot: speed-up of each timed arm over autoregressive decoding; a line marks 1."""
    pairs = [(arm, result.speedup(arm, bootstrap)) for arm in _drafting(result)]
    timed = [(arm, interval) for arm, interval in pairs if interval is not None]
    if not timed:
        raise UserError("no arm has a speed-up: time an autoregressive arm and another one on the same prompts")
    figure, axes = _figure(7.2, 1.35 + 0.42 * len(timed))
    axes.axvline(1, color=_INK, linewidth=1, linestyle=(0, (4, 3)))
    _dots(axes, [arm.name for arm, _ in timed], [interval for _, interval in timed], decimals=2)
    axes.set_xlabel(f"times faster than autoregressive decoding, {result.metadata.device}")
    _title(axes, "Measured speed-up")
    return figure


def slots_figure(result: EvaluationResult) -> "Figure":
    """Lines: conditional acceptance of each slot; points of fewer than 20 rounds are left out.

    Of arms that differ in drafted length only, the longest is drawn; the histogram does the same.
    """
    arms = _longest(_drafting(result))
    figure, axes = _figure(7.2, 4.0)
    slots = 1
    for index, arm in enumerate(arms):
        counts = arm.counts
        shares = np.where(np.asarray(counts.reached) >= _FEW, counts.conditional(), np.nan)
        numbers = np.arange(1, len(shares) + 1)
        slots = max(slots, len(shares))
        axes.plot(numbers, shares, label=arm.name, **_style(index), linewidth=1.6, markersize=5)
    axes.set_xticks(range(1, slots + 1))
    axes.set_xlim(0.7, slots + 0.3)
    axes.set_ylim(0, 1)
    axes.set_xlabel("draft slot")
    axes.set_ylabel("accepted, given all earlier slots were")
    _title(axes, "Acceptance of each slot")
    _legend(figure, axes, len(arms))
    return figure


def histogram_figure(result: EvaluationResult) -> "Figure":
    """Small multiples: share of rounds that committed 1, 2, ... tokens, one panel an arm on common axes."""
    arms = _longest(_drafting(result))
    columns = min(3, len(arms))
    rows = math.ceil(len(arms) / columns)
    figure = _blank(7.2 if columns > 1 else 4.5, 0.5 + 1.75 * rows)
    longest = max(arm.drafted_length for arm in arms) + 1
    panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    for index, axes in enumerate(panels.flat):
        if index >= len(arms):
            axes.set_visible(False)
            continue
        _decorate(axes)
        counts = arms[index].counts
        shares = np.asarray(counts.histogram[1:]) / counts.rounds
        axes.bar(np.arange(1, len(shares) + 1), shares, width=0.8, color=PALETTE[0])
        axes.axvline(counts.tau_pooled, color=PALETTE[1], linewidth=1.4)
        axes.set_title(f"{_short(arms[index].name, 30)}", loc="left", fontsize=9, color=_INK)
        axes.text(
            0.98,
            0.92,
            f"mean {counts.tau_pooled:.2f}",
            transform=axes.transAxes,
            ha="right",
            va="top",
            color=PALETTE[1],
            fontsize=8.5,
        )
        axes.set_xticks(range(1, longest + 1) if longest <= 9 else range(1, longest + 1, 3))
        axes.tick_params(labelbottom=index + columns >= len(arms))
    figure.supxlabel("tokens committed in a round, bonus included", fontsize=9.5, color=_INK)
    figure.supylabel("share of rounds", fontsize=9.5, color=_INK)
    return figure


def drafted_length_figure(series: Mapping[str, Sequence[tuple[int, Interval]]]) -> "Figure":
    """Lines: speed-up against drafted length W, from label -> [(W, interval), ...]; see `speedup_series`."""
    if not series or not any(series.values()):
        raise UserError("no speed-up at any drafted length: evaluate an arm at two or more drafted lengths")
    figure, axes = _figure(7.2, 3.8)
    axes.axhline(1, color=_INK, linewidth=1, linestyle=(0, (4, 3)))
    lengths: set[int] = set()
    for index, (label, points) in enumerate(series.items()):
        ordered = sorted(points, key=lambda point: point[0])
        x = np.asarray([length for length, _ in ordered], dtype=float)
        y = np.asarray([interval.value for _, interval in ordered])
        low, high = (np.asarray([getattr(i, side) for _, i in ordered]) for side in ("low", "high"))
        shift = (index - (len(series) - 1) / 2) * 0.08
        lengths |= {length for length, _ in ordered}
        axes.errorbar(
            x + shift,
            y,
            yerr=np.maximum([y - low, high - y], 0),
            label=label,
            **_style(index),
            linewidth=1.6,
            markersize=5,
            elinewidth=1.2,
            capsize=0,
        )
    axes.set_xticks(sorted(lengths))
    axes.set_xlabel("drafted tokens in a round")
    axes.set_ylabel("times faster than autoregressive")
    _title(axes, "Speed-up and drafted length")
    _legend(figure, axes, len(series))
    return figure


def speedup_series(
    result: EvaluationResult, bootstrap: Bootstrap = Bootstrap()
) -> dict[str, list[tuple[int, Interval]]]:
    """Timed arms grouped by weights, method, passes and temperature; groups of one drafted length are left out."""
    groups: dict[str, list[tuple[int, Interval]]] = {}
    methods: dict[str, set[str]] = {}
    for arm in _drafting(result):
        methods.setdefault(arm.drafter, set()).add(arm.method)
    for arm in _drafting(result):
        interval = result.speedup(arm, bootstrap)
        if interval is None:
            continue
        label = arm.drafter or arm.method
        if arm.drafter and len(methods[arm.drafter]) > 1:
            label += f", {arm.method}"
        if arm.passes > 1:
            label += f", {arm.passes} passes"
        if arm.temperature:
            label += f", temperature {arm.temperature:g}"
        groups.setdefault(label, []).append((arm.drafted_length, interval))
    return {label: points for label, points in groups.items() if len({length for length, _ in points}) > 1}


def training_figure(runs: Mapping[str, Curves], metrics: Sequence[str] | None = None) -> "Figure":
    """Panels of training curves: run label -> curves (see `read_metrics`); by default losses and tau estimates."""
    names = list(metrics) if metrics is not None else _default_metrics(runs)
    names = [name for name in names if any(name in curves for curves in runs.values())]
    if not names:
        known = sorted({name for curves in runs.values() for name in curves})
        raise UserError(f"no metric to draw; the runs hold {', '.join(known[:12]) or 'none'}")
    columns = min(2, len(names))
    rows = math.ceil(len(names) / columns)
    figure = _blank(7.2, 0.5 + (2.4 if columns > 1 else 3.2) * rows)
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes, name in zip(panels, names, strict=False):
        _decorate(axes)
        axes.set_title(name, loc="left", fontsize=9.5, color=_INK)
        axes.set_xlabel("step", color=_INK)
        for index, (label, curves) in enumerate(runs.items()):
            if name in curves:
                _curve(axes, *curves[name], label, PALETTE[index % len(PALETTE)])
    for axes in panels[len(names) :]:
        axes.set_visible(False)
    if len(runs) > 1:
        handles = {
            label: line for axes in panels for line, label in zip(*axes.get_legend_handles_labels(), strict=True)
        }
        figure.legend(
            handles.values(), handles.keys(), loc="outside lower center", ncols=min(4, len(handles)), frameon=False
        )
    return figure


def read_metrics(path: str | Path) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Read a `metrics.jsonl` of rows {"step": n, name: value, ...}: name -> (steps, values), sorted by step.

    A step written again, by a run that resumed, replaces what stood there; a last line cut in the middle by a kill is
    left out; values that are not numbers (text, null) are skipped. Anything else is a UserError with file and line.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read metrics {path}: {error}") from error
    table: dict[str, dict[int, float]] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            step = row["step"]
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            if number == len(lines):  # no newline behind it: the writer was stopped here
                break
            raise UserError(f"{path}:{number} must be a JSON object with 'step', got {line[:60]!r}") from error
        if isinstance(step, bool) or not isinstance(step, int):
            raise UserError(f"{path}:{number} must have an integer 'step', got {step!r}")
        for name, value in row.items():
            if name != "step" and isinstance(value, int | float) and not isinstance(value, bool):
                table.setdefault(name, {})[step] = float(value)
    return {
        name: (np.asarray(sorted(points)), np.asarray([points[step] for step in sorted(points)]))
        for name, points in table.items()
    }


def png_bytes(figure: "Figure", dpi: int = 160) -> bytes:
    """The figure as a PNG file's bytes, the same for the same figure."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi, metadata={"Software": None})
    return buffer.getvalue()


def save_png(figure: "Figure", path: str | Path, dpi: int = 160) -> Path:
    """Write a PNG file, folders included."""
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(png_bytes(figure, dpi))
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from error
    return path


def result_figures(result: EvaluationResult, bootstrap: Bootstrap = Bootstrap()) -> dict[str, "Figure"]:
    """Every figure the result has data for: file stem -> figure."""
    if not any(arm.method != AUTOREGRESSIVE for arm in result):
        return {}
    figures = {"tau": tau_figure(result, bootstrap)}
    if any(result.speedup(arm, bootstrap) is not None for arm in result):
        figures["speedup"] = speedup_figure(result, bootstrap)
    figures["slots"] = slots_figure(result)
    series = speedup_series(result, bootstrap)
    if series:
        figures["drafted_length"] = drafted_length_figure(series)
    figures["histogram"] = histogram_figure(result)
    return figures


def _drafting(result: EvaluationResult) -> list[MethodResult]:
    arms = [arm for arm in result if arm.method != AUTOREGRESSIVE]
    if not arms:
        raise UserError("nothing to draw: every arm is autoregressive")
    return arms


def _longest(arms: Sequence[MethodResult]) -> list[MethodResult]:
    longest: dict[tuple[object, ...], int] = {}
    for arm in arms:
        longest[_settings(arm)] = max(arm.drafted_length, longest.get(_settings(arm), 0))
    # Two arms of one length and equal settings (say, two refinement orders) are both wanted.
    return [arm for arm in arms if arm.drafted_length == longest[_settings(arm)]]


def _settings(arm: MethodResult) -> tuple[object, ...]:
    return (arm.drafter, arm.method, arm.passes, arm.temperature, arm.training_steps)


def require_matplotlib() -> None:
    """Raises MissingExtraError, for callers who have long work to do before they draw."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise MissingExtraError("matplotlib", "report") from error


def _blank(width: float, height: float) -> "Figure":
    require_matplotlib()
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained", facecolor="white")


def _figure(width: float, height: float) -> tuple["Figure", "Axes"]:
    figure = _blank(width, height)
    axes = figure.subplots()
    _decorate(axes)
    return figure, axes


def _decorate(axes: "Axes") -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#888888")
    axes.grid(True, color=_GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_INK, labelsize=9, color="#888888")
    axes.xaxis.label.set_color(_INK)
    axes.yaxis.label.set_color(_INK)


def _title(axes: "Axes", text: str) -> None:
    axes.set_title(text, loc="left", fontsize=11, fontweight="bold", color=_INK)


def _style(index: int) -> dict[str, Any]:
    turn, place = divmod(index, len(PALETTE))
    return {
        "color": PALETTE[place],
        "marker": MARKERS[(place + turn) % len(MARKERS)],
        "linestyle": "--" if turn else "-",
    }


def _legend(figure: "Figure", axes: "Axes", entries: int) -> None:
    if entries > 1:
        figure.legend(*axes.get_legend_handles_labels(), loc="outside right upper", frameon=False, fontsize=9)


def _dots(axes: "Axes", names: Sequence[str], intervals: Sequence[Interval], decimals: int) -> None:
    rows = np.arange(len(names))[::-1]
    for row, interval in zip(rows, intervals, strict=True):
        axes.plot([interval.low, interval.high], [row, row], color=PALETTE[0], linewidth=2, solid_capstyle="round")
        axes.plot(interval.value, row, marker="o", markersize=7, color=PALETTE[0])
        axes.annotate(
            f"{interval.value:.{decimals}f}",
            (interval.high, row),
            xytext=(7, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
            color=_INK,
        )
    axes.set_yticks(rows, [_short(name, 40) for name in names])
    axes.set_ylim(-0.6, len(names) - 0.4)
    axes.grid(False, axis="y")
    axes.margins(x=0.12)


def _curve(axes: "Axes", steps: np.ndarray, values: np.ndarray, label: str, colour: str) -> None:
    width = len(values) // 40
    if width < 2:
        axes.plot(steps, values, color=colour, linewidth=1.6, label=label)
        return
    axes.plot(steps, values, color=colour, linewidth=0.7, alpha=0.25)
    kernel = np.ones(width) / width
    axes.plot(steps[width - 1 :], np.convolve(values, kernel, mode="valid"), color=colour, linewidth=1.6, label=label)


def _default_metrics(runs: Mapping[str, Curves]) -> list[str]:
    known = sorted({name for curves in runs.values() for name in curves})
    chosen = [name for name in known if "loss" in name.lower() or "tau" in name.lower()]
    return (chosen or known)[:6]


def _short(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"
