# SPDX-License-Identifier: Apache-2.0
"""The command line: parse, build, run. New knobs are keys of a job, not flags."""

from __future__ import annotations

import json
import os
import platform
import shutil
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
from hotbed.job import Job, json_schema
from hotbed.jobfile import parse_value
from hotbed.show import console, print_checkpoint, print_columns, print_difference, print_results, print_values

if TYPE_CHECKING:
    from hotbed.training.model import RecModel
    from hotbed.training.watch import History

HELP = "Train, follow, evaluate and inspect recommendation models that a job file describes; see docs/jobs.md."

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=HELP)

JobFile = Annotated[Path, typer.Argument(metavar="JOB.yaml", help="A job: YAML, or JSON.")]
Assignments = Annotated[
    list[str] | None, typer.Option("--set", metavar="A.B=C", help="Set one value of the job; may be given often.")
]


Checkpoint = Annotated[str, typer.Argument(metavar="CKPT", help="A folder of states, one of them, or a URL.")]


@app.command()
def train(job_file: JobFile, assignments: Assignments = None) -> None:
    """Train the job's model, from the start; run its stream; write model and report to its output folder."""
    run_job(_read(job_file, assignments))


@app.command()
def online(
    job_file: JobFile,
    assignments: Assignments = None,
    max_steps: Annotated[int | None, typer.Option(help="End after so many steps, earlier runs included.")] = None,
    max_seconds: Annotated[float | None, typer.Option(help="End after so many seconds.")] = None,
) -> None:
    """Follow the job's stream: predict each batch, then learn it. Started again, it goes on where it was left.

    A job with `train` learns that first, once. Ctrl-C ends it after a step, and leaves its state.
    """
    follow_job(_read(job_file, assignments), max_steps, max_seconds)


@app.command()
def evaluate(job_file: JobFile, assignments: Assignments = None) -> None:
    """Evaluate the trained model in the job's output folder on the job's validation data."""
    import hotbed as hb

    job = _read(job_file, assignments)
    if job.valid is None:
        raise ConfigError("job.valid: missing key — `hotbed evaluate` needs a source with labels — add it, or --set it")
    model = hb.load(_newest(job))
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
    model = hb.load(_newest(job))
    scores = model.predict(job.dataset(source, model.schema))
    columns = scores if isinstance(scores, Mapping) else {model.schema.labels[0].name: scores}
    path = Path(job.output) / "predictions.parquet"
    pq.write_table(pa.table({name: pa.array(values) for name, values in columns.items()}), path)
    console.print(f"{len(next(iter(columns.values()))):,} predictions, in the order of the source: {path}")


@app.command()
def inspect(
    what: Annotated[str, typer.Argument(metavar="JOB.yaml|CKPT", help="A job file; or a folder or URL of states.")],
    assignments: Assignments = None,
) -> None:
    """Show what a job is: its data, columns and tables, and the trained model; or what a checkpoint holds."""
    import hotbed as hb

    if "://" in what or Path(what).is_dir():
        from hotbed.persist import chain

        print_checkpoint(chain.describe(what))
        return
    job = _read(Path(what), assignments)
    print_columns(job)
    rest = {key: value for key, value in job.to_json().items() if key != "schema"}
    console.print(escape(yaml.safe_dump(rest, sort_keys=False, default_flow_style=None, width=110)), highlight=False)
    newest = _newest(job)
    if (Path(newest) / "CURRENT").exists():
        console.print(hb.load(newest).summary(), highlight=False)
    else:
        console.print(f"not trained yet: no checkpoint in {job.output}")


@app.command()
def serve(
    models: Annotated[list[str], typer.Argument(metavar="[NAME=]MODEL...", help="Folders of exported models.")],
    watch: Annotated[list[str] | None, typer.Option(help="[NAME=]DIR or kafka://HOST:PORT/TOPIC to follow.")] = None,
    host: Annotated[str, typer.Option(help="The address to listen at.")] = "127.0.0.1",
    http_port: Annotated[int, typer.Option(help="Of REST, metrics and the page; 0: a free one.")] = 8000,
    grpc_port: Annotated[int, typer.Option(help="0: a free one; -1: no gRPC.")] = 8001,
    token_file: Annotated[Path | None, typer.Option(help="Answer only who sends one of its lines as a token.")] = None,
    assignments: Assignments = None,
) -> None:
    """Answer prediction requests over the Open Inference Protocol; follow a trainer. SIGTERM drains. See docs/serving.md."""
    from hotbed.serving.server.http import serve

    settings = {"host": host, "port": http_port, "grpc_port": None if grpc_port < 0 else grpc_port,
                "token_file": None if token_file is None else str(token_file)}  # fmt: skip
    serve(models, watch or (), {**settings, **_assigned(assignments, "serve")})


@app.command()
def verify(checkpoint: Checkpoint) -> None:
    """Check every file of a checkpoint and of what it rests on; what is wrong is named, with exit code 2."""
    from hotbed.persist import chain

    found = chain.verify(checkpoint)
    console.print(
        f"{found['folder']} is whole: {found['kind']}, version {found['version']}, {found['links']} links, "
        f"{found['files']} files, {found['bytes'] / 2**20:,.1f} MiB\ndigest   {found['digest']}\n"
        f"content  {found['content_digest']}", highlight=False, soft_wrap=True)  # fmt: skip


@app.command()
def diff(one: Checkpoint, two: Checkpoint) -> None:
    """Show what differs between two checkpoints; exit code 1 where something does."""
    from hotbed.persist import chain

    found = chain.diff(one, two)
    if found["same"]:
        console.print("the same content")
        return
    print_difference(found)
    raise typer.Exit(1)


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
    if job.train is None:
        raise ConfigError("job.train: missing key — `hotbed train` begins with it — add it, or use `hotbed online`")
    model, history = learn_past(job)
    histories = {"train": history}
    if job.stream is not None:
        shutil.rmtree(job.state_path, ignore_errors=True)  # a training from the start begins its stream there too
        histories["stream"] = learn_stream(job, model)
    print_results(model, histories)
    console.print(f"model: {model.save(job.output)}", highlight=False, soft_wrap=True)
    print_report(job, model, histories)
    return model


def follow_job(job: Job, max_steps: int | None = None, max_seconds: float | None = None) -> RecModel:
    """Go on with the job's stream, or begin: train first what it has to train; returns the model."""
    if job.stream is None:
        raise ConfigError("job.stream: missing key — `hotbed online` follows it — add a source, or use `hotbed train`")
    histories: dict[str, History] = {}
    if (Path(job.state_path) / "CURRENT").exists():
        model = job.rec_model(job.schema_of(job.state_path))
    elif job.train is None:
        model = _new(job)
    else:
        model, histories["train"] = learn_past(job)
    histories["stream"] = learn_stream(job, model, max_steps, max_seconds)
    print_results(model, histories)
    console.print(f"state: {job.state_path}", highlight=False, soft_wrap=True)
    print_report(job, model, histories)
    return model


def learn_past(job: Job) -> tuple[RecModel, History]:
    """A model that has learned the job's `train`."""
    assert job.train is not None
    model = _new(job)
    _begin(job, model, "training")
    valid = None if job.valid is None else job.dataset(job.valid, model.schema)
    data = job.dataset(job.train, model.schema)
    return model, model.fit(data, valid, job.fit.epochs, job.make_callbacks(), seed=job.seed)


def learn_stream(job: Job, model: RecModel, max_steps: int | None = None, max_seconds: float | None = None) -> History:
    """Follow the job's stream."""
    assert job.stream is not None
    _begin(job, model, "the stream: each batch is predicted, then learned by")
    events = job.dataset(job.stream, model.schema, batch_size=job.fit.stream_batch_size)
    return model.online_train(
        events, job.make_callbacks(stream=True), max_steps=max_steps, max_seconds=max_seconds, seed=job.seed
    )


def _new(job: Job) -> RecModel:
    """The job's model before it learned anything, with the rows that it starts from."""
    model = job.rec_model(job.fitted())
    if job.warm_start is not None:
        start = job.warm_start
        found = model.warm_start(start.path, start.rename, optimizer_state=start.optimizer_state)
        for here, there in found.items():
            console.print(f"warm start: {here} has {len(model.tables[here]):,} rows of {there} in {start.path}")
    return model


def _begin(job: Job, model: RecModel, what: str) -> None:
    output, schema = Path(job.output), model.schema
    output.mkdir(parents=True, exist_ok=True)
    (output / "job.json").write_text(json.dumps(job.to_json(), indent=1, ensure_ascii=False), encoding="utf-8")
    name = config.kind_of(type(model.network))
    console.rule(f"[bold]{what} {name} on {len(schema.ids)} id and {len(schema.dense)} dense features", align="left")


def _newest(job: Job) -> str:
    """Where the newest model of a job is: in its stream's states, or in its output folder."""
    return job.state_path if (Path(job.state_path) / "CURRENT").exists() else job.output


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
        ("prometheus_client", "prometheus", "the Prometheus callback"),
        ("confluent_kafka", "kafka", "events from Kafka"),
        ("onnxruntime", "serve", "serving"),
        ("onnx", "export", "exporting for serving"),
    ):
        found = _version(package) if util.find_spec(package) else f"absent: pip install hotbed[{extra}]"
        rows.append((package, found, purpose))
    rows.append(("device", _device(), "the dense network; tables stay on the host"))
    return rows


def print_report(job: Job, model: RecModel, histories: Mapping[str, History]) -> None:
    """Write the report, and say where."""
    from hotbed.training.report import write_report

    output = Path(job.output)
    title = f"{config.kind_of(type(model.network))}: {output.name}"
    report = write_report(output / "report.html", histories, title=title, summary=model.summary())
    console.print(f"report: {report}", highlight=False, soft_wrap=True)


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
    return Job.read(job_file, _assigned(assignments, "job"))


def _assigned(assignments: list[str] | None, prefix: str) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for assignment in assignments or []:
        path, equals, text = assignment.partition("=")
        if not equals:
            raise ConfigError(f"--set: no '=' — received {assignment!r} — write a.b=c")
        values[path.strip().removeprefix(f"{prefix}.")] = parse_value(text)
    return values


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
