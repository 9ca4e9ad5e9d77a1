# SPDX-License-Identifier: Apache-2.0
"""The command line: read the arguments, call what does the work, print what it returns.

A new setting is a key of a job, not a flag. Each command imports what does its work: the processes
of several ranks start after what their launcher has imported.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from hotbed.cli import logged, processes
from hotbed.cli.arguments import assigned, read_job
from hotbed.cli.launch import launch
from hotbed.errors import ConfigError, HotbedError
from hotbed.logs import log_lines
from hotbed.memory_limit import warning_of_memory

HELP = (
    "Train, follow, evaluate and inspect recommendation models that a job file describes; see "
    "docs/jobs.md."
)

app = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=HELP
)

JobFile = Annotated[Path, typer.Argument(metavar="JOB.yaml", help="A job: YAML, or JSON.")]
Assignments = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="A.B=C", help="Set one value of the job; may be repeated."),
]
ServerSettings = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Set one value of the server; may be repeated."
    ),
]
Ranks = Annotated[
    int | None,
    typer.Option(min=1, help="Processes of this machine that do it together: see docs/ranks.md."),
]
Host = Annotated[str, typer.Option(help="The address to listen at.")]
TokenFile = Annotated[
    Path | None,
    typer.Option(help="A file of tokens, one a line; requests without one are rejected."),
]
AskToken = Annotated[
    Path | None, typer.Option(help="A file of tokens; servers that are asked get the first one.")
]
Watch = Annotated[
    list[str] | None, typer.Option(help="[NAME=]DIR or kafka://HOST:PORT/TOPIC to follow.")
]
RoutesFile = Annotated[
    Path | None, typer.Option(help="A file that says which versions answer; see docs/routing.md.")
]
Checkpoint = Annotated[
    str, typer.Argument(metavar="CKPT", help="A folder of states, one state, or a URL.")
]
SERVERS = ("serve", "parameter-server")


@app.callback()
def begin(context: typer.Context) -> None:
    """Log with time and level, and warn before memory ends; the servers log as JSON."""
    log_lines("json" if context.invoked_subcommand in SERVERS else "text")
    context.with_resource(warning_of_memory())


@app.command()
def train(
    job_file: JobFile,
    assignments: Assignments = None,
    restart: Annotated[
        bool, typer.Option("--restart", help="Move the state of an earlier stream aside first.")
    ] = False,
    ranks: Ranks = None,
) -> None:
    """Train the job's model from the start, then run its stream; write the model and a report.

    A job whose stream has a state is rejected: resume it with `hotbed online`. A training file of
    another system is recognised, and trained as that system does.
    """
    if ranks is not None and ranks > 1:
        flags = ["--restart"] if restart else []
        _run_on_ranks(ranks, ["train", str(job_file), *flags], assignments)
        return
    from hotbed.cli import show
    from hotbed.job import run

    job = run.read(job_file, assigned(assignments, "job"))
    if isinstance(job, run.ForeignJob):
        job.train(restart=restart)
        return
    learned = run.train(job, restart=restart, report=show.print_event, progress=True)
    show.print_trained(learned)


@app.command()
def check(job_file: JobFile, assignments: Assignments = None) -> None:
    """Ask within seconds whether the job can run here; exit with 1 if it cannot.

    Secrets, files, topics, rights and room, the first rows of each source, memory, the state that
    it resumes from, and what has changed since. See docs/jobs.md.
    """
    from hotbed.cli import show
    from hotbed.job.check import check as check_job

    answers = check_job(read_job(job_file, assignments))
    show.print_answers(answers)
    if any(answer.outcome == "error" for answer in answers):
        raise typer.Exit(1)


@app.command()
def plan(
    job_file: JobFile,
    ranks: Annotated[
        int | None, typer.Option(help="Processes to look at; default: 1, 2, 4 up to 256.")
    ] = None,
    ram: Annotated[
        str | None, typer.Option(help="Memory that a process may take, such as 64GB.")
    ] = None,
    rows: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TABLE=N", help="Rows that a table will have, such as user=1e9; repeatable."
        ),
    ] = None,
    bandwidth: Annotated[
        str | None, typer.Option(help="Between hosts, such as 10Gbit; default: as measured here.")
    ] = None,
    latency: Annotated[
        str | None, typer.Option(help="Of a message between hosts, such as 100us.")
    ] = None,
    host_ranks: Annotated[
        int | None, typer.Option(min=1, help="Processes of each of several hosts; default: 1.")
    ] = None,
    cores: Annotated[
        int | None, typer.Option(min=1, help="Of each host; default: those of this machine.")
    ] = None,
    disk_reads: Annotated[
        str | None,
        typer.Option(help="Of a disk for hb.Ssd, such as 100k/s; default: as measured here."),
    ] = None,
    assignments: Assignments = None,
) -> None:
    """Predict memory, bytes and time of the job on several ranks, before machines are bought.

    It samples the ids of `train`, and measures this machine for a few seconds, and the disk of
    tables on hb.Ssd. plan.html in the job's output has the picture. See docs/ranks.md.
    """
    from hotbed.cli import planning as of_plan
    from hotbed.job.plan_page import write_plan
    from hotbed.job.planning import Wishes
    from hotbed.job.planning import plan as plan_job

    job = read_job(job_file, assignments)
    wishes = Wishes(
        ranks,
        of_plan.quantity("--ram", ram, of_plan.BYTES),
        of_plan.expected_rows(rows),
        of_plan.quantity("--latency", latency, of_plan.TIMES),
        of_plan.quantity("--bandwidth", bandwidth, of_plan.RATES),
        of_plan.disks_of(job, of_plan.quantity("--disk-reads", disk_reads, of_plan.READS)),
        host_ranks,
        cores,
    )
    planned = plan_job(job, wishes)
    page = job.output_path("plan.html")
    write_plan(page, planned, f"Plan of {job_file.name}")
    of_plan.print_plan(planned, page)


@app.command()
def online(
    job_file: JobFile,
    assignments: Assignments = None,
    max_steps: Annotated[
        int | None, typer.Option(help="End after this number of steps, earlier runs included.")
    ] = None,
    max_seconds: Annotated[
        float | None, typer.Option(help="End after this number of seconds.")
    ] = None,
    ranks: Ranks = None,
) -> None:
    """Follow the job's stream: predict each batch, then learn it. Started again, it resumes.

    A job with `train` learns it first, once. Ctrl-C ends the run after a step and saves its state.
    """
    if ranks is not None and ranks > 1:
        flags = [] if max_steps is None else ["--max-steps", str(max_steps)]
        flags += [] if max_seconds is None else ["--max-seconds", str(max_seconds)]
        _run_on_ranks(ranks, ["online", str(job_file), *flags], assignments)
        return
    from hotbed.cli import show
    from hotbed.job import run

    learned = run.online(
        read_job(job_file, assignments),
        max_steps,
        max_seconds,
        report=show.print_event,
        progress=True,
    )
    show.print_followed(learned)


@app.command()
def prepare(
    job_file: Annotated[
        Path, typer.Argument(metavar="PREPARE.yaml", help="A preparation: YAML, or JSON.")
    ],
    assignments: Assignments = None,
    engine: Annotated[
        str, typer.Option(help="What runs the tasks: local, or ray for a Ray cluster.")
    ] = "local",
    workers: Annotated[
        int | None, typer.Option(help="Tasks at a time; default: one for each processor.")
    ] = None,
    restart: Annotated[
        bool, typer.Option("--restart", help="Move an output that exists aside first.")
    ] = False,
    fitted: Annotated[
        str | None,
        typer.Option(
            "--workflow",
            metavar="FOLDER",
            help="Fit nothing: encode the rows as an earlier preparation did, whose output this "
            "is.",
        ),
    ] = None,
) -> None:
    """Make training files of raw files, out of core, and fit the workflow that servers apply.

    With --workflow, the source and the output come from the file, and all rows are in the part
    `valid`. See docs/prepare.md.
    """
    from hotbed import config
    from hotbed.cli import show
    from hotbed.prepare import Engine, Preparation, Workflow
    from hotbed.prepare import prepare as run_prepare

    job = Preparation.read(job_file, assigned(assignments, "prepare"))
    runs_tasks = config.build({"kind": engine, "workers": workers}, Engine, "--engine")
    with show.StageBars() as bars:
        if fitted is None:
            workflow = run_prepare(job, runs_tasks, restart=restart, report=bars.update)
        else:
            workflow = Workflow(fitted).apply(
                job.source, job.output, engine=runs_tasks, restart=restart, report=bars.update
            )
    show.print_prepared(workflow)


@app.command()
def evaluate(
    job_file: JobFile,
    assignments: Assignments = None,
    by: Annotated[
        list[str] | None,
        typer.Option(
            metavar="COLUMN[=BOUNDS]",
            help="Divide figures by a column such as country, or age=18,30,50; may be repeated.",
        ),
    ] = None,
    ranks: Ranks = None,
) -> None:
    """Evaluate the trained model in the job's output folder on the job's validation data."""
    if ranks is not None and ranks > 1:
        flags = [part for column in by or () for part in ("--by", column)]
        _run_on_ranks(ranks, ["evaluate", str(job_file), *flags], assignments)
        return
    from hotbed.cli import show
    from hotbed.job import run
    from hotbed.job.file import names_a_job

    if not names_a_job(str(job_file)):
        raise ConfigError(
            f"{job_file}: not a job file, got a folder or URL. Give the job file: its `valid` "
            "is the data to evaluate on."
        )
    job = read_job(job_file, assignments)
    show.print_evaluated(run.evaluate(job, run.segments_by(by) if by else None))


@app.command()
def predict(
    what: Annotated[
        str,
        typer.Argument(
            metavar="JOB.yaml|MODEL", help="A job file, or the folder of an exported model."
        ),
    ],
    files: Annotated[
        list[str] | None,
        typer.Argument(metavar="[FILES]...", help="The files that an exported model scores."),
    ] = None,
    out: Annotated[str | None, typer.Option(help="The Parquet file to write, or its URL.")] = None,
    keep: Annotated[
        str | None,
        typer.Option(
            metavar="COLUMN,…", help="Columns to copy beside the predictions, such as user,item."
        ),
    ] = None,
    assignments: Assignments = None,
    ranks: Ranks = None,
) -> None:
    """Score files with an exported model, or a job's `predict` source with its newest model.

    Without `predict`, `valid` is scored. predictions.parquet has the predictions in the order of
    the rows, and the columns of `--keep`. An exported model does not need torch.
    """
    from hotbed.cli import show
    from hotbed.job import run
    from hotbed.job.file import names_a_job

    keep_columns = keep.split(",") if keep else []
    if names_a_job(what):
        if files:
            raise ConfigError(
                f"{what}: a job scores the files it names, got {files}. Give MODEL FILES, or the "
                "job alone with --set predict=…"
            )
        if ranks is not None and ranks > 1:
            flags = [] if out is None else ["--out", out]
            flags += [] if keep is None else ["--keep", keep]
            _run_on_ranks(ranks, ["predict", what, *flags], assignments)
            return
        show.print_predictions(run.predict(read_job(Path(what), assignments), out, keep_columns))
        return
    if not files or assignments or ranks:
        raise ConfigError(
            f"{what}: an exported model scores files in one process, got {files or 'no files'}, "
            f"--set {assignments or 'nothing'} and --ranks {ranks or 'nothing'}. Write hotbed "
            "predict MODEL FILES..."
        )
    with show.ScoringBar() as bar:
        path = out or "predictions.parquet"
        predictions = run.predict_files(what, files, path, keep_columns, bar.update)
    show.print_predictions(predictions)


@app.command()
def export(
    what: Annotated[
        str,
        typer.Argument(
            metavar="JOB.yaml|CKPT", help="A trained job, or a folder or URL of states."
        ),
    ],
    out: Annotated[
        str | None,
        typer.Option(help="The folder or URL to write; default: `export` in the job's output."),
    ] = None,
    tower: Annotated[
        str | None,
        typer.Option(help="Of a two-tower model, one tower alone: user or item. Needs --out."),
    ] = None,
    assignments: Assignments = None,
) -> None:
    """Freeze the newest model of a job or a checkpoint for `hotbed serve` and `hotbed predict`."""
    from hotbed.cli import show
    from hotbed.job import run
    from hotbed.job.file import names_a_job
    from hotbed.job.tables import StateSettings

    if out is None and (tower is not None or not names_a_job(what)):
        raise ConfigError(
            f"--out: missing, got {what}, which has no output folder for it. Say where to write "
            "the model."
        )
    if names_a_job(what):
        exported = run.export(read_job(Path(what), assignments), out, tower)
    else:
        settings = StateSettings.of(assigned(assignments, "job"))
        exported = run.export_state(what, str(out), settings, tower)
    show.print_export(exported)


@app.command()
def publish(
    what: Annotated[
        str,
        typer.Argument(
            metavar="JOB.yaml|CKPT", help="A trained job, or a folder or URL of states."
        ),
    ],
    to: Annotated[str, typer.Option(help="The folder or URL that servers watch.")],
    state: Annotated[
        int | None, typer.Option(help="The number of the state; default: the newest.")
    ] = None,
    keep: Annotated[int, typer.Option(help="Full versions that are kept.", min=1)] = 2,
    force: Annotated[
        str | None,
        typer.Option(metavar="REASON", help="Publish a state that a gate held, and say why."),
    ] = None,
    assignments: Assignments = None,
) -> None:
    """Publish a state for servers, such as an earlier one after bad data. See docs/persist.md."""
    from hotbed.cli import show
    from hotbed.job import run
    from hotbed.job.file import names_a_job
    from hotbed.job.tables import StateSettings

    if names_a_job(what):
        published = run.publish(read_job(Path(what), assignments), to, state, keep, forced=force)
    else:
        settings = StateSettings.of(assigned(assignments, "job"))
        published = run.publish(what, to, state, keep, settings, force)
    show.print_published(published)


@app.command()
def inspect(
    what: Annotated[
        str,
        typer.Argument(metavar="JOB.yaml|CKPT", help="A job file, or a folder or URL of states."),
    ],
    assignments: Assignments = None,
) -> None:
    """Show a job with its columns, tables and trained model; or the contents of a checkpoint."""
    from hotbed.cli import checkpoints, show
    from hotbed.job import run
    from hotbed.job.file import names_a_job
    from hotbed.persist.upkeep.inspect import describe_checkpoint

    if names_a_job(what):
        show.print_job(run.inspect(read_job(Path(what), assignments)))
    else:
        checkpoints.print_checkpoint(describe_checkpoint(what))


@app.command()
def serve(
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="[NAME=]MODEL...",
            help="Folders of exported models, or grpc://HOST:PORT of a parameter server.",
        ),
    ],
    watch: Watch = None,
    routes: RoutesFile = None,
    host: Host = "127.0.0.1",
    http_port: Annotated[
        int, typer.Option(help="The port of REST, metrics and the page; 0: a free one.")
    ] = 8000,
    grpc_port: Annotated[
        int, typer.Option(help="The port of gRPC; 0: a free one; -1: no gRPC.")
    ] = 8001,
    token_file: TokenFile = None,
    assignments: ServerSettings = None,
) -> None:
    """Answer prediction requests over the Open Inference Protocol, and follow a trainer.

    SIGTERM drains the server. See docs/serving.md.
    """
    from hotbed.serving.main import serve_models

    settings: dict[str, Any] = {
        "host": host,
        "port": http_port,
        "grpc_port": None if grpc_port < 0 else grpc_port,
        "token_file": None if token_file is None else str(token_file),
    }
    settings |= assigned(assignments, "serve")
    serve_models(models, watch or (), settings, None if routes is None else str(routes))


@app.command()
def route(
    model: Annotated[str | None, typer.Argument(help="The name of a model.")] = None,
    routes: Annotated[Path, typer.Option(help="The file of rules that servers were given.")] = Path(
        "routes.yaml"
    ),
    stable: Annotated[
        str | None, typer.Option(metavar="VERSION|newest", help="Which version answers.")
    ] = None,
    canary: Annotated[
        str | None,
        typer.Option(metavar="VERSION=SHARE|none", help="Another version for some users: 4310=5%."),
    ] = None,
    by: Annotated[
        str | None, typer.Option(help="The column of the context that names the user.")
    ] = None,
    salt: Annotated[
        str | None, typer.Option(help="Text that decides which users the canary answers.")
    ] = None,
    shadow: Annotated[
        str | None,
        typer.Option(metavar="VERSION|newest|none", help="A version that is only compared."),
    ] = None,
    show: Annotated[
        list[str] | None,
        typer.Option(metavar="URL", help="Compare replicas; may be repeated. Changes nothing."),
    ] = None,
    token_file: AskToken = None,
) -> None:
    """Change which versions of a model answer, or compare replicas. See docs/routing.md.

    The file gets the next revision; servers read it within a second. With --show, the exit code is
    1 if replicas differ or have a problem.
    """
    from hotbed.cli import show as tables
    from hotbed.serving.main import compare_replicas

    if show:
        rows, are_alike = compare_replicas(show, None if token_file is None else str(token_file))
        tables.print_replicas(rows)
        if not are_alike:
            raise typer.Exit(1)
        return
    if model is None:
        raise ConfigError(
            "route: expected a model, got none. Write hotbed route MODEL --stable 4213."
        )
    changes = {"stable": stable, "canary": canary, "by": by, "salt": salt, "shadow": shadow}
    _change_rule(model, routes, changes)


def _change_rule(model: str, routes: Path, changes: Mapping[str, str | None]) -> None:
    from hotbed.cli import show
    from hotbed.serving.main import change_routes

    revision, rule = change_routes(routes, model, changes)
    show.print_rule(str(routes), revision, model, rule)


@app.command(name="parameter-server")
def parameter_server(
    models: Annotated[
        list[str], typer.Argument(metavar="[NAME=]MODEL...", help="Folders of exported models.")
    ],
    watch: Watch = None,
    routes: RoutesFile = None,
    host: Host = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The port; 0: a free one.")] = 8002,
    rows: Annotated[
        Path | None, typer.Option(help="The folder that keeps rows; default: a temporary one.")
    ] = None,
    token_file: TokenFile = None,
    assignments: ServerSettings = None,
) -> None:
    """Hold rows for `hotbed serve NAME=grpc://HOST:PORT` elsewhere, and follow a trainer.

    SIGTERM drains the server. See docs/serving.md.
    """
    from hotbed.serving.main import serve_rows

    settings: dict[str, Any] = {
        "host": host,
        "port": port,
        "rows": None if rows is None else str(rows),
        "token_file": None if token_file is None else str(token_file),
    }
    settings |= assigned(assignments, "parameter-server")
    serve_rows(models, watch or (), settings, None if routes is None else str(routes))


for command in (logged.rescore, logged.measure, logged.replay):
    app.command()(command)


@app.command()
def watch(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="The output of a job, its file, or its states.")
    ],
    servers: Annotated[
        list[str] | None, typer.Argument(metavar="[SERVER]...", help="http://HOST:PORT to ask.")
    ] = None,
    host: Host = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The port; 0: a free one.")] = 9111,
    published: Annotated[
        str | None, typer.Option(help="The folder of versions; default: as the job says.")
    ] = None,
    quality: Annotated[
        Path | None, typer.Option(help="The output of `hotbed measure`; default: RUN/quality.")
    ] = None,
    token_file: AskToken = None,
) -> None:
    """Show a run, its publisher and its servers on one live page, until Ctrl-C.

    It reads what they write, and never asks the training. See docs/watch_page.md.
    """
    from hotbed.cli import show
    from hotbed.watch.server import PageSettings, serve_page

    settings = PageSettings(published, quality, token_file, host, port)
    serve_page(run, servers or (), settings, show.print_line)


@app.command()
def verify(checkpoint: Checkpoint) -> None:
    """Check every file of a checkpoint and of the states it needs.

    CKPT may also be a prepared folder, or the folder of rows of a server. A bad file is named, and
    the exit code is 2.
    """
    from hotbed.cli import checkpoints
    from hotbed.connectors.prepared import is_prepared, verify_prepared
    from hotbed.persist.upkeep.inspect import verify as verify_checkpoint
    from hotbed.serving.main import is_served, verify_served

    if is_prepared(checkpoint):
        checkpoints.print_verified(verify_prepared(checkpoint))
    elif is_served(checkpoint):
        checkpoints.print_verified_rows(verify_served(checkpoint))
    else:
        checkpoints.print_verified(verify_checkpoint(checkpoint))


@app.command()
def rows(
    model: Checkpoint,
    history: Annotated[str, typer.Option(metavar="COLUMN=VALUE", help="The key, such as user=42.")],
) -> None:
    """Show what a checkpoint or an export keeps of one key: its histories and counts."""
    from hotbed.cli import checkpoints
    from hotbed.persist.upkeep.kept import kept_entries

    feature, equals, value = history.partition("=")
    if not equals:
        raise ConfigError(
            f"rows: --history takes COLUMN=VALUE, got {history!r}. Give such as user=42."
        )
    checkpoints.print_kept(history, kept_entries(model, feature, value))


@app.command()
def rollback(
    path: Annotated[
        str,
        typer.Argument(metavar="PATH|MODEL", help="A local folder of states, or a served model."),
    ],
    state: Annotated[int | None, typer.Option(help="The number of the state to return to.")] = None,
    to: Annotated[
        int | None, typer.Option(help="The version that all users of a served model get.")
    ] = None,
    routes: Annotated[
        Path, typer.Option(help="The file of rules that the servers of the model were given.")
    ] = Path("routes.yaml"),
    good: Annotated[
        bool, typer.Option("--good", help="Return to the newest state that no gate held.")
    ] = False,
) -> None:
    """Return to an earlier state of a stream, or with --to to an earlier version of a served model.

    A stream's newer states are moved aside: see docs/persist.md. A model is pinned to the version,
    and its canary ends, while its trainer continues: see docs/routing.md.
    """
    from hotbed.cli import checkpoints

    if good and (state is not None or to is not None):
        raise ConfigError(
            f"rollback: expected --good or a number, got --good and {state if to is None else to}. "
            "Give one of them."
        )
    if to is not None:
        if state is not None:
            raise ConfigError(
                f"rollback: expected --state or --to, got both: {state} and {to}. Give --state for "
                "a stream, --to for a served model."
            )
        _change_rule(path, routes, {"stable": str(to), "canary": "none"})
        return
    from hotbed.job.ranks import from_first
    from hotbed.persist.upkeep.rollback import number_of_good, roll_back

    if good:
        state = number_of_good(path)
    if processes.is_rank():
        rolled_back = from_first(lambda: roll_back(path, state))
    else:
        rolled_back = roll_back(path, state)
    checkpoints.print_rolled_back(path, rolled_back)


@app.command(hidden=True, context_settings={"ignore_unknown_options": True})
def restore(arguments: Annotated[list[str] | None, typer.Argument()] = None) -> None:
    """Name the command that returns to an earlier state."""
    line = " ".join(arguments or [])
    raise ConfigError(
        f"restore: not a command, got 'hotbed restore {line}'. Run 'hotbed rollback {line}'."
    )


@app.command()
def diff(one: Checkpoint, two: Checkpoint) -> None:
    """Show the differences between two checkpoints; the exit code is 1 if there are any."""
    from hotbed.cli import checkpoints, show
    from hotbed.persist.upkeep.inspect import diff as difference_of

    difference = difference_of(one, two)
    if difference["same"]:
        show.print_line("the same content")
        return
    checkpoints.print_difference(difference)
    raise typer.Exit(1)


@app.command()
def init(
    data_file: Annotated[
        str | None,
        typer.Argument(metavar="DATAFILE", help="csv, tsv, jsonl or parquet; or its URL."),
    ] = None,
    label: Annotated[
        str | None, typer.Option(help="The column to predict; default: guessed.")
    ] = None,
    other: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="FILE[#NAME]",
            help="Instead of a data file: a model_config.yaml of FuxiCTR, and the name of an "
            "experiment in it.",
        ),
    ] = None,
    columns: Annotated[
        str | None,
        typer.Option(
            metavar="A,B,C", help="Names of the columns of a csv or tsv file without a header."
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="The job file to write.")] = Path("job.yaml"),
    prepare: Annotated[
        bool, typer.Option("--prepare", help="Draft a preparation of the rows, too: prepare.yaml.")
    ] = False,
    user: Annotated[
        str | None, typer.Option(help="With --prepare: the column that says who chose.")
    ] = None,
    item: Annotated[
        str | None, typer.Option(help="With --prepare: the column that says what was chosen.")
    ] = None,
) -> None:
    """Write a commented job for a data file by looking at its columns."""
    from hotbed.cli import show
    from hotbed.job.drafting.init import init_from, init_job, init_preparation
    from hotbed.prepare import Preparation

    if data_file is None and other is None:
        raise ConfigError("init: missing argument, got neither a data file nor --from. Give one.")
    if data_file is None:
        init_from(str(other), out)
        show.print_written_job(out)
        return
    names = None
    if columns is not None:
        names = [name.strip() for name in columns.split(",")]
    if not prepare:
        if user is not None or item is not None:
            raise ConfigError("init: --user and --item are for a preparation. Add --prepare.")
        init_job(data_file, out, label, names)
        show.print_written_job(out)
        return
    preparation = init_preparation(data_file, out, names, label=label, user=user, item=item)
    Preparation.read(preparation)
    show.print_written_preparation(preparation, out)


@app.command()
def schema() -> None:
    """Print the JSON Schema of job files, for completion and checks in editors."""
    from hotbed.job.json_schema import json_schema

    typer.echo(json.dumps(json_schema(), indent=1, ensure_ascii=False))


@app.command()
def doctor(
    ranks: Ranks = None,
    disk: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="A folder for hb.Ssd: measure how fast its disk is."),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="A device for the dense part, such as cuda: check it."),
    ] = None,
) -> None:
    """List what this machine and this install can do.

    With --device, train a small model on it, and compare copies, rows, losses, loss scaling and
    states with the CPU's, which takes up to two minutes: see docs/devices.md. If a check fails, the
    exit code is 1.

    With --disk, write a file of 1 GiB in a folder, read it at random for some seconds, and remove
    it: the reads a second bound the speed of tables on that disk, see docs/tiers.md.

    With --ranks N, connect N processes, and measure how fast they reach each other. Under
    torchrun, do it with the processes that it started, also on several hosts.
    """
    from hotbed.cli import disk as disks
    from hotbed.cli import doctor as machine
    from hotbed.cli import show

    if processes.is_rank():
        machine.print_connection(machine.connection())
        return
    if disk is not None:
        with show.StageBars() as bars:
            speed = disks.measure(str(disk), bars.update)
        disks.print_disk(speed)
    if device is not None:
        from hotbed.cli.device import print_checks

        if not print_checks(device):
            raise typer.Exit(1)
    if disk is None and device is None:
        machine.print_machine(machine.diagnose())
        if not machine.has_native_core():
            raise typer.Exit(1)
    if ranks is not None and ranks > 1:
        _run_on_ranks(ranks, ["doctor"])


def main() -> None:
    """Entry point: a deliberate error is one line on stderr and exit code 2, not a traceback.

    On several ranks the first prints; the launcher reports the error that ended them.
    """
    # at Python's thresholds, walks over all that is imported take a fifth of a start
    gc.set_threshold(10_000, 20, 20)
    if sys.__stderr__ is not None and not faulthandler.is_enabled():
        faulthandler.enable(sys.__stderr__)  # a crash of native code prints what each thread did
    if processes.is_rank():
        _show_on_first()
        processes.behave_as_rank()  # after the import of Polars, which takes SIGINT
    try:
        app()
    except HotbedError as error:
        if processes.is_rank():
            processes.leave(error, 2)
        if os.environ.get("HOTBED_TRACEBACK"):
            raise
        from hotbed.cli import show

        show.print_error(error)
        sys.exit(2)
    except Exception as error:
        if processes.is_rank():
            processes.leave(error, 1)
        raise


def _show_on_first() -> None:
    """Let the first rank alone print."""
    from hotbed.cli import show

    show.console.quiet = not processes.is_first()


def _run_on_ranks(
    ranks: int, arguments: Sequence[str], assignments: Sequence[str] | None = None
) -> None:
    """Run a command on several processes; exit with a message if one of them fails.

    They read the job: to check it takes torch, whose import would delay their start.
    """
    flags = [f"--set={assignment}" for assignment in assignments or ()]
    failure = launch([*arguments, *flags], ranks)
    if failure is not None:
        from hotbed.cli import show

        show.print_failure(failure)
        raise typer.Exit(failure.exit_code)


if __name__ == "__main__":
    main()
