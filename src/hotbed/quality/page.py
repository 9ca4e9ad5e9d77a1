# SPDX-License-Identifier: Apache-2.0
"""The page of what was measured: one HTML file that opens without a network or a library."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hotbed.persist.container.store import write_text
from hotbed.pictures.charts import COLORS, Chart, Series, figure
from hotbed.pictures.numbers import number_text
from hotbed.pictures.page import grid, page_of, section, side_by_side
from hotbed.quality.cells import METRICS
from hotbed.quality.results import Quality

PAGE = "report.html"
"""The file of the page in the folder of results."""
Row = Mapping[str, Any]
_WINDOWS_TEXT = (
    "Each point is a window of event time, of requests whose outcomes are known. Bands are "
    "intervals, in which the samples of a user count together."
)
_DIFFERENCES_TEXT = (
    "The figure of a route minus that of the other one, with its interval. An interval that holds "
    "0 says that the window cannot tell the two apart. With many windows and values, one in twenty "
    "intervals of equal versions does not hold 0."
)
_NEWEST_TEXT = (
    "Behind each figure is half the width of its interval; - stands for an undefined figure."
)
_ALL = "all answered"
_TITLES = {
    "auc": "AUC",
    "log_loss": "Log loss",
    "normalized_entropy": "Normalized entropy",
    "calibration": "Calibration: mean score by mean label",
    "rate": "Rate of positives",
    "hit_rate": "Hit rate of the shown lists",
    "ndcg": "NDCG of the shown lists",
}


def write_page(path: Path, quality: Quality) -> None:
    """Write the page of some windows, of which there is at least one."""
    windows = quality.windows.to_pylist()
    newest = windows[-1]["begin"]
    whole = next(row for row in windows if row["begin"] == newest)
    cards = {
        "samples": whole["samples"],
        "users": whole["users"],
        **{_TITLES[name].partition(":")[0]: whole[name] for name in METRICS},
    }
    subtitle = f"newest window: {newest:%Y-%m-%d %H:%M} to {whole['end']:%Y-%m-%d %H:%M} UTC"
    sections = [*over_time(quality), *newest_tables(quality, "the newest window")]
    write_text(path, page_of("Quality of what was served", subtitle, cards, sections))


def over_time(quality: Quality) -> list[str]:
    """Return sections with charts of all windows: the routes, and their differences."""
    compared: dict[str, list[Row]] = {}
    for row in quality.differences.to_pylist():
        if row["column"] is None:
            compared.setdefault(f"{row['route']} minus {row['against']}", []).append(row)
    return [
        _charts("Over time", _WINDOWS_TEXT, by_route(quality.windows.to_pylist())),
        _charts("Differences over time", _DIFFERENCES_TEXT, compared, levels={"equal": 0.0}),
    ]


def newest_tables(quality: Quality, which: str) -> list[str]:
    """Return sections with tables of the newest window; `which`: its name."""
    newest = quality.windows["begin"].to_pylist()[-1]
    differences = quality.differences.to_pylist()
    return [
        _table(f"Differences in {which}", differences, newest),
        _table(f"{which[0].upper()}{which[1:]}", quality.windows.to_pylist(), newest),
    ]


def by_route(windows: Sequence[Row]) -> dict[str, list[Row]]:
    """Return the rows of whole routes by the name of their line, in the order of time."""
    routes: dict[str, list[Row]] = {}
    for row in windows:
        if row["column"] is None:
            routes.setdefault(row["route"] or _ALL, []).append(row)
    if len(routes) == 2:  # all answers are those of one route
        del routes[_ALL]
    return routes


def _charts(
    name: str,
    text: str,
    lines: Mapping[str, Sequence[Row]],
    levels: Mapping[str, float] | None = None,
) -> str:
    """Return a section with a chart of each metric; "" without lines."""
    charts = [figure(chart) for chart in charts_of(lines, METRICS, levels)]
    return section(name, side_by_side(charts), text) if charts else ""


def charts_of(
    lines: Mapping[str, Sequence[Row]],
    metrics: Sequence[str],
    levels: Mapping[str, float] | None = None,
) -> list[Chart]:
    """Return a chart of each metric that is defined, with a line for each name in `lines`."""
    charts = []
    for metric in metrics:
        chart = Chart(_TITLES[metric], "", time=True, levels=levels or {})
        for color, (line, rows) in enumerate(lines.items()):
            windows = [row for row in rows if not math.isnan(row[metric])]
            if windows:
                chart.series.append(_line(line, metric, windows, color % COLORS))
        if chart.series:
            charts.append(chart)
    return charts


def _line(name: str, metric: str, rows: Sequence[Row], color: int) -> Series:
    """Return a metric over time, with a band where all of its windows have intervals."""
    x = [row["begin"].timestamp() * 1e6 for row in rows]
    ends = [(row[f"{metric}_low"], row[f"{metric}_high"]) for row in rows]
    if any(math.isnan(low) for low, _ in ends):
        ends = []
    return Series(name, x, [row[metric] for row in rows], color, dots=True, ends=ends)


def _table(name: str, rows: Sequence[Row], newest: Any) -> str:
    """Return a section with the rows of the newest window; "" without any."""
    counts = [count for count in ("against", "users", "samples") if rows and count in rows[0]]
    heads = [_TITLES[metric].partition(":")[0] for metric in METRICS]
    cells = []
    for row in rows:
        if row["begin"] != newest:
            continue
        place = [row["route"] or _ALL, row["column"] or "", value_text(row)]
        numbers = [number_text(row[count]) for count in counts]
        cells.append([*place, *numbers, *(figure_text(row, metric) for metric in METRICS)])
    head = ["route", "column", "value", *counts, *heads]
    return section(name, grid(head, cells), _NEWEST_TEXT) if cells else ""


def value_text(row: Row) -> str:
    """Return the value of a row; values that are too rare to be measured apart are others."""
    if row["column"] is None:
        return ""
    return "others" if row["value"] is None else str(row["value"])


def figure_text(row: Row, metric: str) -> str:
    """Return a figure with half the width of its interval, as far as both are known."""
    if math.isnan(row[metric]):
        return "-"
    reach = (row[f"{metric}_high"] - row[f"{metric}_low"]) / 2
    return f"{row[metric]:.4f}" if math.isnan(reach) else f"{row[metric]:.4f} ±{reach:.4f}"
