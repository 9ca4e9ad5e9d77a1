# SPDX-License-Identifier: Apache-2.0
"""The page of a preparation: its rows in charts, bars and tables, as one HTML file.

The page says nothing of the hour or the machine: preparing the same rows again gives the same page.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from hotbed import config
from hotbed.data.fitted import FittedMap
from hotbed.data.learners import Quantiles
from hotbed.data.schema import Dense, Id, Schema
from hotbed.data.transforms import Transform
from hotbed.persist.container.store import write_text
from hotbed.pictures.bars import Bar, bars_figure
from hotbed.pictures.charts import Chart, Series, figure
from hotbed.pictures.numbers import number_text
from hotbed.pictures.page import grid, page_of, section, side_by_side
from hotbed.prepare.report.alone import MOST_AUC, Finding
from hotbed.prepare.report.distinct import ERROR, FEW
from hotbed.prepare.report.profile import ColumnProfile, PartProfile, Profile
from hotbed.prepare.report.timeline import Timeline

MOST_BARS = 40
MOST_SMALL_CHARTS = 30
MOST_PIECES = 200
MOST_POINTS = 100
"""Points of a line of shares: each stands for about 1 % of the rows."""

BINS = 30
DOTS = 40
"""Points of a line that are drawn as dots."""

_PART_NAMES = {"train": "training", "valid": "validation"}
_PART_COLORS = {"train": 0, "valid": 1}


def write_report(
    path: Path,
    profile: Profile,
    raw: Schema,
    *,
    title: str = "Preparation report",
    facts: Mapping[str, Any] | None = None,
    about: Mapping[str, Any] | None = None,
    findings: Sequence[Finding] = (),
) -> None:
    """Write the page of a preparation.

    Args:
        path: the file.
        profile: of the rows that were written.
        raw: the fitted schema over raw rows.
        title: text of the head.
        facts: more numbers for the cards on top.
        about: more about the preparation by name, as text: its source, its parts.
        findings: what tells a label by itself.
    """
    sections = [
        _alone(findings),
        _labels(profile),
        _missing(profile),
        _distinct(profile),
        _unknown(profile),
        _dense(profile),
        _columns(profile, raw),
        _features(raw),
        _about(about or {}),
    ]
    cards = {**_cards(profile, raw), **(facts or {})}
    write_text(path, page_of(title, f"hotbed {version('hotbed')}", cards, sections))


def _alone(findings: Sequence[Finding]) -> str:
    """Return the warning of what tells a label by itself."""
    if not findings:
        return ""
    rows = [
        [finding.what, finding.label, f"{finding.auc:.3f}", f"{finding.num_rows:,}"]
        for finding in findings
    ]
    text = (
        f"Alone, each of these tells a label with an AUC above {MOST_AUC:g} on a sample of the "
        "rows. Check that it is known before the label, and is made alike for both labels."
    )
    table = grid(["what", "label", "AUC", "rows"], rows, text=True)
    return section("Warning: columns that tell the label", table, text)


def _cards(profile: Profile, raw: Schema) -> dict[str, Any]:
    cards: dict[str, Any] = {}
    for name, part in profile.parts.items():
        cards[f"{_PART_NAMES[name]} rows"] = part.rows
    for label in raw.labels:
        for name, part in profile.parts.items():
            mean = part.positives[label.name] / max(part.rows, 1)
            if label.name in profile.amounts:
                cards[f"mean {label.name}, {_PART_NAMES[name]}"] = mean
            else:
                cards[f"{label.name}, {_PART_NAMES[name]}"] = _percent(mean)
    cards["id features"] = len(raw.ids)
    cards["dense features"] = len(raw.dense)
    return {name: value for name, value in cards.items() if value != 0}


# --- labels ---------------------------------------------------------------------------------------


def _labels(profile: Profile) -> str:
    """Return the section of the rows and the labels, over time or in the order of the rows."""
    with_times = [part for part in profile.parts.values() if not part.pieces]
    if with_times:
        charts = _over_time(profile)
        text = (
            "Over the time of the events. A point of a share or a mean stands for about 1 % of the "
            "rows of its part."
        )
    else:
        charts = _over_rows(profile)
        text = "Without a time column, the rows are drawn in the order of the files."
    if not charts:
        return ""
    return section("Rows and labels", side_by_side([figure(chart) for chart in charts]), text)


def _over_time(profile: Profile) -> list[Chart]:
    timelines = _equally_wide(profile.parts)
    unit = next(iter(timelines.values())).unit
    per = f"per {unit}"
    if unit[0].isdigit():
        per = f"in {unit}"
    rows = Chart(f"Rows {per}", "time of the event, UTC", time=True, from_zero=True)
    charts = [rows]
    points = {name: timeline.sums() for name, timeline in timelines.items()}
    for name, (times, sums) in points.items():
        rows.series.append(_series(name, times, sums[:, 0]))
    labels = next(iter(profile.parts.values())).positives
    for number, label in enumerate(labels, start=1):
        chart = Chart(_mean_text(profile, label), "time of the event, UTC", time=True)
        for name, (times, sums) in points.items():
            middles, larger = _larger(times, sums)
            chart.series.append(_series(name, middles, larger[:, number] / larger[:, 0]))
        charts.append(chart)
    if len({time for times, _ in points.values() for time in times}) < 2:
        return []
    return [_with_dots(chart) for chart in charts]


def _equally_wide(parts: Mapping[str, PartProfile]) -> dict[str, Timeline]:
    """Return the timeline of each part, in bins of one width."""
    timelines = {name: part.timeline for name, part in parts.items()}
    for other in list(timelines.values()):
        timelines = {name: line.as_wide_as(other) for name, line in timelines.items()}
    return timelines


def _larger(times: np.ndarray, sums: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return sums of neighbouring bins that hold enough rows, and the mean time of their rows."""
    rows = sums[:, 0]
    ends = np.cumsum(rows)
    groups = (ends - rows) * MOST_POINTS // ends[-1]
    starts = np.flatnonzero(np.diff(groups, prepend=-1))
    larger = np.add.reduceat(sums, starts, axis=0)
    moments = np.add.reduceat(times * rows, starts)
    return moments / larger[:, 0], larger


def _over_rows(profile: Profile) -> list[Chart]:
    charts: list[Chart] = []
    labels = next(iter(profile.parts.values())).positives
    for number, label in enumerate(labels, start=1):
        chart = Chart(f"{_mean_text(profile, label)}, in the order of the rows", "rows")
        for name, part in profile.parts.items():
            sums = _fewer(np.array(part.pieces))
            if len(sums) > 1:
                ends = np.cumsum(sums[:, 0])
                chart.series.append(_series(name, ends, sums[:, number] / sums[:, 0]))
        if chart.series:
            charts.append(_with_dots(chart))
    return charts


def _with_dots(chart: Chart) -> Chart:
    """Return the chart with a dot at each point, if no line has many of them."""
    is_sparse = all(len(line.x) <= DOTS for line in chart.series)
    for line in chart.series:
        line.dots = is_sparse
    return chart


def _fewer(pieces: np.ndarray) -> np.ndarray:
    """Return at most `MOST_PIECES` sums of neighbouring pieces."""
    step = -(-len(pieces) // MOST_PIECES)
    return np.add.reduceat(pieces, range(0, len(pieces), step), axis=0)


def _mean_text(profile: Profile, label: str) -> str:
    if label in profile.amounts:
        return f"Mean {label}"
    return f"Share of positives, {label}"


def _series(part: str, x: np.ndarray, y: np.ndarray) -> Series:
    return Series(_PART_NAMES[part], x.tolist(), y.tolist(), color=_PART_COLORS[part])


# --- columns --------------------------------------------------------------------------------------


def _missing(profile: Profile) -> str:
    shares = {
        name: column.missing / column.values
        for name, column in profile.columns.items()
        if column.missing
    }
    num_whole = len(profile.columns) - len(shares)
    if not shares:
        text = f"No value is missing in any of the {num_whole} columns."
        return section("Missing values", "", text)
    order = sorted(shares, key=lambda name: -shares[name])
    bars = [Bar(name, shares[name], _percent(shares[name])) for name in order]
    text = f"Of the raw rows that were written. {num_whole} columns have a value in every row."
    figures = _bar_figures("Share of missing values", bars, end=1.0)
    return section("Missing values", side_by_side(figures), text)


def _distinct(profile: Profile) -> str:
    counts = {name: column.distinct.count() for name, column in profile.columns.items()}
    order = sorted(counts, key=lambda name: -counts[name])
    bars = [Bar(name, counts[name], _distinct_text(profile.columns[name])) for name in order]
    text = (
        f"Of the raw rows that were written. Up to {FEW:,} values are counted exactly. Numbers "
        f"with ≈ are estimates of HyperLogLog, with a standard deviation of {_percent(ERROR)}. "
        "Bars grow with the logarithm."
    )
    figures = _bar_figures("Different values", bars, logarithmic=True)
    return section("Different values", side_by_side(figures), text)


def _unknown(profile: Profile) -> str:
    """Return the section of ids that vocabularies lack, by part."""
    figures: list[str] = []
    for name, part in profile.parts.items():
        bars: list[Bar] = []
        for feature, (num_ids, num_unknown) in part.ids.items():
            share = num_unknown / max(num_ids, 1)
            bars.append(Bar(feature, share, _percent(share), _PART_COLORS[name]))
        bars.sort(key=lambda bar: -bar.value)
        if bars:
            title = f"Unknown ids, {_PART_NAMES[name]}"
            figures += _bar_figures(title, bars, end=1.0)
    if not figures:
        return ""
    text = (
        "Ids of the features that end with the transform map: the share that is not in the "
        "vocabulary, and gets the id 0. In the training rows these are ids that are too rare; in "
        "the validation rows, also ids that training has never shown."
    )
    return section("Unknown ids", side_by_side(figures), text)


def _bar_figures(
    title: str, bars: Sequence[Bar], *, end: float | None = None, logarithmic: bool = False
) -> list[str]:
    """Return the bars in one figure, or in two where there are many."""
    shown = bars[:MOST_BARS]
    if len(bars) > MOST_BARS:
        title = f"{title}, {MOST_BARS} of {len(bars)} columns"
    if end is None:
        end = max((bar.value for bar in bars), default=0.0)
    half = len(shown)
    if half > 12:
        half = -(-half // 2)
    figures: list[str] = []
    for first in range(0, len(shown), half):
        heading = title
        if first:
            heading = f"{title}, continued"
        part = shown[first : first + half]
        figures.append(bars_figure(heading, part, end=end, logarithmic=logarithmic))
    return figures


def _dense(profile: Profile) -> str:
    figures: list[str] = []
    for name, quantiles in list(profile.dense.items())[:MOST_SMALL_CHARTS]:
        line = _histogram(quantiles)
        if line is not None:
            figures.append(figure(Chart(name, "value", [line], from_zero=True)))
    if not figures:
        return ""
    text = (
        "Dense features after their transforms, as the model gets them: the share of the rows by "
        "value, without the outermost half percent on both sides."
    )
    if len(profile.dense) > MOST_SMALL_CHARTS:
        text = f"{text} The first {MOST_SMALL_CHARTS} of {len(profile.dense)} features."
    return section("Numbers", side_by_side(figures, small=True), text)


def _histogram(quantiles: Quantiles) -> Series | None:
    """Return the shares of the rows in bins of equal width; None without two different values."""
    values = np.array(quantiles.learned())[1:-1]
    if not len(values) or values[0] == values[-1]:
        return None
    counts, edges = np.histogram(values, BINS)
    middles = (edges[1:] + edges[:-1]) / 2
    shares = counts / len(values)
    return Series("share of the rows", middles.tolist(), shares.tolist())


# --- tables ---------------------------------------------------------------------------------------


def _columns(profile: Profile, raw: Schema) -> str:
    roles: dict[str, list[str]] = {}
    for role in raw.columns:
        kind = type(role).__name__.lower()
        roles.setdefault(role.source, []).append(kind)
    head = ["column", "role", "type", "missing", "different", "least", "mean", "largest"]
    rows: list[list[str]] = []
    for name, column in profile.columns.items():
        rows.append(
            [
                name,
                ", ".join(dict.fromkeys(roles.get(name, ["not a feature"]))),
                ", ".join(column.types) or "–",
                _percent(column.missing / max(column.values, 1)),
                _distinct_text(column),
                *_amounts(column, roles.get(name, [])),
            ]
        )
    return section("Columns", grid(head, rows))


def _amounts(column: ColumnProfile, roles: Sequence[str]) -> list[str]:
    """Return the least number, the mean and the largest number; dashes for names of things."""
    is_amount = not {"id", "time"} & set(roles)
    if not roles or not is_amount:
        return ["–", "–", "–"]
    return [number_text(number) for number in (column.low, column.mean, column.high)]


def _features(raw: Schema) -> str:
    """Return the table of what each feature is made of, with what was learned."""
    rows: list[list[str]] = []
    for column in raw.columns:
        if isinstance(column, (Dense, Id)):
            steps = " → ".join(_transform_text(transform) for transform in column.transforms)
            rows.append([column.name, type(column).__name__.lower(), column.source, steps or "–"])
    if not rows:
        return ""
    head = ["feature", "role", "column", "transforms, with what they learned"]
    return section("Features", grid(head, rows, text=True))


def _transform_text(transform: Transform) -> str:
    described = config.describe(transform)
    if isinstance(described, str):
        return described
    values: list[str] = []
    fitted = getattr(transform, "fitted", None)
    if isinstance(fitted, FittedMap):
        values.append(f"{len(fitted):,} keys")
    for key, value in described.items():
        if key not in ("kind", "fitted"):
            values.append(f"{key} {_value_text(value)}")
    if not values:
        return str(described["kind"])
    return f"{described['kind']} ({', '.join(values)})"


def _value_text(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_value_text(member)}" for key, member in value.items())
    if isinstance(value, (list, tuple)) and len(value) > 6:
        return f"of {len(value):,}"
    if isinstance(value, (list, tuple)):
        return ", ".join(_value_text(member) for member in value)
    return number_text(value)


def _about(about: Mapping[str, Any]) -> str:
    if not about:
        return ""
    rows = [[name, str(value)] for name, value in about.items()]
    return section("The preparation", grid(["", ""], rows, text=True))


def _distinct_text(column: ColumnProfile) -> str:
    count = column.distinct.count()
    if column.distinct.is_exact:
        return f"{count:,}"
    return f"≈ {count:,}"


def _percent(share: float) -> str:
    """Return a share in percent with three significant digits."""
    if not math.isfinite(share):
        return "–"
    percent = 100 * share
    if 0 < percent < 0.001:
        return "< 0.001 %"
    return f"{percent:.3g} %"
