"""One HTML file that holds a whole evaluation: no script, no link, no other file. Called by `eval` and `demo`."""

import base64
import dataclasses
import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dstill_jax.evaluation import colour, plots, tables
from dstill_jax.evaluation.colour import Segment
from dstill_jax.evaluation.results import AUTOREGRESSIVE, EvaluationResult
from dstill_jax.evaluation.serialize import DEFINITIONS, write_text
from dstill_jax.evaluation.stats import Bootstrap

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_STYLE = """
:root { color-scheme: light; }
body { margin: 0 auto; padding: 2rem 1.25rem 4rem; max-width: 76rem; background: #fff; color: #1d1d1f;
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
p, .caveats, pre, dl, figure { max-width: 58rem; box-sizing: border-box; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 .3rem; }
h2 { font-size: 1.15rem; margin: 2.4rem 0 .6rem; border-bottom: 1px solid #ddd; padding-bottom: .25rem; }
h3 { font-size: 1rem; margin: 1.4rem 0 .4rem; }
.lead, .note, .legend, figcaption { color: #55585e; }
.note, .legend, figcaption { font-size: .88rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; }
th, td { padding: .35rem .5rem; text-align: left; vertical-align: top; border-bottom: 1px solid #e4e4e7; }
th { border-bottom: 2px solid #999; font-weight: 600; vertical-align: bottom; }
.number { text-align: right; white-space: nowrap; }
th.number { white-space: normal; }
tbody tr:hover { background: #f6f7f9; }
.caveats { background: #fff8e6; border-left: 4px solid #e69f00; padding: .7rem 1rem; margin: 1.2rem 0; }
.caveats p { margin: 0 0 .3rem; font-weight: 600; }
.caveats ul { margin: 0; padding-left: 1.2rem; }
figure { margin: 1.4rem 0; }
figure img { max-width: 100%; height: auto; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; background: #f6f7f9; border: 1px solid #e4e4e7;
  border-radius: 4px; padding: .8rem 1rem;
  font: .88rem/1.65 ui-monospace, SFMono-Regular, Menlo, Consolas, "Liberation Mono", monospace; }
pre.sample span { border-radius: 2px; -webkit-box-decoration-break: clone; box-decoration-break: clone; }
.legend span { border-radius: 2px; }
dl { display: grid; grid-template-columns: minmax(8rem, max-content) 1fr; gap: .2rem 1rem; font-size: .9rem; }
dt { color: #55585e; } dd { margin: 0; overflow-wrap: anywhere; }
@media print { body { max-width: none; } .scroll { overflow: visible; } }
"""
_CAPTIONS = {
    "tau": "Acceptance length of each arm; dots are means over responses, bars their intervals over prompts.",
    "speedup": "Measured speed-up; right of the dashed line is faster than autoregressive decoding.",
    "slots": "Share of rounds in which a slot was accepted among those in which all earlier slots were; "
    "of arms that differ in drafted length only, the longest.",
    "drafted_length": "Speed-up at each drafted length, with intervals; too long a draft costs more than it gives.",
    "histogram": "How many tokens a round commits; the vertical line is the mean (pooled tau).",
    "training": "Training curves; the faint line is every recorded step, the strong one a running mean.",
}


@dataclass(frozen=True)
class Sample:
    """A passage for the report: what was asked, and the answer in coloured segments of up to `slots` slots."""

    title: str
    prompt: str
    segments: Sequence[Segment]
    slots: int


def render_report(
    result: EvaluationResult,
    *,
    title: str | None = None,
    caveats: Sequence[str] = (),
    samples: Sequence[Sample] = (),
    training: Mapping[str, plots.Curves] | None = None,
    reference: str | None = None,
    command: str | None = None,
    bootstrap: Bootstrap = Bootstrap(),
) -> str:
    """The HTML document.

    caveats:   sentences set apart above everything else.
    samples:   coloured passages.
    training:  run label -> curves of `plots.read_metrics`.
    reference: name of the arm against which a table of paired changes of tau is given.
    command:   what reproduces the report; default: the metadata's.
    """
    headline = tables.headline_table(result, bootstrap)
    heading = title or f"Speculative decoding of {result.metadata.target}"
    figures: dict[str, Figure] = plots.result_figures(result, bootstrap)
    if training:
        figures["training"] = plots.training_figure(training)
    body = [
        f"<h1>{html.escape(heading)}</h1>",
        f'<p class="lead">{html.escape(tables.conditions(result))}</p>',
        _caveats(caveats),
        "<h2>Results</h2>",
        f'<div class="scroll">{tables.html_table(headline)}</div>',
        f'<p class="note">{html.escape(tables.lossless(result))}</p>',
    ]
    if tables.FEW_NOTE in headline.footnotes:
        body.append(f'<p class="note">{html.escape(tables.FEW_NOTE)}</p>')
    if reference is not None:
        change = tables.change_table(result, reference, bootstrap)
        body += [f"<h3>{html.escape(change.title)}</h3>", f'<div class="scroll">{tables.html_table(change)}</div>']
    body += ["<h2>Figures</h2>" if figures else "", *(_figure(name, figure) for name, figure in figures.items())]
    body += [_samples(samples), _arms(result), _definitions(), _environment(result, command)]
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>{html.escape(heading)}</title>\n'
        f"<style>{_STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(part for part in body if part)
        + "\n</body>\n</html>\n"
    )


def write_report(
    path: str | Path,
    result: EvaluationResult,
    *,
    title: str | None = None,
    caveats: Sequence[str] = (),
    samples: Sequence[Sample] = (),
    training: Mapping[str, plots.Curves] | None = None,
    reference: str | None = None,
    command: str | None = None,
    bootstrap: Bootstrap = Bootstrap(),
) -> Path:
    """Write what `render_report` gives; see there."""
    text = render_report(
        result,
        title=title,
        caveats=caveats,
        samples=samples,
        training=training,
        reference=reference,
        command=command,
        bootstrap=bootstrap,
    )
    return write_text(path, text)


def _caveats(caveats: Sequence[str]) -> str:
    if not caveats:
        return ""
    items = "".join(f"<li>{html.escape(caveat)}</li>" for caveat in caveats)
    return f'<div class="caveats"><p>Read this first</p><ul>{items}</ul></div>'


def _figure(name: str, figure: "Figure") -> str:
    data = base64.b64encode(plots.png_bytes(figure)).decode("ascii")
    width = round(figure.get_size_inches()[0] * 100)
    caption = html.escape(_CAPTIONS[name])
    return (
        f'<figure><img width="{width}" alt="{caption}" src="data:image/png;base64,{data}">'
        f"<figcaption>{caption}</figcaption></figure>"
    )


def _samples(samples: Sequence[Sample]) -> str:
    if not samples:
        return ""
    parts = ["<h2>Samples</h2>"]
    legend = ""
    for sample in samples:
        parts.append(f"<h3>{html.escape(sample.title)}</h3>")
        if sample.prompt:
            parts.append(f'<p class="note">Prompt: {html.escape(sample.prompt)}</p>')
        if (new := colour.legend_html(sample.slots)) != legend:
            legend = new
            parts.append(legend)
        parts.append(colour.to_html(sample.segments, sample.slots))
    return "\n".join(parts)


def _arms(result: EvaluationResult) -> str:
    described = [arm for arm in result if arm.description]
    if not described:
        return ""
    items = "".join(f"<dt>{html.escape(a.name)}</dt><dd>{html.escape(a.description)}</dd>" for a in described)
    return f"<h2>Arms</h2>\n<dl>{items}</dl>"


def _definitions() -> str:
    return "<h2>Definitions</h2>\n" + "\n".join(f"<p>{html.escape(text)}</p>" for text in DEFINITIONS.values())


def _environment(result: EvaluationResult, command: str | None) -> str:
    values = dataclasses.asdict(result.metadata)
    shown_command = command or values["command"]
    versions = values.pop("versions")
    seeds = values.pop("seeds")
    rows = {name.replace("_", " "): str(value) for name, value in values.items() if name != "command" and value}
    if seeds:
        rows["seeds"] = ", ".join(f"{name} {seed}" for name, seed in seeds.items())
    if versions:
        rows["versions"] = ", ".join(f"{name} {version}" for name, version in versions.items())
    temperatures = sorted({arm.temperature for arm in result})
    rows["temperature"] = ", ".join(f"{t:g}" for t in temperatures)
    for name in ("top_k", "top_p"):
        if filters := sorted({getattr(arm, name) for arm in result} - {None}):
            rows[name.replace("_", " ")] = ", ".join(map(str, filters))
    if not any(arm.method == AUTOREGRESSIVE for arm in result):
        rows["speed-up"] = "not available: no autoregressive arm"
    items = "".join(f"<dt>{html.escape(name)}</dt><dd>{html.escape(value)}</dd>" for name, value in rows.items())
    parts = [f"<h2>Environment</h2>\n<dl>{items}</dl>"]
    if shown_command:
        parts.append(f"<h2>Reproduce</h2>\n<pre>{html.escape(shown_command)}</pre>")
    return "\n".join(parts)
