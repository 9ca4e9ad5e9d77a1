# SPDX-License-Identifier: Apache-2.0
"""What the command line does: train and follow a job, score with what came of it, freeze it for
servers.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.progress import MofNCompleteColumn, Progress

from hotbed import config
from hotbed.cli import show
from hotbed.cli.show import console
from hotbed.connectors import DeadLetters, Journal, Live
from hotbed.errors import ConfigError, DataError
from hotbed.files import Lock, Where, resolve, sync_folder
from hotbed.job.draft import source_of
from hotbed.job.job import Job
from hotbed.persist.recover import finish_first
from hotbed.persist.store import JOURNAL, LETTERS, new_file, open_store

if TYPE_CHECKING:
    from hotbed.training.model import RecModel
    from hotbed.training.watching.history import History


def run_job(job: Job, *, restart: bool = False) -> RecModel:
    """Train, stream, save and report as the job says; prints the results; returns the model.

    Args:
        restart: move the state that an earlier stream of the job left aside, and begin anew.

    Raises:
        ConfigError: the job has nothing to train, or its stream has a state and `restart` is not
            set.
        PersistError: another run holds the lock of the stream's states.
    """
    if job.train is None:
        raise ConfigError(
            "job.train: missing key — `hotbed train` begins with it — add it, or use `hotbed "
            "online`"
        )
    with own_states(job, restart=restart) as live:
        if has_state(job.state_path):
            raise ConfigError(
                f"job.output: its stream has a state in {job.state_path}, got `hotbed train`. "
                "Resume it with `hotbed online`, or move it aside with `hotbed train --restart`."
            )
        model, history = learn_past(job)
        histories = {"train": history}
        if job.stream is not None:
            histories["stream"] = learn_stream(job, model, live)
    show.print_results(model, histories)
    console.print(f"model: {model.save(job.output)}", highlight=False, soft_wrap=True)
    print_report(job, model, histories)
    return model


def follow_job(
    job: Job, max_steps: int | None = None, max_seconds: float | None = None
) -> RecModel:
    """Resume the job's stream, or begin it: first train what it has to train; returns the model."""
    if job.stream is None:
        raise ConfigError(
            "job.stream: missing key — `hotbed online` follows it — add a source, or use `hotbed "
            "train`"
        )
    histories: dict[str, History] = {}
    with own_states(job) as live:
        if has_state(job.state_path):
            model = job.rec_model(job.schema_of(job.state_path))
        elif job.train is None:
            model = _new(job)
        else:
            model, histories["train"] = learn_past(job)
        histories["stream"] = learn_stream(job, model, live, max_steps, max_seconds)
    show.print_results(model, histories)
    console.print(f"state: {job.state_path}", highlight=False, soft_wrap=True)
    print_report(job, model, histories)
    return model


def has_state(where: Where) -> bool:
    """Whether there is a newest checkpoint under `where`; FormatError where CURRENT is torn or
    lost.
    """
    return open_store(where).newest() is not None


@contextlib.contextmanager
def own_states(job: Job, *, restart: bool = False) -> Iterator[Live | None]:
    """Hold the lock of the stream's states while the job trains and follows its stream.

    Yields the journal and the dead letters that lie beside the states; None where nothing can be
    locked (an object store) or there is nothing to lock (a job without a stream).
    """
    folder = resolve(job.state_path)
    if isinstance(folder, str) or (job.stream is None and not folder.exists()):
        if restart and has_state(job.state_path):
            raise ConfigError(
                f"--restart: cannot move the state {job.state_path} aside, got an object store. "
                "Choose another output for the job."
            )
        yield None
        return
    with contextlib.ExitStack() as stack:
        if restart and folder.exists():
            with Lock(folder / JOURNAL):
                _move_aside(folder)
        journal = stack.enter_context(contextlib.closing(Journal(folder / JOURNAL)))
        finish_first(folder)
        yield Live(journal, DeadLetters(folder / LETTERS))


def _move_aside(folder: Path) -> None:
    """Rename a locked folder of states, unless it is empty; the lock goes with it."""
    if not any(path.is_dir() or path.stat().st_size for path in folder.iterdir()):
        return
    number = 1
    while (aside := folder.with_name(f"{folder.name}.aside-{number}")).exists():
        number += 1
    os.rename(folder, aside)
    sync_folder(folder.parent)
    console.print(f"earlier state: {aside}", highlight=False, soft_wrap=True)


def learn_past(job: Job) -> tuple[RecModel, History]:
    """A model that has learned the job's `train`."""
    assert job.train is not None
    model = _new(job)
    _begin(job, model, "training")
    valid = None if job.valid is None else job.dataset(job.valid, model.schema)
    data = job.dataset(job.train, model.schema)
    return model, model.fit(data, valid, job.fit.epochs, job.make_callbacks(), seed=job.seed)


def learn_stream(
    job: Job,
    model: RecModel,
    live: Live | None,
    max_steps: int | None = None,
    max_seconds: float | None = None,
) -> History:
    """Follow the job's stream; `live`: the journal and the dead letters that are held for it."""
    assert job.stream is not None
    _begin(job, model, "the stream: each batch is predicted, then learned by")
    events = job.dataset(job.stream, model.schema, batch_size=job.fit.stream_batch_size)
    events.live = live or events.live
    return model.online_train(
        events,
        job.make_callbacks(stream=True),
        max_steps=max_steps,
        max_seconds=max_seconds,
        seed=job.seed,
    )


def _new(job: Job) -> RecModel:
    """The job's model before it learned anything, with the rows that it starts from."""
    model = job.rec_model(job.fitted())
    if job.warm_start is not None:
        start = job.warm_start
        found = model.warm_start(start.path, start.rename, optimizer_state=start.optimizer_state)
        for here, there in found.items():
            console.print(
                f"warm start: {here} has {len(model.tables[here]):,} rows of {there} in "
                f"{start.path}"
            )
    return model


def _begin(job: Job, model: RecModel, what: str) -> None:
    schema = model.schema
    with new_file(job.output_path("job.json")) as file:
        file.write(json.dumps(job.to_json(), indent=1, ensure_ascii=False).encode())
    name = config.kind_of(type(model.network))
    console.rule(
        f"[bold]{what} {name} on {len(schema.ids)} id and {len(schema.dense)} dense features",
        align="left",
    )


def predict_job(job: Job, out: str | None) -> None:
    """Score what the job says with its newest model."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    import hotbed as hb

    source = job.predict or job.valid
    if source is None:
        raise ConfigError(
            "job.predict: missing key — there is nothing to score — add a source, or --set it"
        )
    model = hb.load(trained(job))
    scores = model.predict(job.dataset(source, model.schema))
    columns = scores if isinstance(scores, Mapping) else {model.schema.labels[0].name: scores}
    path = out or job.output_path("predictions.parquet")
    with new_file(path) as file:
        pq.write_table(pa.table({name: pa.array(values) for name, values in columns.items()}), file)
    show.print_written(len(next(iter(columns.values()))), path)


def predict_files(model: str, files: list[str], path: str) -> None:
    """Score files with an exported model, without torch, batch by batch; the result appears whole
    or not at all.
    """
    import pyarrow.parquet as pq

    import hotbed as hb

    sources = [source_of(file)[0] for file in files]
    if len({type(source) for source in sources}) > 1:
        raise ConfigError(f"files of several kinds — received {files} — score one kind at a time")
    source: Any = replace(sources[0], path=files)  # type: ignore[type-var]
    session = hb.InferenceSession(model)
    rows = 0
    progress = Progress(
        *Progress.get_default_columns(), MofNCompleteColumn(), console=console, transient=True
    )
    with progress as bar, new_file(path) as file:
        task = bar.add_task("scoring", total=source.num_rows())
        writer = None
        for batch in session.predict_source(source):
            writer = writer or pq.ParquetWriter(file, batch.schema)
            writer.write_batch(batch)
            rows += batch.num_rows
            bar.update(task, completed=rows)
        if writer is None:
            raise DataError(f"no rows — received {files} — give files with rows")
        writer.close()
    show.print_written(rows, path)


def export_job(job: Job, out: str | None) -> None:
    """Freeze the job's newest model for servers; by default into its output folder."""
    states = trained(job)
    _export(
        job.rec_model(job.schema_of(states)).restore(states),
        states,
        out or job.output_path("export"),
    )


def export_state(states: str, out: str) -> None:
    """Freeze the newest state of a checkpoint, which must know how its network is built."""
    import hotbed as hb
    from hotbed.persist.format import open_checkpoint

    if not (open_checkpoint(states).manifest["model"] or {}).get("network"):
        raise ConfigError(
            f"{states}: a checkpoint without its network — received one that Hotbed cannot "
            "rebuild — "
            "give the job, or call model.export() where the network is built"
        )
    _export(hb.load(states), states, out)


def _export(model: RecModel, states: str, out: str) -> None:
    from hotbed.persist.format import open_checkpoint

    show.print_export(open_checkpoint(model.export(out, states)).manifest, out)


def newest(job: Job) -> str:
    """Where the newest model of a job is: in its stream's states, or in its output folder."""
    return job.state_path if has_state(job.state_path) else job.output


def trained(job: Job) -> str:
    """Where the newest model of a job is; ConfigError where there is none yet."""
    states = newest(job)
    if not has_state(states):
        raise ConfigError(
            f"job: not trained yet — received no checkpoint in {job.output} — `hotbed train` it "
            "first"
        )
    return states


def print_report(job: Job, model: RecModel, histories: Mapping[str, History]) -> None:
    """Write the report, and say where."""
    from hotbed.training.described import summary_of
    from hotbed.training.watching.report import write_report

    title = f"{config.kind_of(type(model.network))}: {Path(job.output).name}"
    parts = {"train": job.train, "valid": job.valid, "stream": job.stream}
    about: dict[str, Any] = {"seed": job.seed, "batch size": job.fit.batch_size}
    about |= {f"data, {name}": source for name, source in parts.items() if source is not None}
    place = job.output_path("report.html")
    report = write_report(place, histories, title=title, summary=summary_of(model), about=about)
    console.print(f"report: {report}", highlight=False, soft_wrap=True)
