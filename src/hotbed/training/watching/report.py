# SPDX-License-Identifier: Apache-2.0
"""The training report: one HTML file that opens without a network or a library.

write_report("report.html", {"train": model.fit(train, valid), "stream": stream_history})
"""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from hotbed.files import Where, resolve
from hotbed.persist.container.store import write_text
from hotbed.pictures.charts import Chart, figure
from hotbed.pictures.numbers import number_text
from hotbed.pictures.page import box, cards_of, grid, page_of, section, side_by_side
from hotbed.training.columns import Tables
from hotbed.training.watching import report_charts, report_runs, report_segments, report_tables
from hotbed.training.watching.baselines import findings
from hotbed.training.watching.history import History
from hotbed.training.watching.served import Answer, Served

__all__ = ["Answer", "Served", "add_serving", "write_report"]


def __dir__() -> list[str]:
    return sorted(__all__)


_MORE_CARDS = "<!-- more cards -->"  # where `add_serving` writes
_MORE_SECTIONS = "<!-- more sections -->"
STREAM_TEXT = (
    "Each batch was predicted before it was learned, as a server would have scored it. A window "
    "compares the events of its own time only; the line of the whole stream compares all events "
    "with each other, so it may lie above or below them."
)
RELIABILITY_TEXT = (
    "Share of positives among events of about the same predicted probability. On the diagonal, "
    "predictions are probabilities; below it the model predicts too much, above it too little."
)
BASELINES_TEXT = (
    "Simple models that learned the same batches in the first pass over the data: the mean of the "
    "labels, a linear model of the same columns, and the mean label of each item."
)
NEW_IDS_TEXT = (
    "Rows of the validation with an id of this column that training has not seen, and how the "
    "model ranks the other rows and these."
)
RANKS_TEXT = (
    "The processes that trained together. Rows: those that each owns at the end. Bytes and seconds "
    "are of the steps alone; the seconds are those of calls to other ranks, and a rank that waits "
    "for a slower one has more of them."
)
DISK_TEXT = (
    "Rows that are not in memory are read from the disk while earlier batches train. A step waits "
    "for those that have not come yet."
)
FLOWS_TEXT = "Ids admitted, refused (once a batch) and evicted, in total so far."


def write_report(
    path: Where,
    histories: Mapping[str, History],
    *,
    title: str = "Training report",
    subtitle: str = "",
    facts: Mapping[str, Any] | None = None,
    summary: str = "",
    about: Mapping[str, Any] | None = None,
) -> Where:
    """Write a self-contained page about one or several calls of `fit`, and return its path.

    Args:
        path: file to write, or its URL.
        histories: by name, such as train and stream, in the order of the page. Where the callback
            `Windows` cut a stream, metrics, tables, freshness and lag are drawn over event time,
            together with `history.compared`. Histories of several models are compared: a chart has
            a line for each of them.
        title: text of the head.
        subtitle: text below the title; the date and the versions are added.
        facts: more numbers for the cards on top.
        summary: text for the end, such as the result of `model.summary()`, which brings the picture
            of a network of `hb.models.Graph`.
        about: settings of the run by name: seed, data, batch sizes. The number of samples and the
            mean label of each history are added.
    """
    sections = [
        _held(histories),
        _baselines(histories),
        report_segments.segments(histories),
        *_chart_sections(histories),
        _MORE_SECTIONS,
        _epochs(histories),
        _tables(histories),
        _ranks(histories),
        _about(histories, about or {}),
    ]
    if summary:
        sections.append(section("Model", box(f"<pre>{html.escape(summary)}</pre>")))
    picture = getattr(summary, "picture", "")
    if picture:
        sections.append(section("Layers", box(picture)))
    versions = (
        f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC · hotbed {version('hotbed')} · "
        f"torch {version('torch')}"
    )
    below = " · ".join(part for part in (subtitle, versions) if part)
    cards = {**number_texts(histories), **(facts or {})}
    write_text(path, page_of(title, below, cards, sections))
    return resolve(path)


def _chart_sections(histories: Mapping[str, History]) -> list[str]:
    """Return the sections that have charts; those of several runs have a line for each."""
    is_compared = len(report_runs.runs_of(histories)) > 1
    charts = report_runs if is_compared else report_charts
    tables = report_runs if is_compared else report_tables
    parts = [
        ("Learning", charts.LEARNING_TEXT, charts.learning(histories)),
        ("The stream", STREAM_TEXT, charts.stream(histories)),
        ("Reliability", RELIABILITY_TEXT, charts.reliability(histories)),
        (
            "What came and went",
            "In each window of the stream.",
            report_charts.flow_of_windows(histories),
        ),
        ("Tables", "Rows that each table holds.", tables.sizes(histories)),
        ("The disk", DISK_TEXT, report_tables.disk(histories)),
    ]
    sections = [_charts(name, text, drawn) for name, text, drawn in parts]
    flows = tables.flows(histories)
    return [*sections, _charts("Admission and eviction", FLOWS_TEXT, flows, small=True)]


def _charts(name: str, text: str, charts: Sequence[Chart], *, small: bool = False) -> str:
    """Return a section of charts; "" without any."""
    if not charts:
        return ""
    return section(name, side_by_side([figure(chart) for chart in charts], small=small), text)


def add_serving(
    path: str | Path, served: Served, facts: Mapping[str, Any] | None = None, note: str = ""
) -> dict[str, float]:
    """Add the answers of a server to a report, and return the numbers on its cards.

    Args:
        path: the report to add to.
        served: answers of a server that followed the training, or, without versions, of one that
            was started after it.
        facts: more numbers for the cards.
        note: a sentence or two about the scores in the charts.
    """
    page = Path(path).read_text(encoding="utf-8")
    numbers = served.numbers()
    text = "A server answered requests with the trained model."
    if served.versions:
        text = (
            "A server followed the training and answered requests all the while. "
            "Each point of freshness is a version."
        )
    if note:
        text = f"{text} {note}"
    addition = _charts("Serving", text, served.charts())
    additions = {_MORE_CARDS: cards_of({**numbers, **(facts or {})}), _MORE_SECTIONS: addition}
    for mark, part in additions.items():
        page = page.replace(mark, part + mark)
    write_text(path, page)
    return numbers


# --- numbers and tables ---------------------------------------------------------------------------


def number_texts(histories: Mapping[str, History]) -> dict[str, Any]:
    """Return the numbers on the cards: metrics of what each history kept, speed, rows."""
    numbers: dict[str, Any] = {}
    runs = report_runs.runs_of(histories)
    for name, history in histories.items():
        for key, value in history.metrics.items():
            plain = key.removeprefix("valid.")
            if plain.rpartition(".")[2] == "loss":
                continue
            text = plain.replace("_", " ")
            if not key.startswith("valid."):
                text = f"{name} {text}"
            elif len(runs) == 1:
                text = f"validation {text}"
            else:
                text = f"{name} validation {text}"
            numbers[text] = value
        if history.kept is not None and history.kept.epoch:
            numbers[f"kept epoch, {name}"] = f"{history.kept.epoch} of {len(history.epochs)}"
        if history.epochs:
            numbers[f"samples/s, {name}"] = history.epochs[-1]["samples_per_second"]
    for name, parts in runs.items():
        tables = _last_tables(parts)
        if tables:
            text = "rows in all tables" if len(runs) == 1 else f"rows in all tables, {name}"
            numbers[text] = sum(stats["rows"] for stats in tables.values())
    return numbers


def kept_text(history: History) -> str:
    """Return which state the model has at the end; "" where it is the last one."""
    moment = history.kept
    if moment is None or not history.points:
        return ""
    return f"epoch {moment.epoch}, step {moment.step:,} of {history.points[-1].step:,}"


def _last_tables(histories: Mapping[str, History]) -> Mapping[str, Mapping[str, Any]]:
    """Return the statistics of the tables at the last point; empty where there are none."""
    for history in reversed(list(histories.values())):
        if history.tables:
            return history.tables
    return {}


def _baselines(histories: Mapping[str, History]) -> str:
    """Return the sections with the metrics of the model and of baselines, and which is better."""
    blocks = []
    for name, history in histories.items():
        shared = {key for row in history.baselines.values() for key in row}
        keys = [key for key in history.metrics if key in shared]
        rows = []
        for title, values in {"the model": history.metrics, **history.baselines}.items():
            rows.append([title, *(number_text(values.get(key, "")) for key in keys)])
        head = ["", *(report_charts.metric_text(key.removeprefix("valid.")) for key in keys)]
        text = " ".join([*findings(history.metrics, history.baselines), BASELINES_TEXT])
        if keys:
            blocks.append(section(f"Beside simple models, {name}", grid(head, rows), text))
        head = ["column", "rows with a new id, %", "AUC, known ids", "AUC, new ids"]
        rows = []
        for column, values in history.new_ids.items():
            numbers = (100 * values["new"], values["auc_known"], values["auc_new"])
            rows.append([column, *(number_text(number) for number in numbers)])
        if rows:
            blocks.append(section(f"Known and new ids, {name}", grid(head, rows), NEW_IDS_TEXT))
    return "\n".join(blocks)


def _held(histories: Mapping[str, History]) -> str:
    """Return the sections with the versions that a gate held, and why."""
    blocks = []
    for name, history in histories.items():
        rows = [[f"{step:,}", reason] for step, reasons in history.held for reason in reasons]
        if rows:
            grid_of_held = grid(["step", "reason"], rows)
            blocks.append(section(f"Versions that were not published, {name}", grid_of_held))
    return "\n".join(blocks)


def _epochs(histories: Mapping[str, History]) -> str:
    blocks = []
    for name, history in histories.items():
        keys = list(dict.fromkeys(key for epoch in history.epochs for key in epoch))
        rows = [[number_text(epoch.get(key, "")) for key in keys] for epoch in history.epochs]
        for epoch, row in zip(history.epochs, rows, strict=True):
            if history.kept is not None and history.kept.epoch == epoch["epoch"]:
                row[keys.index("epoch")] += " (kept)"
        if rows:
            head = [key.replace("_", " ") for key in keys]
            blocks.append(section(f"Epochs, {name}", grid(head, rows)))
    return "\n".join(blocks)


def _tables(histories: Mapping[str, History]) -> str:
    blocks = []
    runs = report_runs.runs_of(histories)
    for run, parts in runs.items():
        tables = _last_tables(parts)
        if not tables:
            continue
        keys = list(dict.fromkeys(key for stats in tables.values() for key in stats))
        rows = []
        for name, stats in tables.items():
            rows.append([name, *(number_text(stats.get(key, "")) for key in keys)])
        head = ["table", *(key.replace("_", " ") for key in keys)]
        of_run = "" if len(runs) == 1 else f", {run}"
        blocks.append(section(f"Tables at the end{of_run}", grid(head, rows)))
        blocks += _evictions(parts, of_run)
    return "\n".join(blocks)


def _ranks(histories: Mapping[str, History]) -> str:
    """Return the sections with what each of several processes did."""
    blocks = []
    head = ["rank", "samples", "rows", "bytes sent a step", "messages a step"]
    head += ["seconds waiting", "of them a step"]
    for name, history in histories.items():
        rows = []
        for work in history.ranks:
            steps = max(work.steps, 1)
            numbers = (
                work.samples,
                work.rows,
                work.sent_bytes / steps,
                work.messages / steps,
                work.wait_seconds,
                work.wait_seconds / steps,
            )
            rows.append([str(work.rank), *map(number_text, numbers)])
        if rows:
            blocks.append(section(f"Ranks, {name}", grid(head, rows), RANKS_TEXT))
    return "\n".join(blocks)


def _evictions(histories: Mapping[str, History], of_run: str) -> list[str]:
    """Return the section with the evicted rows of each table, by reason."""
    tables: Tables = {}
    for history in histories.values():
        tables |= history.evictions
    if not tables:
        return []
    reasons = list(dict.fromkeys(reason for counts in tables.values() for reason in counts))
    rows = [
        [name, *(number_text(counts.get(reason, 0)) for reason in reasons)]
        for name, counts in tables.items()
    ]
    head = ["table", *(reason.replace("_", " ") for reason in reasons)]
    return [section(f"Evicted rows by reason{of_run}", grid(head, rows))]


def _about(histories: Mapping[str, History], about: Mapping[str, Any]) -> str:
    """Return the section with `about`, and the samples and mean label of each history."""
    rows = [[name, str(value)] for name, value in about.items()]
    for name, history in histories.items():
        if history.points:
            text = f"{history.points[-1].samples:,}"
            if not math.isnan(history.mean_label):
                text += f", mean label {number_text(history.mean_label)}"
            rows.append([f"samples learned, {name}", text])
        if history.kept is not None:
            rows.append([f"kept state, {name}", kept_text(history)])
    if not rows:
        return ""
    return section("The run", grid(["", ""], rows, text=True))
