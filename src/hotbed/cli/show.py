# SPDX-License-Identifier: Apache-2.0
"""What the commands print of a job: columns, events, results, tables, errors."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import yaml
from rich.console import Console
from rich.markup import escape
from rich.progress import MofNCompleteColumn, Progress, TaskID
from rich.table import Table as Grid

from hotbed.cli.launch import RankFailure
from hotbed.job.check import JobAnswer
from hotbed.job.events import Began, Event, Finished, MovedAside, Scored, WarmStarted
from hotbed.job.run import ColumnFacts, Evaluated, JobFacts, Learned, Predictions, Published
from hotbed.job.states import Exported
from hotbed.prepare import Stage, Workflow
from hotbed.quality.cells import BASE, METRICS, REPLAY
from hotbed.quality.page import PAGE, figure_text, value_text
from hotbed.quality.replay_page import verdict
from hotbed.quality.samples import VERSION

if TYPE_CHECKING:
    from hotbed.embedding.table import Table
    from hotbed.quality.replay import Replayed
    from hotbed.quality.results import Quality
    from hotbed.serving.request_log.rescoring import Rescored
    from hotbed.serving.routes.editing import ReplicaRoute
    from hotbed.training.columns import Tables
    from hotbed.training.watching.history import History
    from hotbed.training.watching.segments import SegmentRow, SegmentTables

console = Console()
_RANKING = ("auc", "hit_rate", "ndcg")  # metrics of the order of scores
_SERVED_AS = "model"  # the name of an exported model in the commands that serve and ask it


def print_line(text: str) -> None:
    """Print a line, never broken and never coloured."""
    console.print(text, highlight=False, soft_wrap=True)


def mebibytes(num_bytes: float) -> str:
    """Return a number of bytes in MiB, with one decimal."""
    return f"{num_bytes / 2**20:,.1f}"


def capacity_text(num_rows: int, capacity: int | None) -> str:
    """Return the rows that were expected, and the part of them that is there."""
    return "" if capacity is None else f"{capacity:,} ({num_rows / capacity:.0%})"


# --- jobs -----------------------------------------------------------------------------------------


def print_event(event: Event) -> None:
    """Print what a command reports while it works."""
    match event:
        case MovedAside():
            print_line(f"earlier state: {event.folder}")
        case WarmStarted():
            console.print(
                f"warm start: {event.table} has {event.num_rows:,} rows of {event.source} in "
                f"{event.path}"
            )
        case Began():
            part = "training"
            if event.part == "stream":
                part = "the stream: each batch is predicted, then learned by"
            features = f"{event.num_ids} id and {event.num_dense} dense features"
            console.rule(f"[bold]{part} {event.model} on {features}", align="left")
        case Finished():
            console.rule("[bold]results", align="left")
            for name, history in event.histories.items():
                _print_history(name, history)
            _print_tables(event.model.tables, event.histories)


class ScoringBar:
    """A bar that shows how many rows are scored, while the `with` block lasts."""

    def __init__(self) -> None:
        self._bar = Progress(
            *Progress.get_default_columns(), MofNCompleteColumn(), console=console, transient=True
        )
        self._task = self._bar.add_task("scoring", total=None)

    def __enter__(self) -> ScoringBar:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def update(self, event: Event) -> None:
        """Show an event of kind `Scored`."""
        if isinstance(event, Scored):
            self._bar.update(self._task, completed=event.num_rows, total=event.total)


class StageBars:
    """A bar for each stage of a preparation, while the `with` block lasts.

    Without a terminal, a line for each stage that has ended.
    """

    def __init__(self) -> None:
        self._bars = Progress(
            *Progress.get_default_columns(),
            MofNCompleteColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> StageBars:
        self._bars.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._bars.stop()

    def update(self, stage: Stage) -> None:
        """Show how far a stage is."""
        if stage.name not in self._tasks:
            self._tasks[stage.name] = self._bars.add_task(stage.name, total=stage.total)
        self._bars.update(self._tasks[stage.name], completed=stage.done)
        if stage.done == stage.total and not console.is_terminal:
            print_line(f"{stage.name}: {stage.total} tasks")


def print_prepared(workflow: Workflow) -> None:
    """Print what was prepared, and where."""
    for name, count in workflow.counts.items():
        if name != "skipped":
            print_line(f"{name.replace('_', ' ')}: {count:,}")
    for reason, count in workflow.counts["skipped"].items():
        letters = Path(workflow.path) / "dead_letters"
        print_line(f"left out ({reason}): {count:,} rows, see {letters}")
    print_line(f"report: {Path(workflow.path) / 'report.html'}")
    print_line(f"prepared: {workflow.path}")


def print_job(job: JobFacts) -> None:
    """Print a job: its columns, its settings and the trained model."""
    _print_columns(job.columns)
    print_derived(job.derived)
    settings = yaml.safe_dump(
        dict(job.settings), sort_keys=False, default_flow_style=None, width=110
    )
    console.print(escape(settings), highlight=False)
    if job.misfit:
        print_line(f"not the trained model: {job.misfit}")
    elif job.model is None:
        console.print(f"not trained yet: no checkpoint in {job.output}")
    else:
        print(job.model)
    if job.join:
        print_join(job.join)


def print_answers(answers: Iterable[JobAnswer]) -> None:
    """Print the answers to questions about a job."""
    colours = {"ok": "green", "warning": "yellow", "error": "red"}
    grid = Grid("question", "", "answer")
    for answer in answers:
        outcome = f"[{colours[answer.outcome]}]{answer.outcome}[/]"
        grid.add_row(escape(answer.question), outcome, escape(answer.text))
    console.print(grid)


def print_join(join: Mapping[str, Any]) -> None:
    """Print what a join of streams holds, counted and read, as a state has it."""
    grid = Grid("join", "")
    for name in ("open_impressions", "held_outcomes"):
        grid.add_row(name, f"{join[name]:,}")
    for name, count in join["counts"].items():
        grid.add_row(name, f"{count:,}")
    grid.add_row("watermark", _event_time(join["watermark"]))
    for number, highs in enumerate(join["newest"]):
        for partition, newest in highs.items():
            place = f"input {number}, partition {partition}" if partition else f"input {number}"
            grid.add_row(f"newest of {escape(place)}", _event_time(newest))
    console.print(grid)


def print_derived(derived: Mapping[str, str]) -> None:
    """Print the columns of requests that depend on other rows."""
    for name, text in derived.items():
        print_line(f"derived   {name}: {text}")


def _print_columns(columns: Iterable[ColumnFacts]) -> None:
    grid = Grid("column", "role", "reads", "table", "settings")
    for column in columns:
        settings = ""
        if column.settings:
            settings = escape(json.dumps(column.settings, ensure_ascii=False))
        reads = f"{column.source}: {column.type or '[red]absent[/]'}"
        if not column.source:
            reads = "kept by the model"
        grid.add_row(column.name, column.role, reads, column.table, settings)
    console.print(grid)


def print_trained(learned: Learned) -> None:
    """Print where the model and the report are."""
    print_line(f"model: {learned.place}")
    print_line(f"report: {learned.report}")


def print_followed(learned: Learned) -> None:
    """Print where the stream's states and the report are."""
    print_line(f"state: {learned.place}")
    print_line(f"report: {learned.report}")


def print_written_job(path: Path) -> None:
    """Print where a drafted job is, and what comes next."""
    console.print(f"wrote {path}: read its comments, correct it, then: hotbed train {path}")


def print_written_preparation(preparation: Path, job: Path) -> None:
    """Print where a drafted preparation and its job are, and what comes next."""
    console.print(
        f"wrote {preparation} and {job}: read their comments, correct them, then: hotbed prepare "
        f"{preparation}; hotbed train {job}"
    )


def _print_history(part: str, history: History) -> None:
    """Print the metrics of a part of a job, and its speed."""
    speed = history.epochs[-1]["samples_per_second"]
    values = history.metrics
    if part == "stream":
        values = {f"progressive {name}": value for name, value in values.items()}
    note = ""
    if history.kept is not None and history.kept.epoch:
        note = f"  (epoch {history.kept.epoch} of {len(history.epochs)} is kept)"
    print_values(part, values, f"  {speed:,.0f} samples/s{note}")
    _print_baselines(history.baselines, history.segments, history.findings)


def _print_tables(tables: Mapping[str, Table], histories: Mapping[str, History]) -> None:
    """Print how tables grew: rows after each part, ids admitted, refused and evicted."""
    parts = [f"rows after {part}" for part in histories]
    grid = _named_grid("table", *parts, "capacity", "admitted", "refused", "evicted", "MiB")
    at_end: Tables = {}
    for history in histories.values():
        at_end = history.tables or at_end
    for name, table in sorted(tables.items()):
        stats = at_end.get(name) or table.stats  # a history counts the rows of all ranks
        num_rows = []
        for history in histories.values():
            num_rows.append(history.tables[name]["rows"] if history.tables else 0)
        counts = [stats["admitted"], stats["refused"], stats["evicted"]]
        # a state holds no bytes, and nothing may have been learned since
        sized = stats if "row_bytes" in stats else table.stats
        num_bytes = sum(value for key, value in sized.items() if "bytes" in key)
        grid.add_row(
            name,
            *(f"{count:,.0f}" for count in num_rows),
            capacity_text(stats["rows"], table.capacity),
            *(f"{count:,.0f}" for count in counts),
            mebibytes(num_bytes),
        )
    console.print(grid)


def print_evaluated(evaluated: Evaluated) -> None:
    """Print the metrics of an evaluation beside those of baselines."""
    print_values("evaluation", evaluated.metrics)
    _print_baselines(evaluated.baselines, evaluated.segments, evaluated.findings)


def _print_baselines(
    figures: Mapping[str, Mapping[str, float]], segments: SegmentTables, findings: Sequence[str]
) -> None:
    """Print the metrics of each baseline, those by segment, and which is better than the model."""
    for name, values in figures.items():
        print_values(f"  {name}", values)
    for column, rows in segments.items():
        _print_segments(column.removeprefix("valid."), rows)
    for sentence in findings:
        print_line(sentence)


def _print_segments(column: str, rows: Sequence[SegmentRow]) -> None:
    """Print the figures of the model for each value, beside the best log loss of a baseline."""
    grid = _named_grid(column, "rows", "positives", "AUC", "log loss", "calibration", "baseline")
    for row in rows:
        model = row.figures["model"]
        losses = {name: values["log_loss"] for name, values in row.figures.items()}
        del losses["model"]
        best = ""
        if losses:
            name = min(losses, key=lambda name: losses[name])
            best = f"{name.partition(' ')[0]} {losses[name]:.4f}"
        counts = (f"{row.rows:,}", f"{row.positives:,}")
        numbers = [f"{model[key]:.4f}" for key in ("auc", "log_loss", "calibration")]
        grid.add_row(escape(row.value), *counts, *numbers, best)
    console.print(grid)


def _named_grid(name: str, *titles: str) -> Grid:
    """Return a grid whose first column holds names, which are never cut."""
    grid = Grid()
    grid.add_column(name, no_wrap=True)
    for title in titles:
        grid.add_column(title)
    return grid


def print_values(title: str, values: Mapping[str, float], more: str = "") -> None:
    """Print named numbers on one line; a loss that is a log loss is printed once."""
    texts = []
    for name, value in values.items():
        if name.endswith("loss") and f"{name.removesuffix('loss')}log_loss" in values:
            continue
        texts.append(f"{name.replace('valid.', 'validation ')} {value:.4f}")
    print_line(f"{title}: {'  '.join(texts)}{more}")


def print_predictions(predictions: Predictions) -> None:
    """Print where predictions are."""
    console.print(
        f"{predictions.num_rows:,} predictions, in the order of the source: {predictions.path}"
    )


def print_rescored(versions: Sequence[Rescored]) -> None:
    """Print logged scores beside those of a model, by the version that scored first."""
    grid = Grid("version", "requests", "scores", "differ", "largest", "mean logged", "mean now")
    for each in versions:
        means = [
            f"{total / max(1, each.scores):.5f}" for total in (each.logged_sum, each.model_sum)
        ]
        counts = [f"{count:,}" for count in (each.requests, each.scores, each.different)]
        name = f"{each.version} ({each.digest[:12]})"
        grid.add_row(name, *counts, f"{each.largest:.3g}", *means)
    console.print(grid)


def print_rule(file: str, revision: int, model: str, rule: Mapping[str, Any]) -> None:
    """Print the rule of a model that was written into a file."""
    console.print(f"{file}: revision {revision}, model {model}:")
    spec = dict(rule) or {"stable": {"follow": True}}
    console.print(yaml.safe_dump(spec, allow_unicode=True).strip(), markup=False)


def print_replicas(rows: Sequence[ReplicaRoute]) -> None:
    """Print by which rule each replica answers."""
    grid = _named_grid("replica", "model", "revision", "stable", "canary", "shadow")
    for row in rows:
        cells = (row.url, row.model, row.revision, row.stable, row.canary, row.shadow)
        grid.add_row(*["" if cell is None else escape(str(cell)) for cell in cells])
    console.print(grid)
    for row in rows:
        if row.problem:
            console.print(f"{row.url}: {row.problem}", markup=False)


def print_window(window: Quality) -> None:
    """Print a line about a window that was measured."""
    whole = window.windows.slice(0, 1).to_pylist()[0]
    print_line(
        f"{whole['begin']:%Y-%m-%d %H:%M} to {whole['end']:%H:%M} UTC: {whole['samples']:,} "
        f"samples of {whole['users']:,} users, rate {whole['rate']:.4f}, "
        f"AUC {figure_text(whole, 'auc')}"
    )


def print_quality(quality: Quality) -> None:
    """Print the newest window: its figures, and the differences that were measured."""
    if not quality.windows.num_rows:
        print_line("no window has all of its outcomes yet")
        return
    newest = quality.windows["begin"].to_pylist()[-1]
    for table, column in ((quality.windows, "users"), (quality.differences, "against")):
        _print_rows([row for row in table.to_pylist() if row["begin"] == newest], column)


def _print_rows(rows: Sequence[Mapping[str, Any]], column: str) -> None:
    """Print all metrics of some rows, if there are any; `column`: a further one."""
    if rows:
        _print_figures(rows, [column, "samples"], _RANKING)
        _print_figures(rows, [], [name for name in METRICS if name not in _RANKING])


def _print_figures(
    rows: Sequence[Mapping[str, Any]], columns: Sequence[str], metrics: Sequence[str]
) -> None:
    """Print some metrics of a window, so few that a terminal of 80 columns has room."""
    grid = Grid()
    for title in ("route", "samples of", *columns, *(name.replace("_", " ") for name in metrics)):
        grid.add_column(title, overflow="fold")
    for row in rows:
        cell = f"{row['column']} {value_text(row)}" if row["column"] else "all"
        texts = [row["route"] or "answered", cell, *(str(row[name]) for name in columns)]
        grid.add_row(*map(escape, texts), *(figure_text(row, name) for name in metrics))
    console.print(grid)


def print_replayed(replayed: Replayed | None, output: Path) -> None:
    """Print what a replay found, and what it cannot know; None: it was stopped."""
    if replayed is None:
        print_line("stopped: the same command resumes")
        return
    sides = (None, BASE, REPLAY)
    windows = replayed.whole.windows.to_pylist()
    whole = [row for row in windows if row["column"] is None and row["route"] in sides]
    _print_rows(whole, "users")
    differences = [
        row
        for row in replayed.whole.differences.to_pylist()
        if row["route"] in (BASE, REPLAY) and row["column"] != VERSION
    ]
    _print_rows(differences, "against")
    prediction = replayed.prediction
    grid = Grid("side", "click rate", "low", "high")
    for side, rate in prediction.rates.items():
        grid.add_row(side, *(f"{value:.5f}" for value in vars(rate).values()))
    console.print(grid)
    print_line(verdict(prediction))
    print_line(
        f"{prediction.lists:,} requests of {prediction.users:,} users with {prediction.clicks:,} "
        f"clicks; {prediction.same_first:.0%} of the lists have the same candidate first"
    )
    print_line("What this cannot know:")
    for limit in prediction.limits:
        print_line(f"- {limit}")
    print_line(f"report: {output / PAGE}")


def print_export(exported: Exported) -> None:
    """Print an exported model: tables, rows, bytes, digest, and how to serve it."""
    manifest = exported.manifest
    tables = manifest.tables
    files = manifest.files
    grid = _named_grid("table", "dim", "rows", "MiB")
    for table in tables:
        num_bytes = sum(files[part.file].bytes for part in table.parts)
        dim = str(table.config["dim"])
        grid.add_row(escape(table.name), dim, f"{table.rows:,}", mebibytes(num_bytes))
    console.print(grid)
    num_rows = sum(table.rows for table in tables)
    num_bytes = sum(file.bytes for file in files.values())
    learned = ""
    if manifest.learned is not None:
        learned = f", learned until {_moment(manifest.learned)}"
    request = shlex.quote(json.dumps(exported.request(), ensure_ascii=False))
    print_line(
        f"version {manifest.version}: {len(tables)} tables, {num_rows:,} rows, "
        f"{num_bytes:,} bytes{learned}\n"
        f"digest {manifest.digest}\n"
        f"exported: {exported.path}\n"
        f"serve it: hotbed serve {_SERVED_AS}={shlex.quote(str(exported.path))}\n"
        f"ask it:   curl -s localhost:8000/v2/models/{_SERVED_AS}/infer -d {escape(request)}"
    )


def print_published(published: Published) -> None:
    """Print what `hotbed.job.run.publish` returned."""
    version = published.version
    if version is None:
        print_line(f"{published.path}: {published.state} is the newest version there already")
        return
    print_line(f"{published.path}: {published.state} is version {version.version} now")


# --- errors --------------------------------------------------------------------------------------


def print_error(error: Exception) -> None:
    """Print an error on stderr, as one message without its traceback."""
    text = f"[bold red]{type(error).__name__}[/] {escape(str(error))}"
    Console(stderr=True).print(text, highlight=False, soft_wrap=True)


def print_failure(failure: RankFailure) -> None:
    """Print the error that ended several ranks, on stderr."""
    whose = "" if failure.rank is None else f"rank {failure.rank}: "
    Console(stderr=True).print(
        f"[bold red]{whose}[/]{escape(failure.message)}", highlight=False, soft_wrap=True
    )


def _event_time(micros: int | None) -> str:
    """Return a time of events; as a number where no calendar has it."""
    if micros is None:
        return "none yet"
    try:
        return _moment(micros / 1e6)
    except (OverflowError, ValueError, OSError):
        return f"{micros} microseconds since 1970"


def _moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
