# SPDX-License-Identifier: Apache-2.0
"""Lay out what was seen as one HTML page, which works without JavaScript."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from hotbed.pictures.bars import Bar, bars_figure
from hotbed.pictures.charts import Chart, Series, figure
from hotbed.pictures.numbers import Language, bytes_text, number_text, seconds_text, share_text
from hotbed.pictures.page import LivePage, grid, log_of, page_of, section, side_by_side
from hotbed.quality.page import by_route, charts_of, figure_text, value_text
from hotbed.training.watching.report_charts import (
    DAY_SECONDS,
    flow,
    metric_chart,
    metric_lines,
    metric_text,
    smooth,
)
from hotbed.watch.asked import ServedModel, ServerAnswer
from hotbed.watch.measured import VERSION, Drift, MeasuredQuality
from hotbed.watch.refreshed import Look
from hotbed.watch.run_folder import Course, SeenRun
from hotbed.watch.saved import SavedState
from hotbed.watch.seen import Seen

RELOAD_SECONDS = 5
_SHOWN_METRICS = ("auc", "log_loss", "calibration", "rate")
_MOST_DOTS = 60
_EVERY = 2  # of so many moments one is drawn, the newest in any case
_SHIFTED = 0.25
_MOVED = 0.1
_SCRIPT = (Path(__file__).parent / "page.js").read_text(encoding="utf-8")
_HEAD = (
    f'<noscript><meta http-equiv="refresh" content="{RELOAD_SECONDS}"></noscript>\n'
    '<link rel="icon" href="data:,">\n'
)
_WORDS = {
    "training": "trains",
    "waiting": "waits for events",
    "ended": "has ended",
    "failed": "has failed",
    "silent": "gives no sign",
    "unknown": "wrote no status",
}
_STATUS_TEXT = "The last ten minutes, as the run wrote them every two seconds."
_WINDOWS_TEXT = "From the newest saved state: a point is a window of the stream."
_STATES_TEXT = (
    "Newest first. A state that a gate held is saved and not published; the last column says why."
)
_SERVED_TEXT = "What each server answered when it was asked last."
_QUALITY_TEXT = (
    "Of what was served, once its outcomes are known. Behind each figure is half the width of its "
    "interval."
)
_DRIFT_TEXT = (
    "Population stability of each segment: the newest window against those before, less what "
    "chance adds. Below 0.1 a column is stable; above 0.25 it has shifted."
)


class DrawnParts:
    """HTML that is drawn once: again only of another value."""

    def __init__(self) -> None:
        self._drawn: dict[tuple[str, Language], tuple[object, str]] = {}

    def once(self, name: str, language: Language, value: object, draw: Callable[[], str]) -> str:
        """Return what `draw` returned for this very value; `name`: of the part of the page."""
        before, text = self._drawn.get((name, language), (None, ""))
        if before is not value:
            text = draw()
            self._drawn[name, language] = (value, text)
        return text


@dataclass(frozen=True)
class _Words:
    """How moments and numbers are written.

    Attributes:
        now: in Unix seconds.
        language: of numbers.
        drawn: parts of the page that change seldom.
    """

    now: float
    language: Language
    drawn: DrawnParts

    def number(self, value: Any) -> str:
        return "–" if value is None else number_text(value, self.language)

    def ago(self, moment: float | None) -> str:
        """Return how long ago a moment was; a clock that is behind counts as now."""
        return "–" if moment is None else f"{seconds_text(max(0.0, self.now - moment))} ago"

    def figure(self, chart: Chart) -> str:
        return figure(replace(chart, language=self.language))


def page(seen: Seen, now: float, language: Language, nonce: str, drawn: DrawnParts) -> str:
    """Return the page.

    Args:
        seen: what it shows.
        now: in Unix seconds.
        language: of numbers.
        nonce: of its script.
        drawn: keeps parts of it for the next call.
    """
    words = _Words(now, language, drawn)
    run = seen.run.value
    sections: list[str] = []
    cards: dict[str, Any] = {}
    title = "Hotbed"
    below = "No run is there yet."
    if run is not None:
        title = Path(run.folder).absolute().name
        below = _subtitle(run, words)
        cards = _cards(run, words)
        sections += [_training(run.status, words), _windows(run.course, words), _states(run, words)]
    sections.append(_served(seen.servers, words))
    if seen.quality is not None and seen.quality.value is not None:
        measured = seen.quality.value
        draw = partial(_quality, measured, words)
        sections.append(drawn.once("quality", language, measured, draw))
    if run is not None:
        sections.append(_machine(run, seen.servers, words))
    notice = _problems(seen, words)
    live = LivePage(_HEAD, notice, _SCRIPT.replace("RELOAD_SECONDS", str(RELOAD_SECONDS)), nonce)
    return page_of(title, below, cards, sections, live=live, language=language)


# --- the head -------------------------------------------------------------------------------------


def _problems(seen: Seen, words: _Words) -> str:
    """Return the box with everything that is wrong; "" where nothing is."""
    sentences = []
    run = seen.run.value
    if seen.run.problem:
        sentences.append(seen.run.problem)
    if run is not None:
        if run.state == "silent":
            sentences.append(
                f"The run has written nothing since {_moment(run.status['written'])} "
                f"({words.ago(run.status['written'])}): its process {run.status['process']} on "
                f"{run.status['host']} ended, is stopped, or is held up."
            )
        sentences += run.problems
    quality = seen.quality
    if quality is not None and quality.problem:
        sentences.append(quality.problem)
    for url, look in seen.servers.items():
        if look.problem:
            since = f" Its last answer came {words.ago(look.read)}." if look.read else ""
            sentences.append(f"{url}: {look.problem}{since}")
        for model in _models(look):
            for problem in model.problems:
                sentences.append(f"{url}, model {model.name}: {problem}")
    if not sentences:
        return ""
    items = "".join(f"<li>{html.escape(sentence)}</li>" for sentence in sentences)
    return f"<div class='box bad' id='problems'><ul>{items}</ul></div>"


def _subtitle(run: SeenRun, words: _Words) -> str:
    status = run.status
    parts = [f"The run {_WORDS[run.state]}"]
    if status:
        part = "stream" if status["part"] == "stream" else f"epoch {status['epoch'] + 1}"
        ranks = f" · {status['ranks']} ranks" if status["ranks"] > 1 else ""
        parts += [
            part,
            f"process {status['process']} on {status['host']}{ranks}",
            f"begun {words.ago(status['began'])}",
            f"as of {_moment(status['written'])}",
        ]
        if run.state == "ended" and status["reason"]:
            parts.insert(1, f"stopped: {status['reason']}")
    return " · ".join(parts)


def _moment(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S} UTC"


def _cards(run: SeenRun, words: _Words) -> dict[str, Any]:
    status = run.status
    observed = status.get("observed", {})
    cards: dict[str, Any] = {}
    if status:
        cards["events/s"] = words.number(run.events_a_second)
        cards["events learned"] = status["samples"]
        if status["epoch_steps"]:
            cards[f"of {words.number(status['epoch_steps'])} steps"] = status["step"]
        if "lag_rows" in observed:
            cards["rows waiting at the source"] = observed["lag_rows"]
        freshness = observed.get("freshness_seconds", math.inf)
        if freshness < DAY_SECONDS:
            cards["from event to learned"] = seconds_text(freshness)
        if observed.get("source_reached") == 0:
            cards["the source"] = "is away"
        for name in ("skipped_rows", "dead_letters", "skipped_batches"):
            if observed.get(name):
                cards[name.replace("_", " ")] = observed[name]
        cards |= _metric_cards(status)
        cards["memory of the run"] = bytes_text(status["memory"]["resident_bytes"])
    if run.states:
        cards["since the last save"] = words.ago(
            max(
                (pair.state.written or 0.0 for pair in run.states if pair.state.folder),
                default=None,
            )
        ).removesuffix(" ago")
    published = [pair.published.written or 0.0 for pair in run.states if pair.published is not None]
    publications = status.get("publications") or {}  # also of a topic, which has no folder
    published.append(publications.get("last_seconds") or 0.0)
    if any(published):
        cards["since the last version"] = words.ago(max(published)).removesuffix(" ago")
    num_held = sum(bool(pair.state.held) for pair in run.states)
    if num_held:
        cards["states held by a gate"] = num_held
    return cards


def _metric_cards(status: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics of the last window of a stream, else those of the last validation."""
    values = status["window"] or status["metrics"]
    cards = {}
    for name, value in values.items():
        plain = name.removeprefix("valid.")
        if plain.rpartition(".")[2] != "loss" and isinstance(value, (int, float)):
            suffix = ", last window" if status["window"] else ""
            cards[f"{metric_text(plain)}{suffix}"] = float(value)
    return cards


# --- what trains ----------------------------------------------------------------------------------


def _training(status: Mapping[str, Any], words: _Words) -> str:
    return _charts("What trains", _STATUS_TEXT, _moments(status), words)


def _windows(course: Course | None, words: _Words) -> str:
    """Return the section of the newest state, which is drawn once for each of them."""
    if course is None:
        return ""

    def draw() -> str:
        return _charts("Windows", _WINDOWS_TEXT, _charts_of_windows(course), words)

    return words.drawn.once("windows", words.language, course, draw)


def _charts(name: str, text: str, charts: Sequence[Chart], words: _Words) -> str:
    """Return a section of charts; "" without any."""
    if not charts:
        return ""
    figures = [words.figure(chart) for chart in charts]
    return section(name, side_by_side(figures, small=True), text)


def _moments(status: Mapping[str, Any]) -> list[Chart]:
    """Return speed, lag, freshness and memory of the last minutes."""
    moments = status.get("moments")
    if not moments or len(moments["time"]) < 2 * _EVERY:
        return []
    moments = {name: values[::-_EVERY][::-1] for name, values in moments.items()}
    times = [1e6 * time for time in moments["time"]]
    speeds = []
    for (t0, n0), (t1, n1) in pairwise(zip(moments["time"], moments["samples"], strict=True)):
        speeds.append((n1 - n0) / max(t1 - t0, 1e-9))
    charts = [_over_time("Events a second", "events/s", times[1:], speeds, 0)]
    for name, title, line, unit, color in (
        ("lag_rows", "Lag", "rows waiting at the source", 1.0, 1),
        ("freshness_seconds", "Freshness", "seconds from event to learned", 1.0, 6),
        ("resident_bytes", "Memory of the run", "MiB", 2.0**-20, 3),
    ):
        values = moments[name]
        pairs = [(x, y * unit) for x, y in zip(times, values, strict=True) if y is not None]
        stale = name == "freshness_seconds" and pairs and pairs[-1][1] > DAY_SECONDS
        if len(pairs) > 1 and not stale:
            x = [moment for moment, _ in pairs]
            charts.append(_over_time(title, line, x, [value for _, value in pairs], color))
    return charts


def _over_time(title: str, name: str, x: list[float], y: list[float], color: int) -> Chart:
    line = Series(name, x, y, color, dots=len(x) <= _MOST_DOTS)
    return Chart(title, "", [line], time=True, from_zero=True)


def _charts_of_windows(course: Course) -> list[Chart]:
    """Return metrics, flow and loss of the course of a run."""
    charts = []
    windows = course.windows
    if windows:
        for key, lines in metric_lines({"window": windows, **course.compared}).items():
            charts.append(metric_chart(key, windows, lines))
    if sum(window.rows for window in windows) and len(windows) > 1:
        charts += flow(windows)
    if len(course.losses) > 1:
        samples = [float(count) for count, _ in course.losses]
        losses = smooth([loss for _, loss in course.losses])
        charts.append(
            Chart("Training loss, smoothed", "samples", [Series("loss", samples, losses)])
        )
    return charts


# --- states and versions --------------------------------------------------------------------------


def _states(run: SeenRun, words: _Words) -> str:
    if not run.states:
        return ""
    head = ["state", "kind", "size", "rows", "saved", "version", "published", "note"]
    rows = [_state_row(pair, words) for pair in run.states]
    place = f" Versions are published in {run.published}." if run.published else ""
    return section("Saved, held, published", log_of(head, rows), _STATES_TEXT + place)


def _state_row(pair: SavedState, words: _Words) -> list[str]:
    state = pair.state
    row = ["–"] * 5
    if state.folder:
        size = bytes_text(state.bytes)
        row = [_version(state.version), state.kind, size, words.number(state.rows)]
        row.append(words.ago(state.written))
    version = pair.published
    row += ["", ""] if version is None else [_version(version.version), words.ago(version.written)]
    note = state.problem or (version.problem if version is not None else "")
    if state.held:
        note = f"held: {' '.join(state.held)}"
        if version is not None:
            note = f"published by force, {version.forced}; {note}"
    return [*row, note]


def _version(version: int | None) -> str:
    return "damaged" if version is None else str(version)


# --- servers --------------------------------------------------------------------------------------


def _served(servers: Mapping[str, Look[ServerAnswer]], words: _Words) -> str:
    blocks = []
    for url, look in servers.items():
        for model in _models(look):
            blocks.append(_model(url, look, model, words))
    return section("What is served", "\n".join(blocks), _SERVED_TEXT) if blocks else ""


def _models(look: Look[ServerAnswer]) -> Sequence[ServedModel]:
    return () if look.value is None else look.value.models


def _model(url: str, look: Look[ServerAnswer], model: ServedModel, words: _Words) -> str:
    head = ["role", "version", "published", "share", "requests", "errors", "mean score"]
    rows = []
    for role in model.roles:
        rows.append(
            [
                role.role,
                str(role.version),
                words.ago(role.published),
                "" if role.share is None else share_text(role.share),
                words.number(role.requests),
                words.number(role.errors),
                words.number(role.mean_score),
            ]
        )
    rule = "no rule: the newest version answers"
    if model.revision is not None:
        plain = json.dumps(model.rule) if model.rule else "follow"
        rule = f"revision {model.revision} of the rule: {plain}"
    facts = [
        f"{model.name} at {url}: {'away' if look.problem else model.state}, {rule}",
        f"median {seconds_text(model.p50)}, 99 % within {seconds_text(model.p99)}",
        f"{words.number(model.candidates)} candidates scored",
    ]
    if model.since is not None and model.learned is not None:
        delay = max(0.0, model.since - model.learned)
        if delay < DAY_SECONDS:
            facts.append(f"{seconds_text(delay)} from its newest event to served")
    if model.logged is not None:
        facts.append(
            f"log: {words.number(model.logged)} requests, {words.number(model.dropped)} dropped"
        )
    text = html.escape(" · ".join(facts), quote=False)
    return f"<p>{text}</p>{grid(head, rows)}"


# --- quality --------------------------------------------------------------------------------------


def _quality(measured: MeasuredQuality, words: _Words) -> str:
    windows = list(measured.windows)
    newest = max(row["begin"] for row in windows)
    charts = charts_of(by_route(windows), _SHOWN_METRICS[:3])
    figures = [words.figure(chart) for chart in charts]
    body = side_by_side(figures, small=True)
    end = max(row["end"] for row in windows)
    text = (
        f"{_QUALITY_TEXT} The newest window: {newest:%Y-%m-%d %H:%M} to {end:%Y-%m-%d %H:%M} UTC."
    )
    heads = [metric_text(name) for name in _SHOWN_METRICS]
    rows = []
    for row in windows:
        if row["begin"] == newest and row["column"] in (None, VERSION):
            name = f"version {value_text(row)}" if row["column"] else "all versions"
            numbers = [words.number(row[count]) for count in ("users", "samples")]
            cells = [figure_text(row, metric) for metric in _SHOWN_METRICS]
            rows.append([row["route"] or "all answered", name, *numbers, *cells])
    body += grid(["route", "", "users", "samples", *heads], rows)
    differences = []
    for row in measured.differences:
        if row["begin"] == newest and row["column"] in (None, VERSION):
            name = f"version {value_text(row)}" if row["column"] else row["route"]
            cells = [figure_text(row, metric) for metric in _SHOWN_METRICS]
            differences.append(
                [f"{name} minus {row['against']}", words.number(row["samples"]), *cells]
            )
    if differences:
        body += grid(["difference", "samples", *heads], differences)
    return section("Quality by version", body, text) + _drift(measured.drift, words)


def _drift(drifts: Sequence[Drift], words: _Words) -> str:
    if not drifts:
        return ""
    bars = []
    rows = []
    for drift in drifts:
        color = 2
        if drift.index >= _MOVED:
            color = 1 if drift.index < _SHIFTED else 5
        bars.append(Bar(drift.column, drift.index, f"{drift.index:.3f}", color))
        moved = "; ".join(
            f"{value}: {share_text(before)} → {share_text(share)}"
            for value, share, before in drift.values
        )
        numbers = [words.number(drift.samples), words.number(drift.before)]
        rows.append([drift.column, f"{drift.index:.3f}", *numbers, moved])
    end = max(_SHIFTED, *(drift.index for drift in drifts))
    body = bars_figure("Population stability index", bars, end=end)
    head = ["column", "index", "samples", "before", "values that moved most"]
    return section("Drift of columns", body + log_of(head, rows), _DRIFT_TEXT)


# --- disk and memory ------------------------------------------------------------------------------


def _machine(run: SeenRun, servers: Mapping[str, Look[ServerAnswer]], words: _Words) -> str:
    rows = []
    memory = run.status.get("memory", {})
    if memory:
        rows.append(["the run", bytes_text(memory["resident_bytes"]), ""])
    if "limit_bytes" in memory:
        rows.append(_memory_row("", memory))
    for url, look in servers.items():
        if look.value is None:
            continue
        if look.value.memory is not None:
            rows.append(_memory_row(f" at {url}", look.value.memory))
        for model in look.value.models:
            if model.cache_bytes is not None:
                name = f"rows in the cache of {model.name} at {url}"
                rows.append([name, bytes_text(model.cache_bytes), ""])
    for disk in run.disks:
        used_bytes = disk.total_bytes - disk.free_bytes
        free = f"{bytes_text(disk.free_bytes)} free of {bytes_text(disk.total_bytes)}"
        rows.append(
            [f"disk of {', '.join(disk.folders)}", free, share_text(used_bytes / disk.total_bytes)]
        )
    saved = sum(pair.state.bytes for pair in run.states)
    published = sum(pair.published.bytes for pair in run.states if pair.published is not None)
    if run.states:
        rows.append(["saved states above", bytes_text(saved), ""])
    if published:
        rows.append(["published versions above", bytes_text(published), ""])
    tables = run.status.get("rows") or (run.course.rows if run.course is not None else {})
    table_rows = [[name, words.number(count)] for name, count in tables.items()]
    body = grid(["", "", "in use"], rows) if rows else ""
    if table_rows:
        body += grid(["table", "rows"], table_rows)
    return section("Disk and memory", body) if body else ""


def _memory_row(place: str, memory: Mapping[str, Any]) -> list[str]:
    used = f"{bytes_text(memory['used_bytes'])} of {bytes_text(memory['limit_bytes'])}"
    share = share_text(memory["used_bytes"] / memory["limit_bytes"])
    return [f"memory of {memory['of']}{place}", used, share]
