# SPDX-License-Identifier: Apache-2.0
"""Whether a job can run here: questions, each with an answer within seconds.

`hotbed check` asks them all. Each start of a training asks those that take no reading: a missing
secret, topic, file or right ends it before its first row is learned.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pyarrow as pa

from hotbed.connectors import Kafka, Memory, ReadPlan, Source
from hotbed.connectors.files import FileSource
from hotbed.data.schema import DisplayPosition, KeptColumn, Label, Weight
from hotbed.embedding.histories import HistoryStore, history_tables
from hotbed.embedding.tier import Ssd
from hotbed.errors import ConfigError, FormatError, HotbedError, SchemaError
from hotbed.files import check_folder, check_scratch, resolve
from hotbed.job.job import Job
from hotbed.job.sampled_tables import facts_of
from hotbed.job.states import check_unchanged, has_state
from hotbed.job.workload import read_ids
from hotbed.memory import peak_bytes
from hotbed.memory_limit import memory_limits
from hotbed.objects import connect
from hotbed.persist.container.format import open_checkpoint
from hotbed.persist.container.store import MANIFEST_FILE, new_file, open_store

if TYPE_CHECKING:
    from hotbed.data.columns import SegmentColumn
    from hotbed.data.schema import Schema

LOG = logging.getLogger("hotbed")
Outcome = Literal["ok", "warning", "error"]
PARTS = ("train", "valid", "stream", "predict")

LIMIT_SECONDS = 5.0
"""How long a question may take; all are asked at the same time."""
START_SECONDS = 3.0
"""The same where a stream resumes, whose broker may be away."""
FIRST_ROWS = 1_000
"""Rows of each source that are read and encoded."""
COUNTED_ROWS = 50_000
"""Rows of `train` whose ids are counted, to predict the memory of tables."""
PATIENCE = 0.7
"""Of the time of a question, for which a topic is waited for."""
NEEDED = ("output", "source", "callbacks")
"""How questions begin without whose answer a job cannot run."""
FULL_SHARE = 0.8
"""Of the memory, from which on a warning is given."""
_SECRET = re.compile(r"\$\{(\w+)\}")


@dataclass(frozen=True)
class JobAnswer:
    """The answer to a question about a job."""

    question: str
    outcome: Outcome
    text: str


class _DoubtError(Exception):
    """What is found may be wrong, or not; its text is a warning."""


Reply = str | Sequence[JobAnswer]
Questions = dict[str, Callable[[], Reply]]


def check(job: Job, limit_seconds: float = LIMIT_SECONDS) -> list[JobAnswer]:
    """Return the answers to all questions about a job.

    Args:
        job: the job.
        limit_seconds: without an answer after this time, a question is answered by a warning.
    """
    import_module("hotbed.training.callbacks")  # torch takes longer than a question may
    import_module("hotbed.training.model")
    questions = {"secrets": lambda: _secrets(job), **_ready(job, patience=PATIENCE * limit_seconds)}
    questions["output"] = lambda: _output(job, write=True)
    for part in PARTS:
        source = getattr(job, part)
        if source is not None:
            questions[f"rows of {part}"] = _rows_question(job, part, source, limit_seconds)
    folders = {str(tier.path) for tier in job.tables.tiers() if isinstance(tier, Ssd)}
    if folders:
        questions["disk of tables"] = lambda: _disks(folders)
    if job.warm_start is not None:
        start = job.warm_start.path
        questions["warm start"] = lambda: open_checkpoint(start).folder
    questions["memory"] = lambda: _memory(job)
    questions["state"] = lambda: _state(job)
    questions["changes"] = lambda: _changes(job)
    return _said_once(_asked(questions, limit_seconds, job))


def _said_once(answers: Iterable[JobAnswer]) -> list[JobAnswer]:
    """Return answers in which an error that several questions met is told by the first of them."""
    first: dict[str, str] = {}
    shortened: list[JobAnswer] = []
    for answer in answers:
        question = first.setdefault(answer.text, answer.question)
        if answer.outcome == "error" and question != answer.question:
            answer = replace(answer, text=f"see {question}")
        shortened.append(answer)
    return shortened


def check_start(job: Job) -> None:
    """Ask whether all that a job reads and writes is there, before its first row is learned.

    Raises:
        ConfigError: a secret is missing, a broker refuses it, or a folder cannot be written.
        DataError: a file, a folder or a topic is missing, or no broker answers.
        PersistError: a topic to publish in is missing, or no broker answers.
    """
    for question, ask in _ready(job, ("valid", "stream")).items():  # `train` is read at once
        try:
            ask()
        except _DoubtError as doubt:
            LOG.warning("job: %s: %s", question, doubt)


def check_resume(job: Job) -> None:
    """Log what is missing where a stream resumes: what is away may come back."""
    for answer in _asked(_ready(job, ("stream",), PATIENCE * START_SECONDS), START_SECONDS, job):
        if answer.outcome != "ok":
            LOG.warning("job: %s: %s", answer.question, answer.text)


def _asked(questions: Questions, limit_seconds: float, job: Job) -> list[JobAnswer]:
    """Return the answers to questions, which threads ask at the same time."""
    answers: dict[str, Sequence[JobAnswer]] = {}

    def ask(question: str) -> None:
        answers[question] = _answered(question, questions[question])

    deadline = time.monotonic() + limit_seconds
    threads = {}
    for question in questions:
        # a daemon: a client that hangs must not keep the process
        threads[question] = threading.Thread(target=ask, args=(question,), daemon=True)
        threads[question].start()
    in_order: list[JobAnswer] = []
    for question, thread in threads.items():
        thread.join(max(0.0, deadline - time.monotonic()))
        is_needed = question.startswith(NEEDED)
        about = question.split()
        of = ""
        if about[0] in ("source", "rows"):
            of = f", got none from {str(getattr(job, about[-1]))[:120]}"
        late = f"no answer within {limit_seconds:g} s{of}. Check that it can be reached."
        none = [JobAnswer(question, "error" if is_needed else "warning", late)]
        in_order += answers.get(question, none)
    return in_order


def _answered(question: str, ask: Callable[[], Reply]) -> Sequence[JobAnswer]:
    try:
        answer = ask()
    except _DoubtError as doubt:
        return [JobAnswer(question, "warning", str(doubt))]
    except HotbedError as error:
        return [JobAnswer(question, "error", str(error))]
    except Exception as error:  # of a source or a class of the user
        return [JobAnswer(question, "error", f"{type(error).__name__}: {error}")]
    if isinstance(answer, str):
        return [JobAnswer(question, "ok", answer)]
    return answer


# --- what is read and written ---------------------------------------------------------------------


def _ready(job: Job, parts: Sequence[str] = PARTS, patience: float | None = None) -> Questions:
    """Return the questions that take no reading of rows.

    Args:
        job: the job.
        parts: whose sources are looked for.
        patience: seconds to wait for a topic; None = as long as a reading does.
    """
    questions: Questions = {"output": lambda: _output(job, write=False)}
    for part in parts:
        if getattr(job, part) is not None:
            questions[f"source {part}"] = _source_question(getattr(job, part), patience)
    questions["callbacks"] = lambda: _callbacks(job.make_callbacks())
    if job.stream is not None:
        questions["callbacks of the stream"] = lambda: _callbacks(job.make_callbacks(stream=True))
    return questions


def _source_question(source: Source, patience: float | None) -> Callable[[], Reply]:
    def ask() -> str:
        num_files = check_ready(source, patience)
        if not num_files:
            return "there"
        return "1 file" if num_files == 1 else f"{num_files:,} files"

    return ask


def _callbacks(callbacks: Sequence[Any]) -> str:
    check_ready(callbacks)
    return ", ".join(type(callback).__name__ for callback in callbacks) or "none"


def check_ready(value: Any, patience: float | None = None) -> int:
    """Call `check_ready` of a value, or of the values that it holds: sources, callbacks, ...

    Args:
        value: what is checked.
        patience: seconds to wait for a topic; None = as long as a reading does.

    Returns:
        The number of files that sources in it read.
    """
    check = getattr(value, "check_ready", None)
    if isinstance(value, Kafka):
        value.check_ready(patience)
    elif callable(check):
        check()
    num_files = 0
    if isinstance(value, FileSource):
        num_files = len(value.files())  # raises where there are none
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for inner in value:
            if is_dataclass(inner) or hasattr(inner, "check_ready"):
                num_files += check_ready(inner, patience)
    elif is_dataclass(value) and not isinstance(value, type):
        for item in fields(value):
            num_files += check_ready(getattr(value, item.name), patience)
    return num_files


def _secrets(job: Job) -> str:
    options = json.dumps([*_options(job.to_json())], default=str)
    names = sorted(set(_SECRET.findall(options)))
    missing = [name for name in names if name not in os.environ]
    if missing:
        raise ConfigError(
            f"no environment variable {', '.join(missing)}, got a job that names it as "
            f"${{{missing[0]}}}. Set it."
        )
    return ", ".join(names) or "none"


def _options(plain: Any) -> Iterator[Any]:
    """Yield the options of clients in a tree of plain values."""
    if isinstance(plain, Mapping):
        yield plain.get("options")
        plain = list(plain.values())
    if isinstance(plain, list):
        for value in plain:
            yield from _options(value)


def _output(job: Job, *, write: bool) -> str:
    """Say whether the output takes files, and the room on its disk; `write`: try an object."""
    check_folder(job.output, "job.output")
    folder = resolve(job.output)
    if isinstance(folder, str):
        if write:
            name = f".hotbed-check-{secrets.token_hex(4)}"
            with new_file(job.output_path(name)) as file:
                file.write(b"hotbed check\n")
            client, root = connect(folder)
            client.rm_file(f"{root}/{name}")
        return f"{folder} takes objects" if write else folder
    path = folder.absolute()
    while not path.exists():
        path = path.parent
    free = shutil.disk_usage(path).free
    needed = _state_bytes(folder) * 2  # the next one is written before an old one is removed
    if free < max(needed, 1 << 28):
        raise _DoubtError(
            f"{folder}: little room, got {_size(free)} free and states of {_size(needed / 2)}. "
            "Free space, or choose another output."
        )
    return f"{folder} takes files; {_size(free)} are free"


def _disks(folders: Iterable[str]) -> str:
    for folder in folders:
        check_scratch(folder, "job.tables.tier.path")
    return ", ".join(sorted(folders))


def _state_bytes(output: Path) -> int:
    """Return the bytes of the largest state in an output folder."""
    sizes: dict[Path, int] = {}
    for manifest in output.glob("**/MANIFEST.json"):
        files = [path for path in manifest.parent.rglob("*") if path.is_file()]
        sizes[manifest] = sum(path.stat().st_size for path in files)
    return max(sizes.values(), default=0)


# --- what is in the data --------------------------------------------------------------------------


def _rows_question(
    job: Job, part: str, source: Source, limit_seconds: float
) -> Callable[[], Reply]:
    return lambda: _rows(job, part, source, limit_seconds / 2)


def _rows(job: Job, part: str, source: Source, seconds: float) -> str:
    """Encode the first rows of a source as its part of the job does."""
    names = source.schema().names
    columns = [
        column
        for column in job.declared.columns
        if not isinstance(column, KeptColumn)
        if part != "predict" or not isinstance(column, (Label, Weight, DisplayPosition))
    ]
    missing = sorted({column.source for column in columns} - set(names))
    if missing:
        raise SchemaError(
            f"job.{part}: no column {', '.join(map(repr, missing))}, got "
            f"{', '.join(map(repr, names))}. Correct the schema or the source."
        )
    rows = _first_rows(source, FIRST_ROWS, seconds)
    if not rows.num_rows:
        if source.endless:
            raise _DoubtError(f"no row within {seconds:g} s, so only the names were compared")
        raise _DoubtError("no rows. Check the path")
    if part == "predict":
        return f"{len(names)} columns, of which the schema reads {len(columns)}"
    schema = _fitted(job, rows)
    data = job.dataset(Memory(rows), schema, batch_size=rows.num_rows)
    if part == "train":
        _check_order(job, schema)
    data.encoder.read_segments(_segments(job, part))
    batch = next(iter(data), None)
    if batch is None:
        raise SchemaError(
            f"job.{part}: none of the first {rows.num_rows} rows can be used. Look at them with "
            "fit.on_error: raise."
        )
    share = {name: float(values.mean()) for name, values in batch.labels.items()}
    labels = ", ".join(f"mean of {name} {mean:.3g}" for name, mean in share.items())
    return f"{batch.num_samples} of the first {rows.num_rows} rows fit the schema; {labels}"


def _check_order(job: Job, schema: Schema) -> None:
    """Raise ConfigError if histories would be kept of rows that do not come once and in order."""
    from hotbed.training.arguments import check_keeps, check_rows_in_order
    from hotbed.training.run import Goal

    if not schema.kept:
        return
    assert job.train is not None
    histories = HistoryStore(schema, history_tables(schema))
    data = job.dataset(job.train, schema)
    check_keeps(histories, schema)
    check_rows_in_order(histories, Goal(data, end_epoch=job.fit.epochs))


def _segments(job: Job, part: str) -> list[SegmentColumn]:
    """Return the columns by which callbacks divide the figures of a part."""
    from hotbed.training.run import Callbacks

    if part == "train":
        return []
    return Callbacks(job.make_callbacks(stream=part == "stream")).segments


def _first_rows(source: Source, most: int, seconds: float) -> pa.Table:
    """Return the first rows of a source, fewer if these are all that come in some seconds."""
    deadline = time.monotonic() + seconds
    batches: list[pa.RecordBatch] = []
    num_rows = 0
    with contextlib.closing(_closable(source.read(None, most, ReadPlan()))) as reading:
        for batch, _ in reading:
            if batch is not None and batch.num_rows:
                batches.append(batch)
                num_rows += batch.num_rows
            if num_rows >= most or time.monotonic() > deadline:
                break
    schema = batches[0].schema if batches else source.schema()
    return pa.Table.from_batches(batches, schema).slice(0, most)


def _closable(batches: Any) -> Generator[Any]:
    yield from batches


def _fitted(job: Job, rows: pa.Table) -> Schema:
    """Return the schema of the newest state, or one that learned from some rows alone."""
    if has_state(job.state_path):
        return job.schema_of(job.state_path)
    return job.declared.fit(Memory(rows))


def _memory(job: Job) -> str:
    """Compare what the tables will take with the memory of the container or the machine."""
    limits = memory_limits()
    if not limits:
        raise _DoubtError("this system does not say how much memory there is")
    limit = limits[0]
    sizes, is_whole = _table_bytes(job)
    total = sum(sizes.values()) + peak_bytes()
    largest = sorted(sizes, key=lambda name: -sizes[name])[:3]
    tables = ", ".join(f"{name} {_size(sizes[name])}" for name in largest)
    extent = "" if is_whole else "at least "
    text = (
        f"{extent}{_size(total)} of {_size(limit.limit_bytes)} of {limit.of}; largest tables: "
        f"{tables or 'none'}"
    )
    if total > FULL_SHARE * limit.limit_bytes:
        raise _DoubtError(
            f"{text}. Give tables a capacity, evict rows, use tier: ssd, or `hotbed plan` for ranks"
        )
    return text


def _table_bytes(job: Job) -> tuple[dict[str, float], bool]:
    """Return the bytes that each table will take, and whether all of its ids are known.

    The rows are those of the newest state, if there is one, else those of the first rows of the
    data, as they grow to its number of rows.
    """
    source = job.train or job.stream
    assert source is not None
    rows = _first_rows(source, COUNTED_ROWS, 1.0)
    schema = _fitted(job, rows)
    model = replace(job, grains=1, tables=job.tables.in_memory()).rec_model(schema)
    total = None if source.endless else source.num_rows()
    read = read_ids(replace(job, train=Memory(rows)), model, max(rows.num_rows // 8, 1), total)
    rows_of_tables: dict[str, int] = {}
    if has_state(job.state_path):
        entries = open_checkpoint(job.state_path).manifest.tables
        rows_of_tables = {entry.name: entry.rows for entry in entries}
    sizes: dict[str, float] = {}
    for name, table in model.tables.items():
        tier = job.tables.tier_of(name)
        expected = rows_of_tables.get(name)
        facts = facts_of(table, tier, read.ids[name], job, read.sampled, expected)
        sizes[name] = facts.memory_of_all()
    return sizes, total is not None or bool(rows_of_tables)


def _size(num_bytes: float) -> str:
    unit = "MiB" if num_bytes < 1 << 30 else "GiB"
    return f"{num_bytes / (1 << (20 if unit == 'MiB' else 30)):,.1f} {unit}"


# --- what is there already ------------------------------------------------------------------------


def _state(job: Job) -> str:
    """Say which state a run resumes from, and check that it is of the job's model."""
    if not has_state(job.state_path):
        if job.stream is None and has_state(job.output):
            return f"{job.output} has a model, which `hotbed train` replaces"
        return "none: training begins anew"
    reader = open_checkpoint(job.state_path)
    grains = (reader.manifest.model or {}).get("grains", 1)
    here = replace(job, grains=job.grains or grains, tables=job.tables.in_memory())
    check_unchanged(job, reader, here.rec_model(job.schema_of(job.state_path)))
    steps = reader.manifest.counters.get("steps", 0)
    return f"`hotbed online` resumes from {reader.folder}: step {steps:,}{_age(reader.folder)}"


def _age(folder: str) -> str:
    place = resolve(folder)
    if isinstance(place, str):
        return ""
    seconds = max(0.0, time.time() - (place / MANIFEST_FILE).stat().st_mtime)
    for unit, length in (("day", 86_400), ("hour", 3_600), ("minute", 60)):
        if seconds >= 2 * length:
            return f", {seconds / length:,.0f} {unit}s old"
    return f", {seconds:.0f} seconds old"


def _changes(job: Job) -> Sequence[JobAnswer] | str:
    """Return an answer for each key that differs from the job.json of the output."""
    try:
        written = open_store(job.output).read("job.json")
    except FormatError:
        return "no job.json in the output"
    before = dict(_flat("", json.loads(written)))
    now = dict(_flat("", job.with_classes().to_json()))
    answers = []
    for key in sorted(before.keys() | now.keys()):
        is_of_run = key == "grains" and not isinstance(job.grains, int)  # it chose their number
        if before.get(key) != now.get(key) and not is_of_run:
            was = _shown(before, key)
            text = f"was {was}, is {_shown(now, key)}"
            answers.append(JobAnswer(f"changed: {key}", "warning", text))
    return answers or "none since the job.json of the output"


def _flat(path: str, plain: Any) -> Iterator[tuple[str, Any]]:
    """Yield the values in a tree of plain values, by dotted path; items of lists by their name."""
    if isinstance(plain, Mapping):
        for key, value in plain.items():
            yield from _flat(f"{path}.{key}".lstrip("."), value)
    elif isinstance(plain, list) and any(isinstance(item, Mapping) for item in plain):
        for number, item in enumerate(plain):
            name = item.get("name", number) if isinstance(item, Mapping) else number
            yield from _flat(f"{path}.{name}", item)
    else:
        yield path, plain


def _shown(values: Mapping[str, Any], key: str) -> str:
    if key not in values:
        return "the default"
    text = json.dumps(values[key], ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."
