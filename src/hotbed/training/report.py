# SPDX-License-Identifier: Apache-2.0
"""The report: one HTML file with what happened in training, that opens anywhere, without a network or a library.

write_report("report.html", {"train": model.fit(train, valid), "stream": model.fit(stream, progressive=True)})
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from hotbed.training.watch import History, Point

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
    """One plot. `time`: x is in microseconds UTC; `marks`: names of x positions that get a dashed line."""

    title: str
    x_label: str
    series: list[Series] = field(default_factory=list)
    time: bool = False
    marks: Mapping[str, float] = field(default_factory=dict)
    from_zero: bool = False


def write_report(
    path: str | Path,
    histories: Mapping[str, History],
    *,
    title: str = "Training report",
    subtitle: str = "",
    facts: Mapping[str, Any] | None = None,
    summary: str = "",
) -> Path:
    """Write a self-contained page about one or several `fit`s, in the order they ran; returns its path.

    `histories`: by name, such as train and stream. `facts`: more numbers for the cards on top. `summary`: text for the
    end, such as `model.summary()`.
    """
    parts = [
        ("Learning", "Mean loss of the batches since the point before, and metrics of each epoch.", _learning(histories)),
        ("The stream", "Each batch was predicted before it was learned, as a server would have scored it.", _stream(histories)),
        ("Tables", "Rows that each table holds.", _sizes(histories)),
        ("Admission and eviction", "Ids admitted, refused (once a batch) and evicted, in total so far.", _flows(histories)),
    ]  # fmt: skip
    sections = [_section(name, text, charts, small=name.startswith("Adm")) for name, text, charts in parts if charts]
    sections.append(_tables(histories))
    if summary:
        sections.append(f"<h2>Model</h2><div class='box'><pre>{html.escape(summary)}</pre></div>")
    cards = {**_numbers(histories), **(facts or {})}
    template = Template(resources.files("hotbed.training").joinpath("report.html").read_text(encoding="utf-8"))
    page = template.safe_substitute(
        title=html.escape(title),
        subtitle=html.escape(subtitle),
        cards="".join(
            f"<div class='card'><b>{html.escape(_number(value))}</b><span>{html.escape(name)}</span></div>"
            for name, value in cards.items()
        ),
        sections="\n".join(sections),
    )
    path = Path(path)
    path.write_text(page, encoding="utf-8")
    return path


# --- what is drawn --------------------------------------------------------------------------------------------------


def _learning(histories: Mapping[str, History]) -> list[Chart]:
    charts = []
    for name, history in histories.items():
        points = [point for point in history.points if math.isfinite(point.loss)]
        if points:
            x, y = [float(point.samples) for point in points], [point.loss for point in points]
            smooth = Series("smoothed", x, _smooth(y), 0)
            lines = [Series("loss", x, y, -1), smooth] if len(points) > 20 else [Series("loss", x, y, 0, dots=True)]
            charts.append(Chart(f"Loss, {name}", "samples", lines))
        valid = _worth(key for epoch in history.epochs for key in epoch if key.startswith("valid."))
        for key in valid if len(history.epochs) > 1 else []:
            x = [epoch["epoch"] for epoch in history.epochs if key in epoch]
            y = [epoch[key] for epoch in history.epochs if key in epoch]
            charts.append(
                Chart(key.replace("valid.", "Validation ").replace("_", " "), "epoch", [Series(key, x, y, 2, True)])
            )
    return charts


def _stream(histories: Mapping[str, History]) -> list[Chart]:
    charts = []
    for history in histories.values():
        points = [point for point in history.points if point.window]
        timed = bool(points) and all(point.time is not None for point in points)
        x = [float(point.time if timed and point.time is not None else point.samples) for point in points]
        for key in _worth(points[0].window) if points else []:
            kept = [
                (at, point.window[key]) for at, point in zip(x, points, strict=True) if math.isfinite(point.window[key])
            ]
            if len(kept) < 2:
                continue
            lines = [Series("window", [at for at, _ in kept], [value for _, value in kept], 0, len(kept) <= 60)]
            if key in history.metrics:
                lines.append(Series("whole stream", [kept[0][0], kept[-1][0]], [history.metrics[key]] * 2, 1))
            label = "event time" if timed else "samples"
            name = key.rpartition(".")[2]
            shown = key.replace("_", " ") if name == "loss" or "_" in name else key.upper()
            charts.append(Chart(f"{shown} over {label}", label, lines, time=timed))
    return charts


def _worth(names: Iterable[str]) -> list[str]:
    """Metric names, each once: the loss last, and left out where the log loss says the same."""
    kept = sorted(set(names), key=lambda name: (name.rpartition(".")[2] in ("loss", "log_loss"), name))
    return [name for name in kept if not (name.endswith("loss") and name.removesuffix("loss") + "log_loss" in kept)]


def _joined(histories: Mapping[str, History]) -> tuple[list[tuple[float, Point]], dict[str, float]]:
    """All points on one axis of samples, and where each history but the first begins."""
    joined: list[tuple[float, Point]] = []
    marks: dict[str, float] = {}
    before = 0.0
    for name, history in histories.items():
        if joined:
            marks[name] = before
        joined += [(before + point.samples, point) for point in history.points]
        before = joined[-1][0] if joined else 0.0
    return joined, marks


def _sizes(histories: Mapping[str, History]) -> list[Chart]:
    joined, marks = _joined(histories)
    names = list(joined[-1][1].tables) if joined else []
    lines = [
        Series(
            name, [x for x, _ in joined], [float(point.tables[name]["rows"]) for _, point in joined], number % COLORS
        )
        for number, name in enumerate(names)
    ]
    if not lines:
        return []
    largest = max(lines[-1].y[-1] if not line.y else max(line.y) for line in lines)
    small = [line for line in lines if max(line.y) < largest / 20]
    large = [line for line in lines if line not in small]
    charts = [Chart("Rows", "samples", large, marks=marks, from_zero=True)]
    return [*charts, Chart("Rows, small tables", "samples", small, marks=marks, from_zero=True)] if small else charts


def _flows(histories: Mapping[str, History]) -> list[Chart]:
    joined, marks = _joined(histories)
    charts = []
    for name in joined[-1][1].tables if joined else []:
        lines = []
        for color, key in ((2, "admitted"), (7, "refused"), (1, "evicted")):
            y = [float(point.tables[name].get(key, 0)) for _, point in joined]
            if any(y):
                lines.append(Series(key, [x for x, _ in joined], y, color))
        if lines:
            charts.append(Chart(name, "samples", lines, marks=marks, from_zero=True))
    return charts


def _numbers(histories: Mapping[str, History]) -> dict[str, Any]:
    """The numbers on the cards: newest metrics of each history, speed, rows."""
    numbers: dict[str, Any] = {}
    for name, history in histories.items():
        for key, value in history.metrics.items():
            plain = key.removeprefix("valid.")
            if plain.rpartition(".")[2] != "loss":
                kind = "validation" if key.startswith("valid.") else name
                numbers[f"{kind} {plain.replace('_', ' ')}"] = value
        if history.epochs:
            numbers[f"samples/s, {name}"] = history.epochs[-1]["samples_per_second"]
    last = next((history.points[-1] for history in reversed(list(histories.values())) if history.points), None)
    if last is not None and last.tables:
        numbers["rows in all tables"] = sum(stats["rows"] for stats in last.tables.values())
    return numbers


def _tables(histories: Mapping[str, History]) -> str:
    blocks = []
    for name, history in histories.items():
        keys = list(dict.fromkeys(key for epoch in history.epochs for key in epoch))
        rows = [[_number(epoch.get(key, "")) for key in keys] for epoch in history.epochs]
        if rows:
            blocks.append(
                f"<h2>Epochs, {html.escape(name)}</h2>" + _grid([key.replace("_", " ") for key in keys], rows)
            )
    last = next((history.points[-1] for history in reversed(list(histories.values())) if history.points), None)
    if last is not None and last.tables:
        keys = list(next(iter(last.tables.values())))
        rows = [[name, *(_number(stats.get(key, "")) for key in keys)] for name, stats in last.tables.items()]
        blocks.append("<h2>Tables at the end</h2>" + _grid(["table", *(key.replace("_", " ") for key in keys)], rows))
    return "\n".join(blocks)


# --- how it is drawn ------------------------------------------------------------------------------------------------


def _section(name: str, text: str, charts: Sequence[Chart], small: bool) -> str:
    figures = "\n".join(_figure(chart) for chart in charts)
    return f"<h2>{name}</h2><p>{text}</p><div class='grid{' small' if small else ''}'>{figures}</div>"


def _figure(chart: Chart) -> str:
    xs = [x for line in chart.series for x in line.x]
    ys = [y for line in chart.series for y in line.y]
    x0, x1 = min(xs), max(xs)
    low, high = (0.0 if chart.from_zero else min(ys)), max(ys)
    steps = _ticks(low, high)
    low, high = min(low, steps[0]), max(high, steps[-1])

    def place_x(x: float) -> float:
        return LEFT + (x - x0) / ((x1 - x0) or 1.0) * (RIGHT - LEFT)

    def place_y(y: float) -> float:
        return BOTTOM - (y - low) / ((high - low) or 1.0) * (BOTTOM - TOP)

    shapes = [
        f"<line class='axis' x1='{LEFT}' x2='{RIGHT}' y1='{place_y(y):.1f}' y2='{place_y(y):.1f}'/>"
        f"<text x='{LEFT - 8}' y='{place_y(y) + 4:.1f}' text-anchor='end'>{_number(y)}</text>"
        for y in steps
    ]
    shapes += [
        f"<text x='{place_x(x):.1f}' y='{BOTTOM + 18}' text-anchor='middle'>{label}</text>"
        for x, label in _x_ticks(x0, x1, chart)
    ]
    shapes.append(f"<text x='{RIGHT}' y='{BOTTOM + 32}' text-anchor='end'>{html.escape(chart.x_label)}</text>")
    for name, x in chart.marks.items():
        shapes.append(f"<line class='mark' x1='{place_x(x):.1f}' x2='{place_x(x):.1f}' y1='{TOP}' y2='{BOTTOM}'/>"
                      f"<text x='{place_x(x) + 5:.1f}' y='{TOP + 9}'>{html.escape(name)}</text>")  # fmt: skip
    for line in chart.series:
        placed = [(place_x(x), place_y(y)) for x, y in zip(line.x, line.y, strict=True)]
        shapes.append(f"<polyline class='plot{' faint' if line.color < 0 else ''}' stroke='{_color(line)}' points='"
                      + " ".join(f"{x:.1f},{y:.1f}" for x, y in placed) + "'/>")  # fmt: skip
        if line.dots:
            shapes += [f"<circle cx='{x:.1f}' cy='{y:.1f}' r='2.6' fill='{_color(line)}'/>" for x, y in placed]
    shapes.append(f"<line class='cursor' y1='{TOP}' y2='{BOTTOM}'/><rect x='{LEFT}' y='{TOP}' width='{RIGHT - LEFT}' "
                  f"height='{BOTTOM - TOP}' fill='transparent'/>")  # fmt: skip
    legend = "".join(f"<span><i style='background:{_color(line)}'></i>{html.escape(line.name)}</span>"
                     for line in chart.series)  # fmt: skip
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


def _grid(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    top = "".join(f"<th>{html.escape(cell)}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<div class='box'><table><tr>{top}</tr>{body}</table></div>"


def _ticks(low: float, high: float) -> list[float]:
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
        return [(x, _number(x)) for x in _ticks(x0, x1) if x0 <= x <= x1 or x1 == x0]
    days = (x1 - x0) / 86_400e6
    shape = "%Y" if days > 1500 else "%b %Y" if days > 120 else "%d %b" if days > 4 else "%d %b %H:%M"
    places = [x0 + (x1 - x0) * part / 4 for part in range(5)]
    return [(x, datetime.fromtimestamp(x / 1e6, UTC).strftime(shape)) for x in places]


def _smooth(values: Sequence[float]) -> list[float]:
    """Exponential mean over about a twentieth of the points."""
    keep = 1.0 - 1.0 / max(2.0, len(values) / 20)
    out, mean, weight = [], 0.0, 0.0
    for value in values:
        mean, weight = keep * mean + (1.0 - keep) * value, keep * weight + 1.0 - keep
        out.append(mean / weight)
    return out


def _number(value: Any) -> str:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return str(value)
    if not math.isfinite(value):
        return "–"
    if abs(value) >= 1e6:
        return f"{value / 1e6:,.4g} M"
    if float(value).is_integer() or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4f}".rstrip("0").rstrip(".") if abs(value) >= 1e-3 else f"{value:.2g}"
