# SPDX-License-Identifier: Apache-2.0
"""The work of the commands on jobs, one function each: they return values, and print nothing.

`hotbed.cli` reads the command line, calls these and prints what they return.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hotbed import config
from hotbed.connectors import Live
from hotbed.data.schema import KeptColumn
from hotbed.errors import ConfigError, DataError
from hotbed.files import Where, resolve
from hotbed.job.check import check_resume, check_start
from hotbed.job.dialect import Dialect, dialect_of
from hotbed.job.drafting.draft import source_of
from hotbed.job.events import Began, Finished, Report, Scored, WarmStarted, ignore
from hotbed.job.file import read_values
from hotbed.job.job import Job
from hotbed.job.ranks import check_same, for_ranks, from_first, num_ranks, together
from hotbed.job.states import (
    Exported,
    check_unchanged,
    exported,
    has_state,
    newest,
    own_states,
    trained,
    with_grains_of,
)
from hotbed.job.tables import AS_SAVED, StateSettings
from hotbed.persist.container.format import read_newest
from hotbed.persist.container.store import new_file, write_text
from hotbed.persist.upkeep.inspect import join_facts
from hotbed.persist.upkeep.rollback import open_state

if TYPE_CHECKING:
    import pyarrow as pa

    from hotbed.connectors.source import Source
    from hotbed.persist.container.format import Reader, Saved
    from hotbed.training.model import RecModel
    from hotbed.training.watching.baselines import Baselines
    from hotbed.training.watching.history import History
    from hotbed.training.watching.segments import BySegment, SegmentTables

_KEEP_ROWS = 65_536  # rows read at a time to copy columns of them

# --- reading --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ForeignJob:
    """A training file of another system: its `dialect`, its values, and the `path` of it."""

    dialect: Dialect
    spec: Mapping[str, Any]
    path: Path

    def train(self, *, restart: bool) -> None:
        """Train it, as its system does.

        Raises:
            ConfigError: `restart` is set, or a value of the file is wrong.
        """
        if restart:
            raise ConfigError(
                f"--restart: moves the states of a stream aside, got {self.path}, a training file "
                f"of {self.dialect.name}, which has none. Leave --restart out."
            )
        if self.dialect.train is None:
            raise ConfigError(
                f"{self.path}: a file of {self.dialect.name} becomes a job first, got it as a job. "
                f"Run hotbed init --from {self.path}."
            )
        self.dialect.train(self.spec)


def read(path: Path, assignments: Mapping[str, object]) -> Job | ForeignJob:
    """Return what a YAML or JSON file describes, with `assignments` of values to dotted paths."""

    def build(spec: Mapping[str, Any]) -> Job | ForeignJob:
        dialect = dialect_of(spec)
        if dialect is None:
            return Job.from_json(spec)
        return ForeignJob(dialect, spec, path)

    return read_values(path, assignments, build)


# --- learning -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Learned:
    """What `train` and `online` return.

    `histories`: by part, `"train"` and `"stream"`. `place`: where the model or the stream's states
    are. `report`: where the report is.
    """

    model: RecModel
    histories: Mapping[str, History]
    place: Where
    report: Where


def train(
    job: Job, *, restart: bool = False, report: Report = ignore, progress: bool = False
) -> Learned:
    """Train the job's model from the start, then go through its stream; save model and report.

    On several ranks each calls it, and the first writes all files but the model.

    Args:
        job: the job.
        restart: rename the folder of states that an earlier stream of the job left, and begin anew.
        report: called with each event.
        progress: show progress bars.

    Raises:
        ConfigError: the job has no `train`, or its stream has a state and `restart` is not set; or
            several ranks cannot train it.
        PersistError: another run holds the lock of the stream's states.
    """
    if job.train is None:
        raise ConfigError(
            "job.train: missing key, got none. `hotbed train` begins with it: add a source, or "
            "use `hotbed online`."
        )
    check_same(job, "train", {"--restart": restart})
    job = for_ranks(job, num_ranks())
    with _owned_states(job, restart=restart, report=report) as live:
        if from_first(lambda: has_state(job.state_path)):
            raise ConfigError(
                f"job.output: its stream has a state in {job.state_path}, got `hotbed train`. "
                "Resume it with `hotbed online`, or move it aside with `hotbed train --restart`."
            )
        learning = _Learning(job, report, progress)
        model = learning.train()
        if job.stream is not None:
            learning.follow(model, live)
    report(Finished(model, learning.histories))
    place = model.save(job.output, learning.baselines)
    page = _write_report(job, model, learning.histories)
    return Learned(model, learning.histories, place, page)


def online(
    job: Job,
    max_steps: int | None = None,
    max_seconds: float | None = None,
    *,
    start: Where | None = None,
    beside: Sequence[Any] = (),
    report: Report = ignore,
    progress: bool = False,
) -> Learned:
    """Resume the job's stream, or begin it; a stream without a state follows the job's `train`.

    Args:
        job: the job.
        max_steps: end after this many steps, those of earlier runs included.
        max_seconds: end after this many seconds.
        start: a checkpoint of the same model that a stream without a state begins with, instead of
            `train`.
        beside: callbacks of the stream beside those of the job.
        report: called with each event.
        progress: show progress bars.

    Raises:
        ConfigError: the job has no `stream`, or fewer grains than there are ranks.
        PersistError: another run holds the lock of the stream's states.
    """
    from hotbed.persist.container.format import open_checkpoint

    if job.stream is None:
        raise ConfigError(
            "job.stream: missing key, got none. `hotbed online` follows it: add a source, or use "
            "`hotbed train`."
        )
    check_same(job, "online", {"--max-steps": max_steps, "--max-seconds": max_seconds})
    with _owned_states(job, restart=False, report=report) as live:
        if from_first(lambda: has_state(job.state_path)):
            with together():
                job = with_grains_of(job.state_path, job)
                schema = job.schema_of(job.state_path)
                newest_state = open_checkpoint(job.state_path)
            learning = _Learning(job, report, progress, beside)
            model = job.rec_model(schema)
            with together():
                check_unchanged(job, newest_state, model)
            from_first(lambda: check_resume(job))
        elif start is not None:
            learning = _Learning(job, report, progress, beside)
            model = _restored(job, states=start)
        else:
            job = for_ranks(job, num_ranks())
            learning = _Learning(job, report, progress, beside)
            model = learning.new_model() if job.train is None else learning.train()
        learning.follow(model, live, max_steps, max_seconds)
    report(Finished(model, learning.histories))
    page = _write_report(job, model, learning.histories)
    return Learned(model, learning.histories, job.state_path, page)


@contextmanager
def _owned_states(job: Job, *, restart: bool, report: Report) -> Iterator[Live | None]:
    """Do what `own_states` does; of several ranks the first alone takes the lock."""
    with ExitStack() as opened:
        states: list[Live | None] = []

        def own() -> None:
            states.append(opened.enter_context(own_states(job, restart=restart, report=report)))

        from_first(own)
        yield states[0] if states else None


class _Learning:
    """The parts of a job that learn; `histories` holds what each part returned."""

    def __init__(
        self, job: Job, report: Report, progress: bool, beside: Sequence[Any] = ()
    ) -> None:
        self.histories: dict[str, History] = {}
        self.baselines: list[Baselines] = []
        self._job = job
        self._beside = beside
        self._report = report
        self._progress = progress

    def new_model(self) -> RecModel:
        """Return the job's model before it learned anything, with the rows it starts from."""
        job = self._job
        with together():
            schema = job.fitted()
        model = job.rec_model(schema)
        start = job.warm_start
        if start is None:
            return model
        sources = model.warm_start(start.path, start.rename, optimizer_state=start.optimizer_state)
        (counts,) = model.learner.summed([{name: model.tables[name].stats for name in sources}])
        for table, source in sources.items():
            num_rows = counts[table]["rows"]
            self._report(WarmStarted(table, num_rows, source, start.path))
        return model

    def train(self) -> RecModel:
        """Return a model that has learned the job's `train`."""
        job = self._job
        assert job.train is not None
        from_first(lambda: check_start(job))
        model = self.new_model()
        self._begin(model, "train")
        valid = None
        if job.valid is not None:
            valid = job.dataset(job.valid, model.schema)
        self.histories["train"] = model.fit(
            job.dataset(job.train, model.schema),
            valid,
            job.fit.epochs,
            self._callbacks(),
            progress=self._progress,
        )
        if job.stream is not None:  # which may fail at once
            model.save(job.output, self.baselines)
        return model

    def follow(
        self,
        model: RecModel,
        live: Live | None,
        max_steps: int | None = None,
        max_seconds: float | None = None,
    ) -> None:
        """Follow the job's stream; `live`: the journal and the dead letters under its lock."""
        job = self._job
        assert job.stream is not None
        self._begin(model, "stream")
        events = job.dataset(job.stream, model.schema, batch_size=job.fit.stream_batch_size)
        events.live = live or events.live
        self.histories["stream"] = model.online_train(
            events,
            [*self._callbacks(stream=True), *self._beside],
            max_steps=max_steps,
            max_seconds=max_seconds,
            progress=self._progress,
        )

    def _callbacks(self, *, stream: bool = False) -> list[Any]:
        """Return the callbacks of a part; its baselines begin with what those before learned."""
        from hotbed.training.watching.baselines import Baselines
        from hotbed.training.watching.status_file import StatusFile

        callbacks = self._job.make_callbacks(stream=stream)
        baselines = [callback for callback in callbacks if isinstance(callback, Baselines)]
        for before, after in zip(self.baselines, baselines, strict=False):
            after.load_state(before.state())
        self.baselines = baselines
        if isinstance(resolve(self._job.output), Path):
            callbacks.append(StatusFile(self._job.output))
        return callbacks

    def _begin(self, model: RecModel, part: str) -> None:
        from hotbed.training.model import set_seed

        job = self._job
        set_seed(job.seed)
        text = json.dumps(job.with_classes().to_json(), indent=1, ensure_ascii=False)
        from_first(lambda: write_text(job.output_path("job.json"), text))
        kind = config.kind_of(type(model.network))
        self._report(Began(part, kind, len(model.schema.ids), len(model.schema.dense)))


def _write_report(job: Job, model: RecModel, histories: Mapping[str, History]) -> Where:
    """Write the page about the run into the job's output folder, and return its place."""
    from hotbed.training.described import summary_of
    from hotbed.training.watching.report import write_report

    about: dict[str, Any] = {"seed": job.seed}
    if model.grains > 1:
        about["grains"] = model.grains
    if num_ranks() > 1:
        about["ranks"] = num_ranks()
    if job.train is not None:
        about["batch size"] = job.fit.batch_size
    if job.stream is not None:
        about["batch size, stream"] = job.fit.stream_batch_size or job.fit.batch_size
    for name, source in (("train", job.train), ("valid", job.valid), ("stream", job.stream)):
        if source is not None:
            about[f"data, {name}"] = source
    title = f"{config.kind_of(type(model.network))}: {Path(job.output).name}"
    summary = summary_of(model)
    page = job.output_path("report.html")
    return from_first(
        lambda: write_report(page, histories, title=title, summary=summary, about=about)
    )


# --- using a model --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Predictions:
    """A Parquet file of `num_rows` predictions, in the order of the source."""

    num_rows: int
    path: Where


@dataclass(frozen=True)
class Evaluated:
    """Metrics of a model; those of baselines by name; and sentences on those that are better.

    `segments`: both by the values of columns, as `BySegment.figures`.
    """

    metrics: Mapping[str, float]
    baselines: Mapping[str, Mapping[str, float]]
    findings: Sequence[str]
    segments: SegmentTables


def evaluate(job: Job, by: BySegment | None = None) -> Evaluated:
    """Return the job's metrics of its newest model on its `valid`, and those of its baselines.

    Args:
        job: the job.
        by: the columns by which figures are divided; None: those of the job's callbacks.

    Raises:
        ConfigError: the job has no `valid`, or says another model or schema than was trained.
    """
    from hotbed.training.watching.baselines import findings
    from hotbed.training.watching.segments import segment_findings

    if job.valid is None:
        raise ConfigError(
            "job.valid: missing key, got none. `hotbed evaluate` needs a source with labels: add "
            "it, or --set it."
        )
    check_same(job, "evaluate")
    model = _restored(job)
    compared = [baselines.comparison() for baselines in _learned_baselines(job)]
    divided = [each.another_pass() for each in ([by] if by else _segments_of(job))]
    metrics = model.evaluate(job.dataset(job.valid, model.schema), [*compared, *divided])
    figures: dict[str, dict[str, float]] = {}
    for comparison in compared:
        figures |= comparison.results()
    tables: SegmentTables = {}
    for each in divided:
        tables |= each.tables()
    sentences = [*findings(metrics, figures), *segment_findings(tables)]
    return Evaluated(metrics, figures, sentences, tables)


def segments_by(columns: Sequence[str]) -> BySegment:
    """Return what divides figures by columns such as `country` and `age=18,30,50`.

    Raises:
        ConfigError: a bound is not a number.
    """
    from hotbed.training.watching.segments import BySegment

    bounds: dict[str, list[float]] = {}
    for text in columns:
        column, separator, numbers = text.partition("=")
        if separator:
            try:
                bounds[column] = [float(number) for number in numbers.split(",")]
            except ValueError:
                raise ConfigError(
                    f"--by: bounds are numbers between commas, got {text!r}. Give such as "
                    f"{column}=18,30,50."
                ) from None
    return BySegment([text.partition("=")[0] for text in columns], bounds)


def _segments_of(job: Job) -> list[BySegment]:
    """Return the callbacks of a job that divide figures: those of training, else of its stream."""
    from hotbed.training.watching.segments import BySegment

    for stream in (False, True):
        callbacks = job.make_callbacks(stream=stream)
        dividing = [callback for callback in callbacks if isinstance(callback, BySegment)]
        if dividing:
            return dividing
    return []


def _learned_baselines(job: Job) -> list[Baselines]:
    """Return the job's baselines with what they learned beside its newest model, if they did."""
    from hotbed.persist.container.format import open_checkpoint
    from hotbed.training.run import Callbacks
    from hotbed.training.watching.baselines import Baselines

    with together():
        states = trained(job)
        progress = open_checkpoint(states).progress
    callbacks = Callbacks(job.make_callbacks(stream=states == job.state_path))
    saved = {**progress.get("wall_callbacks", {}), **progress.get("callbacks", {})}
    there = {name: state for name, state in saved.items() if name.startswith("baselines.")}
    callbacks.load_state(there)
    return callbacks.of(Baselines) if there else []


def predict(job: Job, out: Where | None = None, keep: Sequence[str] = ()) -> Predictions:
    """Score the job's `predict`, else its `valid`, with its newest model.

    Args:
        job: the job.
        out: the Parquet file to write, or its URL; None: `predictions.parquet` in the job's output.
        keep: columns of the source to copy beside the predictions.

    Raises:
        DataError: rows that cannot be used were left out, so that others cannot be kept.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    from hotbed.serving.session import beside

    source = job.predict or job.valid
    if source is None:
        raise ConfigError(
            "job.predict: missing key, got none. There is nothing to score: add a source, or "
            "--set it."
        )
    check_same(job, "predict")
    model = _restored(job)
    scores = model.predict(job.dataset(source, model.schema))
    if not isinstance(scores, Mapping):
        scores = {model.schema.labels[0].name: scores}
    predictions = {name: pa.array(values) for name, values in scores.items()}
    num_rows = len(next(iter(predictions.values())))
    path = out or job.output_path("predictions.parquet")

    def write() -> None:
        table = pa.table(predictions)
        if keep:
            table = pa.table(beside(_kept_rows(source, keep, num_rows), keep, predictions))
        with new_file(path) as file:
            pq.write_table(table, file)

    from_first(write)
    return Predictions(num_rows, path)


def _kept_rows(source: Source, keep: Sequence[str], num_rows: int) -> pa.Table:
    """Return columns of a source of which `num_rows` rows were scored."""
    import pyarrow as pa

    from hotbed.connectors.read_plan import ReadPlan

    batches = [rows for rows, _ in source.read(None, _KEEP_ROWS, ReadPlan(tuple(keep)))]
    table = pa.Table.from_batches(batches, None if batches else source.schema())
    if table.num_rows != num_rows:
        raise DataError(
            f"--keep: expected {num_rows} rows, as were scored, got {table.num_rows}. Rows that "
            "cannot be used were left out. Set fit.on_error=raise to see them, or leave --keep out."
        )
    return table


def predict_files(
    model: Where,
    files: Sequence[str],
    out: Where,
    keep: Sequence[str] = (),
    report: Report = ignore,
) -> Predictions:
    """Score files with an exported model, without torch, batch by batch.

    The result appears whole, or not at all.

    Args:
        model: folder or URL of the exported model.
        files: csv, tsv, jsonl or parquet files, all of one kind.
        out: the Parquet file to write, or its URL.
        keep: columns of the files to copy beside the predictions.
        report: called with `Scored` after each batch.
    """
    import pyarrow.parquet as pq

    import hotbed as hb

    sources = [source_of(file) for file in files]
    if len({type(source) for source in sources}) > 1:
        raise ConfigError(
            f"FILES: they are of several kinds, got {', '.join(files)}. Score one kind at a time."
        )
    source = replace(sources[0], path=list(files))
    session = hb.InferenceSession(model)
    total = source.num_rows()
    num_rows = 0
    with new_file(out) as file, ExitStack() as opened:
        writer = None
        for batch in session.predict_source(source, keep=keep):
            if writer is None:
                writer = opened.enter_context(pq.ParquetWriter(file, batch.schema))
            writer.write_batch(batch)
            num_rows += batch.num_rows
            report(Scored(num_rows, total))
        if writer is None:
            raise DataError(f"FILES: no rows, got {', '.join(files)}. Give files with rows.")
    return Predictions(num_rows, out)


def export(job: Job, out: Where | None = None, tower: str | None = None) -> Exported:
    """Freeze the job's newest model for servers; `out`: None is `export` in the job's output.

    `tower`: of a two-tower model, the side whose tower is frozen alone.
    """
    with together():
        states = trained(job)
    model = _restored(job)
    out = out or job.output_path("export")
    return exported(model, states, out, tower)


def export_state(
    states: Where, out: Where, settings: StateSettings = AS_SAVED, tower: str | None = None
) -> Exported:
    """Freeze the newest state of a checkpoint; `settings`: where its rows lie meanwhile.

    Raises:
        ConfigError: the checkpoint does not hold how its network is built.
    """
    from hotbed.persist.container.format import open_checkpoint

    with together():
        reader = open_checkpoint(states)
    model = _rebuilt(states, reader, settings)
    return exported(model, states, out, tower)


def _restored(job: Job, reader: Reader | None = None, states: Where | None = None) -> RecModel:
    """Return the model that a job says, with what it learned.

    Args:
        job: the job.
        reader: the state; None is the newest one.
        states: the checkpoint; None is that of the job.

    Raises:
        ConfigError: the job says another model or schema than was trained.
    """
    from hotbed.persist.container.format import open_checkpoint

    with together():
        states = states or trained(job)
        schema = job.schema_of(states)
        grained = with_grains_of(states, job)
        newest_state = reader or open_checkpoint(states)
    model = grained.rec_model(schema)
    with together():
        check_unchanged(grained, newest_state, model)
    return model.restore(reader or states, job.checkpoint.get("allow", ()))


def _rebuilt(states: Where, reader: Reader, settings: StateSettings) -> RecModel:
    """Return the model of a state; raise ConfigError if it does not say how to build it."""
    import hotbed as hb

    if not (reader.manifest.model or {}).get("network"):
        raise ConfigError(
            f"{states}: its network cannot be rebuilt, got a checkpoint without its description. "
            "Give the job, or use model.export() or a publisher where the network is built."
        )
    return hb.load(reader, tier=settings.tiers(reader.table_names))


@dataclass(frozen=True)
class Published:
    """What `publish` returns: the state, the folder or URL, and what was published there.

    `version`: None if this state is the newest version there already.
    """

    state: str
    path: Where
    version: Saved | None


def publish(
    what: Job | Where,
    to: Where,
    state: int | None = None,
    keep: int = 2,
    settings: StateSettings = AS_SAVED,
    forced: str | None = None,
) -> Published:
    """Publish a state for servers that watch a folder, such as the one before bad data.

    Args:
        what: the job, or the folder or URL of its states.
        to: the folder or URL that servers watch.
        state: the number of the state; None is the newest.
        keep: number of full versions that are kept there.
        settings: where the rows of a state lie meanwhile; a job says it itself.
        forced: why a state that a gate held is published; its version says so.

    Raises:
        ConfigError: there is no such state, or its network cannot be rebuilt.
        PersistError: a trainer publishes there, or a gate held the state.
    """
    import hotbed as hb

    with together():
        states = trained(what) if isinstance(what, Job) else what
        reader = hb.checkpoints.open_checkpoint(states)
        if state is not None:
            reader = open_state(states, state)
    if isinstance(what, Job):
        model = _restored(what, reader)
    else:
        model = _rebuilt(states, reader, settings)

    def version() -> Saved | None:
        publisher = hb.PublishDirectory(to, keep)
        publisher.graph = model.graph()
        return publisher.publish(reader, forced=forced)

    return Published(reader.folder, to, from_first(version))


# --- looking --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ColumnFacts:
    """A column of a job.

    Attributes:
        source: the raw column; "" of a history or count, which the model keeps.
        type: of the raw column, None where the data do not have it.
    """

    name: str
    role: str
    source: str
    type: str | None
    table: str
    settings: Mapping[str, Any]


@dataclass(frozen=True)
class JobFacts:
    """A job's columns and settings, and the text of its model; None where it is not trained.

    `derived`: raw columns of requests that depend on other rows, and how they are computed.
    `misfit`: why the model that is there is not the job's; "" where it is, or none is there.
    `join`: what the join of its stream holds, as `join_facts` returns it.
    """

    columns: Sequence[ColumnFacts]
    derived: Mapping[str, str]
    settings: Mapping[str, Any]
    output: str
    model: str | None
    misfit: str = ""
    join: Mapping[str, Any] = field(default_factory=dict)


def inspect(job: Job) -> JobFacts:
    """Return a job's columns with the types of its data, its settings, and the trained model."""
    source = job.train or job.stream
    assert source is not None
    raw = source.schema()
    columns: list[ColumnFacts] = []
    for column in job.declared.columns:
        settings = config.describe(column)
        for shown in ("kind", "name", "column", "table"):
            settings.pop(shown, None)
        columns.append(
            ColumnFacts(
                name=column.name,
                role=config.kind_of(type(column)),
                source="" if isinstance(column, KeptColumn) else column.source,
                type=str(raw.field(column.source).type) if column.source in raw.names else None,
                table=getattr(column, "table", None) or "",
                settings=settings,
            )
        )
    plain = job.with_classes().to_json()
    rest = {key: value for key, value in plain.items() if key != "schema"}
    of_requests = job.declared.raw or job.declared
    model, misfit = _summary(job)
    join: Mapping[str, Any] = {}
    if has_state(job.state_path):
        join = read_newest(job.state_path, join_facts)
    return JobFacts(columns, of_requests.derived, rest, job.output, model, misfit, join)


def _summary(job: Job) -> tuple[str | None, str]:
    """Return the text of a job's newest model; or why the job does not say that model."""
    if not has_state(newest(job)):
        return None, ""
    from hotbed.training.described import summary_of

    try:
        return summary_of(_restored(job)), ""
    except ConfigError as error:
        return None, str(error)
