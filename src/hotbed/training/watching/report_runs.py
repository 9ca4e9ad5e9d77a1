# SPDX-License-Identifier: Apache-2.0
"""Choose what the report draws of several runs: one chart for each number, with a line a run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from hotbed.pictures.charts import COLORS, Chart, Series
from hotbed.training.watching.history import History
from hotbed.training.watching.points import Point
from hotbed.training.watching.report_charts import (
    FLOWS,
    MOST_DOTS,
    VALID,
    are_timed,
    kept_mark,
    metric_text,
    places_of,
    reliability_chart,
    smooth,
    windows_of,
    worth_drawing,
)
from hotbed.training.watching.report_tables import MOST_LINES

LEARNING_TEXT = (
    "Mean loss of the batches since the point before, smoothed where there are many, and metrics "
    "of each epoch."
)
SMOOTHED_POINTS = 20
Line = tuple[list[float], list[float]]
"""Places and values of a line."""


def runs_of(histories: Mapping[str, History]) -> dict[str, dict[str, History]]:
    """Return the runs by name: each the histories that came one after the other in one model.

    A run of several histories has the name of its first one.
    """
    runs: dict[str, dict[str, History]] = {}
    before: History | None = None
    for name, history in histories.items():
        if before is None or not history.follows(before):
            runs[name] = {}
        next(reversed(runs.values()))[name] = history
        before = history
    return runs


def learning(histories: Mapping[str, History]) -> list[Chart]:
    """Return the training loss of each run over samples, and metrics of validation over epochs."""
    charts = _charts("Training loss", "samples", histories, _loss)
    for key in worth_drawing(_names(histories)):
        title = "Validation " + metric_text(key.removeprefix(VALID), sentence=False)
        charts += _charts(title, "epoch", histories, partial(_epochs, key))
    for chart in charts:
        marks: dict[str, float] = {}
        for name, history in histories.items():
            marks |= kept_mark(history, chart.x_label, f"kept, {name}")
        chart.marks = marks
    return charts


def stream(histories: Mapping[str, History]) -> list[Chart]:
    """Return the progressive metrics of each run, over event time where all runs have it."""
    windows = [window for history in histories.values() for window in windows_of(history)]
    timed = are_timed(windows)
    label = "event time" if timed else "samples"

    def values(key: str, history: History) -> Line:
        defined = [w for w in windows_of(history) if math.isfinite(w.values.get(key, math.nan))]
        return places_of(defined, timed=timed), [window.values[key] for window in defined]

    charts = []
    for key in worth_drawing(name for window in windows for name in window.values):
        title = f"{metric_text(key)} over {label}"
        charts += _charts(title, label, histories, partial(values, key))
    for chart in charts:
        chart.time = timed
    return charts


def reliability(histories: Mapping[str, History]) -> list[Chart]:
    """Return the share of positives over the predicted probability, a line a run."""
    keys = dict.fromkeys(key for history in histories.values() for key in history.reliability)
    charts = []
    for key in keys:
        part, _, label = key.partition(".")
        if part == "valid":
            part = "validation"
        names = ", ".join(text for text in (part, label) if text)

        def curve(history: History, key: str = key) -> Line:
            points = history.reliability[key].curve() if key in history.reliability else []
            return [x for x, _ in points], [y for _, y in points]

        lines = _lines(histories, curve)
        if lines:
            charts.append(reliability_chart(names, lines))
    return charts


def sizes(histories: Mapping[str, History]) -> list[Chart]:
    """Return the rows of each table, a line a run; where there are many tables, of all together."""
    return _of_tables(histories, ("rows",))


def flows(histories: Mapping[str, History]) -> list[Chart]:
    """Return the ids admitted, refused and evicted of each table, a line a run."""
    return _of_tables(histories, tuple(FLOWS))


def _of_tables(histories: Mapping[str, History], keys: Sequence[str]) -> list[Chart]:
    tables = dict.fromkeys(
        table
        for history in histories.values()
        for point in history.points[-1:]
        for table in point.tables
    )
    charts = []
    for key in keys:
        if len(tables) > MOST_LINES:
            titles = {f"All tables, {key}": tuple(tables)}
        else:
            titles = {f"{table}, {key}": (table,) for table in tables}
        for title, names in titles.items():

            def counts(history: History, names: Sequence[str] = names, key: str = key) -> Line:
                points = [point for point in history.points if _has_any(point, names)]
                y = [float(sum(p.tables.get(n, {}).get(key, 0) for n in names)) for p in points]
                return ([float(point.samples) for point in points], y) if any(y) else ([], [])

            charts += _charts(title, "samples", histories, counts, from_zero=True)
    return charts


def _charts(
    title: str,
    x_label: str,
    histories: Mapping[str, History],
    line_of: Callable[[History], Line],
    *,
    from_zero: bool = False,
) -> list[Chart]:
    """Return one chart with a line for each run that has the number; none without any."""
    lines = _lines(histories, line_of)
    if not lines:
        return []
    return [Chart(title, x_label, lines, from_zero=from_zero)]


def _lines(histories: Mapping[str, History], line_of: Callable[[History], Line]) -> list[Series]:
    """Return a line for each run that has points of it."""
    lines = []
    for number, (name, history) in enumerate(histories.items()):
        x, y = line_of(history)
        if x:
            lines.append(Series(name, x, y, number % COLORS, dots=len(x) <= MOST_DOTS))
    return lines


def _loss(history: History) -> Line:
    points = [point for point in history.points if math.isfinite(point.loss)]
    y = [point.loss for point in points]
    if len(y) > SMOOTHED_POINTS:
        y = smooth(y)
    return [float(point.samples) for point in points], y


def _epochs(key: str, history: History) -> Line:
    epochs = [epoch for epoch in history.epochs if key in epoch]
    return [epoch["epoch"] for epoch in epochs], [epoch[key] for epoch in epochs]


def _names(histories: Mapping[str, History]) -> Iterator[str]:
    """Yield the names of the validation metrics."""
    for history in histories.values():
        for epoch in history.epochs:
            yield from (key for key in epoch if key.startswith(VALID))


def _has_any(point: Point, tables: Sequence[str]) -> bool:
    return any(table in point.tables for table in tables)
