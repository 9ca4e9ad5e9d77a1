# SPDX-License-Identifier: Apache-2.0
"""JobReplay: what another job would have done with the logged requests, and what users with it."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from hotbed import checks, config
from hotbed.connectors.join.join import Join
from hotbed.connectors.read_plan import ReadPlan
from hotbed.connectors.request_log import RequestLog, topic_of
from hotbed.connectors.source import Source
from hotbed.connectors.status import ended
from hotbed.errors import ConfigError, DataError, FormatError, SchemaError
from hotbed.files import Where, local_path, new_file, writing
from hotbed.job import run
from hotbed.job.events import Report, ignore
from hotbed.job.file import override
from hotbed.job.job import Job
from hotbed.persist.container.store import write_text
from hotbed.quality.cells import BASE, REPLAY
from hotbed.quality.measure import OpenWindows, ServingQuality, waits_of
from hotbed.quality.page import PAGE
from hotbed.quality.prediction import Prediction, predict
from hotbed.quality.replay_page import write_replay_page
from hotbed.quality.results import Quality
from hotbed.quality.samples import PLACE
from hotbed.quality.scoring import ScoreWhenShown

log = logging.getLogger("hotbed")

WARM_UP = 0.5
"""Default of the share of rows that a job without a state learns before rows count."""
_KEPT_OF_CHECKPOINT = ("every_steps", "every_seconds", "full_every", "keep", "wait", "allow")
_TELLING = ("prometheus", "tensor_board")  # callbacks that others read
_SCORES = "scores.f32"
_JOB = "replay.json"
_PREDICTION = "prediction.parquet"


@dataclass(frozen=True)
class Replayed:
    """What a replay found.

    Attributes:
        quality: of all windows of the log: of the answers, and of the route `replay`.
        whole: the same for the time after the warm-up, as one window.
        prediction: of a test of the job against what answered, or against the base.
    """

    quality: Quality
    whole: Quality
    prediction: Prediction


@dataclass(frozen=True)
class JobReplay:
    """Last week again: another job learns the logged requests and their outcomes in event time.

    Each candidate is scored by what the job had learned when it was shown. These scores are
    compared with the logged ones, and predict the difference of the click rate that a test of both
    on users would have shown. docs/replay.md says how, and what the log cannot know.

    Args:
        measure: the joined log, and how its quality is measured. Its `output` has the results, and
            the states of the job, from which a killed replay resumes.
        job: the other job; its `stream`, `output`, publisher, Prometheus and TensorBoard are left
            out. It learns its `train` first, which must end before the log begins.
        base: a second job that is replayed, with which the first one is compared; None = the
            scores in the log.
        start: a checkpoint that the job begins with, instead of `train`.
        place: the column that says at which place a candidate was shown, a whole number; None =
            candidates were shown by falling score.
        warm_up: the share of rows that are learned, but do not count; None = one half, and nothing
            with `start`.

    Raises:
        ConfigError: an argument is wrong.

    Example:
        >>> measure = hb.ServingQuality(samples, user="user", output="replayed")
        >>> hb.JobReplay(measure, hb.Job.read("other.yaml")).replay().prediction.difference
    """

    measure: ServingQuality
    job: Job
    base: Job | None = None
    start: Where | None = None
    place: str | None = None
    warm_up: float | None = None

    def __post_init__(self) -> None:
        checks.between("replay.warm_up", self.warm_up, 0.0, 0.95)
        if self.measure.output is None:
            raise ConfigError(
                "replay.measure: its `output` holds the states of the job, got None. Give a folder."
            )
        source = _ending(self.measure.samples)
        object.__setattr__(self, "measure", dataclasses.replace(self.measure, samples=source))

    def replay(self, report: Report = ignore, *, progress: bool = False) -> Replayed | None:
        """Replay the log, write the results, and return them.

        Args:
            report: called with each event of the training.
            progress: show progress bars.

        Returns:
            None: a signal ended it. The same call resumes.

        Raises:
            SchemaError: the log lacks a column of the job.
            DataError: the log has no outcomes, or is not in the order of time.
            ConfigError: the output holds the replay of another job.
            FormatError: the settings of the job in the output are torn.
            PersistError: another process replays into this folder, the disk refuses, or the output
                lacks scores.
        """
        rows = LoggedRows.read(self.measure, self.place)
        scores: dict[str, NDArray[np.float32]] = {}
        for route, job in ((BASE, self.base), (REPLAY, self.job)):
            if job is None:
                continue
            start = self.start if route == REPLAY else None
            replaying = _ReplayedJob(self, route, job, rows)
            learned = replaying.learn(start, report, progress=progress)
            if learned is None:
                return None
            scores[route] = learned
        replayed = self._compared(rows.table, scores)
        self._write(replayed)
        return replayed

    def _compared(self, answered: pa.Table, scores: Mapping[str, NDArray[np.float32]]) -> Replayed:
        warm_up = self.warm_up
        if warm_up is None:
            warm_up = WARM_UP if self.start is None else 0.0
        times = np.sort(answered["time"].to_numpy())
        begin = int(times[int(len(times) * warm_up)])
        parts = [answered, *(_scored(answered, route, scores[route]) for route in scores)]
        counted = [part.filter(pa.compute.greater_equal(part["time"], begin)) for part in parts]
        is_counted = answered["time"].to_numpy() >= begin
        of_counted = {route: values[is_counted] for route, values in scores.items()}
        prediction = predict(counted[0], of_counted, self.measure.level)
        whole = dataclasses.replace(self.measure, seconds=None)
        return Replayed(_measured(self.measure, parts), _measured(whole, counted), prediction)

    def _write(self, replayed: Replayed) -> None:
        output = self.output
        replayed.quality.write(output)
        replayed.whole.write(output / "whole")
        place = output / _PREDICTION
        with writing(place), new_file(place) as file:
            pq.write_table(replayed.prediction.table(), file)
        write_replay_page(output / PAGE, replayed.quality, replayed.whole, replayed.prediction)

    @property
    def output(self) -> Path:
        """The folder of results and states."""
        assert self.measure.output is not None
        return local_path(self.measure.output, "measure.output")


def measure_of(where: str, job: Job, assignments: Mapping[str, object]) -> ServingQuality:
    """Return how a log is measured for the replay of a job.

    Args:
        where: a file for `hotbed measure`; or the folder of a log: its outcomes are then those of
            the join that is the `stream` of the job.
        job: the other job; results go to `replay` in its output.
        assignments: values of the file by dotted path.

    Raises:
        ConfigError: the job says no outcomes, or a value is wrong.
    """
    output = f"{job.output}/replay"
    if Path(where).is_file():
        return ServingQuality.read(where, {"output": output, **assignments})
    if not isinstance(job.stream, Join):
        raise ConfigError(
            f"job.stream: its join would say where the outcomes of {where} are, got "
            f"{type(job.stream).__name__}. Give a file for hotbed measure instead of the log."
        )
    impressions = {"kind": "request_log", "where": where, "follow": False}
    samples = {**config.describe(job.stream), "impressions": impressions}
    spec = override({"samples": samples, "output": output}, assignments)
    measure: ServingQuality = config.build(spec, ServingQuality, "measure")
    return measure


@dataclass(frozen=True)
class LoggedRows:
    """The joined rows of a log in the order of the join.

    Attributes:
        table: as `MeasuredColumns.samples` returns them, with `place` where a column says it.
        label: the column of the label.
    """

    table: pa.Table
    label: str

    @classmethod
    def read(cls, measure: ServingQuality, place: str | None) -> LoggedRows:
        """Read a log and its outcomes.

        Raises:
            SchemaError: it lacks a column.
            DataError: nothing of it can be learned.
        """
        columns = measure.columns()
        names = list(columns.names)
        if place is not None:
            if place not in measure.samples.schema().names:
                raise SchemaError(
                    f"replay.place: the samples lack the column, got {place!r} in "
                    f"{measure.samples.schema().names}. Name the column of places."
                )
            names.append(place)
        parts = []
        counts: Mapping[str, int] = {}
        batches = measure.samples.read(plan=ReadPlan(tuple(names), opens=True))
        with ended(batches):
            for batch, position in batches:
                counts = position.state.get("counts", counts)
                if batch.num_rows:
                    samples = columns.samples(batch)
                    if place is not None:
                        samples = samples.append_column(PLACE, _whole_numbers(batch, place))
                    parts.append(samples)
        if counts.get("late"):
            log.warning(
                "replay: %d logged candidates are left out: their times come so late in the log "
                "that their windows had closed. Give the join a larger lateness_seconds",
                counts["late"],
            )
        table = (
            pa.concat_tables(parts) if parts else pa.table({"label": pa.array([], pa.float64())})
        )
        num_positives = int(table["label"].to_numpy().sum())
        if not 0 < num_positives < table.num_rows:
            raise DataError(
                "replay: it needs candidates with an outcome and some without, got "
                f"{num_positives} of {table.num_rows} with one; the join counts {dict(counts)}. "
                "Correct `on`, `time`, `unit` and `within` of the join, or give a log whose "
                "outcomes are known."
            )
        times = table["time"].to_numpy()
        back = int((np.maximum.accumulate(times) - times).max()) / 1e6
        known_after = waits_of(measure.samples) / 1e6
        if back > known_after:
            raise DataError(
                "replay: the log must be in the order of time, but for the time after which "
                f"outcomes are known, {known_after:g} s; got a candidate {back:g} s before an "
                f"earlier one. Sort it: {{kind: sort, by: {measure.samples.time}, source: …}} as "
                "the impressions of the join."
            )
        return cls(table, columns.label)


def _whole_numbers(batch: pa.RecordBatch, place: str) -> pa.Array:
    """Return the column of places; raise SchemaError if it has other values."""
    try:
        return batch[place].cast(pa.int64())
    except pa.ArrowException as error:
        raise SchemaError(
            f"replay.place: a place is a whole number, got the column {place!r} of "
            f"{batch[place].type}: {error}. Name the column of places."
        ) from error


class _ReplayedJob:
    """Lets a job learn logged rows, each of which it has scored before."""

    def __init__(self, replay: JobReplay, route: str, job: Job, rows: LoggedRows) -> None:
        samples = replay.measure.samples
        output = replay.output / route
        checkpoint = {
            key: job.checkpoint[key] for key in _KEPT_OF_CHECKPOINT if key in job.checkpoint
        }
        callbacks = [spec for spec in job.stream_callbacks if _kind(spec) not in _TELLING]
        self._job = dataclasses.replace(
            job,
            stream=samples,
            stream_callbacks=callbacks,
            baselines=bool(job.baselines),
            checkpoint=checkpoint or {"every_seconds": 60.0},
            fit=dataclasses.replace(job.fit, on_error="raise"),
            output=str(output),
        )
        self._output = output
        times = rows.table["time"].to_numpy()
        waits = waits_of(samples)
        self._scoring = ScoreWhenShown(self._job, times, waits, rows.label, output / _SCORES)
        self._num_rows = len(times)

    def learn(
        self, start: Where | None, report: Report, *, progress: bool
    ) -> NDArray[np.float32] | None:
        """Learn all rows and return their scores; None if a signal ended it before."""
        self._check_same(start)
        run.online(self._job, start=start, beside=[self._scoring], report=report, progress=progress)
        if self._scoring.num_scored < self._num_rows:
            return None
        return self._scoring.scores()

    def _check_same(self, start: Where | None) -> None:
        """Raise ConfigError if the output holds the replay of another job, else write which."""
        plain = {**self._job.with_classes().to_json(), "start": start and str(start)}
        plain = json.loads(json.dumps(plain))
        file = self._output / _JOB
        if file.exists():
            try:
                before = dict(json.loads(file.read_text(encoding="utf-8")))
            except (ValueError, TypeError) as error:
                raise FormatError(
                    f"{file}: expected the settings of a replayed job, got {error}. Remove the "
                    "folder, and replay again."
                ) from error
            changed = sorted(
                key for key in {**before, **plain} if before.get(key) != plain.get(key)
            )
            if changed:
                raise ConfigError(
                    f"{self._output}: it holds the replay of a job with other "
                    f"{', '.join(changed)}, got { {key: plain.get(key) for key in changed} }. Give "
                    "another output, or remove the folder."
                )
            return
        write_text(file, json.dumps(plain, indent=1, ensure_ascii=False))


def _ending(samples: Join) -> Join:
    """Return a join that ends, of the requests that were answered.

    Raises:
        ConfigError: it reads a topic, or outcomes that never end.
    """
    impressions: Source = samples.impressions
    if isinstance(impressions, RequestLog) and topic_of(impressions.where) is None:
        impressions = dataclasses.replace(impressions, follow=False, shadows=False)
    samples = dataclasses.replace(samples, impressions=impressions)
    if samples.endless:
        endless = [type(source).__name__ for source in samples.inputs if source.endless]
        raise ConfigError(
            f"replay.measure: a replay needs a log and outcomes that end, got {endless}. Read "
            "files, such as samples.outcomes='{kind: parquet, path: clicks/*.parquet}'."
        )
    return samples


def _kind(spec: Any) -> str:
    return str(spec if isinstance(spec, str) else spec.get("kind"))


def _scored(answered: pa.Table, route: str, scores: NDArray[np.float32]) -> pa.Table:
    """Return answered rows as a route of its own with other scores."""
    table = answered
    columns = {
        "score": pa.array(scores, pa.float64()),
        "route": pa.array(np.full(table.num_rows, route)),
    }
    for name, values in columns.items():
        table = table.set_column(table.schema.get_field_index(name), name, values)
    return table


def _measured(measure: ServingQuality, parts: list[pa.Table]) -> Quality:
    """Return the quality of samples by window."""
    windows = OpenWindows(measure)
    for part in parts:
        windows.put(part)
    return Quality.concat(list(windows.close()))
