# SPDX-License-Identifier: Apache-2.0
"""Plots as SVG inside one HTML page, without a plotting library: axes, lines, legends, and data for
the page's script.
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

WIDTH = 560
HEIGHT = 250
LEFT = 52
RIGHT = 546
TOP = 12
BOTTOM = 218
COLORS = 8


@dataclass
class Series:
    """One line: `x` ascending. `color`: number of a colour, -1 = thin and faint, behind its
    smoothed self.
    """

    name: str
    x: list[float]
    y: list[float]
    color: int = 0
    dots: bool = False


@dataclass
class Chart:
    """One plot.

    `time`: x is in microseconds UTC. `marks`, `levels`: names of x and y positions that get a
    dashed line. `from_zero`: the y axis begins at 0. `x_bounds`: where the x axis begins and ends;
    by default it spans the series.
    """

    title: str
    x_label: str
    series: list[Series] = field(default_factory=list)
    time: bool = False
    marks: Mapping[str, float] = field(default_factory=dict)
    levels: Mapping[str, float] = field(default_factory=dict)
    from_zero: bool = False
    x_bounds: tuple[float, float] | None = None


@dataclass(frozen=True)
class _Axes:
    """Where values lie in the picture."""

    x0: float
    x1: float
    low: float
    high: float
    steps: list[float]

    @classmethod
    def of(cls, chart: Chart) -> _Axes:
        xs = [x for line in chart.series for x in line.x]
        ys = [y for line in chart.series for y in line.y] + list(chart.levels.values())
        x0, x1 = chart.x_bounds or (min(xs), max(xs))
        low = 0.0 if chart.from_zero else min(ys)
        steps = ticks(low, max(ys))
        return cls(x0, x1, min(low, steps[0]), max(*ys, steps[-1]), steps)

    def x(self, x: float) -> float:
        return LEFT + (x - self.x0) / ((self.x1 - self.x0) or 1.0) * (RIGHT - LEFT)

    def y(self, y: float) -> float:
        return BOTTOM - (y - self.low) / ((self.high - self.low) or 1.0) * (BOTTOM - TOP)


def figure(chart: Chart) -> str:
    """Return the chart as a `figure` element, with its data for the script of the page."""
    axes = _Axes.of(chart)
    shapes = [*_scales(chart, axes), *_marks(chart, axes)]
    for line in chart.series:
        shapes += _line(line, axes)
    shapes.append(
        f"<line class='cursor' y1='{TOP}' y2='{BOTTOM}'/><rect x='{LEFT}' y='{TOP}' "
        f"width='{RIGHT - LEFT}' height='{BOTTOM - TOP}' fill='transparent'/>"
    )
    title = html.escape(chart.title)
    data = html.escape(json.dumps(_data(chart, axes)))
    return (
        f'<figure data-chart="{data}"><figcaption>{title}</figcaption>'
        f"<div class='legend'>{_legend(chart)}</div>"
        f"<svg viewBox='0 0 {WIDTH} {HEIGHT}' role='img' aria-label='{title}'>{''.join(shapes)}</svg>"
        "<div class='tip'></div></figure>"
    )


def _scales(chart: Chart, axes: _Axes) -> list[str]:
    """Lines and numbers of the y axis, and the labels of the x axis."""
    shapes = [
        f"{_level_line('axis', axes.y(y))}"
        f"<text x='{LEFT - 8}' y='{axes.y(y) + 4:.1f}' text-anchor='end'>{number_text(y)}</text>"
        for y in axes.steps
    ]
    for x, label in _x_ticks(axes.x0, axes.x1, chart):
        anchor = "end" if axes.x(x) > RIGHT - 30 else "middle"
        place = f"x='{axes.x(x):.1f}' y='{BOTTOM + 18}' text-anchor='{anchor}'"
        shapes.append(f"<text {place}>{label}</text>")
    label = html.escape(chart.x_label)
    shapes.append(f"<text x='{RIGHT}' y='{BOTTOM + 32}' text-anchor='end'>{label}</text>")
    return shapes


def _marks(chart: Chart, axes: _Axes) -> list[str]:
    """Dashed lines at named places of both axes."""
    shapes = []
    for name, mark in chart.marks.items():
        x = axes.x(mark)
        shapes.append(
            f"<line class='mark' x1='{x:.1f}' x2='{x:.1f}' y1='{TOP}' y2='{BOTTOM}'/>"
            f"<text x='{x + 5:.1f}' y='{TOP + 9}'>{html.escape(name)}</text>"
        )
    return shapes + [_level_line("mark", axes.y(y)) for y in chart.levels.values()]


def _level_line(kind: str, y: float) -> str:
    return f"<line class='{kind}' x1='{LEFT}' x2='{RIGHT}' y1='{y:.1f}' y2='{y:.1f}'/>"


def _line(line: Series, axes: _Axes) -> list[str]:
    places = [(axes.x(x), axes.y(y)) for x, y in zip(line.x, line.y, strict=True)]
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    kind = "plot faint" if line.color < 0 else "plot"
    color = _color(line)
    shapes = [f"<polyline class='{kind}' stroke='{color}' points='{points}'/>"]
    if line.dots:
        shapes += [f"<circle cx='{x:.1f}' cy='{y:.1f}' r='2.6' fill='{color}'/>" for x, y in places]
    return shapes


def _legend(chart: Chart) -> str:
    entries = []
    for line in chart.series:
        kind = "faint" if line.color < 0 else ""
        swatch = f"<i class='{kind}' style='background:{_color(line)}'></i>"
        entries.append(f"<span>{swatch}{html.escape(line.name)}</span>")
    entries += [f"<span><i class='level'></i>{html.escape(name)}</span>" for name in chart.levels]
    return "".join(entries)


def _data(chart: Chart, axes: _Axes) -> dict[str, Any]:
    """What the script of the page shows at the pointer."""
    series = []
    for line in chart.series:
        y = [float(f"{value:.6g}") for value in line.y]
        series.append({"name": line.name, "x": line.x, "y": y, "color": _color(line)})
    return {
        "x0": axes.x0,
        "x1": axes.x1,
        "left": LEFT,
        "right": RIGHT,
        "width": WIDTH,
        "time": chart.time,
        "label": chart.x_label,
        "series": series,
    }


def _color(line: Series) -> str:
    return f"var(--c{max(line.color, 0)})"


def ticks(low: float, high: float) -> list[float]:
    """About five round numbers that enclose low..high."""
    if not high > low:
        low = low - (abs(low) * 0.1 or 1.0)
        high = high + (abs(high) * 0.1 or 1.0)
    raw = (high - low) / 4
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= raw * 0.999)
    first = math.floor(low / step + 1e-9)
    last = math.ceil(high / step - 1e-9)
    return [round(step * number, 10) for number in range(first, last + 1)]


def _x_ticks(x0: float, x1: float, chart: Chart) -> list[tuple[float, str]]:
    if not chart.time:
        if chart.x_label == "epoch":
            width = max(1, math.ceil((x1 - x0) / 8))
            return [(float(x), str(x)) for x in range(int(x0), int(x1) + 1, width)]
        return (
            [(x, number_text(x)) for x in ticks(x0, x1) if x0 <= x <= x1]
            if x1 > x0
            else [(x0, number_text(x0))]
        )
    days = (x1 - x0) / 86_400e6
    shape = (
        "%Y" if days > 1500 else "%b %Y" if days > 120 else "%d %b" if days > 4 else "%d %b %H:%M"
    )
    places = [x0 + (x1 - x0) * part / 4 for part in range(5)] if x1 > x0 else [x0]
    return [(x, datetime.fromtimestamp(x / 1e6, UTC).strftime(shape)) for x in places]


def number_text(value: Any) -> str:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return str(value)
    if not math.isfinite(value):
        return "–"
    if abs(value) >= 1e6:
        return f"{value / 1e6:,.4g} M"
    if float(value).is_integer() or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4f}".rstrip("0").rstrip(".") if abs(value) >= 1e-3 else f"{value:.2g}"
