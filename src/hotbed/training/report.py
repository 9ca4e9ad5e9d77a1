# SPDX-License-Identifier: Apache-2.0
"""The report: one HTML file with what happened in training, that opens anywhere, without a network or a library.

write_report("report.html", {"train": model.fit(train, valid), "stream": model.fit(stream, progressive=True)})
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from itertools import pairwise
from pathlib import Path
from string import Template
from typing import Any

from hotbed.metrics.chart import COLORS, Chart, Series, figure, number_text
from hotbed.metrics.history import History, Point
from hotbed.metrics.served import Served
from hotbed.metrics.windows import Window

_MORE_CARDS, _MORE_SECTIONS = "<!-- more cards -->", "<!-- more sections -->"  # where `add_serving` writes


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
    end, such as `model.summary()`. Where the callback `Windows` cut a stream, metrics, tables, freshness and lag are
    drawn over event time; `history.compared["frozen"] = other_windows.points` draws another model's beside them.
    """
    parts = [
        ("Learning", "Mean loss of the batches since the point before, and metrics of each epoch.", _learning(histories)),
        ("The stream", "Each batch was predicted before it was learned, as a server would have scored it.", _stream(histories)),
        ("What came and went", "In each window of the stream.", _flow_of_windows(histories)),
        ("Tables", "Rows that each table holds.", _sizes(histories)),
        ("Admission and eviction", "Ids admitted, refused (once a batch) and evicted, in total so far.", _flows(histories)),
    ]  # fmt: skip
    sections = [_section(name, text, charts, small=name.startswith("Adm")) for name, text, charts in parts if charts]
    sections += [_MORE_SECTIONS, _tables(histories)]
    if summary:
        sections.append(f"<h2>Model</h2><div class='box'><pre>{html.escape(summary)}</pre></div>")
    cards = {**number_texts(histories), **(facts or {})}
    template = Template(resources.files("hotbed.training").joinpath("report.html").read_text(encoding="utf-8"))
    page = template.safe_substitute(
        title=html.escape(title),
        subtitle=html.escape(subtitle),
        cards=_cards(cards),
        sections="\n".join(sections),
    )
    path = Path(path)
    path.write_text(page, encoding="utf-8")
    return path


def add_serving(path: str | Path, served: Served) -> dict[str, float]:
    """Add to a report how a server answered while it followed the training; returns the numbers on its cards."""
    page, numbers = Path(path).read_text(encoding="utf-8"), served.numbers()
    told = "A server followed the training and was asked all the while. Each point of freshness is a version."
    section = _section("Serving", told, served.charts(), small=False)
    for mark, more in (_MORE_CARDS, _cards(numbers)), (_MORE_SECTIONS, section):
        page = page.replace(mark, more + mark)
    Path(path).write_text(page, encoding="utf-8")
    return numbers


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
        if history.windows:
            charts += _metrics_of_windows(history)
            continue
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
            charts.append(Chart(f"{_shown(key)} over {label}", label, lines, time=timed))
    return charts


def _shown(key: str) -> str:
    """A metric's name for people: AUC, log loss."""
    words = {"auc": "AUC", "gauc": "GAUC", "ndcg": "NDCG"}
    label, _, name = key.rpartition(".")
    name, _, group = name.partition("@")
    text = words.get(name, name.replace("_", " ") if label else name.replace("_", " ").capitalize())
    return (f"{label}: " if label else "") + text + (f" by {group}" if group else "")


LEVELS = {"calibration": {"calibrated": 1.0}, "normalized_entropy": {"knows the mean only": 1.0}}


def _metrics_of_windows(history: History) -> list[Chart]:
    charts = []
    for key in _worth(key for window in history.windows for key in window.values):
        lines = []
        named = {"window": history.windows, **history.compared}
        for color, (name, windows) in zip((0, 2, 3, 4, 5, 6, 7), named.items(), strict=False):
            kept = [w for w in windows if math.isfinite(w.values.get(key, math.nan))]
            if kept:
                lines.append(_line(name, kept, [w.values[key] for w in kept], color))
        if lines and key in history.metrics and math.isfinite(history.metrics[key]):
            ends = [lines[0].x[0], lines[0].x[-1]]
            lines.append(Series("whole stream", ends, [history.metrics[key]] * 2, 1))
        if lines:
            levels = LEVELS.get(key.rpartition(".")[2], {})
            charts.append(_over(f"{_shown(key)}", history.windows, lines, levels=levels))
    return charts


def _flow_of_windows(histories: Mapping[str, History]) -> list[Chart]:
    """Events, ids, rows, bytes, freshness and lag, for each history that has windows."""
    charts = []
    for name, windows in ((name, history.windows) for name, history in histories.items() if len(history.windows) > 1):
        suffix = f", {name}" if sum(bool(history.windows) for history in histories.values()) > 1 else ""
        charts.append(
            _over("Events" + suffix, windows, [_line("events", windows, [w.rows for w in windows], 0)], zero=True)
        )
        flows = [
            _line(key, windows[1:], [_sum(b, key) - _sum(a, key) for a, b in pairwise(windows)], color)
            for color, key in ((2, "admitted"), (7, "refused"), (1, "evicted"))
        ]
        if any(any(line.y) for line in flows):
            charts.append(_over("Ids" + suffix, windows, [line for line in flows if any(line.y)], zero=True))
        if any(w.tables for w in windows):
            rows = [_line("rows", windows, [_sum(w, "rows") for w in windows], 3)]
            charts.append(_over("Rows of all tables" + suffix, windows, rows, zero=True))
        for key, (title, unit, factor) in OBSERVED.items():
            kept = [w for w in windows if key in w.observed]
            values = [w.observed[key] * factor for w in kept]
            replayed = key == "freshness_seconds" and values and min(values) > 86_400
            if any(values) and not replayed:  # history that is played again is not stale
                charts.append(_over(title + suffix, windows, [_line(unit, kept, values, 6)], zero=True))
    return charts


# observation -> title, name of the line, unit
OBSERVED = {
    "bytes": ("Memory of all tables", "MiB", 2.0**-20),
    "freshness_seconds": ("Freshness", "seconds from event to learned", 1.0),
    "lag_rows": ("Lag", "rows waiting at the source", 1.0),
    "skipped_rows": ("Skipped rows", "so far", 1.0),
    "dead_letters": ("Dead letters", "so far", 1.0),
    "skipped_batches": ("Skipped batches", "so far", 1.0),
}


def _timed(windows: Sequence[Window]) -> bool:
    return all(window.end is not None for window in windows)


def _line(name: str, windows: Sequence[Window], values: Sequence[float], color: int) -> Series:
    x = [float(w.end if w.end is not None else w.samples) for w in windows]
    return Series(name, x, [float(value) for value in values], color, len(x) <= 60)


def _over(
    title: str,
    windows: Sequence[Window],
    lines: list[Series],
    *,
    levels: Mapping[str, float] | None = None,
    zero: bool = False,
) -> Chart:
    """A chart over event time, where windows have it, else over samples."""
    timed = _timed(windows)
    label = "event time" if timed else "samples"
    return Chart(f"{title} over {label}", label, lines, time=timed, levels=levels or {}, from_zero=zero)


def _sum(window: Window, key: str) -> int:
    return sum(stats.get(key, 0) for stats in window.tables.values())


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


def number_texts(histories: Mapping[str, History]) -> dict[str, Any]:
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
        rows = [[number_text(epoch.get(key, "")) for key in keys] for epoch in history.epochs]
        if rows:
            blocks.append(
                f"<h2>Epochs, {html.escape(name)}</h2>" + _grid([key.replace("_", " ") for key in keys], rows)
            )
    last = next((history.points[-1] for history in reversed(list(histories.values())) if history.points), None)
    if last is not None and last.tables:
        keys = list(next(iter(last.tables.values())))
        rows = [[name, *(number_text(stats.get(key, "")) for key in keys)] for name, stats in last.tables.items()]
        blocks.append("<h2>Tables at the end</h2>" + _grid(["table", *(key.replace("_", " ") for key in keys)], rows))
    return "\n".join(blocks)


# --- parts of the page -----------------------------------------------------------------------------------------------


def _cards(cards: Mapping[str, Any]) -> str:
    return "".join(
        f"<div class='card'><b>{html.escape(number_text(value))}</b><span>{html.escape(name)}</span></div>"
        for name, value in cards.items()
    )


def _section(name: str, text: str, charts: Sequence[Chart], small: bool) -> str:
    figures = "\n".join(figure(chart) for chart in charts)
    return f"<h2>{name}</h2><p>{text}</p><div class='grid{' small' if small else ''}'>{figures}</div>"


def _grid(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    top = "".join(f"<th>{html.escape(cell)}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<div class='box'><table><tr>{top}</tr>{body}</table></div>"


def _smooth(values: Sequence[float]) -> list[float]:
    """Exponential mean over about a twentieth of the points."""
    keep = 1.0 - 1.0 / max(2.0, len(values) / 20)
    out, mean, weight = [], 0.0, 0.0
    for value in values:
        mean, weight = keep * mean + (1.0 - keep) * value, keep * weight + 1.0 - keep
        out.append(mean / weight)
    return out
