# SPDX-License-Identifier: Apache-2.0
"""The command line: parse, build, run. New knobs are keys of a job, not flags."""

from __future__ import annotations

import json
import os
import sys
from importlib import util
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.console import Console
from rich.markup import escape

from hotbed.cli import show, verbs
from hotbed.cli.show import console
from hotbed.errors import ConfigError, HotbedError
from hotbed.files import resolve
from hotbed.job.draft import draft
from hotbed.job.file import parse_value
from hotbed.job.job import Job, json_schema
from hotbed.persist.store import MANIFEST

HELP = "Train, follow, evaluate and inspect recommendation models that a job file describes; see docs/jobs.md."

app = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=HELP
)

JobFile = Annotated[Path, typer.Argument(metavar="JOB.yaml", help="A job: YAML, or JSON.")]
Assignments = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="A.B=C", help="Set one value of the job; may be given often."),
]
ServerSettings = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Set one value of the server; may be given often."
    ),
]

Checkpoint = Annotated[
    str, typer.Argument(metavar="CKPT", help="A folder of states, one of them, or a URL.")
]


@app.command()
def train(
    job_file: JobFile,
    assignments: Assignments = None,
    restart: Annotated[
        bool, typer.Option("--restart", help="Move the state of an earlier stream aside.")
    ] = False,
) -> None:
    """Train the job's model, from the start; run its stream; write model and report to its output
    folder.

    A job whose stream has a state is refused: resume it with `hotbed online`.
    """
    verbs.run_job(_read(job_file, assignments), restart=restart)


@app.command()
def online(
    job_file: JobFile,
    assignments: Assignments = None,
    max_steps: Annotated[
        int | None, typer.Option(help="End after so many steps, earlier runs included.")
    ] = None,
    max_seconds: Annotated[float | None, typer.Option(help="End after so many seconds.")] = None,
) -> None:
    """Follow the job's stream: predict each batch, then learn it. Started again, it goes on where
    it was left.

    A job with `train` learns that first, once. Ctrl-C ends it after a step, and leaves its state.
    """
    verbs.follow_job(_read(job_file, assignments), max_steps, max_seconds)


@app.command()
def evaluate(job_file: JobFile, assignments: Assignments = None) -> None:
    """Evaluate the trained model in the job's output folder on the job's validation data."""
    import hotbed as hb

    if _is_folder(str(job_file)):
        raise ConfigError(
            f"{job_file}: a folder — received no job — give the job file, whose `valid` says what "
            "to evaluate"
        )
    job = _read(job_file, assignments)
    if job.valid is None:
        raise ConfigError(
            "job.valid: missing key — `hotbed evaluate` needs a source with labels — add it, or "
            "--set it"
        )
    model = hb.load(verbs.trained(job))
    show.print_values("evaluation", model.evaluate(job.dataset(job.valid, model.schema)))


@app.command()
def predict(
    what: Annotated[
        str,
        typer.Argument(
            metavar="JOB.yaml|MODEL", help="A job file; or the folder of an exported model."
        ),
    ],
    files: Annotated[
        list[str] | None,
        typer.Argument(metavar="[FILES]...", help="What an exported model scores."),
    ] = None,
    out: Annotated[str | None, typer.Option(help="The Parquet file to write, or its URL.")] = None,
    assignments: Assignments = None,
) -> None:
    """Score files with an exported model; or a job's `predict` source (default: `valid`) with its
    newest model.

    Writes predictions.parquet: the predictions in the order of the rows. An exported model needs no
    torch.
    """
    if not _is_folder(what):
        if files:
            raise ConfigError(
                f"{what}: files are for an exported model — received a job and {files} — "
                "give MODEL FILES, or the job alone with --set predict=…"
            )
        verbs.predict_job(_read(Path(what), assignments), out)
        return
    if not files or assignments:
        raise ConfigError(
            f"{what}: an exported model scores files — received {files or 'none'}, --set "
            f"{assignments or 'nothing'} — "
            "write hotbed predict MODEL FILES..."
        )
    verbs.predict_files(what, files, out or "predictions.parquet")


@app.command()
def export(
    what: Annotated[
        str,
        typer.Argument(
            metavar="JOB.yaml|CKPT", help="A trained job; or a folder or URL of states."
        ),
    ],
    out: Annotated[
        str | None,
        typer.Option(help="The folder or URL to write; default: `export` in the job's output."),
    ] = None,
    assignments: Assignments = None,
) -> None:
    """Freeze a job's newest model, or the newest state of a checkpoint, for `hotbed serve` and
    `hotbed predict`.
    """
    if not _is_folder(what):
        verbs.export_job(_read(Path(what), assignments), out)
    elif out is None:
        raise ConfigError(
            f"--out: missing — received {what}, which has no output folder — say where to write "
            "the model"
        )
    else:
        verbs.export_state(what, out)


@app.command()
def inspect(
    what: Annotated[
        str,
        typer.Argument(metavar="JOB.yaml|CKPT", help="A job file; or a folder or URL of states."),
    ],
    assignments: Assignments = None,
) -> None:
    """Show what a job is: its data, columns and tables, and the trained model; or what a checkpoint
    holds.
    """
    import hotbed as hb

    if _is_folder(what):
        from hotbed.persist import chain

        show.print_checkpoint(chain.describe(what))
        return
    job = _read(Path(what), assignments)
    show.print_columns(job)
    rest = {key: value for key, value in job.to_json().items() if key != "schema"}
    console.print(
        escape(yaml.safe_dump(rest, sort_keys=False, default_flow_style=None, width=110)),
        highlight=False,
    )
    newest = verbs.newest(job)
    if verbs.has_state(newest):
        hb.load(newest).summary()
    else:
        console.print(f"not trained yet: no checkpoint in {job.output}")


@app.command()
def serve(
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="[NAME=]MODEL...",
            help="Folders of exported models; grpc://HOST:PORT: of a parameter server.",
        ),
    ],
    watch: Annotated[
        list[str] | None, typer.Option(help="[NAME=]DIR or kafka://HOST:PORT/TOPIC to follow.")
    ] = None,
    host: Annotated[str, typer.Option(help="The address to listen at.")] = "127.0.0.1",
    http_port: Annotated[
        int, typer.Option(help="Of REST, metrics and the page; 0: a free one.")
    ] = 8000,
    grpc_port: Annotated[int, typer.Option(help="0: a free one; -1: no gRPC.")] = 8001,
    token_file: Annotated[
        Path | None, typer.Option(help="Answer only who sends one of its lines as a token.")
    ] = None,
    assignments: ServerSettings = None,
) -> None:
    """Answer prediction requests over the Open Inference Protocol; follow a trainer. SIGTERM
    drains. See docs/serving.md.
    """
    from hotbed.serving.server.http import serve

    settings = {
        "host": host,
        "port": http_port,
        "grpc_port": None if grpc_port < 0 else grpc_port,
        "token_file": None if token_file is None else str(token_file),
    }
    serve(models, watch or (), {**settings, **_assigned(assignments, "serve")})


@app.command(name="parameter-server")
def parameter_server(
    models: Annotated[
        list[str], typer.Argument(metavar="[NAME=]MODEL...", help="Folders of exported models.")
    ],
    watch: Annotated[
        list[str] | None, typer.Option(help="[NAME=]DIR or kafka://HOST:PORT/TOPIC to follow.")
    ] = None,
    host: Annotated[str, typer.Option(help="The address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0: a free one.")] = 8002,
    rows: Annotated[
        Path | None, typer.Option(help="The folder that keeps rows; default: a temporary one.")
    ] = None,
    token_file: Annotated[
        Path | None, typer.Option(help="Answer only who sends one of its lines as a token.")
    ] = None,
    assignments: ServerSettings = None,
) -> None:
    """Hold rows for `hotbed serve NAME=grpc://HOST:PORT` elsewhere; follow a trainer. SIGTERM
    drains. See docs/serving.md.
    """
    from hotbed.serving.server.rows_service import serve_rows

    settings = {
        "host": host,
        "port": port,
        "rows": None if rows is None else str(rows),
        "token_file": None if token_file is None else str(token_file),
    }
    serve_rows(models, watch or (), {**settings, **_assigned(assignments, "parameter-server")})


@app.command()
def verify(checkpoint: Checkpoint) -> None:
    """Check every file of a checkpoint and of what it rests on; what is wrong is named, with exit
    code 2.
    """
    from hotbed.persist import chain

    found = chain.verify(checkpoint)
    console.print(
        f"{found['folder']} is whole: {found['kind']}, version {found['version']}, "
        f"{found['links']} links, "
        f"{found['files']} files, {found['bytes'] / 2**20:,.1f} MiB\ndigest   {found['digest']}\n"
        f"content  {found['content_digest']}",
        highlight=False,
        soft_wrap=True,
    )


@app.command()
def restore(
    path: Annotated[str, typer.Argument(metavar="PATH", help="A local folder of states.")],
    state: Annotated[
        int | None, typer.Option(help="The number of the state to go back to.")
    ] = None,
) -> None:
    """Go back to an earlier state of a stream; what is newer is moved aside. See docs/persist.md."""
    from hotbed.persist import recover

    done = recover.go_back(path, state)
    aside = ", ".join(done["aside"]) or "nothing"
    console.print(
        f"{path} resumes from {done['folder']}: {done['kind']}, version {done['version']}\n"
        f"moved to {path}/aside: {aside}",
        highlight=False,
        soft_wrap=True,
    )


@app.command()
def diff(one: Checkpoint, two: Checkpoint) -> None:
    """Show what differs between two checkpoints; exit code 1 where something does."""
    from hotbed.persist import chain

    found = chain.diff(one, two)
    if found["same"]:
        console.print("the same content")
        return
    show.print_difference(found)
    raise typer.Exit(1)


@app.command()
def init(
    data_file: Annotated[
        Path, typer.Argument(metavar="DATAFILE", help="csv, tsv, jsonl or parquet.")
    ],
    label: Annotated[
        str | None, typer.Option(help="The column to predict, where it is not plain.")
    ] = None,
    columns: Annotated[
        str | None,
        typer.Option(
            metavar="A,B,C", help="Names of the columns of a csv or tsv file without a header."
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="The job file to write.")] = Path("job.yaml"),
) -> None:
    """Write a commented job for a data file by looking at its columns."""
    if out.exists():
        raise ConfigError(
            f"{out}: the file exists — it is not overwritten — give another name with --out"
        )
    names = None if columns is None else [name.strip() for name in columns.split(",")]
    out.write_text(draft(str(data_file), label, names), encoding="utf-8")
    Job.read(out)
    console.print(f"wrote {out}: read its comments, correct it, then: hotbed train {out}")


@app.command()
def schema() -> None:
    """Print the JSON Schema of job files, for completion and checks in editors."""
    typer.echo(json.dumps(json_schema(), indent=1, ensure_ascii=False))


@app.command()
def doctor() -> None:
    """Tell what this machine and this install can do."""
    show.print_machine()
    if not util.find_spec("hotbed._core"):
        raise typer.Exit(1)


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


def _is_folder(what: str) -> bool:
    """Whether a folder or URL is named, and no job file."""
    place = resolve(what)
    return isinstance(place, str) or place.is_dir() or place.name == MANIFEST


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


if __name__ == "__main__":
    main()
