"""Pictures of results.json: what each arm changes against its control, and how far down a block drafts are right.

    python experiments/003_when_does_dstill_pay/plots.py     (needs the extra `report`)

PNG files are written beside this one.
"""

import json
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from dstill_jax.evaluation.plots import MARKERS, PALETTE, save_png

HERE = Path(__file__).resolve().parent
_SETTINGS = {"one pass": "one pass", "tree 16": "tree of 16", "tree 64": "tree of 64"}


def changes_figure(lines: list[dict[str, Any]], control: str, title: str) -> Figure | None:
    """Dot plot: change of tau against `control` in per cent, by arm and way of decoding; None if no arm has one."""
    found = {(x["arm"], x["setting"]): x["against"][control]["change"] for x in lines if control in x["against"]}
    names = list(dict.fromkeys(name for name, setting in found if setting in _SETTINGS))[::-1]
    if not names:
        return None
    figure = Figure(figsize=(7.2, 1.6 + 0.45 * len(names)), layout="constrained")
    axes = figure.subplots()
    axes.axvline(0, color="#333333", linewidth=1, linestyle=(0, (4, 3)))
    for index, (setting, label) in enumerate(_SETTINGS.items()):
        points = [(row, *found[name, setting]) for row, name in enumerate(names) if (name, setting) in found]
        rows, values, low, high = map(list, zip(*points, strict=True))
        error = [[v - x for v, x in zip(values, low, strict=True)], [x - v for v, x in zip(values, high, strict=True)]]
        at = [row + 0.2 * (1 - index) for row in rows]
        axes.errorbar(values, at, xerr=error, fmt=MARKERS[index], color=PALETTE[index], label=label, markersize=5)
    axes.set_yticks(range(len(names)), names)
    axes.set_xlabel(f"change of τ against {control}, % (95 % interval over prompts)")
    axes.set_title(title, loc="left")
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    return figure


def slots_figure(lines: list[dict[str, Any]], names: tuple[str, ...], title: str) -> Figure:
    """Lines: acceptance of each slot given that those before it are right, one pass, at every position of the answers."""
    figure = Figure(figsize=(7.2, 4), layout="constrained")
    axes = figure.subplots()
    drawn = [x for x in lines if x["setting"] == "one pass" and x["arm"] in names and x["acceptance"]]
    for index, line in enumerate(drawn):
        shares = line["acceptance"]
        style = {"color": PALETTE[index], "marker": MARKERS[index]}
        axes.plot(range(1, len(shares) + 1), shares, label=line["arm"], **style)
    axes.set_xlabel("draft slot")
    axes.set_ylabel("accepted, given all earlier slots were")
    axes.set_title(title, loc="left")
    figure.legend(loc="outside lower center", ncols=4, frameon=False)
    return figure


def main() -> None:
    targets = json.loads((HERE / "results.json").read_text(encoding="utf-8"))["targets"]
    results = max(targets.values(), key=lambda of_target: len(json.dumps(of_target)))  # the one that most is known of
    for block in (8, 16):
        lines = results["large"].get(f"block {block}, choosing", [])
        for prefix in ("", "deep_"):
            layers, stem = (4, f"block{block}_deep.png") if prefix else (2, f"block{block}.png")
            figure = changes_figure(lines, f"{prefix}a1c", f"Acceptance length, block {block}, {layers} layers")
            if figure is not None:
                save_png(figure, HERE / f"changes_{stem}")
                names = tuple(f"{prefix}{name}" for name in ("s1", "a1c", "auf", "dstill"))
                save_png(slots_figure(lines, names, f"Slots, block {block}, {layers} layers"), HERE / f"slots_{stem}")


if __name__ == "__main__":
    main()
