# SPDX-License-Identifier: Apache-2.0
"""What the commands print: columns, events, results, tables, checkpoints, the machine."""

from __future__ import annotations

import json
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

from hotbed.cli.disk import DEPTHS, DiskSpeed
from hotbed.cli.doctor import Part
from hotbed.job.events import Began, Event, Finished, MovedAside, Scored, WarmStarted
from hotbed.job.run import ColumnFacts, Exported, JobFacts, Learned, Predictions, Published
from hotbed.prepare import Stage, Workflow

if TYPE_CHECKING:
    from hotbed.embedding.table import Table
    from hotbed.parallel.launch import RankFailure
    from hotbed.parallel.probe import RankConnections
    from hotbed.training.watching.columns import Tables
    from hotbed.training.watching.history import History

console = Console()
_BARS = "▁▂▃▄▅▆▇█"


def print_line(text: str) -> None:
    """Print a line, never broken and never coloured."""
    console.print(text, highlight=False, soft_wrap=True)


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
    _print_derived(job.derived)
    settings = yaml.safe_dump(
        dict(job.settings), sort_keys=False, default_flow_style=None, width=110
    )
    console.print(escape(settings), highlight=False)
    if job.model is None:
        console.print(f"not trained yet: no checkpoint in {job.output}")
    else:
        print(job.model)


def _print_columns(columns: Iterable[ColumnFacts]) -> None:
    grid = Grid("column", "role", "reads", "table", "settings")
    for column in columns:
        settings = ""
        if column.settings:
            settings = escape(json.dumps(column.settings, ensure_ascii=False))
        kind = column.type or "[red]absent[/]"
        grid.add_row(column.name, column.role, f"{column.source}: {kind}", column.table, settings)
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
    print_values(part, values, f"  {speed:,.0f} samples/s")


def _print_tables(tables: Mapping[str, Table], histories: Mapping[str, History]) -> None:
    """Print how tables grew: rows after each part, ids admitted, refused and evicted."""
    parts = [f"rows after {part}" for part in histories]
    grid = Grid("table", *parts, "capacity", "admitted", "refused", "evicted", "MiB")
    at_end: Tables = {}
    for history in histories.values():
        if history.points:
            at_end = history.points[-1].tables
    for name, table in sorted(tables.items()):
        stats = at_end.get(name) or table.stats  # a history counts the rows of all ranks
        num_rows = []
        for history in histories.values():
            num_rows.append(history.points[-1].tables[name]["rows"] if history.points else 0)
        counts = [stats["admitted"], stats["refused"], stats["evicted"]]
        num_bytes = sum(value for key, value in stats.items() if "bytes" in key)
        grid.add_row(
            name,
            *(f"{count:,.0f}" for count in num_rows),
            _capacity(stats["rows"], table.capacity),
            *(f"{count:,.0f}" for count in counts),
            _mebibytes(num_bytes),
        )
    console.print(grid)


def _capacity(num_rows: int, capacity: int | None) -> str:
    """Return the rows that were expected, and the part of them that is there."""
    return "" if capacity is None else f"{capacity:,} ({num_rows / capacity:.0%})"


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


def print_export(exported: Exported) -> None:
    """Print an exported model: tables, rows, bytes, digest, and how to serve it."""
    manifest = exported.manifest
    tables = manifest.tables
    files = manifest.files
    grid = Grid("table", "dim", "rows", "MiB")
    for table in tables:
        num_bytes = sum(files[part.file].bytes for part in table.parts)
        dim = str(table.config["dim"])
        grid.add_row(escape(table.name), dim, f"{table.rows:,}", _mebibytes(num_bytes))
    console.print(grid)
    num_rows = sum(table.rows for table in tables)
    num_bytes = sum(file.bytes for file in files.values())
    learned = ""
    if manifest.learned is not None:
        learned = f", learned until {_moment(manifest.learned)}"
    print_line(
        f"version {manifest.version}: {len(tables)} tables, {num_rows:,} rows, "
        f"{num_bytes:,} bytes{learned}\n"
        f"digest {manifest.digest}\n"
        f"exported: {exported.path}\n"
        f"serve it: hotbed serve {exported.path}"
    )


# --- checkpoints ----------------------------------------------------------------------------------


def print_checkpoint(facts: Mapping[str, Any]) -> None:
    """Print what a checkpoint holds, as `hotbed.persist.inspect` returns it."""
    mebibytes = _mebibytes(sum(facts["bytes"]))
    console.print(
        f"{facts['folder']}: {facts['kind']}, version {facts['version']}, {mebibytes} MiB",
        highlight=False,
    )
    for name in ("digest", "parent", "positions", "counters"):
        print_line(f"{name:9} {escape(json.dumps(facts[name]))}")
    for link in facts["chain"]:
        print_line(f"rests on  {link['folder']} {link['digest']}")
    dense = facts["dense"]
    console.print(f"dense     {dense['parameters']:,} parameters in {dense['tensors']} tensors")
    if "ids" in facts:
        _print_id_graph(facts["ids"])
    if facts["maps"]:
        print_line(f"maps      {facts['maps']} files of what transforms learned")
    _print_derived(facts["derived"])
    console.print(_grid_of(facts["tables"]))
    for table in facts["tables"]:
        if table["on_disk"]:
            print_line(f"{table['name']} on its tier: {table['on_disk']}")


def _print_id_graph(graph: Mapping[str, Any]) -> None:
    """Print the tensors that a model takes, and the lookups whose ids a server computes."""
    for tensor in graph["arguments"]:
        shape = ", ".join(["n", *map(str, tensor["shape"])])
        source = f"{tensor['part']} of column {tensor['column']}"
        print_line(
            f"input     {tensor['name']}: {tensor['dtype']} {escape(f'[{shape}]')}, {source}"
        )
    lookups = ", ".join(map(escape, graph["lookups"]))
    print_line(f"ids       {graph['file']} computes those of {lookups}")


def _print_derived(derived: Mapping[str, str]) -> None:
    """Print the columns of requests that depend on other rows."""
    for name, text in derived.items():
        print_line(f"derived   {name}: {text}")


def _grid_of(tables: Iterable[Mapping[str, Any]]) -> Grid:
    """Return a line for each table of a checkpoint."""
    changes = ("here: changed", "removed", "waiting")
    grid = Grid("table", "dim", "rows", "capacity", "MiB", *changes, "norms of rows", "counts")
    for table in tables:
        grid.add_row(
            table["name"],
            str(table["dim"]),
            f"{table['rows']:,}",
            _capacity(table["rows"], table["capacity"]),
            _mebibytes(table["bytes"]),
            f"{table['changed']:,}",
            f"{table['removed']:,}",
            _waiting(table),
            _histogram(table["norms"]),
            _histogram(table["counts"]),
        )
    return grid


def _waiting(table: Mapping[str, Any]) -> str:
    """Return how many ids wait for admission; those in a sketch have no number."""
    if not table["sketched_partitions"]:
        return f"{table['candidates']:,}"
    return f"{table['candidates']:,} + sketch"


def _histogram(bins: Sequence[Mapping[str, float]]) -> str:
    """Return rows by powers of two as one line: `0.0625 ▁▃█▂ 1`."""
    if not bins:
        return ""
    most = max(bin["rows"] for bin in bins)
    bars = ""
    for bin in bins:
        height = int(len(_BARS) * bin["rows"] / (most + 1))
        bars += _BARS[height]
    return f"{bins[0]['from']:g} {bars} {bins[-1]['to']:g}"


def print_verified(facts: Mapping[str, Any]) -> None:
    """Print what was verified, as `hotbed.persist.inspect.verify` returns it."""
    if "rows" in facts:
        rows = ", ".join(f"{part} {num_rows:,} rows" for part, num_rows in facts["rows"].items())
        print_line(
            f"{facts['folder']} is whole: prepared, {rows}, {facts['files']} files, "
            f"{_mebibytes(facts['bytes'])} MiB\n"
            f"digest   {facts['digest'] or 'not noted by the version that wrote it'}"
        )
        return
    print_line(
        f"{facts['folder']} is whole: {facts['kind']}, version {facts['version']}, "
        f"{facts['links']} links, {facts['files']} files, {_mebibytes(facts['bytes'])} MiB\n"
        f"digest   {facts['digest']}\n"
        f"content  {facts['content_digest']}"
    )


def print_restored(path: str, facts: Mapping[str, Any]) -> None:
    """Print which state a stream resumes from, as `hotbed.persist.resume.go_back` returns it."""
    aside = ", ".join(facts["aside"]) or "nothing"
    print_line(
        f"{path} resumes from {facts['folder']}: {facts['kind']}, version {facts['version']}\n"
        f"moved to {path}/aside: {aside}"
    )


def print_published(published: Published) -> None:
    """Print what `hotbed.job.run.publish` returned."""
    version = published.version
    if version is None:
        print_line(f"{published.path}: {published.state} is the newest version there already")
        return
    print_line(f"{published.path}: {published.state} is version {version.version} now")


def print_difference(facts: Mapping[str, Any]) -> None:
    """Print what differs between two checkpoints, as `hotbed.persist.inspect.diff` returns it."""
    grid = Grid("table", "added", "removed", "changed", "largest difference")
    for name, table in facts["tables"].items():
        if table is None:
            grid.add_row(name, "only in one")
            continue
        counts = [f"{table[key]:,}" for key in ("added", "removed", "changed")]
        grid.add_row(name, *counts, f"{table['largest']:.3g}")
    console.print(grid)
    if not any(_differs(table) for table in facts["tables"].values()) and not facts["dense"]:
        print_line("all rows and tensors are equal")
    for name, largest in facts["dense"].items():
        text = "other shape"
        if largest is not None:
            text = f"{largest:.3g}"
        console.print(f"{name}: {text}", highlight=False)
    for name in ("positions", "counters"):
        before, after = facts[name]
        if before != after:
            print_line(f"{name}: {before}\n      now: {after}")
    if facts["others"]:
        print_line(f"other parts that differ: {', '.join(facts['others'])}")


def _differs(table: Mapping[str, Any] | None) -> bool:
    return table is None or any(table[key] for key in ("added", "removed", "changed"))


# --- the machine ----------------------------------------------------------------------------------


def print_machine(parts: Iterable[Part]) -> None:
    """Print what this machine and this install can do."""
    grid = Grid("", "found", "what it is for", title="hotbed doctor", title_justify="left")
    for part in parts:
        grid.add_row(part.name, escape(part.state), part.purpose)
    console.print(grid)


def print_connection(connection: RankConnections) -> None:
    """Print how the ranks of a job reach each other."""
    hosts = len(set(connection.hosts))
    grid = Grid(
        "each rank sends to each other one",
        "a call takes",
        "each sends",
        title=f"{len(connection.hosts)} ranks on {hosts} host{'s' if hosts > 1 else ''}, over gloo",
        title_justify="left",
    )
    for num_bytes, seconds in connection.seconds.items():
        size = f"{num_bytes} B" if num_bytes < 1024 else f"{num_bytes // 1024:,} KiB"
        # of a few bytes the time of a call counts
        rate = "" if num_bytes < 1024 else f"{connection.bandwidth(num_bytes) / 2**20:,.1f} MiB/s"
        grid.add_row(size, f"{seconds * 1e6:,.0f} us", rate)
    console.print(grid)
    for problem in connection.problems:
        print_line(escape(problem))


def print_disk(speed: DiskSpeed) -> None:
    """Print how fast a disk is."""
    kind = f", {speed.file_system}" if speed.file_system else ""
    head = [f"random reads a second, {depth} at once" for depth in DEPTHS]
    grid = Grid("engine", *head, title=f"{escape(speed.folder)}{kind}", title_justify="left")
    for engine in dict.fromkeys(engine for engine, _ in speed.reads):
        grid.add_row(engine, *(f"{speed.reads[engine, depth]:,.0f}" for depth in DEPTHS))
    console.print(grid)
    median, longest = speed.sync_seconds
    print_line(
        f"fdatasync of a block: {median * 1e3:.2f} ms, {longest * 1e3:.2f} ms at most\n"
        f"writes one after the other: {_mebibytes(speed.write_bytes)} MiB/s"
    )
    if "io_uring" not in {engine for engine, _ in speed.reads}:
        print_line("io_uring is not allowed here: threads read, with twice the CPU time")
    if not speed.is_direct:
        print_line("reads go through the page cache here: these are figures of memory")


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


def _mebibytes(num_bytes: float) -> str:
    return f"{num_bytes / 2**20:,.1f}"


def _moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
