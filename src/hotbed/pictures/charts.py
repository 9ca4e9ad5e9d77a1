# SPDX-License-Identifier: Apache-2.0
"""Draw plots as SVG for one HTML page, without a plotting library.

A plot has axes, lines and a legend, and holds its data for the script of the page.
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from hotbed.pictures.numbers import Language, number_text

WIDTH = 560
HEIGHT = 250
LEFT = 52
RIGHT = 546
TOP = 12
BOTTOM = 218
COLORS = 8
_BY_SECONDS = 3600e6  # spans of time, in microseconds, whose moments are shown to the second


@dataclass
class Series:
    """One line of a plot.

    Attributes:
        name: text in the legend.
        x: ascending.
        y: one value for each of `x`.
        color: number of a colour from 0 to 7; -1 draws a thin, faint line.
        dots: draw a dot at each point.
        ends: the ends of an interval around each of `y`, drawn as a band; none = no band.
    """

    name: str
    x: list[float]
    y: list[float]
    color: int = 0
    dots: bool = False
    ends: list[tuple[float, float]] = field(default_factory=list)


@dataclass
class Chart:
    """One plot.

    Attributes:
        title: text above the plot.
        x_label: text below the x axis.
        series: the lines, at least one.
        time: x is in microseconds UTC.
        marks: x positions that get a dashed line, by name.
        levels: y positions that get a dashed line, by name.
        from_zero: the y axis begins at 0.
        x_bounds: begin and end of the x axis; None = those of the series.
        language: of the numbers.
    """

    title: str
    x_label: str
    series: list[Series] = field(default_factory=list)
    time: bool = False
    marks: Mapping[str, float] = field(default_factory=dict)
    levels: Mapping[str, float] = field(default_factory=dict)
    from_zero: bool = False
    x_bounds: tuple[float, float] | None = None
    language: Language = "en"


@dataclass(frozen=True)
class _Axes:
    """Map values to places in the picture."""

    x0: float
    x1: float
    low: float
    high: float
    steps: list[float]  # the numbers on the y axis

    @classmethod
    def of(cls, chart: Chart) -> _Axes:
        xs = [x for line in chart.series for x in line.x]
        ys = [y for line in chart.series for y in line.y] + list(chart.levels.values())
        ys += [y for line in chart.series for ends in line.ends for y in ends]
        x0, x1 = chart.x_bounds or (min(xs), max(xs))
        low = 0.0 if chart.from_zero else min(ys)
        steps = ticks(low, max(ys))
        return cls(x0, x1, min(low, steps[0]), max(*ys, steps[-1]), steps)

    def x(self, x: float) -> float:
        """Return the place of a value of the x axis."""
        span = (self.x1 - self.x0) or 1.0
        return LEFT + (x - self.x0) / span * (RIGHT - LEFT)

    def y(self, y: float) -> float:
        """Return the place of a value of the y axis."""
        span = (self.high - self.low) or 1.0
        return BOTTOM - (y - self.low) / span * (BOTTOM - TOP)


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
        f"<svg viewBox='0 0 {WIDTH} {HEIGHT}' role='img' aria-label='{title}'>"
        f"{''.join(shapes)}</svg>"
        "<div class='tip'></div></figure>"
    )


def _scales(chart: Chart, axes: _Axes) -> list[str]:
    """Return lines and numbers of the y axis, and the labels of the x axis."""
    shapes = []
    for step in axes.steps:
        y = axes.y(step)
        shapes.append(_level_line("axis", y))
        place = f"x='{LEFT - 8}' y='{y + 4:.1f}' text-anchor='end'"
        shapes.append(f"<text {place}>{number_text(step, chart.language)}</text>")
    for number, (tick, label) in enumerate(_x_ticks(axes.x0, axes.x1, chart)):
        x = axes.x(tick)
        anchor = "end" if x > RIGHT - 30 else "middle"
        between = " class='between'" if number % 2 else ""  # left out where the page is narrow
        place = f"x='{x:.1f}' y='{BOTTOM + 18}' text-anchor='{anchor}'{between}"
        shapes.append(f"<text {place}>{label}</text>")
    label = html.escape(chart.x_label)
    shapes.append(f"<text x='{RIGHT}' y='{BOTTOM + 32}' text-anchor='end'>{label}</text>")
    return shapes


def _marks(chart: Chart, axes: _Axes) -> list[str]:
    """Return dashed lines at named places of both axes."""
    shapes = []
    for name, mark in chart.marks.items():
        x = axes.x(mark)
        beside = f"x='{x + 5:.1f}'"
        if x > (LEFT + RIGHT) / 2:
            beside = f"x='{x - 5:.1f}' text-anchor='end'"
        shapes.append(
            f"<line class='mark' x1='{x:.1f}' x2='{x:.1f}' y1='{TOP}' y2='{BOTTOM}'/>"
            f"<text {beside} y='{TOP + 9}'>{html.escape(name)}</text>"
        )
    return shapes + [_level_line("mark", axes.y(y)) for y in chart.levels.values()]


def _level_line(kind: str, y: float) -> str:
    return f"<line class='{kind}' x1='{LEFT}' x2='{RIGHT}' y1='{y:.1f}' y2='{y:.1f}'/>"


def _line(line: Series, axes: _Axes) -> list[str]:
    """Return a line, and its dots."""
    places = [(axes.x(x), axes.y(y)) for x, y in zip(line.x, line.y, strict=True)]
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    kind = "plot faint" if line.color < 0 else "plot"
    color = _color(line)
    shapes = [f"<polyline class='{kind}' stroke='{color}' points='{points}'/>"]
    if line.ends:
        shapes.insert(0, _band(line, axes))
    if line.dots:
        for x, y in places:
            shapes.append(f"<circle cx='{x:.1f}' cy='{y:.1f}' r='2.6' fill='{color}'/>")
    return shapes


def _band(line: Series, axes: _Axes) -> str:
    """Return the area between the ends of intervals; of one point it is a stroke."""
    lows = [(axes.x(x), axes.y(low)) for x, (low, _) in zip(line.x, line.ends, strict=True)]
    highs = [(axes.x(x), axes.y(high)) for x, (_, high) in zip(line.x, line.ends, strict=True)]
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in [*lows, *reversed(highs)])
    color = _color(line)
    return (
        f"<polygon points='{points}' fill='{color}' fill-opacity='.15' stroke='{color}' "
        "stroke-opacity='.3' stroke-width='1'/>"
    )


def _legend(chart: Chart) -> str:
    entries = []
    for line in chart.series:
        kind = "faint" if line.color < 0 else ""
        swatch = f"<i class='{kind}' style='background:{_color(line)}'></i>"
        entries.append(f"<span>{swatch}{html.escape(line.name)}</span>")
    for name in chart.levels:
        entries.append(f"<span><i class='level'></i>{html.escape(name)}</span>")
    return "".join(entries)


def _data(chart: Chart, axes: _Axes) -> dict[str, Any]:
    """Return the values that the script of the page shows at the pointer."""
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
        "seconds": chart.time and axes.x1 - axes.x0 < _BY_SECONDS,
        "language": chart.language,
        "label": chart.x_label,
        "series": series,
    }


def _color(line: Series) -> str:
    return f"var(--c{max(line.color, 0)})"


def ticks(low: float, high: float) -> list[float]:
    """Return about five round numbers that enclose low..high."""
    if not high > low:
        low = low - (abs(low) * 0.1 or 1.0)
        high = high + (abs(high) * 0.1 or 1.0)
    distance = (high - low) / 4
    power = 10.0 ** math.floor(math.log10(distance))
    steps = [power * factor for factor in (1, 2, 2.5, 5, 10)]
    step = next(step for step in steps if step >= distance * 0.999)
    first = math.floor(low / step + 1e-9)
    last = math.ceil(high / step - 1e-9)
    return [round(step * number, 10) for number in range(first, last + 1)]


def _x_ticks(x0: float, x1: float, chart: Chart) -> list[tuple[float, str]]:
    """Return places on the x axis and their labels."""
    if chart.time:
        return _time_ticks(x0, x1)
    if chart.x_label == "epoch":
        width = max(1, math.ceil((x1 - x0) / 8))
        return [(float(x), str(x)) for x in range(int(x0), int(x1) + 1, width)]
    if not x1 > x0:
        return [(x0, number_text(x0, chart.language))]
    return [(x, number_text(x, chart.language)) for x in ticks(x0, x1) if x0 <= x <= x1]


def _time_ticks(x0: float, x1: float) -> list[tuple[float, str]]:
    """Return five moments and their texts, as exact as the span asks for."""
    days = (x1 - x0) / 86_400e6
    if days > 1500:
        layout = "%Y"
    elif days > 120:
        layout = "%b %Y"
    elif days > 4:
        layout = "%d %b"
    elif x1 - x0 >= _BY_SECONDS or not x1 > x0:
        layout = "%d %b %H:%M"
    else:
        layout = "%H:%M:%S"
    places = [x0]
    if x1 > x0:
        places = [x0 + (x1 - x0) * part / 4 for part in range(5)]
    labels = [datetime.fromtimestamp(x / 1e6, UTC).strftime(layout) for x in places]
    return list(zip(places, labels, strict=True))
