# SPDX-License-Identifier: Apache-2.0
"""What is open at a position, as it is saved and put back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from hotbed.connectors.join.columns import loaded, written, written_types
from hotbed.connectors.join.segment import SEGMENT_ROWS, Segment
from hotbed.connectors.live import SavedRows

NUMBER = "\0number"
TIME = "\0time"
KIND = "\0kind"


@dataclass(frozen=True)
class OpenLogs:
    """What was open at a position, from another position on.

    Attributes:
        impressions: the segments of that moment.
        outcomes: the same of outcomes.
        matches: numbers and times of the outcomes that met an impression.
        oldest: the earliest time of an event that matters.
        opened: of the position.
        since: of the other one.
    """

    impressions: Sequence[Segment]
    outcomes: Sequence[Segment]
    matches: np.ndarray
    oldest: int
    opened: Mapping[str, int]
    since: Mapping[str, int]

    def batches(self, log: str) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a log that are still needed; of one without rows nothing."""
        if log == "matches":
            numbers, times = self.matches[:, self.matches[1] >= self.oldest]
            if len(numbers):
                columns = [pa.array(numbers), pa.array(times)]
                yield pa.RecordBatch.from_arrays(columns, names=[NUMBER, TIME])
            return
        segments = self.impressions
        if log == "outcomes":
            segments = self.outcomes
        chosen: list[tuple[Segment, np.ndarray]] = []
        for segment in segments:
            numbers = segment.numbers
            is_open = (numbers >= self.since[log]) & (numbers < self.opened[log])
            rows = np.flatnonzero(is_open & (segment.times >= self.oldest))
            if len(rows):
                chosen.append((segment, rows))
        if not chosen:
            return
        schemas = [written_types(segment.types) for segment, _ in chosen]
        schema = pa.unify_schemas(schemas, promote_options="default")
        for segment, rows in chosen:
            empty = schema.empty_table()  # with columns that other segments have
            table = pa.concat_tables(
                [empty, written(segment.rows(rows))], promote_options="permissive"
            )
            table = table.append_column(NUMBER, pa.array(segment.numbers[rows]))
            table = table.append_column(TIME, pa.array(segment.times[rows]))
            if segment.kinds is not None:
                table = table.append_column(KIND, pa.array(segment.kinds[rows]))
            yield from table.combine_chunks().to_batches()


def saved_tables(saved: SavedRows, log: str) -> Iterator[pa.Table]:
    """Yield the saved rows of a log as tables of about a segment each."""
    waiting: list[pa.RecordBatch] = []
    num_rows = 0
    for batch in saved.batches(log):
        waiting.append(batch)
        num_rows += batch.num_rows
        if num_rows >= SEGMENT_ROWS // 2:
            yield _as_table(waiting)
            waiting = []
            num_rows = 0
    if waiting:
        yield _as_table(waiting)


def _as_table(batches: list[pa.RecordBatch]) -> pa.Table:
    tables = [pa.Table.from_batches([batch]) for batch in batches]
    return loaded(pa.concat_tables(tables, promote_options="default")).combine_chunks()


def saved_matches(saved: SavedRows) -> tuple[np.ndarray, np.ndarray]:
    """Return the numbers and times of the saved outcomes that met an impression."""
    schema = pa.schema([(NUMBER, pa.int64()), (TIME, pa.int64())])
    matches = pa.Table.from_batches(saved.batches("matches"), schema)
    return matches[NUMBER].to_numpy(), matches[TIME].to_numpy()
