# SPDX-License-Identifier: Apache-2.0
"""Plots as SVG inside one HTML page, without a plotting library: axes, lines, legends, and data for the page's script."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 560, 250, 52, 546, 12, 218
COLORS = 8


@dataclass
class Series:
    """One line: `x` ascending. `color`: number of a colour, -1 = thin and faint, behind its smoothed self."""

    name: str
    x: list[float]
    y: list[float]
    color: int = 0
    dots: bool = False


@dataclass
class Chart:
    """One plot.

    `time`: x is in microseconds UTC. `marks`, `levels`: names of x and y positions that get a dashed line. `from_zero`: the y
    axis begins at 0. `x_bounds`: where the x axis begins and ends; by default it spans the series.
    """

    title: str
    x_label: str
    series: list[Series] = field(default_factory=list)
    time: bool = False
    marks: Mapping[str, float] = field(default_factory=dict)
    levels: Mapping[str, float] = field(default_factory=dict)
    from_zero: bool = False
    x_bounds: tuple[float, float] | None = None


def figure(chart: Chart) -> str:
    xs = [x for line in chart.series for x in line.x]
    ys = [y for line in chart.series for y in line.y] + list(chart.levels.values())
    x0, x1 = chart.x_bounds or (min(xs), max(xs))
    low, high = (0.0 if chart.from_zero else min(ys)), max(ys)
    steps = ticks(low, high)
    low, high = min(low, steps[0]), max(high, steps[-1])

    def place_x(x: float) -> float:
        return LEFT + (x - x0) / ((x1 - x0) or 1.0) * (RIGHT - LEFT)

    def place_y(y: float) -> float:
        return BOTTOM - (y - low) / ((high - low) or 1.0) * (BOTTOM - TOP)

    shapes = [
        f"<line class='axis' x1='{LEFT}' x2='{RIGHT}' y1='{place_y(y):.1f}' y2='{place_y(y):.1f}'/>"
        f"<text x='{LEFT - 8}' y='{place_y(y) + 4:.1f}' text-anchor='end'>{number_text(y)}</text>"
        for y in steps
    ]
    shapes += [
        f"<text x='{place_x(x):.1f}' y='{BOTTOM + 18}' text-anchor='{'end' if place_x(x) > RIGHT - 30 else 'middle'}'>{label}</text>"
        for x, label in _x_ticks(x0, x1, chart)
    ]
    shapes.append(f"<text x='{RIGHT}' y='{BOTTOM + 32}' text-anchor='end'>{html.escape(chart.x_label)}</text>")
    for name, x in chart.marks.items():
        shapes.append(f"<line class='mark' x1='{place_x(x):.1f}' x2='{place_x(x):.1f}' y1='{TOP}' y2='{BOTTOM}'/>"
                      f"<text x='{place_x(x) + 5:.1f}' y='{TOP + 9}'>{html.escape(name)}</text>")  # fmt: skip
    shapes += [f"<line class='mark' x1='{LEFT}' x2='{RIGHT}' y1='{place_y(y):.1f}' y2='{place_y(y):.1f}'/>"
               for y in chart.levels.values()]  # fmt: skip
    for line in chart.series:
        placed = [(place_x(x), place_y(y)) for x, y in zip(line.x, line.y, strict=True)]
        shapes.append(f"<polyline class='plot{' faint' if line.color < 0 else ''}' stroke='{_color(line)}' points='"
                      + " ".join(f"{x:.1f},{y:.1f}" for x, y in placed) + "'/>")  # fmt: skip
        if line.dots:
            shapes += [f"<circle cx='{x:.1f}' cy='{y:.1f}' r='2.6' fill='{_color(line)}'/>" for x, y in placed]
    shapes.append(f"<line class='cursor' y1='{TOP}' y2='{BOTTOM}'/><rect x='{LEFT}' y='{TOP}' width='{RIGHT - LEFT}' "
                  f"height='{BOTTOM - TOP}' fill='transparent'/>")  # fmt: skip
    legend = "".join(
        f"<span><i class='{'faint' if line.color < 0 else ''}' style='background:{_color(line)}'></i>"
        f"{html.escape(line.name)}</span>"
        for line in chart.series
    )
    legend += "".join(f"<span><i class='level'></i>{html.escape(name)}</span>" for name in chart.levels)
    data = {
        "x0": x0, "x1": x1, "left": LEFT, "right": RIGHT, "width": WIDTH, "time": chart.time, "label": chart.x_label,
        "series": [{"name": line.name, "x": line.x, "y": [float(f"{y:.6g}") for y in line.y], "color": _color(line)}
                   for line in chart.series],
    }  # fmt: skip
    return (
        f'<figure data-chart="{html.escape(json.dumps(data))}"><figcaption>{html.escape(chart.title)}</figcaption>'
        f"<div class='legend'>{legend}</div><svg viewBox='0 0 {WIDTH} {HEIGHT}' role='img' "
        f"aria-label='{html.escape(chart.title)}'>{''.join(shapes)}</svg><div class='tip'></div></figure>"
    )


def _color(line: Series) -> str:
    return f"var(--c{max(line.color, 0)})"


def ticks(low: float, high: float) -> list[float]:
    """About five round numbers that enclose low..high."""
    if not high > low:
        low, high = low - (abs(low) * 0.1 or 1.0), high + (abs(high) * 0.1 or 1.0)
    raw = (high - low) / 4
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(step * number, 10) for number in range(first, last + 1)]


def _x_ticks(x0: float, x1: float, chart: Chart) -> list[tuple[float, str]]:
    if not chart.time:
        if chart.x_label == "epoch":
            width = max(1, math.ceil((x1 - x0) / 8))
            return [(float(x), str(x)) for x in range(int(x0), int(x1) + 1, width)]
        return [(x, number_text(x)) for x in ticks(x0, x1) if x0 <= x <= x1] if x1 > x0 else [(x0, number_text(x0))]
    days = (x1 - x0) / 86_400e6
    shape = "%Y" if days > 1500 else "%b %Y" if days > 120 else "%d %b" if days > 4 else "%d %b %H:%M"
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
