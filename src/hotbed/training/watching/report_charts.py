# SPDX-License-Identifier: Apache-2.0
"""The charts of the report: which of a history's numbers are drawn, over what, beside what."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from hotbed.training.watching.chart import COLORS, Chart, Series
from hotbed.training.watching.history import History, Point
from hotbed.training.watching.window_log import Window

VALID = "valid."
VALID_LOSS = VALID + "loss"
MOST_LINES = 6  # tables that get a line or a chart of their own; the others are drawn together
FLOWS = {"admitted": 2, "refused": 7, "evicted": 1}  # counter of a table -> colour of its line


def learning(histories: Mapping[str, History]) -> list[Chart]:
    charts = []
    for name, history in histories.items():
        points = [point for point in history.points if math.isfinite(point.loss)]
        if points:
            charts.append(Chart(f"Loss, {name}", "samples", _losses(history, points)))
        valid = _worth(key for epoch in history.epochs for key in epoch if key.startswith(VALID))
        for key in valid if len(history.epochs) > 1 else []:
            x = [epoch["epoch"] for epoch in history.epochs if key in epoch]
            y = [epoch[key] for epoch in history.epochs if key in epoch]
            title = "Validation " + _shown(key.removeprefix(VALID), sentence=False)
            charts.append(Chart(title, "epoch", [Series(key, x, y, 2, True)]))
    return charts


def _losses(history: History, points: Sequence[Point]) -> list[Series]:
    """The training loss over samples, and the validation loss at the end of each epoch."""
    x = [float(point.samples) for point in points]
    y = [point.loss for point in points]
    if len(points) > 20:
        lines = [Series("training", x, y, -1), Series("training, smoothed", x, _smooth(y), 0)]
    else:
        lines = [Series("training", x, y, 0, dots=True)]
    ends: dict[float, float] = {point.epoch + 1: float(point.samples) for point in history.points}
    valid = [
        (ends[epoch["epoch"]], epoch[VALID_LOSS])
        for epoch in history.epochs
        if _validated(epoch, ends)
    ]
    if valid:
        lines.append(
            Series(
                "validation", [end for end, _ in valid], [loss for _, loss in valid], 1, dots=True
            )
        )
    return lines


def _validated(epoch: Mapping[str, float], ends: Mapping[float, float]) -> bool:
    return math.isfinite(epoch.get(VALID_LOSS, math.nan)) and epoch["epoch"] in ends


def reliability(histories: Mapping[str, History]) -> list[Chart]:
    charts = []
    for name, history in histories.items():
        for key, reliability in history.reliability.items():
            points = reliability.curve()
            if not points:
                continue
            part, _, label = key.partition(".")
            shown = ", ".join(
                filter(None, [name, "validation" if part == "valid" else part, label])
            )
            predicted = [x for x, _ in points]
            end = max(max(point) for point in points)
            lines = [
                Series("predictions are probabilities", [0.0, end], [0.0, end], 7),
                Series("observed", predicted, [y for _, y in points], 0, dots=True),
            ]
            charts.append(
                Chart(
                    f"Share of positives, {shown}", "predicted probability", lines, from_zero=True
                )
            )
    return charts


def stream(histories: Mapping[str, History]) -> list[Chart]:
    charts = []
    for history in histories.values():
        if history.windows:
            charts += _metrics_of_windows(history)
            continue
        points = [point for point in history.points if point.window]
        timed = bool(points) and all(point.time is not None for point in points)
        x = [
            float(point.time if timed and point.time is not None else point.samples)
            for point in points
        ]
        for key in _worth(points[0].window) if points else []:
            kept = [
                (at, point.window[key])
                for at, point in zip(x, points, strict=True)
                if math.isfinite(point.window[key])
            ]
            if len(kept) < 2:
                continue
            lines = [
                Series(
                    "window",
                    [at for at, _ in kept],
                    [value for _, value in kept],
                    0,
                    len(kept) <= 60,
                )
            ]
            if key in history.metrics:
                lines.append(
                    Series("whole stream", [kept[0][0], kept[-1][0]], [history.metrics[key]] * 2, 1)
                )
            label = "event time" if timed else "samples"
            charts.append(Chart(f"{_shown(key)} over {label}", label, lines, time=timed))
    return charts


def _shown(key: str, sentence: bool = True) -> str:
    """A metric's name for people: AUC, log loss; the first word in capitals where it begins a
    `sentence`.
    """
    words = {"auc": "AUC", "gauc": "GAUC", "ndcg": "NDCG"}
    label, _, name = key.rpartition(".")
    name, _, group = name.partition("@")
    text = words.get(name, name.replace("_", " "))
    if sentence and not label and name not in words:
        text = text.capitalize()
    return (f"{label}: " if label else "") + text + (f" by {group}" if group else "")


LEVELS = {"calibration": {"calibrated": 1.0}, "normalized_entropy": {"knows the mean only": 1.0}}


def _metrics_of_windows(history: History) -> list[Chart]:
    charts = []
    for key in _worth(key for window in history.windows for key in window.values):
        lines = []
        named = {"window": history.windows, **history.compared}
        for color, (name, windows) in zip((0, 7, 2, 3, 4, 5, 6), named.items(), strict=False):
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


def flow_of_windows(histories: Mapping[str, History]) -> list[Chart]:
    """Events, ids, rows, bytes, freshness and lag, for each history that has windows."""
    charts = []
    for name, windows in (
        (name, history.windows) for name, history in histories.items() if len(history.windows) > 1
    ):
        suffix = (
            f", {name}" if sum(bool(history.windows) for history in histories.values()) > 1 else ""
        )
        charts.append(
            _over(
                "Events" + suffix,
                windows,
                [_line("events", windows, [w.rows for w in windows], 0)],
                zero=True,
            )
        )
        flows = [
            _line(
                key, windows[1:], [_sum(b, key) - _sum(a, key) for a, b in pairwise(windows)], color
            )
            for key, color in FLOWS.items()
        ]
        if any(any(line.y) for line in flows):
            charts.append(
                _over("Ids" + suffix, windows, [line for line in flows if any(line.y)], zero=True)
            )
        if any(w.tables for w in windows):
            rows = [_line("rows", windows, [_sum(w, "rows") for w in windows], 3)]
            charts.append(_over("Rows of all tables" + suffix, windows, rows, zero=True))
        for key, (title, unit, factor) in OBSERVED.items():
            kept = [w for w in windows if key in w.observed]
            values = [w.observed[key] * factor for w in kept]
            replayed = key == "freshness_seconds" and values and min(values) > 86_400
            if any(values) and not replayed:  # history that is played again is not stale
                charts.append(
                    _over(title + suffix, windows, [_line(unit, kept, values, 6)], zero=True)
                )
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
    return Chart(
        f"{title} over {label}", label, lines, time=timed, levels=levels or {}, from_zero=zero
    )


def _sum(window: Window, key: str) -> int:
    return sum(stats.get(key, 0) for stats in window.tables.values())


def _worth(names: Iterable[str]) -> list[str]:
    """Metric names, each once: the loss last, and left out where the log loss says the same."""
    kept = sorted(
        set(names), key=lambda name: (name.rpartition(".")[2] in ("loss", "log_loss"), name)
    )
    return [
        name
        for name in kept
        if not (name.endswith("loss") and name.removesuffix("loss") + "log_loss" in kept)
    ]


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


def sizes(histories: Mapping[str, History]) -> list[Chart]:
    joined, marks = _joined(histories)
    if not joined or not joined[-1][1].tables:
        return []
    x = [place for place, _ in joined]
    rows = {
        name: [float(point.tables[name]["rows"]) for _, point in joined]
        for name in joined[-1][1].tables
    }
    largest = max(max(values) for values in rows.values())
    groups = {
        "Rows": {name: values for name, values in rows.items() if max(values) >= largest / 20},
        "Rows, small tables": {
            name: values for name, values in rows.items() if max(values) < largest / 20
        },
    }
    charts = []
    for title, tables in groups.items():
        grouped = _grouped({name: [values] for name, values in tables.items()})
        lines = [
            Series(name, x, values, number % COLORS)
            for number, (name, (values,)) in enumerate(grouped.items())
        ]
        if lines:
            charts.append(Chart(title, "samples", lines, marks=marks, from_zero=True))
    return charts


def flows(histories: Mapping[str, History]) -> list[Chart]:
    joined, marks = _joined(histories)
    names = list(joined[-1][1].tables) if joined else []
    x = [place for place, _ in joined]
    counts = {
        name: [[float(point.tables[name].get(key, 0)) for _, point in joined] for key in FLOWS]
        for name in names
    }
    charts = []
    for name, flows in _grouped(counts).items():
        lines = [
            Series(key, x, y, color)
            for (key, color), y in zip(FLOWS.items(), flows, strict=True)
            if any(y)
        ]
        if lines:
            charts.append(Chart(name, "samples", lines, marks=marks, from_zero=True))
    return charts


def _grouped(tables: Mapping[str, list[list[float]]]) -> dict[str, list[list[float]]]:
    """The tables with the largest values at the end; the others summed up as one."""
    if len(tables) <= MOST_LINES:
        return dict(tables)
    order = sorted(
        tables, key=lambda name: sum(values[-1] for values in tables[name]), reverse=True
    )
    others = [tables[name] for name in order[MOST_LINES - 1 :]]
    shown = {name: tables[name] for name in tables if name in order[: MOST_LINES - 1]}
    total = [
        [sum(values) for values in zip(*lines, strict=True)] for lines in zip(*others, strict=True)
    ]
    return {**shown, f"{len(others)} other tables together": total}


def _smooth(values: Sequence[float]) -> list[float]:
    """Exponential mean over about a twentieth of the points."""
    keep = 1.0 - 1.0 / max(2.0, len(values) / 20)
    smooth = []
    mean = weight = 0.0
    for value in values:
        mean = keep * mean + (1.0 - keep) * value
        weight = keep * weight + 1.0 - keep
        smooth.append(mean / weight)
    return smooth
