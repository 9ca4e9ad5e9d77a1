# SPDX-License-Identifier: Apache-2.0
"""The command line: parse, build, run. New knobs are keys of a job, not flags."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Mapping
from importlib import import_module, metadata, util
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import yaml
from rich.console import Console
from rich.markup import escape
from rich.table import Table as Grid

from hotbed import config
from hotbed.errors import ConfigError, HotbedError
from hotbed.job import Job, json_schema, parse_value

if TYPE_CHECKING:
    from hotbed.embedding.table import Table
    from hotbed.training.model import RecModel
    from hotbed.training.watch import History

HELP = "Train, evaluate and inspect recommendation models that a job file describes; see docs/jobs.md."

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=HELP)
console = Console()

JobFile = Annotated[Path, typer.Argument(metavar="JOB.yaml", help="A job: YAML, or JSON.")]
Assignments = Annotated[
    list[str] | None, typer.Option("--set", metavar="A.B=C", help="Set one value of the job; may be given often.")
]


@app.command()
def train(job_file: JobFile, assignments: Assignments = None) -> None:
    """Train the job's model, run its stream, and write checkpoint and report to its output folder."""
    run_job(_read(job_file, assignments))


@app.command()
def evaluate(job_file: JobFile, assignments: Assignments = None) -> None:
    """Evaluate the trained model in the job's output folder on the job's validation data."""
    import hotbed as hb

    job = _read(job_file, assignments)
    if job.valid is None:
        raise ConfigError("job.valid: missing key — `hotbed evaluate` needs a source with labels — add it, or --set it")
    model = hb.load(job.output)
    print_values("evaluation", model.evaluate(job.dataset(job.valid, model.schema)))


@app.command()
def predict(job_file: JobFile, assignments: Assignments = None) -> None:
    """Score the job's `predict` source (default: `valid`); write predictions.parquet to its output folder."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    import hotbed as hb

    job = _read(job_file, assignments)
    source = job.predict or job.valid
    if source is None:
        raise ConfigError("job.predict: missing key — there is nothing to score — add a source, or --set it")
    model = hb.load(job.output)
    scores = model.predict(job.dataset(source, model.schema))
    columns = scores if isinstance(scores, Mapping) else {model.schema.labels[0].name: scores}
    path = Path(job.output) / "predictions.parquet"
    pq.write_table(pa.table({name: pa.array(values) for name, values in columns.items()}), path)
    console.print(f"{len(next(iter(columns.values()))):,} predictions, in the order of the source: {path}")


@app.command()
def inspect(job_file: JobFile, assignments: Assignments = None) -> None:
    """Show what a job is: its data, columns and tables; and the trained model, once there is one."""
    import hotbed as hb

    job = _read(job_file, assignments)
    print_columns(job)
    rest = {key: value for key, value in job.to_json().items() if key != "schema"}
    console.print(escape(yaml.safe_dump(rest, sort_keys=False, default_flow_style=None, width=110)), highlight=False)
    if (Path(job.output) / "CURRENT").exists():
        console.print(hb.load(job.output).summary(), highlight=False)
    else:
        console.print(f"not trained yet: no checkpoint in {job.output}")


@app.command()
def init(
    data_file: Annotated[Path, typer.Argument(metavar="DATAFILE", help="csv, tsv, jsonl or parquet.")],
    label: Annotated[str | None, typer.Option(help="The column to predict, where it is not plain.")] = None,
    out: Annotated[Path, typer.Option(help="The job file to write.")] = Path("job.yaml"),
) -> None:
    """Write a commented job for a data file by looking at its columns."""
    from hotbed.draft import draft

    if out.exists():
        raise ConfigError(f"{out}: the file exists — it is not overwritten — give another name with --out")
    out.write_text(draft(str(data_file), label), encoding="utf-8")
    Job.read(out)
    console.print(f"wrote {out}: read its comments, correct it, then: hotbed train {out}")


@app.command()
def schema() -> None:
    """Print the JSON Schema of job files, for completion and checks in editors."""
    typer.echo(json.dumps(json_schema(), indent=1, ensure_ascii=False))


@app.command()
def doctor() -> None:
    """Tell what this machine and this install can do."""
    grid = Grid("", "found", "what it is for", title="hotbed doctor", title_justify="left")
    for name, found, purpose in diagnose():
        grid.add_row(name, escape(found), purpose)
    console.print(grid)
    if not util.find_spec("hotbed._core"):
        raise typer.Exit(1)


def run_job(job: Job) -> RecModel:
    """Train, stream, save and report as the job says; prints what comes of it; returns the model."""
    from hotbed.training.report import write_report

    schema = job.schema.fit(job.train)
    model = job.rec_model(schema)
    fit, output = job.fit, Path(job.output)
    output.mkdir(parents=True, exist_ok=True)
    (output / "job.json").write_text(json.dumps(job.to_json(), indent=1, ensure_ascii=False), encoding="utf-8")
    name = config.kind_of(type(model.network))
    console.rule(f"[bold]training {name} on {len(schema.ids)} id and {len(schema.dense)} dense features", align="left")
    valid = None if job.valid is None else job.dataset(job.valid, schema)
    data = job.dataset(job.train, schema)
    histories = {"train": model.fit(data, valid, fit.epochs, job.make_callbacks(), seed=job.seed)}
    if job.stream is not None:
        console.rule("[bold]the stream: each batch is predicted, then learned", align="left")
        events = job.dataset(job.stream, schema, batch_size=fit.stream_batch_size)
        callbacks = job.make_callbacks(stream=True)
        histories["stream"] = model.fit(events, callbacks=callbacks, progressive=True)
    console.rule("[bold]results", align="left")
    for part, history in histories.items():
        speed = history.epochs[-1]["samples_per_second"]
        kind = "progressive " if part == "stream" else ""
        values = {kind + name: value for name, value in history.metrics.items()}
        print_values(part, values, f"  {speed:,.0f} samples/s")
    print_tables(model.tables, histories)
    console.print(f"model: {model.save(output)}", highlight=False, soft_wrap=True)
    summary = model.summary()
    report = write_report(output / "report.html", histories, title=f"{name}: {output.name}", summary=summary)
    console.print(f"report: {report}", highlight=False, soft_wrap=True)
    return model


def diagnose() -> list[tuple[str, str, str]]:
    """(part, what was found, what it is for), of this machine and install."""
    rows = [
        ("hotbed", _version("hotbed"), ""),
        ("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}", ""),
        ("processors", str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()), ""),
        ("memory", _memory(), "tables of the Ram tier"),
        ("native core", _native(), "tables; without it nothing trains"),
    ]
    for package, extra, purpose in (
        ("torch", "train", "training, evaluation, prediction"),
        ("tensorboard", "tensorboard", "the TensorBoard callback"),
        ("confluent_kafka", "kafka", "events from Kafka"),
        ("onnxruntime", "serve", "serving"),
        ("onnx", "export", "exporting for serving"),
    ):
        found = _version(package) if util.find_spec(package) else f"absent: pip install hotbed[{extra}]"
        rows.append((package, found, purpose))
    rows.append(("device", _device(), "the dense network; tables stay on the host"))
    return rows


def print_columns(job: Job) -> None:
    """Print the job's columns: role, the raw column and its type, table, settings."""
    raw = job.train.schema()
    grid = Grid("column", "role", "reads", "table", "settings")
    for column in job.schema.columns:
        shown_elsewhere = ("kind", "name", "column", "table")
        settings = {key: value for key, value in config.describe(column).items() if key not in shown_elsewhere}
        kind = raw.field(column.source).type if column.source in raw.names else "[red]absent[/]"
        text = escape(json.dumps(settings, ensure_ascii=False)) if settings else ""
        table = str(getattr(column, "table", "") or "")
        grid.add_row(column.name, config.kind_of(type(column)), f"{column.source}: {kind}", table, text)
    console.print(grid)


def print_tables(tables: Mapping[str, Table], histories: Mapping[str, History]) -> None:
    """Print how tables grew: rows after each part, and the ids that were admitted, refused and evicted on the way."""
    grid = Grid("table", *(f"rows after {part}" for part in histories), "admitted", "refused", "evicted", "MiB")
    for name, stats in ((name, table.stats) for name, table in sorted(tables.items())):
        rows = [history.points[-1].tables[name]["rows"] if history.points else 0 for history in histories.values()]
        counts = [f"{count:,.0f}" for count in (*rows, stats["admitted"], stats["refused"], stats["evicted"])]
        size = sum(value for key, value in stats.items() if "bytes" in key)
        grid.add_row(name, *counts, f"{size / 2**20:.1f}")
    console.print(grid)


def print_values(title: str, values: Mapping[str, float], more: str = "") -> None:
    """Print named numbers on one line."""
    same = [name for name in values if name.endswith("loss") and f"{name.removesuffix('loss')}log_loss" in values]
    kept = {name.replace("valid.", "validation "): value for name, value in values.items() if name not in same}
    named = "  ".join(f"{name} {value:.4f}" for name, value in kept.items())
    console.print(f"{title}: {named}{more}", highlight=False, soft_wrap=True)


def main() -> None:
    """Entry point: a deliberate error is one line on stderr and exit code 2, not a traceback."""
    try:
        app()
    except HotbedError as error:
        if os.environ.get("HOTBED_TRACEBACK"):
            raise
        text = f"[bold red]{type(error).__name__}[/] {escape(str(error))}"
        Console(stderr=True).print(text, highlight=False, soft_wrap=True)
        sys.exit(2)


def _read(job_file: Path, assignments: list[str] | None) -> Job:
    values: dict[str, Any] = {}
    for assignment in assignments or []:
        path, equals, text = assignment.partition("=")
        if not equals:
            raise ConfigError(f"--set: no '=' — received {assignment!r} — write a.b=c")
        values[path.strip().removeprefix("job.")] = parse_value(text)
    return Job.read(job_file, values)


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return str(getattr(__import__(package), "__version__", "unknown version"))


def _memory() -> str:
    try:
        return f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.1f} GiB"
    except (ValueError, OSError, AttributeError):
        return "unknown"


def _native() -> str:
    try:
        core = import_module("hotbed._core")
    except ImportError as error:
        return f"absent: {error}"
    return f"{core.isa_name()}, {core.num_threads()} threads"


def _device() -> str:
    if not util.find_spec("torch"):
        return "none without torch"
    torch = import_module("torch")
    if torch.cuda.is_available():
        return f"cuda: {torch.cuda.get_device_name()}"
    return "mps" if torch.backends.mps.is_available() else f"cpu, {torch.get_num_threads()} threads"


if __name__ == "__main__":
    main()
