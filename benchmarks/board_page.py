# SPDX-License-Identifier: Apache-2.0
"""The tables and the picture of docs/accuracy.md, from the lines of `board.py`.

python benchmarks/board_page.py board.jsonl --picture docs/accuracy.svg
"""

from __future__ import annotations

import argparse
import html
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from board import ADMISSIONS, BASELINES, HISTORIES, KEPT, MODELS, lines_of
from board_logs import LOGS
from intervals import half_width

from hotbed.pictures.charts import ticks

BASES = {name: "DCNv2" for name in ADMISSIONS} | {name: "DNN" for name in [*HISTORIES, *KEPT]}
"""What the entries that add something are compared with."""

LABEL = 100  # width of the names
PANEL = 190
GAP = 22
TOP = 40
ROW = 21
STYLE = """
svg { font-family: system-ui, -apple-system, "Segoe UI", Roboto, sans-serif }
.page { fill: #fff } text { fill: #1d2430; font-size: 12px } .head { font-weight: 600 }
.small { fill: #57606a; font-size: 11px } .axis { stroke: #d0d7de } .line { stroke: #eef1f4 }
.mean { fill: #0b62c4 } .interval { stroke: #0b62c4; stroke-width: 2 }
.peer { fill: none; stroke: #c2410c; stroke-width: 1.6 }
.level { stroke: #57606a; stroke-dasharray: 3 3 }
"""


@dataclass(frozen=True)
class Cell:
    """Mean and 95 % interval over seeds; no interval where there is one seed."""

    mean: float
    interval: float | None

    def text(self, sign: str = "") -> str:
        """Return the cell as a table shows it; `sign`: "+" shows the sign of the mean."""
        text = f"{self.mean:{sign}.4f}".replace("0.", ".", 1)
        if self.interval is None:
            return text
        return f"{text} ± {self.interval:.4f}".replace("± 0.", "± .")


Key = tuple[str, str]
Values = Mapping[Key, Mapping[int, float]]
"""Figures by model and log, then by seed."""

Cells = Mapping[Key, Cell]


def values_of(lines: Iterable[Mapping[str, Any]], figure: str) -> Values:
    """Return one figure of all lines that have it."""
    values: dict[Key, dict[int, float]] = {}
    for line in lines:
        if figure in line:
            values.setdefault((line["model"], line["log"]), {})[line["seed"]] = line[figure]
    return values


def changes(values: Values, base: Values, of: Mapping[str, str]) -> Values:
    """Return by how much models differ from others, seed by seed; `of`: the other of each model."""
    differences: dict[Key, dict[int, float]] = {}
    for (model, log), seeds in values.items():
        others = base.get((of.get(model, ""), log), {})
        common = {seed: seeds[seed] - others[seed] for seed in seeds if seed in others}
        if common:
            differences[model, log] = common
    return differences


def cells_of(values: Values) -> Cells:
    """Return mean and interval over the seeds of each model and log."""
    return {key: cell_of(list(seeds.values())) for key, seeds in values.items()}


def cell_of(seeds: Sequence[float]) -> Cell:
    """Return mean and interval of the values of seeds."""
    if len(seeds) < 2:
        return Cell(seeds[0], None)
    return Cell(statistics.mean(seeds), half_width(seeds))


def table(
    title: str, cells: Cells, models: Iterable[str], logs: Sequence[str], sign: str = ""
) -> str:
    """Return the cells as a table of Markdown, and an empty line."""
    rows = [f"| {title} | {' | '.join(logs)} |", "|---" * (len(logs) + 1) + "|"]
    for model in models:
        texts = [cells[model, log].text(sign) if (model, log) in cells else "" for log in logs]
        if any(texts):
            rows.append(f"| {model} | {' | '.join(texts)} |")
    return "\n".join([*rows, ""])


def panel(log: str, cells: Cells, models: Sequence[str], left: float) -> list[str]:
    """Return the shapes of one log: a dot, an interval and a ring for the peer of each model."""
    shown = [cells[model, log] for model in models if (model, log) in cells]
    lows = [cell.mean - (cell.interval or 0.0) for cell in shown]
    highs = [cell.mean + (cell.interval or 0.0) for cell in shown]
    popularity = cells.get(("popularity", log))
    means = [] if popularity is None else [popularity.mean]
    steps = ticks(min(lows + means), max(highs + means))
    bottom = TOP + ROW * len(models)

    def x(value: float) -> float:
        return left + (value - steps[0]) / (steps[-1] - steps[0]) * PANEL

    shapes = [f"<text class='head' x='{left}' y='16'>{html.escape(log)}</text>"]
    for step in steps:
        place = f"{x(step):.1f}"
        shapes.append(f"<line class='axis' x1='{place}' x2='{place}' y1='{TOP}' y2='{bottom}'/>")
        text = f"{step:g}".removeprefix("0") or "0"
        shapes.append(
            f"<text class='small' x='{place}' y='{bottom + 15}' text-anchor='middle'>{text}</text>"
        )
    if popularity is not None:
        place = f"{x(popularity.mean):.1f}"
        shapes.append(f"<line class='level' x1='{place}' x2='{place}' y1='{TOP}' y2='{bottom}'/>")
    for number, model in enumerate(models):
        y = TOP + ROW * (number + 0.5)
        shapes.append(f"<line class='line' x1='{left}' x2='{left + PANEL}' y1='{y}' y2='{y}'/>")
        cell = cells.get((model, log))
        if cell is not None:
            ends = (x(cell.mean - (cell.interval or 0.0)), x(cell.mean + (cell.interval or 0.0)))
            shapes.append(
                f"<line class='interval' x1='{ends[0]:.1f}' x2='{ends[1]:.1f}' y1='{y}' y2='{y}'/>"
                f"<circle class='mean' cx='{x(cell.mean):.1f}' cy='{y}' r='3.4'/>"
            )
        other = cells.get((f"FuxiCTR {model}", log))
        if other is not None:
            shapes.append(f"<circle class='peer' cx='{x(other.mean):.1f}' cy='{y}' r='6'/>")
    return shapes


def picture(cells: Cells, models: Sequence[str], logs: Sequence[str]) -> str:
    """Return an SVG with a panel for each log."""
    width = LABEL + (PANEL + GAP) * len(logs) + GAP
    height = TOP + ROW * len(models) + 48
    shapes = []
    for number, model in enumerate(models):
        y = TOP + ROW * (number + 0.5) + 4
        shapes.append(f"<text x='{LABEL - 12}' y='{y}' text-anchor='end'>{model}</text>")
    for number, log in enumerate(logs):
        shapes += panel(log, cells, models, LABEL + (PANEL + GAP) * number)
    legend = (
        "AUC, each sample scored before it is learned. Dot and bar: mean and 95 % interval over "
        "seeds. Ring: FuxiCTR's layers. Dashed: popularity."
    )
    shapes.append(f"<text class='small' x='{LABEL}' y='{height - 8}'>{legend}</text>")
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' role='img' "
        f"aria-label='AUC of each model on each log'><style>{STYLE}</style>"
        f"<rect class='page' width='{width}' height='{height}'/>{''.join(shapes)}</svg>\n"
    )


def main() -> None:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("lines", type=Path, help="the file of board.py")
    p.add_argument("--picture", type=Path, help="file of the SVG")
    a = p.parse_args()
    lines = lines_of(a.lines)
    logs = [log for log in LOGS if any(line["log"] == log for line in lines)]
    board = [name for model in MODELS for name in (model, f"FuxiCTR {model}")]
    board += BASELINES
    auc, log_loss = values_of(lines, "auc"), values_of(lines, "log_loss")
    print(table("AUC", cells_of(auc), board, logs))
    print(table("log loss", cells_of(log_loss), board, logs))
    late_auc, late_log_loss = values_of(lines, "late_auc"), values_of(lines, "late_log_loss")
    shown = {
        "AUC": auc,
        "log loss": log_loss,
        "AUC of the later half": late_auc,
        "log loss of the later half": late_log_loss,
    }
    for title, values in shown.items():
        differences = changes(values, values, BASES)
        print(table(f"change of {title}", cells_of(differences), BASES, logs, "+"))
    itself = {model: model for model in [*MODELS, *BASELINES]}
    scaled = changes(values_of(lines, "calibrated"), log_loss, itself)
    print(table("change of log loss by calibration", cells_of(scaled), itself, logs, "+"))
    table_rows = values_of(lines, "table_rows")
    for model in ("DCNv2", *ADMISSIONS):
        print(model, {log: table_rows[model, log][0] for log in logs if (model, log) in table_rows})
    for log in logs:
        counts = {model: len(seeds) for (model, other), seeds in auc.items() if other == log}
        print(log, counts)
    if a.picture is not None:
        a.picture.write_text(picture(cells_of(auc), list(MODELS), logs))


if __name__ == "__main__":
    main()
