# SPDX-License-Identifier: Apache-2.0
"""Choose what the report draws: which numbers of a history, over what, in which chart."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from hotbed.pictures.charts import Chart, Series
from hotbed.training.watching.points import Point
from hotbed.training.watching.window_log import Window

if TYPE_CHECKING:
    from hotbed.training.watching.history import History

VALID = "valid."
VALID_LOSS = VALID + "loss"
MOST_DOTS = 60  # points of a line that are drawn as dots
DAY_SECONDS = 86_400
LEARNING_TEXT = "Mean loss of the batches since the point before, and metrics of each epoch."
FLOWS = {"admitted": 2, "refused": 7, "evicted": 1}  # counter of a table -> colour of its line
BASELINE_COLORS = (7, 3, 4, 5, 6)
WINDOW_COLORS = (0, *BASELINE_COLORS, 2)
ACRONYMS = {"auc": "AUC", "gauc": "GAUC", "ndcg": "NDCG"}
# metric -> name and value of a level that it is compared with
LEVELS = {"calibration": {"calibrated": 1.0}, "normalized_entropy": {"knows the mean only": 1.0}}
# observation -> title, name of the line, unit
OBSERVED = {
    "bytes": ("Memory of all tables", "MiB", 2.0**-20),
    "freshness_seconds": ("Freshness", "seconds from event to learned", 1.0),
    "lag_rows": ("Lag", "rows waiting at the source", 1.0),
    "skipped_rows": ("Skipped rows", "so far", 1.0),
    "dead_letters": ("Dead letters", "so far", 1.0),
    "skipped_batches": ("Skipped batches", "so far", 1.0),
}


# --- epochs ---------------------------------------------------------------------------------------


def learning(histories: Mapping[str, History]) -> list[Chart]:
    """Return the loss of each history over samples, and metrics of validation over epochs."""
    charts = []
    for name, history in histories.items():
        points = [point for point in history.points if math.isfinite(point.loss)]
        if points:
            lines = _losses(history, points)
            marks = kept_mark(history, "samples")
            lines += _beside(lines[-1], _losses_of_baselines(history))
            charts.append(Chart(f"Loss, {name}", "samples", lines, marks=marks))
        if len(history.epochs) > 1:
            charts += _validation_metrics(history)
    return charts


def _validation_metrics(history: History) -> list[Chart]:
    charts = []
    names = [key for epoch in history.epochs for key in epoch if key.startswith(VALID)]
    for key in worth_drawing(names):
        epochs = [epoch for epoch in history.epochs if key in epoch]
        x = [epoch["epoch"] for epoch in epochs]
        y = [epoch[key] for epoch in epochs]
        title = "Validation " + metric_text(key.removeprefix(VALID), sentence=False)
        line = Series(key, x, y, color=2, dots=True)
        marks = kept_mark(history, "epoch")
        lines = [line, *_beside(line, values_of_baselines(history, key))]
        charts.append(Chart(title, "epoch", lines, marks=marks))
    return charts


def values_of_baselines(history: History, key: str) -> dict[str, float]:
    """Return the value of a metric of each baseline, by its name."""
    values = {name: figures.get(key, math.nan) for name, figures in history.baselines.items()}
    return {name: value for name, value in values.items() if math.isfinite(value)}


def _losses_of_baselines(history: History) -> dict[str, float]:
    """Return the log loss of each baseline where it is the loss of the model; else none."""
    log_loss = history.metrics.get(VALID + "log_loss", math.nan)
    if not math.isclose(history.metrics.get(VALID_LOSS, math.nan), log_loss, rel_tol=1e-3):
        return {}
    return values_of_baselines(history, VALID + "log_loss")


def _beside(line: Series, values: Mapping[str, float]) -> list[Series]:
    """Return a level line for each baseline, as long as the line of the model."""
    ends = [line.x[0], line.x[-1]]
    named = zip(BASELINE_COLORS, values.items(), strict=False)
    return [Series(name, ends, [value, value], color) for color, (name, value) in named]


def kept_mark(history: History, axis: str, name: str = "kept") -> dict[str, float]:
    """Return the place of the state that was kept, on an axis of samples or epochs, by `name`."""
    if history.kept is None or not history.kept.epoch:
        return {}
    return {name: float(history.kept.samples if axis == "samples" else history.kept.epoch)}


def _losses(history: History, points: Sequence[Point]) -> list[Series]:
    """Return the training loss over samples, and the validation loss at the end of each epoch."""
    x = [float(point.samples) for point in points]
    y = [point.loss for point in points]
    if len(points) > 20:
        faint = Series("training", x, y, color=-1)
        lines = [faint, Series("training, smoothed", x, smooth(y), color=0)]
    else:
        lines = [Series("training", x, y, color=0, dots=True)]
    samples_at_end: dict[float, float] = {}
    for point in history.points:
        samples_at_end[point.epoch + 1] = float(point.samples)
    ends = []
    losses = []
    for epoch in history.epochs:
        loss = epoch.get(VALID_LOSS, math.nan)
        if math.isfinite(loss) and epoch["epoch"] in samples_at_end:
            ends.append(samples_at_end[epoch["epoch"]])
            losses.append(loss)
    if losses:
        lines.append(Series("validation", ends, losses, color=1, dots=True))
    return lines


def smooth(values: Sequence[float]) -> list[float]:
    """Return the exponential mean over about a twentieth of the points."""
    keep = 1.0 - 1.0 / max(2.0, len(values) / 20)
    smooth = []
    mean = 0.0
    weight = 0.0
    for value in values:
        mean = keep * mean + (1.0 - keep) * value
        weight = keep * weight + 1.0 - keep
        smooth.append(mean / weight)
    return smooth


def reliability(histories: Mapping[str, History]) -> list[Chart]:
    """Return the share of positives over the predicted probability, for each label."""
    charts = []
    for name, history in histories.items():
        for key, curve in history.reliability.items():
            points = curve.curve()
            if not points:
                continue
            part, _, label = key.partition(".")
            if part == "valid":
                part = "validation"
            names = ", ".join(text for text in (name, part, label) if text)
            predicted = [x for x, _ in points]
            observed = [y for _, y in points]
            line = Series("observed", predicted, observed, color=0, dots=True)
            charts.append(reliability_chart(names, [line]))
    return charts


def reliability_chart(names: str, lines: Sequence[Series]) -> Chart:
    """Return a chart of shares of positives, with the diagonal on which they should lie."""
    end = max(max(*line.x, *line.y) for line in lines)
    diagonal = Series("predictions are probabilities", [0.0, end], [0.0, end], color=7)
    title = f"Share of positives, {names}" if names else "Share of positives"
    return Chart(title, "predicted probability", [diagonal, *lines], from_zero=True)


# --- streams --------------------------------------------------------------------------------------


def stream(histories: Mapping[str, History]) -> list[Chart]:
    """Return the progressive metrics of each stream."""
    return [chart for history in histories.values() for chart in _metrics(history)]


def windows_of(history: History) -> list[Window]:
    """Return the windows of a stream; the points of one that the callback `Windows` did not cut."""
    return history.windows or windows_of_points(history.points)


def windows_of_points(points: Iterable[Point]) -> list[Window]:
    """Return the points at which a stream had progressive metrics, as windows."""
    points = [point for point in points if point.window]
    timed = all(point.time is not None for point in points)
    return [
        Window(None, point.time if timed else None, 0, point.samples, point.window)
        for point in points
    ]


def are_timed(windows: Iterable[Window]) -> bool:
    """Return whether all windows have an event time."""
    return all(window.end is not None for window in windows)


def places_of(windows: Iterable[Window], *, timed: bool) -> list[float]:
    """Return the place of each window: its event time, or its samples."""
    return [float((window.end or 0) if timed else window.samples) for window in windows]


def _metrics(history: History) -> list[Chart]:
    windows = windows_of(history)
    if len(windows) < 2 and not history.windows:
        return []
    charts = []
    for key, lines in metric_lines({"window": windows, **history.compared}).items():
        total = history.metrics.get(key, math.nan)
        if math.isfinite(total):
            lines.append(_whole_stream(lines[0], total))
        if not history.windows:
            lines += _beside(lines[0], values_of_baselines(history, key))
        charts.append(metric_chart(key, windows, lines))
    return charts


def metric_lines(named: Mapping[str, Sequence[Window]]) -> dict[str, list[Series]]:
    """Return the lines of each metric that is worth drawing, by the metric.

    Args:
        named: windows by the name of their line; those of the model first, whose metrics count.
    """
    lines_of: dict[str, list[Series]] = {}
    windows = next(iter(named.values()))
    for key in worth_drawing(name for window in windows for name in window.values):
        lines = []
        for color, (name, others) in zip(WINDOW_COLORS, named.items(), strict=False):
            defined = [w for w in others if math.isfinite(w.values.get(key, math.nan))]
            if defined:
                values = [window.values[key] for window in defined]
                lines.append(_line(name, defined, values, color))
        if lines:
            lines_of[key] = lines
    return lines_of


def metric_chart(key: str, windows: Sequence[Window], lines: list[Series]) -> Chart:
    """Return the chart of a metric over windows, with the level that it is compared with."""
    levels = LEVELS.get(key.rpartition(".")[2], {})
    return _over(metric_text(key), windows, lines, levels=levels)


def _whole_stream(line: Series, value: float) -> Series:
    """Return a level line as long as `line`."""
    return Series("whole stream", [line.x[0], line.x[-1]], [value, value], color=1)


def flow_of_windows(histories: Mapping[str, History]) -> list[Chart]:
    """Return events, ids, rows, bytes, freshness and lag of each history with several windows."""
    streams = {name: history.windows for name, history in histories.items() if history.windows}
    charts = []
    for name, windows in streams.items():
        if len(windows) > 1:
            suffix = f", {name}" if len(streams) > 1 else ""
            charts += flow(windows, suffix)
    return charts


def flow(windows: Sequence[Window], suffix: str = "") -> list[Chart]:
    """Return events, ids, rows, bytes, freshness and lag of several windows."""
    events = _line("events", windows, [window.rows for window in windows], color=0)
    charts = [_over("Events" + suffix, windows, [events], zero=True)]
    flows = []
    for key, color in FLOWS.items():
        totals = [_sum(window, key) for window in windows]
        new = [after - before for before, after in pairwise(totals)]
        if any(new):
            flows.append(_line(key, windows[1:], new, color))
    if flows:
        charts.append(_over("Ids" + suffix, windows, flows, zero=True))
    if any(window.tables for window in windows):
        rows = _line("rows", windows, [_sum(window, "rows") for window in windows], color=3)
        charts.append(_over("Rows of all tables" + suffix, windows, [rows], zero=True))
    for key, (title, name, unit) in OBSERVED.items():
        observed = [window for window in windows if key in window.observed]
        values = [window.observed[key] * unit for window in observed]
        if not any(values):
            continue
        if key == "freshness_seconds" and min(values) > DAY_SECONDS:
            continue  # a history that is replayed is not stale
        line = _line(name, observed, values, color=6)
        charts.append(_over(title + suffix, windows, [line], zero=True))
    return charts


def _sum(window: Window, key: str) -> int:
    """Return a counter, summed over all tables."""
    return sum(stats.get(key, 0) for stats in window.tables.values())


def _line(name: str, windows: Sequence[Window], values: Sequence[float], color: int) -> Series:
    """Return a line over event time where windows have it, else over samples."""
    x = places_of(windows, timed=are_timed(windows))
    y = [float(value) for value in values]
    return Series(name, x, y, color, dots=len(x) <= MOST_DOTS)


def _over(
    title: str,
    windows: Sequence[Window],
    lines: list[Series],
    *,
    levels: Mapping[str, float] | None = None,
    zero: bool = False,
) -> Chart:
    """Return a chart over event time where windows have it, else over samples."""
    timed = are_timed(windows)
    label = "event time" if timed else "samples"
    return Chart(
        f"{title} over {label}", label, lines, time=timed, levels=levels or {}, from_zero=zero
    )


# --- names of metrics -----------------------------------------------------------------------------


def metric_text(key: str, sentence: bool = True) -> str:
    """Return a metric's name for people, such as AUC, or Log loss at the begin of a `sentence`."""
    label, _, name = key.rpartition(".")
    name, _, group = name.partition("@")
    text = ACRONYMS.get(name, name.replace("_", " "))
    if sentence and not label and name not in ACRONYMS:
        text = text.capitalize()
    if label:
        text = f"{label}: {text}"
    if group:
        text = f"{text} by {group}"
    return text


def worth_drawing(names: Iterable[str]) -> list[str]:
    """Return each metric once: losses last, without a loss that equals the log loss."""

    def order(name: str) -> tuple[bool, str]:
        return name.rpartition(".")[2] in ("loss", "log_loss"), name

    metrics = sorted(set(names), key=order)
    worth = []
    for name in metrics:
        log_loss = name.removesuffix("loss") + "log_loss"
        if not (name.endswith("loss") and log_loss in metrics):
            worth.append(name)
    return worth
