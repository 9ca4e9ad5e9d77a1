# SPDX-License-Identifier: Apache-2.0
"""BySegment: figures of the model and of its baselines for each country, each device, ..."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from hotbed import checks
from hotbed.config import described
from hotbed.data.columns import SegmentColumn
from hotbed.errors import ConfigError
from hotbed.metrics.segments import SegmentFigures, ValueFigures
from hotbed.training.run import Kept, Run
from hotbed.training.step.example import Example
from hotbed.training.step.scorer import Progressive, Scorer, watch_scores
from hotbed.training.watching.baselines import CONSTANT, Baselines, Comparison, findings, scores_of

MODEL = "model"
LEAST_ROWS = 100
"""Rows of a value that a sentence may be about: fewer say little."""
LEAST_OF_CLASS = 10
"""Rows of either class among them."""
MOST_SENTENCES = 3
"""About the values of one column."""
RECENT_SECONDS = 60.0


@dataclass(frozen=True)
class SegmentRow:
    """The figures of one value of a column.

    Attributes:
        value: its text, a range of numbers, `(missing)`, or `(other)`.
        rows: its samples.
        positives: those with a positive label.
        figures: `auc`, `log_loss` and `calibration` by name: of the model ("model"), and of each
            baseline.
    """

    value: str
    rows: int
    positives: int
    figures: Mapping[str, Mapping[str, float]]


SegmentTables = dict[str, list[SegmentRow]]
"""The rows of each column, by its name."""


@described
class BySegment:
    """Divide the figures of the model, and of its baselines, by the values of some columns.

    For each value: rows, positives, AUC, log loss, and calibration (the mean prediction divided by
    the mean label). The columns are raw ones of the data, also such as the model does not read.
    They are read with the rows that are validated or evaluated, and with those of a stream, which
    count as they were predicted before they were learned. Training has the same bits without them.

    Args:
        columns: names of the columns.
        bounds: of those that hold numbers: where one segment ends and the next begins, ascending.
        most: values of a column that have figures, those with most rows. The others are summed up
            as `(other)`. So are values that come after 1,000 others, in a stream after 100 others.
            In a stream, the AUC of more than 4,096 rows of a value is counted in 1,024 bins.

    Raises:
        ConfigError: for bounds that do not ascend; at the first batch, if the model does not
            predict probabilities, or if the data have no such column.

    Example: `model.evaluate(test, hb.callbacks.BySegment(["country", "age"], {"age": [18, 30]}))`
    """

    reads_features = False  # the columns come with the labels

    def __init__(
        self,
        columns: Sequence[str],
        bounds: Mapping[str, Sequence[float]] | None = None,
        most: int = 20,
    ) -> None:
        checks.at_least("BySegment.most", most, 1)
        names = checks.names(columns)
        for name in bounds or {}:
            checks.one_of("BySegment.bounds", name, names)
        self.segments = tuple(_segment(name, (bounds or {}).get(name)) for name in names)
        self._most = most
        self._own = self.another_pass()  # of a stream, or of `evaluate`
        self._validated: dict[int, SegmentTables] = {}  # by step
        self._recent: tuple[float, SegmentTables] = (-math.inf, {})

    def on_fit_begin(self, run: Run) -> None:
        self._own = self.another_pass()
        self._validated = {}
        self._recent = (-math.inf, {})

    def barrier(self, step: int, now: int | None) -> bool:
        return False  # it reads no table

    def on_predicted(self, run: Run) -> None:
        self._own.on_predicted(run)

    def another_pass(self) -> SegmentPass:
        """Return a callback of `RecModel.evaluate` that divides figures by the same columns."""
        return SegmentPass(self.segments, self._most)

    def record(self, validation: SegmentPass, run: Run, prefix: str) -> None:
        """Take the figures of a validation at this step; `prefix`: of the names of columns."""
        best = run.callbacks.kept
        steps = [] if best is None else [best.step]
        self._validated = {step: self._validated[step] for step in steps if step in self._validated}
        tables = {f"{prefix}{name}": rows for name, rows in validation.tables().items()}
        self._validated[run.step] = tables

    @property
    def figures(self) -> SegmentTables:
        """The rows of each column: those of a stream or of `evaluate` so far, by its name.

        Those of the newest validation have names such as `valid.country`. Of a model with several
        labels, the name of the label comes before that of the column.
        """
        return self.figures_at(None)

    def figures_at(self, kept: Kept | None) -> SegmentTables:
        """Return `figures`, but of the validation of the state that is kept."""
        validated = list(self._validated.values())[-1:]
        if kept is not None and kept.step in self._validated:
            validated = [self._validated[kept.step]]
        return {**self._own.tables(), **(validated[0] if validated else {})}

    @property
    def recent(self) -> SegmentTables:
        """The figures of at most `RECENT_SECONDS` ago, for callers that ask often."""
        now = time.monotonic()
        if now - self._recent[0] > RECENT_SECONDS:
            self._recent = (now, self.figures)
        return self._recent[1]

    def state(self) -> dict[str, Any]:
        """Return all under one key that no content digest covers: models are equal without it."""
        validated = []
        for step, tables in self._validated.items():
            plain = {name: [asdict(row) for row in rows] for name, rows in tables.items()}
            validated.append([step, plain])
        return {"wall_beside": {"own": self._own.state(), "validated": validated}}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned; columns with other bounds begin anew."""
        beside = state["wall_beside"]
        self._own.load_state(beside["own"])
        self._validated = {}
        for step, tables in beside["validated"]:
            rows_of = {name: [SegmentRow(**row) for row in rows] for name, rows in tables.items()}
            self._validated[step] = rows_of


class SegmentPass:
    """Divides the figures of one pass over data: those of the model and of its baselines."""

    def __init__(self, segments: Sequence[SegmentColumn], most: int) -> None:
        self.segments = segments
        self._most = most
        self._scorer: Scorer | None = None  # of the model
        self._scorers: dict[str, Scorer] = {}
        self._saved: Mapping[str, Any] = {}  # of scorers without a batch so far
        self._baselines: list[Baselines] = []
        self._learns = False
        self._endless = False

    def barrier(self, step: int, now: int | None) -> bool:
        return False

    def on_predicted(self, run: Run) -> None:
        scorer = watch_scores(run.observer, self)
        if scorer is None:
            return
        if not scorer.gives_probabilities:
            raise ConfigError(
                "BySegment: predicted probabilities are needed, got a model without them. Give "
                "RecModel a cross-entropy such as loss_fn='bce', or leave BySegment out."
            )
        self._scorer = scorer
        self._scorers = {}
        comparisons = run.callbacks.of(Comparison)
        self._baselines = [*run.callbacks.of(Baselines), *(each.baselines for each in comparisons)]
        self._learns = isinstance(run.observer, Progressive)
        self._endless = run.online

    def watch(self, outputs: tuple[Any, ...], example: Example) -> None:
        """Take a batch that the model has scored."""
        assert self._scorer is not None
        every = {MODEL: outputs}
        for baselines in self._baselines:
            every |= scores_of(baselines, self._scorer, outputs, example)
        for name, scores in every.items():
            if name not in self._scorers:
                metrics = {each.column: self._counts(each) for each in self.segments}
                self._scorers[name] = self._scorer.again(metrics)
                if name in self._saved:
                    self._scorers[name].load_state(self._saved[name])
            self._scorers[name].feed(scores, example)

    def tables(self) -> SegmentTables:
        """Return the rows of each column, by its name."""
        every: dict[str, dict[str, list[ValueFigures]]] = {}
        for name, counts in self._every().items():
            every[name] = {column: each.figures() for column, each in counts.items()}
        tables: SegmentTables = {}
        for column, values in every.get(MODEL, {}).items():
            others = {
                name: {value.value: value.metrics for value in by_column[column]}
                for name, by_column in every.items()
                if column in by_column
            }
            tables[column] = [self._row(value, others) for value in values]
        return tables

    def state(self) -> dict[str, Any]:
        """Return the counts of the model and of each baseline."""
        scorers = {name: scorer.state() for name, scorer in self._scorers.items()}
        return {
            "segments": [[each.column, each.bounds] for each in self.segments],
            "scorers": {**self._saved, **scorers},
            "is_of_stream": [self._learns, self._endless],
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned; columns with other bounds begin anew."""
        self._scorers = {}
        self._learns, self._endless = state["is_of_stream"]
        bounds = {each.column: each.bounds for each in self.segments}
        as_before = [
            name
            for name, of_state in state["segments"]
            if name in bounds and (of_state and tuple(of_state)) == bounds[name]
        ]
        self._saved = {}
        for name, scorer in state["scorers"].items():
            metrics = {
                key: value
                for key, value in scorer["metrics"].items()
                if key in as_before or key.partition(".")[2] in as_before  # after a label
            }
            self._saved = {**self._saved, name: {**scorer, "metrics": metrics}}

    def _every(self) -> dict[str, dict[str, SegmentFigures]]:
        """Return the counts by column, of the model and of each baseline."""
        every: dict[str, dict[str, SegmentFigures]] = {}
        for name, scorer in self._saved.items():
            every[name] = {}
            for column, state in scorer["metrics"].items():
                every[name][column] = self._counts(None)
                every[name][column].load_state(state)
        return every | {name: scorer.by_name for name, scorer in self._scorers.items()}

    def _counts(self, segment: SegmentColumn | None) -> SegmentFigures:
        return SegmentFigures(segment, self._most, endless=self._endless)

    def _row(
        self, value: ValueFigures, others: Mapping[str, Mapping[str, Mapping[str, float]]]
    ) -> SegmentRow:
        """Return the row of a value; `others`: metrics of all by name and value."""
        figures = {}
        for name, by_value in others.items():
            metrics = dict(by_value.get(value.value, {}))
            if name == CONSTANT and self._learns:
                metrics.pop("auc", None)  # its order would be that of time
            if metrics:
                figures[name] = metrics
        return SegmentRow(value.value, value.rows, value.positives, figures)


def segment_findings(tables: Mapping[str, Sequence[SegmentRow]]) -> list[str]:
    """Return sentences that say in which segments a baseline is better than the model.

    They are about values of at least `LEAST_ROWS` rows; those of most rows come first.
    """
    sentences: list[str] = []
    for column, rows in tables.items():
        worse = [sentence for row in rows if (sentence := _finding(column, row))]
        sentences += worse[:MOST_SENTENCES]
        num_more = len(worse) - MOST_SENTENCES
        if num_more > 0:
            sentences.append(f"The same holds for {num_more} more values of {_plain(column)}.")
    return sentences


def _finding(column: str, row: SegmentRow) -> str:
    """Return a sentence on the baseline with the lowest log loss, if the model's is higher."""
    if row.rows < LEAST_ROWS or min(row.positives, row.rows - row.positives) < LEAST_OF_CLASS:
        return ""
    losses = {name: values.get("log_loss", math.nan) for name, values in row.figures.items()}
    best = min(losses, key=lambda name: losses[name])
    if not losses[best] < losses.get(MODEL, math.nan):
        return ""
    (sentence,) = findings(row.figures[MODEL], {best: dict(row.figures[best])})
    where = f"Where {_plain(column)} is {row.value} ({row.rows:,} rows)"
    return f"{where}, {sentence[:1].lower()}{sentence[1:]}"


def _plain(column: str) -> str:
    return column.removeprefix("valid.")


def _segment(column: str, bounds: Sequence[float] | None) -> SegmentColumn:
    if bounds is None:
        return SegmentColumn(column)
    numbers = tuple(float(bound) for bound in bounds)
    is_ascending = all(low < high for low, high in pairwise(numbers))
    if not numbers or not is_ascending or not all(map(math.isfinite, numbers)):
        raise ConfigError(
            f"BySegment.bounds.{column}: ascending numbers are needed, got {list(bounds)}. Give "
            "such as [18, 30, 50]."
        )
    return SegmentColumn(column, numbers)
