# SPDX-License-Identifier: Apache-2.0
"""Scores of logged rows while a job learns them: each row by what was known when it was shown."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hotbed.connectors.position import Position
from hotbed.errors import ConfigError, PersistError
from hotbed.files import writing

if TYPE_CHECKING:
    from hotbed.data.batch import Batch
    from hotbed.job.job import Job
    from hotbed.training.run import Run

_SCORE = np.dtype("<f4")


class ScoreWhenShown:
    """Scores the rows of a stream by what the job had learned when each of them was shown.

    The outcome of a row is known some time after it was shown. So before a batch is learned, all
    rows are scored that were shown until the outcomes of this batch were known. Rows are scored in
    batches, which are due with their first row: a row is never scored later than it was shown.

    Scores are written at the place of their rows. A killed run writes some of them again, with
    equal bits.

    Args:
        job: whose stream is learned.
        times: when each row of the stream was shown, in microseconds, [n].
        waits: how long after that its outcome is known, in microseconds.
        label: the column of the label whose scores are kept.
        file: of the scores, float32 [n].
    """

    reads_features = False

    def __init__(
        self, job: Job, times: NDArray[np.int64], waits: int, label: str, file: Path
    ) -> None:
        self._job = job
        self._shown = np.maximum.accumulate(times)  # rows are learned in the order of the stream
        self._waits = waits
        self._label = label
        self._file = file
        self._position: Position | None = None
        self._batches: Iterator[Batch] | None = None
        self.num_scored = 0

    def barrier(self, step: int, now: int | None) -> bool:
        return True  # scoring reads the tables

    def on_step_begin(self, run: Run) -> None:
        assert run.example is not None
        last = run.samples + run.example.num_samples - 1
        due = int(self._shown[last]) + self._waits
        self._score(run, int(np.searchsorted(self._shown, due, side="right")))

    def on_stream_end(self, run: Run) -> None:
        if not run.stopped:
            self._score(run, len(self._shown))

    def on_fit_end(self, run: Run) -> None:
        if isinstance(self._batches, Generator):
            self._batches.close()
        self._batches = None

    def state(self) -> dict[str, Any]:
        """Return how many rows are scored; their scores are on disk then."""
        if self._file.exists():
            with writing(self._file), open(self._file, "rb+") as file:
                os.fsync(file.fileno())
        position = None if self._position is None else self._position.to_json()
        return {"rows": self.num_scored, "position": position}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""
        self.num_scored = int(state["rows"])
        self._position = None
        if state["position"] is not None:
            self._position = Position.from_json(state["position"])

    def scores(self) -> NDArray[np.float32]:
        """Return the scores of all rows; raise PersistError where the file lacks some."""
        content = self._file.read_bytes() if self._file.exists() else b""
        num_scores = len(content) // _SCORE.itemsize
        scores = np.frombuffer(content, _SCORE, num_scores).copy()
        if len(scores) != len(self._shown):
            raise self._lack(len(self._shown), len(scores))
        return scores

    def _lack(self, num_rows: int, num_scores: int) -> PersistError:
        return PersistError(
            f"{self._file}: it needs the scores of {num_rows} rows, got {num_scores}. Remove the "
            "folder, and replay again."
        )

    def _score(self, run: Run, end: int) -> None:
        """Score batches until one begins at row `end` or behind it."""
        if self.num_scored >= end:
            return
        if self._batches is None:
            self._batches = self._opened(run)
        with writing(self._file), open(self._file, "ab") as file:
            begin = self.num_scored * _SCORE.itemsize
            if file.tell() < begin:
                raise self._lack(self.num_scored, file.tell() // _SCORE.itemsize)
            file.truncate(begin)
            while self.num_scored < end:
                batch = next(self._batches)
                scores = self._of_label(run, _predicted(run, batch))
                file.write(scores.astype(_SCORE).tobytes())
                self.num_scored += len(scores)
                self._position = batch.position

    def _opened(self, run: Run) -> Iterator[Batch]:
        """Return the batches after those that are scored."""
        job = self._job
        assert job.stream is not None
        schema = run.model.schema
        assert schema is not None
        rows = job.dataset(job.stream, schema, batch_size=job.fit.stream_batch_size)
        rows = rows.without_labels()
        if self._position is not None:
            rows.resume(self._position)
        return iter(rows)

    def _of_label(self, run: Run, scores: Any) -> NDArray[np.float32]:
        """Return the scores of the label that is measured."""
        schema = run.model.schema
        assert schema is not None
        names = [label.name for label in schema.labels if label.source == self._label]
        if not names:
            sources = [label.source for label in schema.labels]
            raise ConfigError(
                f"replay.job: it learns the labels {sources}, got {self._label!r} as the label "
                "that is measured. Give the join the label of the job, or give measure.label."
            )
        if isinstance(scores, Mapping):
            scores = scores[names[0]]
        return np.asarray(scores, np.float32).reshape(len(scores))


def _predicted(run: Run, batch: Batch) -> Any:
    """Return the scores of a batch by the model as it is now; of several labels by name."""
    from hotbed.training.step.example import prepare
    from hotbed.training.step.scorer import scorer_of

    learner = run.learner
    if run.model.histories is not None:
        batch = run.model.histories.fill(batch, leaves=False)
    scorer = scorer_of(run.observer)
    assert scorer is not None, "a job has a loss"
    example = prepare(batch, learner.device, labelled=False, network=learner.network)
    _, scores, _ = scorer.outputs(example)
    return scores
