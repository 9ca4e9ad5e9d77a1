# SPDX-License-Identifier: Apache-2.0
"""Choose what the report draws of tables: their rows, their ids, and the disk that they lie on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from hotbed.pictures.charts import COLORS, Chart, Series
from hotbed.training.watching.history import History
from hotbed.training.watching.points import Point
from hotbed.training.watching.report_charts import FLOWS

MOST_LINES = 6  # tables that get a line or a chart of their own; the others are drawn together


def sizes(histories: Mapping[str, History]) -> list[Chart]:
    """Return the rows of each table over samples; small tables get a chart of their own."""
    points, marks = _on_one_axis(histories)
    if not points or not points[-1][1].tables:
        return []
    x = [place for place, _ in points]
    rows = {}
    for name in points[-1][1].tables:
        rows[name] = [float(point.tables[name]["rows"]) for _, point in points]
    small_rows = max(max(values) for values in rows.values()) / 20
    large = {name: [values] for name, values in rows.items() if max(values) >= small_rows}
    small = {name: [values] for name, values in rows.items() if max(values) < small_rows}
    charts = []
    for title, tables in (("Rows", large), ("Rows, small tables", small)):
        lines: list[Series] = []
        for name, (values,) in _joined(tables).items():
            lines.append(Series(name, x, values, len(lines) % COLORS))
        if lines:
            charts.append(Chart(title, "samples", lines, marks=marks, from_zero=True))
    return charts


def flows(histories: Mapping[str, History]) -> list[Chart]:
    """Return the ids admitted, refused and evicted over samples, one chart for each table."""
    points, marks = _on_one_axis(histories)
    if not points:
        return []
    x = [place for place, _ in points]
    counts = {}
    for name in points[-1][1].tables:
        tables = [point.tables[name] for _, point in points]
        counts[name] = [[float(table.get(key, 0)) for table in tables] for key in FLOWS]
    charts = []
    for name, values in _joined(counts).items():
        lines = []
        for (key, color), y in zip(FLOWS.items(), values, strict=True):
            if any(y):
                lines.append(Series(key, x, y, color))
        if lines:
            charts.append(Chart(name, "samples", lines, marks=marks, from_zero=True))
    return charts


def disk(histories: Mapping[str, History]) -> list[Chart]:
    """Return misses, waits, writes and space over samples, where rows lie on a disk."""
    points, marks = _on_one_axis(histories)
    on_disk = [(place, point) for place, point in points if point.disk]
    if len(on_disk) < 2:
        return []
    x = [place for place, _ in on_disk[1:]]
    steps = []
    for (_, before), (_, point) in pairwise(on_disk):
        later = point.step - before.step
        steps.append(later if later > 0 else point.step)  # a history of its own counts anew
    read = {key: _since(on_disk, key) for key in ("hits", "misses", "waited_seconds")}
    looked_up = [sum(both) for both in zip(read["hits"], read["misses"], strict=True)]
    misses = [_part(100 * m, n) for m, n in zip(read["misses"], looked_up, strict=True)]
    waits = [_part(1e3 * s, n) for s, n in zip(read["waited_seconds"], steps, strict=True)]
    now = [point.disk for _, point in on_disk[1:]]
    written = [_part(stats["written_bytes"], stats["put_bytes"]) for stats in now]
    space = [_part(stats["file_bytes"], stats["live_bytes"]) for stats in now]
    lines = {
        "Rows that were not in memory, of each hundred": [Series("misses", x, misses, 0)],
        "Waits for the disk": [Series("milliseconds a step", x, waits, 1)],
        "Bytes of the disk": [
            Series("written for each that left memory", x, written, 2),
            Series("taken for each of a live row", x, space, 3),
        ],
    }
    return [
        Chart(title, "samples", series, marks=marks, from_zero=True)
        for title, series in lines.items()
    ]


def _since(points: Sequence[tuple[float, Point]], key: str) -> list[float]:
    """Return how much a total has risen since the point before; a new process counts anew."""
    totals = [point.disk[key] for _, point in points]
    return [after - before if after >= before else after for before, after in pairwise(totals)]


def _part(amount: float, whole: float) -> float:
    return amount / whole if whole else 0.0


def _on_one_axis(
    histories: Mapping[str, History],
) -> tuple[list[tuple[float, Point]], dict[str, float]]:
    """Return all points with their places on one axis of samples.

    The second value holds where each history but the first begins, and what was kept of it.
    """
    points: list[tuple[float, Point]] = []
    marks: dict[str, float] = {}
    begin = 0.0
    for name, history in histories.items():
        if points:
            marks[name] = begin
        if history.kept is not None:
            marks["kept"] = begin + history.kept.samples
        points += [(begin + point.samples, point) for point in history.points]
        if points:
            begin = points[-1][0]
    return points, marks


def _joined(tables: Mapping[str, list[list[float]]]) -> dict[str, list[list[float]]]:
    """Return the lines of at most `MOST_LINES` tables; smaller tables are summed up as one."""
    if len(tables) <= MOST_LINES:
        return dict(tables)

    def at_the_end(name: str) -> float:
        return sum(values[-1] for values in tables[name])

    order = sorted(tables, key=at_the_end, reverse=True)
    largest = order[: MOST_LINES - 1]
    others = [tables[name] for name in order[MOST_LINES - 1 :]]
    lines = {name: tables[name] for name in tables if name in largest}
    total = []
    for same_line in zip(*others, strict=True):
        total.append([sum(values) for values in zip(*same_line, strict=True)])
    lines[f"{len(others)} other tables together"] = total
    return lines
